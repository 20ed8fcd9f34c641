//! Compiled kernels of a GPU: how many a start needed, and where the driver keeps their machine code.
//!
//! NVRTC makes PTX of a kernel's text, anew in each process. The driver makes machine code of the PTX, and keeps that from
//! one process to the next ([`DriverCache`]).

mod driver_cache;
#[cfg(feature = "cuda")]
mod launched;

use std::fmt;

use serde::Serialize;

pub use driver_cache::DriverCache;

/// How many kernels were compiled, and what is kept of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Kernels that NVRTC compiled in this process, those of burn too.
    pub compiled: usize,
    /// Folder where the driver keeps their machine code, or why there is none.
    pub driver_cache: String,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally {
            compiled,
            driver_cache,
        } = self;
        write!(
            f,
            "{compiled} compiled; cache of the driver: {driver_cache}"
        )
    }
}

/// Begins, or goes on, to count the kernels that are launched for the first time. Without a GPU it does nothing.
pub fn begin() {
    #[cfg(feature = "cuda")]
    launched::begin();
}

/// Ends the counting, which costs each launch a little; none where no kernel was launched so far.
pub fn tally() -> Option<Tally> {
    #[cfg(feature = "cuda")]
    return launched::end();
    #[cfg(not(feature = "cuda"))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn without_a_gpu_there_is_nothing_to_tell() {
        begin();
        assert_eq!(tally(), None);
    }

    #[test]
    fn a_tally_is_told_in_one_line() {
        let tally = Tally {
            compiled: 34,
            driver_cache: "/c".to_owned(),
        };
        assert_eq!(tally.to_string(), "34 compiled; cache of the driver: /c");
    }
}
