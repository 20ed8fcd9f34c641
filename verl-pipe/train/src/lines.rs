//! Files to which complete lines are appended.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use serde::Serialize;

/// A file to which complete lines are appended.
#[derive(Debug)]
pub(crate) struct Lines {
    pub path: PathBuf,
    pub file: File,
    len: u64,
}

impl Lines {
    /// Creates the file, which must not exist.
    pub(crate) fn create(path: PathBuf) -> io::Result<Lines> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)?;
        Ok(Lines { path, file, len: 0 })
    }

    /// Appends a line with one call; a partially written line is removed again.
    pub(crate) fn add(&mut self, value: &impl Serialize) -> io::Result<()> {
        self.add_text(serde_json::to_string(value)?)
    }

    /// Size of the file (bytes).
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Appends `line` like [`Lines::add`].
    pub(crate) fn add_text(&mut self, mut line: String) -> io::Result<()> {
        line.push('\n');
        let written = self
            .file
            .write_all(line.as_bytes())
            .and_then(|()| self.file.flush());
        match written {
            Ok(()) => self.len += line.len() as u64,
            // A partial line would corrupt the file. If truncating fails too, the first error is the one to report.
            Err(_) => drop(self.file.set_len(self.len)),
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_partially_written_line_is_removed() {
        let temp = tempfile::tempdir().unwrap();
        let mut lines = Lines::create(temp.path().join("lines.jsonl")).unwrap();
        lines.add(&json!({"a": 1})).unwrap();
        // As if the disk had accepted half of a line and then failed.
        lines.file.write_all(b"{\"b\":").unwrap();
        lines.file = File::open(&lines.path).unwrap();
        assert!(lines.add(&json!({"b": 2})).is_err());
        lines.file = OpenOptions::new().write(true).open(&lines.path).unwrap();
        lines.file.set_len(lines.len).unwrap();
        assert_eq!(fs::read_to_string(&lines.path).unwrap(), "{\"a\":1}\n");
    }
}
