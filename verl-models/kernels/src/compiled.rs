//! Compiled GPU kernels: how many a process compiled, and where the driver caches their machine code.
//!
//! NVRTC compiles a kernel's source to PTX in every process. The driver compiles PTX to machine code, which it caches
//! across processes ([`DriverCache`]).

mod driver_cache;
#[cfg(feature = "cuda")]
mod launched;

use std::fmt;

use serde::Serialize;

pub use driver_cache::DriverCache;

/// How many kernels were compiled, and where their machine code is cached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Kernels that NVRTC compiled in this process, including burn's.
    pub compiled: usize,
    /// Folder where the driver caches their machine code, or why there is none.
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

/// Starts, or continues, to count first launches of kernels. Without a GPU it does nothing.
pub fn begin() {
    #[cfg(feature = "cuda")]
    launched::begin();
}

/// Stops counting, which slows down each launch a little. `None` if no kernel has been launched so far.
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
    fn without_a_gpu_there_is_no_tally() {
        begin();
        assert_eq!(tally(), None);
    }

    #[test]
    fn a_tally_prints_on_one_line() {
        let tally = Tally {
            compiled: 34,
            driver_cache: "/c".to_owned(),
        };
        assert_eq!(tally.to_string(), "34 compiled; cache of the driver: /c");
    }
}
