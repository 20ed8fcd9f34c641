//! Files to which whole lines are added.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use serde::Serialize;

/// A file to which whole lines are added.
#[derive(Debug)]
pub(crate) struct Lines {
    pub path: PathBuf,
    pub file: File,
    len: u64,
}

impl Lines {
    /// Makes the file, which must not be there.
    pub(crate) fn create(path: PathBuf) -> io::Result<Lines> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)?;
        Ok(Lines { path, file, len: 0 })
    }

    /// Adds a line with one call; half of one is cut off again.
    pub(crate) fn add(&mut self, value: &impl Serialize) -> io::Result<()> {
        let line = format!("{}\n", serde_json::to_string(value)?);
        let written = self
            .file
            .write_all(line.as_bytes())
            .and_then(|()| self.file.flush());
        match written {
            Ok(()) => self.len += line.len() as u64,
            // Half a line would spoil the file; if it cannot even be cut, the first error is the one to tell.
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
    fn a_half_written_line_is_cut_off() {
        let temp = tempfile::tempdir().unwrap();
        let mut lines = Lines::create(temp.path().join("lines.jsonl")).unwrap();
        lines.add(&json!({"a": 1})).unwrap();
        // As if the disk had taken half of a line and then refused.
        lines.file.write_all(b"{\"b\":").unwrap();
        lines.file = File::open(&lines.path).unwrap();
        assert!(lines.add(&json!({"b": 2})).is_err());
        lines.file = OpenOptions::new().write(true).open(&lines.path).unwrap();
        lines.file.set_len(lines.len).unwrap();
        assert_eq!(fs::read_to_string(&lines.path).unwrap(), "{\"a\":1}\n");
    }
}
