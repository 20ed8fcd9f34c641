//! Whether the process of a run is there: it holds a lock on `metrics.jsonl`, which the system takes back however the
//! process ends.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::run::records::{Status, StatusFile};

/// What is told of a run whose process is gone without a word.
pub(crate) const ABANDONED: &str = "no process of the run is left, although status.json says that it runs: it was killed, or its machine went down; \
     what it wrote until then is there, and a run begins anew in another folder (`run.dir`)";

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

/// Whether the run in `dir` says that it runs, and its process is gone.
pub(crate) fn is_abandoned(dir: &Path) -> bool {
    let status = std::fs::read(dir.join("status.json"));
    let status = status
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let runs = status.is_some_and(|file: StatusFile| file.status == Status::Running);
    runs && is_held(dir) == Some(false)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::run::folder::{RunFolder, RunState};

    #[test]
    fn a_run_that_ends_without_a_word_is_abandoned() {
        let temp = tempfile::tempdir().expect("a folder");
        let dir = temp.path().join("run");
        let folder = RunFolder::create(&dir, 5).expect("a run");
        assert_eq!((is_held(&dir), is_abandoned(&dir)), (Some(true), false));
        drop(folder);
        assert_eq!((is_held(&dir), is_abandoned(&dir)), (Some(false), true));
        std::fs::remove_dir_all(&dir).expect("removed");
        let folder = RunFolder::create(&dir, 5).expect("a run");
        let finished = RunState {
            status: Status::Finished,
            ..RunState::running(5)
        };
        folder.set_state(&finished).expect("written");
        drop(folder);
        assert!(!is_abandoned(&dir));
        assert_eq!(is_held(temp.path()), None);
    }
}
