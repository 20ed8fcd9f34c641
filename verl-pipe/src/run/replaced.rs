//! Run folders that hold nothing worth keeping: those of runs that ended before their first step was done.

use std::path::Path;

/// Takes the folder `dir` of a run that ended before its first step was done out of the way, and removes it. Gives why that
/// run ended; `None` where the folder is anything else, and then it is left as it is.
///
/// Two processes may try at once: who holds the lock of the old run's metrics, and finds them still at their place, is the
/// one. The folder is renamed before anything of it is removed, so whoever looks finds all of it or nothing.
#[cfg(unix)]
pub(super) fn replace(dir: &Path) -> Option<String> {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    let metrics = File::open(dir.join("metrics.jsonl")).ok()?;
    // Looked at before the lock is taken: that of a run which begins just now must not be taken from it for a moment.
    worthless(dir)?;
    metrics.try_lock().ok()?;
    let (held, there) = (
        metrics.metadata().ok()?,
        fs::metadata(dir.join("metrics.jsonl")).ok()?,
    );
    if (held.dev(), held.ino()) != (there.dev(), there.ino()) {
        return None;
    }
    let reason = worthless(dir)?;
    let mut name = std::ffi::OsString::from(".");
    name.push(dir.file_name()?);
    name.push(format!(".replaced-{}", std::process::id()));
    let aside = dir.with_file_name(name);
    fs::rename(dir, &aside).ok()?;
    if let Err(error) = fs::remove_dir_all(&aside) {
        tracing::warn!("cannot remove `{}`: {error}", aside.display());
    }
    Some(reason)
}

/// Without locks of files nobody can tell that no other process replaces the folder too.
#[cfg(not(unix))]
pub(super) fn replace(_dir: &Path) -> Option<String> {
    None
}

