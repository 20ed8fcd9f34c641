//! The vector registers that CPU kernels use.
//!
//! They decide how fast a result is computed, not its bits: every sum has its own fixed order, products are fused with
//! their additions on every processor, and functions such as eˣ are computed here from additions and products.

use std::sync::OnceLock;

/// Kinds of vector registers, narrowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Registers {
    /// Registers that the compiler assumes for any processor of the architecture.
    Plain,
    /// AVX2 and FMA of x86-64: 16 registers of 8 numbers.
    Avx2,
    /// AVX-512 of x86-64: 32 registers of 16 numbers.
    Avx512,
}

/// The environment variable that limits the registers to use.
pub const VARIABLE: &str = "VERL_REGISTERS";

/// Name of the order in which CPU kernels add, which fixes the bits of their results on any processor.
///
/// `versions.json` and the conditions of a trace record it: a replay expects equal bits on another processor if both
/// sides have the same name. Change the name whenever a kernel adds in another order, rounds at another place, or
/// computes a function such as eˣ differently.
pub const SUMS: &str = "fixed-1";

impl Registers {
    /// All kinds.
    pub const ALL: [Registers; 3] = [Registers::Plain, Registers::Avx2, Registers::Avx512];

    /// Its name in [`VARIABLE`], in `versions.json` and in the conditions of a trace.
    pub fn name(self) -> &'static str {
        match self {
            Registers::Plain => "plain",
            Registers::Avx2 => "avx2",
            Registers::Avx512 => "avx512",
        }
    }
}

/// The widest registers of this processor.
pub fn found() -> Registers {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return if is_x86_feature_detected!("avx512f") {
            Registers::Avx512
        } else {
            Registers::Avx2
        };
    }
    Registers::Plain
}

/// The registers that kernels use: the widest of this processor, limited by [`VARIABLE`].
pub fn used() -> Registers {
    static USED: OnceLock<Registers> = OnceLock::new();
    *USED.get_or_init(|| {
        let limit = std::env::var(VARIABLE).ok();
        limit.map_or(found(), |name| at_most(&name).unwrap_or_else(|_| found()))
    })
}

/// The widest registers of this processor that are at most as wide as `name`.
///
/// # Errors
/// If `name` is unknown; the text lists the known names.
pub fn at_most(name: &str) -> Result<Registers, String> {
    let limit = Registers::ALL.into_iter().find(|kind| kind.name() == name);
    let names = || Registers::ALL.map(Registers::name).join("`, `");
    let limit = limit.ok_or_else(|| {
        format!(
            "{VARIABLE} is `{name}`, which is not a kind of registers: set it to one of `{}`, or unset it",
            names()
        )
    })?;
    Ok(limit.min(found()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_never_widens() {
        assert_eq!(at_most("plain"), Ok(Registers::Plain));
        assert_eq!(at_most("avx512"), Ok(found()));
        assert!(at_most("avx2").expect("a known name") <= Registers::Avx2);
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = at_most("AVX").expect_err("no such registers");
        assert_eq!(
            error,
            "VERL_REGISTERS is `AVX`, which is not a kind of registers: set it to one of `plain`, `avx2`, `avx512`, or unset it"
        );
    }
}
