//! Files that are written aside and then renamed: one that has its name is whole.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::trace::error::TraceError;

/// Where a partly written file lies until it is whole.
pub(crate) fn aside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.partial"))
}

/// A file under construction. What is left of it is removed, unless it is given its name.
#[derive(Debug)]
pub(crate) struct Partial {
    path: PathBuf,
    aside: PathBuf,
    named: bool,
}

impl Partial {
    /// Makes the file aside.
    pub fn create(path: PathBuf) -> Result<(Partial, File), TraceError> {
        let aside = aside(&path);
        let file = File::create(&aside).map_err(|e| TraceError::file("create", &aside, e))?;
        let partial = Partial {
            path,
            aside,
            named: false,
        };
        Ok((partial, file))
    }

    /// The name that it is to have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name.
    pub fn name(mut self) -> Result<(), TraceError> {
        let named = fs::rename(&self.aside, &self.path);
        named.map_err(|e| TraceError::file("rename", &self.aside, e))?;
        self.named = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.named {
            // It may be what fills the disk; whatever failed before is the error to tell.
            let _ = fs::remove_file(&self.aside);
        }
    }
}

/// Has `write` fill a file aside, then gives it its name. What is left of a failure is removed.
pub(crate) fn write_aside<T>(
    path: &Path,
    write: impl FnOnce(File) -> Result<T, TraceError>,
) -> Result<T, TraceError> {
    let (partial, file) = Partial::create(path.to_owned())?;
    let value = write(file)?;
    partial.name()?;
    Ok(value)
}

/// Writes a JSON document.
pub(crate) fn write_json<T: Serialize>(path: &Path, document: &T) -> Result<(), TraceError> {
    write_aside(path, |file| {
        serde_json::to_writer_pretty(&file, document)
            .map_err(|e| TraceError::file("write", path, e))
    })
}

/// Makes a folder and those above it.
pub(crate) fn make_dir(dir: &Path) -> Result<(), TraceError> {
    fs::create_dir_all(dir).map_err(|e| TraceError::file("create", dir, e))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_has_its_name_when_it_is_whole_and_a_failure_leaves_nothing() {
        let temp = tempfile::tempdir().expect("a folder");
        let path = temp.path().join("a.json");
        let names = || {
            let entries = fs::read_dir(temp.path()).expect("a folder").flatten();
            let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.collect::<Vec<_>>()
        };
        let failed = write_aside(&path, |mut file| {
            file.write_all(b"half").expect("writes");
            assert_eq!(names(), [".a.json.partial"]);
            Err::<(), _>(TraceError::damaged(&path, "it broke off"))
        });
        assert_eq!(failed.expect_err("it broke off").code(), "T003");
        assert_eq!(names(), [""; 0]);
        write_aside(&path, |mut file| {
            file.write_all(b"all").expect("writes");
            Ok(())
        })
        .expect("writes");
        assert_eq!(names(), ["a.json"]);
        assert_eq!(fs::read_to_string(&path).expect("reads"), "all");
    }
}
