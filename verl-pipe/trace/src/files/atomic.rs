//! Files that are written under a temporary name and then renamed: a file under its final name is complete.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::files::error::TraceError;

/// The temporary path of a file until it is complete; in the same folder, so that renaming is atomic.
pub(crate) fn partial_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.partial"))
}

/// A file under construction. Dropping it before [`Partial::commit`] removes the file.
#[derive(Debug)]
pub(crate) struct Partial {
    path: PathBuf,
    temporary: PathBuf,
    committed: bool,
}

impl Partial {
    /// Creates the file under its temporary name.
    pub fn create(path: PathBuf) -> Result<(Partial, File), TraceError> {
        let temporary = partial_path(&path);
        let file =
            File::create(&temporary).map_err(|e| TraceError::file("create", &temporary, e))?;
        let partial = Partial {
            path,
            temporary,
            committed: false,
        };
        Ok((partial, file))
    }

    /// The final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file to its final name.
    pub fn commit(mut self) -> Result<(), TraceError> {
        let renamed = fs::rename(&self.temporary, &self.path);
        renamed.map_err(|e| TraceError::file("rename", &self.temporary, e))?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.committed {
            // The file may be what fills the disk. The error that came before is the one to report.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a file with `write` under a temporary name and then renames it. A failure leaves no file.
pub fn write_atomically<T>(
    path: &Path,
    write: impl FnOnce(File) -> Result<T, TraceError>,
) -> Result<T, TraceError> {
    let (partial, file) = Partial::create(path.to_owned())?;
    let value = write(file)?;
    partial.commit()?;
    Ok(value)
}

/// Writes a JSON document.
pub fn write_json<T: Serialize>(path: &Path, document: &T) -> Result<(), TraceError> {
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
