//! Whether the process of a run is there: it holds a lock on `metrics.jsonl`, which the system takes back however the
//! process ends.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::run::records::{Status, StatusFile};
use crate::trace::error::TraceError;

/// What is told of a run that [`Process::Gone`] is said of.
pub(crate) const ABANDONED: &str = "no process holds this folder, although status.json says that the run goes on: the run was killed, its machine went down, or \
     it goes on elsewhere, on another machine or in the folder of which this is a copy; what was written until then is there, \
     and a run that was killed begins anew in another folder (`run.dir`)";

/// What is known of the process of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Process {
    /// It ended, and said so.
    Ended,
    /// It holds the folder.
    Holds,
    /// The run goes on by its status, and no process holds the folder: it was killed, or this is a copy of the folder.
    Gone,
    /// The run goes on by its status, and there is no lock to look at.
    Unknown,
}

/// Takes the lock, for as long as `metrics` is open. Where the file system has none, nothing is told of the process.
pub(super) fn hold(metrics: &File) {
    // Elsewhere a lock keeps others from reading the file.
    #[cfg(unix)]
    if let Err(error) = metrics.try_lock() {
        tracing::debug!("metrics.jsonl is not locked: {error}");
    }
    #[cfg(not(unix))]
    let _ = metrics;
}

/// Whether some process holds the run in `dir`; `None` where that cannot be told.
pub(crate) fn is_held(dir: &Path) -> Option<bool> {
    if !cfg!(unix) {
        return None;
    }
    let metrics = File::open(dir.join("metrics.jsonl")).ok()?;
    match metrics.try_lock_shared() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}

/// What is known of the process of the run in `dir`.
///
/// # Errors
/// A status.json that cannot be read.
pub(crate) fn process_of(dir: &Path) -> Result<Process, TraceError> {
    // Looked at first: a run that ends meanwhile has said so in its status.
    let held = is_held(dir);
    let path = dir.join("status.json");
    let bytes = std::fs::read(&path).map_err(|e| TraceError::file("read", &path, e))?;
    let file: StatusFile = serde_json::from_slice(&bytes).map_err(|e| {
        TraceError::damaged(
            &path,
            format!("{e}, so that nothing tells whether the run goes on"),
        )
    })?;
    Ok(match (file.status, held) {
        (Status::Running, Some(true)) => Process::Holds,
        (Status::Running, Some(false)) => Process::Gone,
        (Status::Running, None) => Process::Unknown,
        _ => Process::Ended,
    })
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::run::folder::{RunFolder, RunState};

    #[test]
    fn a_run_that_ends_without_a_word_is_gone() {
        let temp = tempfile::tempdir().expect("a folder");
        let dir = temp.path().join("run");
        let process = || process_of(&dir).expect("a status");
        let folder = RunFolder::create(&dir, 5).expect("a run");
        assert_eq!((is_held(&dir), process()), (Some(true), Process::Holds));
        drop(folder);
        assert_eq!((is_held(&dir), process()), (Some(false), Process::Gone));
        std::fs::remove_file(dir.join("metrics.jsonl")).expect("removed");
        assert_eq!((is_held(&dir), process()), (None, Process::Unknown));
        std::fs::remove_dir_all(&dir).expect("removed");
        let folder = RunFolder::create(&dir, 5).expect("a run");
        let finished = RunState {
            status: Status::Finished,
            ..RunState::running(5)
        };
        folder.set_state(&finished).expect("written");
        drop(folder);
        assert_eq!(process(), Process::Ended);
        assert!(process_of(temp.path()).is_err());
    }
}
