//! Compiled kernels of a GPU: how many a start needed, and, with the feature `kernel-cache`, where they are kept from one
//! process to the next.
//!
//! They lie in `kernels` below the folder that `VERL_CACHE_DIR` names, else below `verl` in the user's cache folder
//! (`XDG_CACHE_HOME`, else `~/.cache`); `VERL_CACHE_DIR=off` keeps none. Everything that decides a kernel's machine code
//! is in its key: text, definitions, entry and block in the name of the file, and in the name of the folder the compiler,
//! headers, driver, compute capability, executable and version of verl. Nothing in it is needed: it may be removed at any
//! time.
//!
//! A file is written aside and renamed, and begins with the hash of what follows, so one that is damaged is not used but
//! compiled again. Any number of processes may share the folder. One that cannot be written costs the cache and a warning.
//!
//! Kernels reach the device through cubecl's store of compiled kernels, which holds those of burn too. cubecl has it with
//! its feature `persistence` alone, so a build without `kernel-cache` compiles at each start.

#[cfg(any(feature = "kernel-cache", test))]
mod files;
#[cfg(any(feature = "kernel-cache", test))]
mod jobs;
#[cfg(feature = "cuda")]
mod launched;
#[cfg(any(feature = "kernel-cache", test))]
mod made_with;
mod place;
#[cfg(feature = "kernel-cache")]
mod store;

use std::fmt;

use serde::Serialize;

#[cfg(feature = "kernel-cache")]
pub(crate) use jobs::Noted;
pub use place::Place;
#[cfg(feature = "kernel-cache")]
pub(crate) use store::{activate, note, open};

/// What became of the kernels that a start launched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Kernels that were compiled.
    pub compiled: usize,
    /// Kernels that lay in the cache.
    pub found: usize,
    /// The folder of the cache, or why there is none.
    pub cache: String,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} kernels compiled, {} from the cache",
            self.compiled, self.found
        )
    }
}

/// Begins to count the kernels that are launched. With the cache it also begins to compile, on threads of its own, those
/// that earlier processes launched for `job` and that are not there. Returns at once; without a GPU it does nothing.
///
/// `job` is any text; the same job should need the same kernels.
pub fn prepare(job: &str) {
    #[cfg(feature = "cuda")]
    launched::begin();
    #[cfg(feature = "kernel-cache")]
    store::prepare(job);
    #[cfg(not(feature = "kernel-cache"))]
    let _ = job;
}

/// Keeps the kernels that are compiled by now; without the cache it does nothing. A disk that refuses is told once, as a
/// warning.
pub fn save() {
    #[cfg(feature = "kernel-cache")]
    store::save();
}

/// What became of the kernels that were launched between [`prepare`] and the first call of this function behind it; none
/// where none was. Counting has a cost for each launch, which ends here.
pub fn tally() -> Option<Tally> {
    #[cfg(feature = "cuda")]
    return launched::end();
    #[cfg(not(feature = "cuda"))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_there_is_nothing_to_tell() {
        prepare("a job");
        save();
        assert_eq!(tally(), None);
    }

    #[test]
    fn a_tally_is_told_in_one_line() {
        let tally = Tally {
            compiled: 3,
            found: 40,
            cache: "/c".to_owned(),
        };
        assert_eq!(tally.to_string(), "3 kernels compiled, 40 from the cache");
    }
}
