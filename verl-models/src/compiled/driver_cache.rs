//! Where the NVIDIA driver keeps machine code.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Where the NVIDIA driver keeps the machine code that it made of PTX, as the environment says.
///
/// It finds a kernel there by its PTX, the device and its own version. Older ones make room for newer ones where they would
/// take more than `CUDA_CACHE_MAXSIZE` bytes.
///
/// # Source
/// CUDA C++ Programming Guide, "CUDA Environment Variables": `CUDA_CACHE_DISABLE`, `CUDA_CACHE_PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriverCache {
    /// In this folder.
    Folder(PathBuf),
    /// Nowhere, since `CUDA_CACHE_DISABLE` is 1.
    Off,
    /// The environment names no folder.
    Unknown,
}

impl DriverCache {
    /// As the environment of this process says.
    pub fn of_environment() -> DriverCache {
        DriverCache::of(|name| std::env::var_os(name))
    }

    /// As the variables say that `lookup` tells; one that is empty counts as absent.
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
    fn the_nearest_variable_names_the_folder() {
        check(&[HOME], "/home/a/.nv/ComputeCache");
        check(&[HOME, ("CUDA_CACHE_PATH", "/c")], "/c");
        check(&[("CUDA_CACHE_PATH", "/c")], "/c");
        check(&[HOME, ("CUDA_CACHE_PATH", "")], "/home/a/.nv/ComputeCache");
    }

    #[test]
    fn why_there_is_none_is_told() {
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
