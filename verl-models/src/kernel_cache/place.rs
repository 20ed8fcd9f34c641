//! Where compiled kernels are kept.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Where compiled kernels are kept, as the environment says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In this folder.
    Folder(PathBuf),
    /// Nowhere, since `VERL_CACHE_DIR` is `off`.
    Off,
    /// Nowhere, since the environment names no folder.
    Unknown,
}

impl Place {
    /// As the environment of this process says.
    pub fn of_environment() -> Place {
        Place::of(|name| std::env::var_os(name))
    }

    /// As the variables say that `lookup` tells. One that is empty counts as absent, and so does a relative
    /// `XDG_CACHE_HOME`, as its specification asks.
    fn of(lookup: impl Fn(&str) -> Option<OsString>) -> Place {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let below = |folder: PathBuf| Place::Folder(folder.join("kernels"));
        if let Some(own) = set("VERL_CACHE_DIR") {
            return match own.to_str() {
                Some("off") => Place::Off,
                _ => below(own.into()),
            };
        }
        let cache = set("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|folder| folder.is_absolute());
        let home = || set("HOME").map(|home| PathBuf::from(home).join(".cache"));
        match cache.or_else(home) {
            Some(folder) => below(folder.join("verl")),
            None => Place::Unknown,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Folder(folder) => write!(f, "{}", folder.display()),
            Place::Off => f.write_str("none: VERL_CACHE_DIR is `off`"),
            Place::Unknown => {
                f.write_str("none: neither VERL_CACHE_DIR nor XDG_CACHE_HOME nor HOME is set")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(variables: &[(&str, &str)], expected: &str) {
        let place = Place::of(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        });
        assert!(place.to_string().starts_with(expected), "{place}");
    }

    #[test]
    fn the_nearest_variable_names_the_folder() {
        let home = ("HOME", "/home/a");
        check(&[home], "/home/a/.cache/verl/kernels");
        check(&[home, ("XDG_CACHE_HOME", "/c")], "/c/verl/kernels");
        check(&[home, ("XDG_CACHE_HOME", "c")], "/home/a/.cache");
        check(&[home, ("XDG_CACHE_HOME", "")], "/home/a/.cache");
        check(&[home, ("VERL_CACHE_DIR", "/v")], "/v/kernels");
        check(&[home, ("VERL_CACHE_DIR", "v")], "v/kernels");
        check(&[home, ("VERL_CACHE_DIR", "")], "/home/a/.cache");
    }

    #[test]
    fn it_can_be_switched_off() {
        check(
            &[("HOME", "/home/a"), ("VERL_CACHE_DIR", "off")],
            "none: VERL_CACHE_DIR",
        );
        check(&[], "none: neither");
    }
}
