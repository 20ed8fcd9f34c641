//! The vector registers that kernels of the CPU use.
//!
//! They decide how fast a result is there, not its bits: every sum has an order of its own, products are fused with
//! their additions on every machine, and functions such as eˣ are computed here from additions and products.

use std::sync::OnceLock;

/// Kinds of vector registers, narrowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Registers {
    /// Those that the compiler assumes of any processor of the architecture.
    Plain,
    /// AVX2 and FMA of x86-64: 16 registers of 8 numbers.
    Avx2,
    /// AVX-512 of x86-64: 32 registers of 16 numbers.
    Avx512,
}

/// The variable that names the widest registers to use.
pub const VARIABLE: &str = "VERL_REGISTERS";

/// Name of the order in which kernels of the CPU add, which fixes the bits of their results whatever the processor.
///
/// `versions.json` and the conditions of a trace record it: a replay expects equal bits on another processor where
/// both sides have the same name. Give it a new name whenever a kernel adds in another order, rounds at another place,
/// or computes a function such as eˣ otherwise.
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

/// The registers that kernels use: the widest of this processor, at most those that [`VARIABLE`] names.
pub fn used() -> Registers {
    static USED: OnceLock<Registers> = OnceLock::new();
    *USED.get_or_init(|| {
        let limit = std::env::var(VARIABLE).ok();
        limit.map_or(found(), |name| at_most(&name).unwrap_or_else(|_| found()))
    })
}

/// The widest registers of this processor that are no wider than those named.
///
/// # Errors
/// No registers have this name; the text says which have.
pub fn at_most(name: &str) -> Result<Registers, String> {
    let limit = Registers::ALL.into_iter().find(|kind| kind.name() == name);
    let names = || Registers::ALL.map(Registers::name).join("`, `");
    let limit = limit.ok_or_else(|| {
        format!(
            "{VARIABLE} is `{name}`, which is not a kind of registers: set one of `{}`, or unset it",
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
        assert!(at_most("avx2").expect("a name") <= Registers::Avx2);
    }

    #[test]
    fn an_unknown_name_is_refused_with_those_that_exist() {
        let error = at_most("AVX").expect_err("no such registers");
        assert_eq!(
            error,
            "VERL_REGISTERS is `AVX`, which is not a kind of registers: set one of `plain`, `avx2`, `avx512`, or unset it"
        );
    }
}
