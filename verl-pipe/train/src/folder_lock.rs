//! Whether the process of a run is alive: it keeps `metrics.jsonl` locked, and the system releases the lock however the
//! process ends.

use std::fs::{File, TryLockError};
use std::path::Path;

use verl_run::records::{Status, StatusFile};
use verl_trace::files::TraceError;

/// Message about a run whose process is [`Process::Gone`].
pub const ABANDONED: &str = "no process has this folder locked, although status.json says that the run is in progress: the run was killed, \
     its machine went down, it runs on another machine, or this is a copy of its folder; everything written so far is \
     still there; to repeat a run that was killed, start it in another folder (`run.dir`)";

/// State of the process of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// The process has ended, and `status.json` says so.
    Ended,
    /// The process is alive and has the folder locked.
    Alive,
    /// `status.json` says that the run is in progress, but no process has the folder locked: the run was killed, or
    /// this is a copy of the folder.
    Gone,
    /// `status.json` says that the run is in progress, and locks are not available.
    Unknown,
}

/// Takes the lock, which lasts as long as `metrics` is open. Without locks on the file system, the state of the process
/// is unknown.
pub(super) fn lock_metrics(metrics: &File) {
    // On other systems a lock prevents other processes from reading the file.
    #[cfg(unix)]
    if let Err(error) = metrics.try_lock() {
        tracing::debug!("metrics.jsonl is not locked: {error}");
    }
    #[cfg(not(unix))]
    let _ = metrics;
}

/// Whether a process has the run in `dir` locked; `None` if that cannot be determined.
pub fn is_locked(dir: &Path) -> Option<bool> {
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

/// State of the process of the run in `dir`.
///
/// # Errors
/// If `status.json` cannot be read.
pub fn process_of(dir: &Path) -> Result<Process, TraceError> {
    // Checked first: a run that ends in between has already written its status.
    let locked = is_locked(dir);
    let path = dir.join("status.json");
    let bytes = std::fs::read(&path).map_err(|e| TraceError::file("read", &path, e))?;
    let file: StatusFile = serde_json::from_slice(&bytes).map_err(|e| {
        TraceError::damaged(&path, format!("{e}, so the state of the run is unknown"))
    })?;
    Ok(match (file.status, locked) {
        (Status::Running, Some(true)) => Process::Alive,
        (Status::Running, Some(false)) => Process::Gone,
        (Status::Running, None) => Process::Unknown,
        _ => Process::Ended,
    })
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::folder::{RunFolder, RunStatus};

    #[test]
    fn a_run_that_ends_without_a_final_status_is_gone() {
        let temp = tempfile::tempdir().expect("a folder");
        let dir = temp.path().join("run");
        let process = || process_of(&dir).expect("a status");
        let folder = RunFolder::create(&dir, 5).expect("a run");
        assert_eq!((is_locked(&dir), process()), (Some(true), Process::Alive));
        drop(folder);
        assert_eq!((is_locked(&dir), process()), (Some(false), Process::Gone));
        std::fs::remove_file(dir.join("metrics.jsonl")).expect("removed");
        assert_eq!((is_locked(&dir), process()), (None, Process::Unknown));
        std::fs::remove_dir_all(&dir).expect("removed");
        let folder = RunFolder::create(&dir, 5).expect("a run");
        let finished = RunStatus {
            status: Status::Finished,
            ..RunStatus::running(5)
        };
        folder.set_status(&finished).expect("written");
        drop(folder);
        assert_eq!(process(), Process::Ended);
        assert!(process_of(temp.path()).is_err());
    }
}
