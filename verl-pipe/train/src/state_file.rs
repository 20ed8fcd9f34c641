//! `status.json`: the state of a run, written so that it fits even on a full disk.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use verl_run::atomic_file::AtomicFile;
use verl_run::records::{Status, StatusFile};

use crate::folder::pretty;

/// Content of `status.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunStatus {
    /// State of the run: in progress, or how it ended.
    pub status: Status,
    /// Last completed step; at most one second old while the run is in progress.
    pub step: u64,
    /// Why it ended early; omitted if empty.
    pub reason: String,
    /// Models whose folder is complete; omitted if there are none.
    pub saved: Vec<String>,
    /// Saved models that contain a part of the step after `step`, which failed; omitted if there are none.
    pub partial: Vec<String>,
}

impl RunStatus {
    /// A run in progress that has completed step `step`.
    pub fn running(step: u64) -> RunStatus {
        RunStatus {
            status: Status::Running,
            step,
            reason: String::new(),
            saved: Vec::new(),
            partial: Vec::new(),
        }
    }
}

/// What a run has reported so far, as counted in `status.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ReportCounts {
    /// Number of warnings and errors.
    pub warnings: u64,
    /// How often each anomaly rule fired.
    pub anomalies: BTreeMap<String, u64>,
}

/// Bytes that a file occupies at least on disk: one block.
pub(super) const BLOCK: usize = 4096;

/// Writes the file to run folder `dir` via a temporary file; a final status survives a loss of power. If there is no space
/// for the temporary file, overwrites the old file, with the reason shortened.
pub(super) fn write_status(dir: &Path, file: &StatusFile) -> io::Result<()> {
    let path = dir.join("status.json");
    // That of a run in progress is replaced every second, and is out of date after a loss of power anyway.
    let finish = match file.status {
        Status::Running => AtomicFile::replace,
        _ => AtomicFile::durable,
    };
    let written = AtomicFile::with(&path, pretty(file).as_bytes()).and_then(finish);
    let Err(error) = written else {
        return Ok(());
    };
    let mut short = file.clone();
    short.reason = file
        .reason
        .as_deref()
        .map(|reason| shortened(reason, BLOCK / 4));
    over_write(&path, &pretty(&short)).map_err(|_| error.source)
}

/// Shortens a text to at most `bytes` bytes, at a character boundary.
fn shortened(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(bytes)])
}

/// Overwrites the content of a small file with `text`, without allocating space on the disk.
fn over_write(path: &Path, text: &str) -> io::Result<()> {
    if text.len() > BLOCK {
        return Err(io::Error::other(
            "the text is larger than the space of the file",
        ));
    }
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}
