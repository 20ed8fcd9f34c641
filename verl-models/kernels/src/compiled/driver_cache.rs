//! Where the NVIDIA driver caches machine code.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Where the NVIDIA driver caches the machine code that it compiled from PTX, according to the environment.
///
/// The driver looks up a kernel by its PTX, the device and the driver version. It evicts the oldest entries when the
/// cache exceeds `CUDA_CACHE_MAXSIZE` bytes.
///
/// # Source
/// CUDA C++ Programming Guide, "CUDA Environment Variables": `CUDA_CACHE_DISABLE`, `CUDA_CACHE_PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriverCache {
    /// In this folder.
    Folder(PathBuf),
    /// Nowhere, because `CUDA_CACHE_DISABLE` is 1.
    Off,
    /// The environment does not set a folder.
    Unknown,
}

impl DriverCache {
    /// The cache according to the environment of this process.
    pub fn of_environment() -> DriverCache {
        DriverCache::of(|name| std::env::var_os(name))
    }

    /// The cache according to the variables that `lookup` returns; an empty variable counts as absent.
    fn of(lookup: impl Fn(&str) -> Option<OsString>) -> DriverCache {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        if set("CUDA_CACHE_DISABLE").is_some_and(|value| value == "1") {
            return DriverCache::Off;
        }
        let named = set("CUDA_CACHE_PATH").map(PathBuf::from);
        let home = || set("HOME").map(|home| PathBuf::from(home).join(".nv/ComputeCache"));
        named
            .or_else(home)
            .map_or(DriverCache::Unknown, DriverCache::Folder)
    }
}

impl fmt::Display for DriverCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DriverCache::Folder(folder) => write!(f, "{}", folder.display()),
            DriverCache::Off => f.write_str("none: CUDA_CACHE_DISABLE is 1"),
            DriverCache::Unknown => f.write_str("none: neither CUDA_CACHE_PATH nor HOME is set"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(variables: &[(&str, &str)], expected: &str) {
        let cache = DriverCache::of(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        });
        assert_eq!(cache.to_string(), expected);
    }

    const HOME: (&str, &str) = ("HOME", "/home/a");

    #[test]
    fn the_most_specific_variable_sets_the_folder() {
        check(&[HOME], "/home/a/.nv/ComputeCache");
        check(&[HOME, ("CUDA_CACHE_PATH", "/c")], "/c");
        check(&[("CUDA_CACHE_PATH", "/c")], "/c");
        check(&[HOME, ("CUDA_CACHE_PATH", "")], "/home/a/.nv/ComputeCache");
    }

    #[test]
    fn the_reason_for_no_cache_is_printed() {
        let off = ("CUDA_CACHE_DISABLE", "1");
        check(&[HOME, off], "none: CUDA_CACHE_DISABLE is 1");
        let named = ("CUDA_CACHE_PATH", "/c");
        check(&[HOME, named, off], "none: CUDA_CACHE_DISABLE is 1");
        check(
            &[HOME, ("CUDA_CACHE_DISABLE", "0")],
            "/home/a/.nv/ComputeCache",
        );
        check(
            &[("HOME", "")],
            "none: neither CUDA_CACHE_PATH nor HOME is set",
        );
    }
}
