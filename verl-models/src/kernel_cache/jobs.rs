//! Which kernels a job launched, so that the next process can compile them before they are asked for.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::write_aside;
use super::made_with::hash;

/// Kernels that a list holds at most; the newest stay.
const MOST: usize = 512;

/// A kernel as it was launched: with the file's present text it can be compiled.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Noted {
    /// Name of the source file.
    pub file: String,
    /// Name of the function.
    pub entry: String,
    /// Lines in front of the text.
    pub definitions: String,
    /// Threads of a block.
    pub block: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    job: String,
    kernels: Vec<Noted>,
}

fn path(root: &Path, job: &str) -> PathBuf {
    root.join("jobs")
        .join(format!("{}.json", hash(job.as_bytes())))
}

/// What processes before launched for `job`, the newest last; nothing where the list is damaged.
pub(crate) fn read(root: &Path, job: &str) -> Vec<Noted> {
    let Ok(text) = fs::read_to_string(path(root, job)) else {
        return Vec::new();
    };
    let list: Option<List> = serde_json::from_str(&text).ok();
    list.filter(|list| list.job == job)
        .map_or(Vec::new(), |list| list.kernels)
}

/// Adds `kernels` to the list of `job`. Of two processes that add at once one may lose: its kernels are then compiled
/// when they are launched.
///
/// # Errors
/// When the disk refuses; then the list is as it was.
pub(crate) fn add(root: &Path, job: &str, kernels: &[Noted]) -> io::Result<()> {
    let mut all = read(root, job);
    let known = all.len();
    for kernel in kernels {
        if !all.contains(kernel) {
            all.push(kernel.clone());
        }
    }
    if all.len() == known {
        return Ok(());
    }
    all.drain(..all.len().saturating_sub(MOST));
    let path = path(root, job);
    fs::create_dir_all(root.join("jobs"))?;
    let list = List {
        job: job.to_owned(),
        kernels: all,
    };
    write_aside(&path, serde_json::to_string_pretty(&list)?.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(number: usize) -> Noted {
        Noted {
            file: "norm.cu".to_owned(),
            entry: "rms_norm".to_owned(),
            definitions: format!("#define WIDTH {number}\n"),
            block: 256,
        }
    }

    #[test]
    fn lists_grow_and_keep_the_newest() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        assert!(read(root, "a").is_empty());
        add(root, "a", &[noted(1), noted(2)]).unwrap();
        add(root, "a", &[noted(2), noted(3)]).unwrap();
        add(root, "b", &[noted(4)]).unwrap();
        assert_eq!(read(root, "a"), [noted(1), noted(2), noted(3)]);
        assert_eq!(read(root, "b"), [noted(4)]);
        let many: Vec<Noted> = (10..10 + MOST).map(noted).collect();
        add(root, "a", &many).unwrap();
        assert_eq!(read(root, "a"), many);
    }

    #[test]
    fn a_damaged_list_is_empty_and_written_anew() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        add(root, "a", &[noted(1)]).unwrap();
        fs::write(path(root, "a"), "{\"job\": \"a\", \"ker").unwrap();
        assert!(read(root, "a").is_empty());
        add(root, "a", &[noted(2)]).unwrap();
        assert_eq!(read(root, "a"), [noted(2)]);
        // A list that lies under another's name.
        fs::copy(path(root, "a"), path(root, "b")).unwrap();
        assert!(read(root, "b").is_empty());
        assert!(add(&path(root, "a"), "c", &[noted(1)]).is_err());
    }
}
