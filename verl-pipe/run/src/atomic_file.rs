//! [`AtomicFile`]: a file that is written aside and renamed when it is complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file under construction. It has a temporary name in the folder of the file that it becomes; dropping it before it is
/// finished removes it, and leaves a file under the final name as it was.
///
/// There are two ways to finish it:
/// - [`AtomicFile::replace`] renames it. A process that ends or is killed leaves the old or the new file, never a part of
///   one. A machine that loses power can leave an empty file. Enough for files that are written often (`status.json` of a
///   run in progress, `stall.json`), and for recordings: readers detect damaged ones, and nothing is lost if one is missing.
/// - [`AtomicFile::durable`] also flushes the file and its folder, so the same is true if the machine loses power. It costs
///   milliseconds. For what nothing can restore: the final `status.json`, and statistics that exist nowhere else.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    aside: PathBuf,
    finished: bool,
}

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} `{}`: {source}", .path.display())]
pub struct AtomicFileError {
    /// The operation that failed, as a verb.
    pub operation: &'static str,
    /// The file or folder that it failed on.
    pub path: PathBuf,
    /// The error of the system.
    pub source: io::Error,
}

impl AtomicFileError {
    fn of(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AtomicFileError {
        let path = path.to_owned();
        move |source| AtomicFileError {
            operation,
            path,
            source,
        }
    }
}

impl AtomicFile {
    /// Creates the temporary file of `path`, and opens it for writing.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn create(path: impl Into<PathBuf>) -> Result<(AtomicFile, File), AtomicFileError> {
        let path = path.into();
        let aside = AtomicFile::aside(&path);
        let file = File::create(&aside).map_err(AtomicFileError::of("create", &aside))?;
        let atomic = AtomicFile {
            path,
            aside,
            finished: false,
        };
        Ok((atomic, file))
    }

    /// The temporary file of `path` with all of its content.
    ///
    /// # Errors
    /// If it cannot be created or written.
    pub fn with(path: &Path, content: &[u8]) -> Result<AtomicFile, AtomicFileError> {
        let (atomic, mut file) = AtomicFile::create(path)?;
        file.write_all(content)
            .map_err(AtomicFileError::of("write", path))?;
        Ok(atomic)
    }

    /// The temporary path of the file `path`; in the same folder, so that renaming is atomic.
    pub fn aside(path: &Path) -> PathBuf {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        path.with_file_name(format!(".{name}.partial"))
    }

    /// The final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file to its final name.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn replace(mut self) -> Result<(), AtomicFileError> {
        fs::rename(&self.aside, &self.path).map_err(AtomicFileError::of("rename", &self.aside))?;
        self.finished = true;
        Ok(())
    }

    /// Flushes the file to disk, renames it to its final name, and flushes its folder.
    ///
    /// # Errors
    /// If one of these fails. If only the last one does, the file has its final name.
    pub fn durable(self) -> Result<(), AtomicFileError> {
        // Opened again, because the caller owns the file; any handle flushes it.
        let file = File::options().write(true).open(&self.aside);
        file.and_then(|file| file.sync_all())
            .map_err(AtomicFileError::of("flush", &self.aside))?;
        let path = self.path.clone();
        self.replace()?;
        flush_folder_of(&path)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.finished {
            // The file may be what fills the disk. The error that came before is the one to report.
            let _ = fs::remove_file(&self.aside);
        }
    }
}

/// Flushes the folder of `path`, so that a new name in it survives a loss of power.
///
/// # Errors
/// If that fails; on a file system that cannot flush a folder it does nothing.
pub fn flush_folder_of(path: &Path) -> Result<(), AtomicFileError> {
    #[cfg(unix)]
    {
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        match File::open(folder).and_then(|folder| folder.sync_all()) {
            Err(error)
                if ![io::ErrorKind::InvalidInput, io::ErrorKind::Unsupported]
                    .contains(&error.kind()) =>
            {
                return Err(AtomicFileError::of("flush", folder)(error));
            }
            _ => {}
        }
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Finish = fn(AtomicFile) -> Result<(), AtomicFileError>;

    const FINISHES: [Finish; 2] = [AtomicFile::replace, AtomicFile::durable];

    /// Names of the files in a folder.
    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).expect("a folder").flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_finished_file_replaces_the_old_one() {
        for finish in FINISHES {
            let temp = tempfile::tempdir().expect("a folder");
            let path = temp.path().join("a.json");
            fs::write(&path, "old").expect("writes");
            let atomic = AtomicFile::with(&path, b"new").expect("writes");
            assert_eq!(names(temp.path()), [".a.json.partial", "a.json"]);
            assert_eq!(fs::read_to_string(&path).expect("reads"), "old");
            finish(atomic).expect("finishes");
            assert_eq!(names(temp.path()), ["a.json"]);
            assert_eq!(fs::read_to_string(&path).expect("reads"), "new");
        }
    }

    #[test]
    fn an_error_half_way_leaves_the_old_file_and_nothing_else() {
        let temp = tempfile::tempdir().expect("a folder");
        let path = temp.path().join("a.json");
        fs::write(&path, "old").expect("writes");
        let half = || -> io::Result<()> {
            let (_atomic, mut file) = AtomicFile::create(&path).expect("creates");
            file.write_all(b"ne")?;
            assert_eq!(names(temp.path()), [".a.json.partial", "a.json"]);
            Err(io::ErrorKind::StorageFull.into())
        };
        half().expect_err("it broke off");
        assert_eq!(names(temp.path()), ["a.json"]);
        assert_eq!(fs::read_to_string(&path).expect("reads"), "old");
    }

    #[test]
    fn a_failed_rename_leaves_nothing_and_names_operation_and_path() {
        for finish in FINISHES {
            let temp = tempfile::tempdir().expect("a folder");
            let path = temp.path().join("a.json");
            // A folder in its place.
            fs::create_dir(&path).expect("a folder");
            let atomic = AtomicFile::with(&path, b"new").expect("writes");
            let error = finish(atomic).expect_err("a folder");
            assert_eq!(
                (error.operation, &error.path),
                ("rename", &temp.path().join(".a.json.partial"))
            );
            assert!(error.to_string().starts_with("cannot rename `"), "{error}");
            assert_eq!(names(temp.path()), ["a.json"]);
        }
    }

    #[test]
    fn a_file_that_cannot_be_created_or_flushed_is_an_error() {
        let temp = tempfile::tempdir().expect("a folder");
        let path = temp.path().join("missing").join("a.json");
        let error = AtomicFile::with(&path, b"new").expect_err("no folder");
        assert_eq!(
            (error.operation, error.path),
            ("create", AtomicFile::aside(&path))
        );
        // Another process removes the temporary file.
        let path = temp.path().join("a.json");
        let atomic = AtomicFile::with(&path, b"new").expect("writes");
        fs::remove_file(AtomicFile::aside(&path)).expect("removes");
        let error = atomic.durable().expect_err("it is gone");
        assert_eq!(error.operation, "flush");
        assert!(!path.exists());
    }
}
