//! Replacing run folders without results: those of runs that ended before completing their first step.

use std::path::Path;

/// Removes the folder `dir` of a run that ended before completing its first step, and returns why that run ended. Any
/// other folder is left unchanged, and the result is `None`.
///
/// If several processes try at once, the one that locks the metrics of the old run and finds them still in place
/// succeeds. The folder is renamed before it is removed, so other processes see either all of it or nothing.
#[cfg(unix)]
pub(super) fn replace(dir: &Path) -> Option<String> {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    let metrics = File::open(dir.join("metrics.jsonl")).ok()?;
    // Checked before taking the lock: a run that is just starting must not lose its lock even briefly.
    disposable(dir)?;
    metrics.try_lock().ok()?;
    let (locked, current) = (
        metrics.metadata().ok()?,
        fs::metadata(dir.join("metrics.jsonl")).ok()?,
    );
    if (locked.dev(), locked.ino()) != (current.dev(), current.ino()) {
        return None;
    }
    let reason = disposable(dir)?;
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

/// Without file locks it is impossible to exclude that another process replaces the folder as well.
#[cfg(not(unix))]
pub(super) fn replace(_dir: &Path) -> Option<String> {
    None
}

/// Why the run in `dir` ended, if it ended before completing its first step and the folder contains no model, no
/// metrics of a step, and no file that a run does not write.
#[cfg(unix)]
fn disposable(dir: &Path) -> Option<String> {
    use std::fs;

    use verl_run::records::{MetricsLine, Status, StatusFile};

    /// Files that a run writes before its first step is complete.
    const WRITTEN: [&str; 15] = [
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
        "timeline.jsonl",
        "trace",
        "versions.json",
        "warnings.jsonl",
    ];
    // A link points to a folder that the user has put elsewhere.
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
    Some(status.reason.unwrap_or_else(|| "unknown reason".to_owned()))
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;

    use verl_run::error::RunError;
    use verl_run::metrics::StepMetrics;
    use verl_run::records::Status;

    use super::*;
    use crate::folder::{RunFolder, RunStatus};

    fn ended(dir: &Path, status: Status, step: u64) -> RunFolder {
        let folder = RunFolder::create(dir, 5).unwrap();
        let state = RunStatus {
            status,
            reason: "no rows".to_owned(),
            ..RunStatus::running(step)
        };
        folder.set_status(&state).unwrap();
        folder
    }

    #[test]
    fn a_run_that_ended_before_its_first_step_is_replaced() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("run");
        for status in [Status::Failed, Status::Cancelled, Status::Stopped] {
            let mut folder = ended(&dir, status, 0);
            fs::create_dir_all(dir.join("trace/steps")).unwrap();
            // Observations before the first step are not a step.
            folder.record(&StepMetrics::default()).unwrap();
            folder
                .set_status(&RunStatus {
                    status,
                    ..RunStatus::running(0)
                })
                .unwrap();
            drop(folder);
            let again = RunFolder::create(&dir, 5).unwrap();
            assert!(again.replaced().is_some(), "{status:?}");
            assert!(!dir.join("trace").exists());
            // No other folder is left next to it.
            assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
            drop(again);
            fs::remove_dir_all(&dir).unwrap();
        }
    }

    #[test]
    fn a_folder_with_anything_worth_keeping_is_not_replaced() {
        let temp = tempfile::tempdir().unwrap();
        let check_kept = |name: &str, change: &dyn Fn(&Path, RunFolder)| {
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
            let state = RunStatus {
                status,
                saved,
                ..RunStatus::running(step)
            };
            folder.set_status(&state).unwrap();
        };
        check_kept("done", &|_, folder| set(&folder, Status::Failed, 1, &[]));
        check_kept("finished", &|_, folder| {
            set(&folder, Status::Finished, 0, &[])
        });
        check_kept("running", &|_, folder| {
            set(&folder, Status::Running, 0, &[])
        });
        check_kept("saved", &|_, folder| {
            set(&folder, Status::Failed, 0, &["actor"])
        });
        check_kept("model", &|dir, _| {
            fs::create_dir(dir.join("model")).unwrap()
        });
        check_kept("notes", &|dir, _| {
            fs::write(dir.join("notes.md"), "mine").unwrap()
        });
        check_kept("metrics", &|_, mut folder| {
            let metrics = StepMetrics {
                step: 1,
                ..StepMetrics::default()
            };
            folder.record(&metrics).unwrap();
            set(&folder, Status::Failed, 0, &[]);
        });
        check_kept("half a line", &|dir, folder| {
            drop(folder);
            fs::write(dir.join("metrics.jsonl"), "{\"step\":").unwrap();
        });
        // Its process is still alive.
        let dir = temp.path().join("locked");
        let _folder = ended(&dir, Status::Failed, 0);
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
    fn when_many_replace_a_folder_at_once_one_succeeds() {
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
            assert!(crate::folder_lock::is_locked(&dir).unwrap());
        }
    }
}
