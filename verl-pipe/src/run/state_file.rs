//! `status.json`: how far a run came, written so that a full disk still takes it.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use crate::run::folder::pretty;
use crate::run::records::{Status, StatusFile};

/// Content of `status.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunState {
    /// How it ended, if it has.
    pub status: Status,
    /// Last whole step; of a run that goes on, at most a second old.
    pub step: u64,
    /// Why it ended early; left out where it is empty.
    pub reason: String,
    /// Models whose folder is whole; left out while there are none.
    pub saved: Vec<String>,
    /// Those among them that hold a part of the step behind `step`, which failed; left out where there are none.
    pub partial: Vec<String>,
}

impl RunState {
    /// A run that goes on behind step `step`.
    pub fn running(step: u64) -> RunState {
        RunState {
            status: Status::Running,
            step,
            reason: String::new(),
            saved: Vec::new(),
            partial: Vec::new(),
        }
    }
}

/// What a run has told so far, as `status.json` counts it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// Warnings and errors.
    pub warnings: u64,
    /// How often each anomaly rule began to hold.
    pub anomalies: BTreeMap<String, u64>,
}

/// Bytes that a file of any size has on its disk: one block.
pub(super) const BLOCK: usize = 4096;

/// Writes the file into run folder `dir`, aside and then renamed; where there is no room for that, over the old one, with
/// its reason cut short.
pub(super) fn write_status(dir: &Path, file: &StatusFile) -> io::Result<()> {
    let aside = dir.join(".status.json.partial");
    let path = dir.join("status.json");
    let written = fs::write(&aside, pretty(file)).and_then(|()| fs::rename(&aside, &path));
    let Err(reason) = written else {
        return Ok(());
    };
    let _ = fs::remove_file(&aside);
    let mut short = file.clone();
    short.reason = file
        .reason
        .as_deref()
        .map(|reason| shortened(reason, BLOCK / 4));
    over_write(&path, &pretty(&short)).map_err(|_| reason)
}

/// At most `bytes` bytes of a text, cut between characters.
fn shortened(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(bytes)])
}

/// Puts `text` in the place of what a small file holds, without asking the disk for room.
fn over_write(path: &Path, text: &str) -> io::Result<()> {
    if text.len() > BLOCK {
        return Err(io::Error::other(
            "the text needs more room than the file has",
        ));
    }
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}