/// Why the run in `dir` ended, where it did so before its first step was done and left no model, no line of a step, and
/// nothing that a run does not write.
#[cfg(unix)]
fn worthless(dir: &Path) -> Option<String> {
    use std::fs;

    use crate::run::records::{MetricsLine, Status, StatusFile};

    /// What a run writes before its first step is done.
    const WRITTEN: [&str; 14] = [
        "config.schema.json",
        "config.toml",
        "data.json",
        "metrics.jsonl",
        "plan.txt",
        "row_errors.jsonl",
        "samples.jsonl",
        "schema.json",
        "stall.json",
        "start.json",
        "status.json",
        "trace",
        "versions.json",
        "warnings.jsonl",
    ];
    // A link leads to a folder that somebody has put elsewhere.
    if fs::symlink_metadata(dir).ok()?.is_symlink() {
        return None;
    }
    let status = fs::read(dir.join("status.json")).ok()?;
    let status: StatusFile = serde_json::from_slice(&status).ok()?;
    let ended = matches!(
        status.status,
        Status::Failed | Status::Cancelled | Status::Stopped
    );
    if !ended || status.step > 0 || !status.saved.is_empty() || !status.partial.is_empty() {
        return None;
    }
    for entry in fs::read_dir(dir).ok()? {
        let name = entry.ok()?.file_name();
        if !WRITTEN.iter().any(|written| name == *written) {
            return None;
        }
    }
    let metrics = fs::read_to_string(dir.join("metrics.jsonl")).ok()?;
    for line in metrics.lines() {
        let line: MetricsLine = serde_json::from_str(line).ok()?;
        if line.step > 0 {
            return None;
        }
    }
    Some(status.reason.unwrap_or_else(|| "it was ended".to_owned()))
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;

    use super::*;
    use crate::run::error::RunError;
    use crate::run::folder::{RunFolder, RunState};
    use crate::run::metrics::StepMetrics;
    use crate::run::records::Status;

    fn ended(dir: &Path, status: Status, step: u64) -> RunFolder {
        let folder = RunFolder::create(dir, 5).unwrap();
        let state = RunState {
            status,
            reason: "no rows".to_owned(),
            ..RunState::running(step)
        };
        folder.set_state(&state).unwrap();
        folder
    }

    #[test]
    fn a_run_that_failed_before_its_first_step_is_replaced() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("run");
        for status in [Status::Failed, Status::Cancelled, Status::Stopped] {
            let mut folder = ended(&dir, status, 0);
            fs::create_dir_all(dir.join("trace/steps")).unwrap();
            // What was observed before the first step is no step.
            folder.record(&StepMetrics::default()).unwrap();
            folder
                .set_state(&RunState {
                    status,
                    ..RunState::running(0)
                })
                .unwrap();
            drop(folder);
            let again = RunFolder::create(&dir, 5).unwrap();
            assert!(again.replaced().is_some(), "{status:?}");
            assert!(!dir.join("trace").exists());
            // No other folder is left beside it.
            assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
            drop(again);
            fs::remove_dir_all(&dir).unwrap();
        }
    }

    #[test]
    fn whatever_may_be_worth_keeping_is_not_replaced() {
        let temp = tempfile::tempdir().unwrap();
        let refused = |name: &str, change: &dyn Fn(&Path, RunFolder)| {
            let dir = temp.path().join(name);
            change(&dir, ended(&dir, Status::Failed, 0));
            let again = RunFolder::create(&dir, 5);
            assert!(
                matches!(again, Err(RunError::FolderExists { .. })),
                "{name}"
            );
            assert!(dir.join("status.json").is_file(), "{name}");
        };
        let set = |folder: &RunFolder, status, step, saved: &[&str]| {
            let saved = saved.iter().map(|name| (*name).to_owned()).collect();
            let state = RunState {
                status,
                saved,
                ..RunState::running(step)
            };
            folder.set_state(&state).unwrap();
        };
        refused("done", &|_, folder| set(&folder, Status::Failed, 1, &[]));
        refused("finished", &|_, folder| {
            set(&folder, Status::Finished, 0, &[])
        });
        refused("running", &|_, folder| {
            set(&folder, Status::Running, 0, &[])
        });
        refused("saved", &|_, folder| {
            set(&folder, Status::Failed, 0, &["actor"])
        });
        refused("model", &|dir, _| {
            fs::create_dir(dir.join("model")).unwrap()
        });
        refused("notes", &|dir, _| {
            fs::write(dir.join("notes.md"), "mine").unwrap()
        });
        refused("metrics", &|_, mut folder| {
            let metrics = StepMetrics {
                step: 1,
                ..StepMetrics::default()
            };
            folder.record(&metrics).unwrap();
            set(&folder, Status::Failed, 0, &[]);
        });
        refused("half a line", &|dir, folder| {
            drop(folder);
            fs::write(dir.join("metrics.jsonl"), "{\"step\":").unwrap();
        });
        // Its process is there still.
        let dir = temp.path().join("held");
        let _held = ended(&dir, Status::Failed, 0);
        assert!(matches!(
            RunFolder::create(&dir, 5),
            Err(RunError::FolderExists { .. })
        ));
        // A link to such a run.
        let (dir, link) = (temp.path().join("there"), temp.path().join("link"));
        drop(ended(&dir, Status::Failed, 0));
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert!(RunFolder::create(&link, 5).is_err());
        assert!(dir.join("status.json").is_file());
    }

    #[test]
    fn of_many_that_replace_at_once_one_has_the_folder() {
        let temp = tempfile::tempdir().unwrap();
        for round in 0..20 {
            let dir = temp.path().join(format!("run-{round}"));
            drop(ended(&dir, Status::Failed, 0));
            let begin = std::sync::Barrier::new(8);
            let made: Vec<RunFolder> = std::thread::scope(|scope| {
                let tries: Vec<_> = (0..8)
                    .map(|_| {
                        scope.spawn(|| {
                            begin.wait();
                            RunFolder::create(&dir, 5).ok()
                        })
                    })
                    .collect();
                let tries = tries.into_iter();
                tries.filter_map(|one| one.join().unwrap()).collect()
            });
            assert_eq!(made.len(), 1, "round {round}");
            assert!(dir.join("status.json").is_file());
            assert!(crate::run::held::is_held(&dir).unwrap());
        }
    }
}
