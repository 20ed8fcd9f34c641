//! Files of a trace: written aside and renamed, so a file under its final name is complete.

use std::fs::{self, File};
use std::path::Path;

use serde::Serialize;
use verl_run::atomic_file::AtomicFile;

use crate::files::error::TraceError;

/// Writes a file with `write` under a temporary name and then renames it. A failure leaves no file.
pub fn write_atomically<T>(
    path: &Path,
    write: impl FnOnce(File) -> Result<T, TraceError>,
) -> Result<T, TraceError> {
    let (atomic, file) = AtomicFile::create(path)?;
    let value = write(file)?;
    atomic.replace()?;
    Ok(value)
}

/// Writes a JSON document.
pub(crate) fn write_json<T: Serialize>(path: &Path, document: &T) -> Result<(), TraceError> {
    write_atomically(path, |file| {
        serde_json::to_writer_pretty(&file, document)
            .map_err(|e| TraceError::file("write", path, e))
    })
}

/// Creates a folder and its parents.
pub(crate) fn make_dir(dir: &Path) -> Result<(), TraceError> {
    fs::create_dir_all(dir).map_err(|e| TraceError::file("create", dir, e))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_is_renamed_when_complete_and_a_failure_leaves_nothing() {
        let temp = tempfile::tempdir().expect("a folder");
        let path = temp.path().join("a.json");
        let names = || {
            let entries = fs::read_dir(temp.path()).expect("a folder").flatten();
            let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.collect::<Vec<_>>()
        };
        let failed = write_atomically(&path, |mut file| {
            file.write_all(b"half").expect("writes");
            assert_eq!(names(), [".a.json.partial"]);
            Err::<(), _>(TraceError::damaged(&path, "it broke off"))
        });
        assert_eq!(failed.expect_err("it broke off").code(), "T003");
        assert_eq!(names(), [""; 0]);
        write_atomically(&path, |mut file| {
            file.write_all(b"all").expect("writes");
            Ok(())
        })
        .expect("writes");
        assert_eq!(names(), ["a.json"]);
        assert_eq!(fs::read_to_string(&path).expect("reads"), "all");
    }
}
