//! The run folder: everything that a run writes, self-contained.
//!
//! `pipe schema --run-file NAME` describes the fields of each file.
//!
//! | file | content |
//! |---|---|
//! | `config.toml` | the pipeline with all settings, including defaults |
//! | `config.schema.json` | schema of `config.toml`, for editors; if a registry is known |
//! | `plan.txt` | the checked graph |
//! | `versions.json` | versions of the crates and the C library, the platform, its processor and the CPU kernels |
//! | `data.json` | origin, rows and fingerprint of each data set |
//! | `metrics.jsonl` | one flat object per step: `step`, `epoch`, `timestamp` (seconds since 1970 UTC), metrics |
//! | `samples.jsonl` | a few rows of each step (`kind` `training`) and samples of observers |
//! | `row_errors.jsonl` | rows that failed or were slow in a stage, and why; if any |
//! | `warnings.jsonl` | warnings of the run; see [`warnings`](crate::warnings); if any |
//! | `model/<name>/` | models at the end of the run |
//! | `trace/` | statistics of every edge, full steps, anomalies; see [`files`](verl_trace::files) |
//! | `schema.json` | keys, shapes and meanings of the pipeline, if steps or stages are traced in full |
//! | `stall.json` | what the run waited for during a long silence; see [`stall`](verl_run::stall) |
//! | `timeline.jsonl` | steps as they ran; see [`timeline_file`](crate::timeline_file) |
//! | `start.json` | duration of each part of the start, up to the end of the first step, and compiled kernels |
//! | `status.json` | see [`RunStatus`] |
//!
//! A line is written with one call and removed again if the disk accepts only a part of it. `status.json` and models
//! are written to a temporary path and renamed, so they are always complete. On a full disk a new `status.json`
//! overwrites the old one within the space it already has.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use serde::Serialize;
use serde_json::Value;
use verl_run::atomic_file::flush_folder_of;
use verl_run::error::RunError;
use verl_run::metrics::{StepMetrics, now};
use verl_run::processor::{c_library, processor_features};
use verl_run::records::{
    Cpu, DataFile, DataOrigin, RowErrorLine, RowStatus, SampleLine, StartFile, StatusFile,
    VersionsFile,
};
use verl_run::runner::Run;
use verl_run::space::Room;

use crate::folder_lock::lock_metrics;
use crate::lines::Lines;
use crate::replaced::replace;
pub use crate::state_file::RunStatus;
use crate::state_file::{BLOCK, ReportCounts, write_status};
pub use verl_run::records::Status;

const NOTHING: &str = "nothing has run yet";

/// Time between two updates of the step in `status.json`.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);

/// Approximate number of bytes by which a line of metrics or samples can grow its file.
const LINE: u64 = BLOCK as u64;

/// Maximum number of lines of `row_errors.jsonl`; later rows are only counted in the metrics.
const MAX_ROW_ERRORS: usize = 20_000;

fn file_error(action: &'static str, path: &Path, reason: io::Error, saved: &str) -> RunError {
    RunError::File {
        action,
        path: path.to_owned(),
        reason,
        saved: saved.to_owned(),
    }
}

/// The folder of one run; created by the run and never shared.
#[derive(Debug)]
pub struct RunFolder {
    dir: PathBuf,
    metrics: Lines,
    samples: Lines,
    /// Created when the first row is written.
    row_errors: Option<Lines>,
    num_row_errors: usize,
    /// Space on its disk that is reserved for the models.
    room: Room,
    counts: ReportCounts,
    /// Why the run ended whose folder this one replaced.
    replaced: Option<String>,
    /// Last step whose metrics are in the file.
    recorded: Option<u64>,
    /// When the step was last updated in `status.json`.
    noted: Option<Instant>,
    target: u64,
}

impl RunFolder {
    /// Creates the folder `dir` for a run of `target` steps. The folder of a run that ended before completing its first
    /// step is replaced if it contains nothing else.
    ///
    /// # Errors
    /// [`RunError::FolderExists`] if anything else exists at `dir`; [`RunError::File`] if the folder cannot be created.
    pub fn create(dir: &Path, target: u64) -> Result<RunFolder, RunError> {
        Self::create_in(dir, target, Room::of(dir, None))
    }

    /// Like [`RunFolder::create`], with the given tracker of the space on its disk.
    pub(crate) fn create_in(dir: &Path, target: u64, room: Room) -> Result<RunFolder, RunError> {
        if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(|e| file_error("create", parent, e, NOTHING))?;
        }
        let mut replaced = None;
        let mut made = fs::create_dir(dir);
        if made
            .as_ref()
            .is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists)
        {
            replaced = replace(dir);
            if replaced.is_some() {
                made = fs::create_dir(dir);
            }
        }
        match made {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(RunError::FolderExists {
                    path: dir.to_owned(),
                });
            }
            Err(e) => return Err(file_error("create", dir, e, NOTHING)),
        }
        let lines = |name: &str| {
            let path = dir.join(name);
            Lines::create(path.clone()).map_err(|e| file_error("create", &path, e, NOTHING))
        };
        let files =
            lines("metrics.jsonl").and_then(|metrics| Ok((metrics, lines("samples.jsonl")?)));
        let (metrics, samples) = files.inspect_err(|_| drop(fs::remove_dir_all(dir)))?;
        lock_metrics(&metrics.file);
        let folder = RunFolder {
            dir: dir.to_owned(),
            metrics,
            samples,
            row_errors: None,
            num_row_errors: 0,
            room,
            counts: ReportCounts::default(),
            replaced,
            recorded: None,
            noted: None,
            target,
        };
        if let Err(error) = folder.set_status(&RunStatus::running(0)) {
            folder.discard();
            return Err(error);
        }
        Ok(folder)
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Why the run ended whose folder this one replaced; `None` if it replaced none.
    pub fn replaced(&self) -> Option<&str> {
        self.replaced.as_deref()
    }

    /// Sets the counts of warnings and anomalies for the next `status.json`.
    pub(crate) fn set_counts(&mut self, counts: ReportCounts) {
        self.counts = counts;
    }

    /// Removes the folder of a run that never ran.
    pub fn discard(self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!("cannot remove `{}`: {error}", self.dir.display());
        }
    }

    /// Writes a text file; for content that is known before the first step.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_text(&self, name: &str, text: &str) -> Result<(), RunError> {
        let path = self.dir.join(name);
        fs::write(&path, text).map_err(|e| file_error("write", &path, e, &self.saved()))
    }

    /// Writes `data.json` and `versions.json`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_origin(&self, run: &Run, versions: &[(String, String)]) -> Result<(), RunError> {
        let data = run.data().iter();
        let data = data.map(|(name, data)| (name.clone(), DataOrigin::of(data.as_ref())));
        self.write_text("data.json", &pretty(&DataFile::from_iter(data)))?;
        let others = versions.iter();
        let others = others.map(|(name, version)| (name.clone(), version.clone().into()));
        let all = VersionsFile {
            engine: env!("CARGO_PKG_VERSION").to_owned(),
            others: others.collect(),
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            processor: processor_features()
                .into_iter()
                .map(str::to_owned)
                .collect(),
            cpu: Cpu::here(),
            cpu_kernels: run.schedule().plan().pipe().cpu_kernels(),
            c_library: Some(c_library()),
            optimised: !cfg!(debug_assertions),
        };
        self.write_text("versions.json", &pretty(&all))
    }

    /// Writes `start.json`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_start(&self, start: &StartFile) -> Result<(), RunError> {
        self.write_text("start.json", &pretty(start))
    }

    /// Adds a line to `metrics.jsonl`.
    ///
    /// # Errors
    /// If the line cannot be written; the message says what is safely on disk.
    pub fn record(&mut self, metrics: &StepMetrics) -> Result<(), RunError> {
        let room = self.room.ensure_free(LINE);
        let written = room.and_then(|()| self.metrics.add(&metrics.to_json()));
        written.map_err(|e| file_error("write", &self.metrics.path, e, &self.saved()))?;
        self.recorded = Some(metrics.step);
        self.note(metrics.step);
        Ok(())
    }

    /// Updates the step in `status.json`, at most once per second.
    fn note(&mut self, step: u64) {
        if self.noted.is_some_and(|at| at.elapsed() < UPDATE_INTERVAL) {
            return;
        }
        self.noted = Some(Instant::now());
        if let Err(error) = self.set_status(&RunStatus::running(step)) {
            // If the disk is full, the next line of metrics reports it.
            tracing::debug!("{error}");
        }
    }

    /// Adds samples of `step` to `samples.jsonl`.
    ///
    /// # Errors
    /// Like [`RunFolder::record`].
    pub fn sample(&mut self, step: u64, samples: &[Value]) -> Result<(), RunError> {
        for sample in samples {
            let mut fields = match sample {
                Value::Object(fields) => fields.clone(),
                other => serde_json::Map::from_iter([("sample".to_owned(), other.clone())]),
            };
            // The key `step` is reserved for the engine.
            fields.shift_remove("step");
            let line = SampleLine { step, fields };
            let room = self.room.ensure_free(LINE);
            let written = room.and_then(|()| self.samples.add(&line));
            written.map_err(|e| file_error("write", &self.samples.path, e, &self.saved()))?;
        }
        Ok(())
    }

    /// Adds rows that failed or were slow to `row_errors.jsonl`, up to its maximum length.
    ///
    /// # Errors
    /// Like [`RunFolder::record`].
    pub fn row_errors(&mut self, lines: &[RowErrorLine]) -> Result<(), RunError> {
        for line in lines {
            if self.num_row_errors > MAX_ROW_ERRORS {
                return Ok(());
            }
            let path = self.dir.join("row_errors.jsonl");
            let written = self.add_row_error(&path, line);
            written.map_err(|e| file_error("write", &path, e, &self.saved()))?;
        }
        Ok(())
    }

    fn add_row_error(&mut self, path: &Path, line: &RowErrorLine) -> io::Result<()> {
        self.room.ensure_free(LINE)?;
        if self.row_errors.is_none() {
            self.row_errors = Some(Lines::create(path.to_owned())?);
        }
        self.num_row_errors += 1;
        let Some(file) = &mut self.row_errors else {
            return Ok(());
        };
        if self.num_row_errors <= MAX_ROW_ERRORS {
            return file.add(line);
        }
        file.add(&RowErrorLine {
            sample: None,
            data_row: None,
            status: RowStatus::LeftOut,
            reason: format!(
                "at most {MAX_ROW_ERRORS} lines are written; `row_errors` of the metrics counts all rows"
            ),
            seconds: None,
            ..line.clone()
        })
    }

    /// Saves model `name` to `model/<name>`, via a temporary folder.
    ///
    /// # Errors
    /// If it cannot be written; in that case no folder of that name exists.
    pub fn save_model(&self, run: &mut Run, name: &str) -> Result<PathBuf, RunError> {
        let models = self.dir.join("model");
        let (aside, dir) = (models.join(format!(".{name}.partial")), models.join(name));
        fs::create_dir_all(&models).map_err(|e| file_error("create", &models, e, &self.saved()))?;
        let written = run.save_model(name, &aside);
        if written.is_err() {
            // A partial model is useless, and `status.json` may need its space.
            if aside.exists()
                && let Err(error) = fs::remove_dir_all(&aside)
            {
                tracing::warn!("cannot remove `{}`: {error}", aside.display());
            }
            // Fails if the folder contains another model, as intended.
            let _ = fs::remove_dir(&models);
        }
        written?;
        // If only this fails, the model stays in the temporary folder.
        fs::rename(&aside, &dir).map_err(|e| file_error("rename", &aside, e, &self.saved()))?;
        if let Err(error) = flush_folder_of(&dir) {
            // The model is complete; only its new name may be lost with the power.
            tracing::warn!("{error}");
        }
        Ok(dir)
    }

    /// Writes `status.json`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn set_status(&self, state: &RunStatus) -> Result<(), RunError> {
        let written = write_status(&self.dir, &self.status_file(state));
        let path = self.dir.join("status.json");
        written.map_err(|reason| file_error("write", &path, reason, &self.saved()))
    }

    fn status_file(&self, state: &RunStatus) -> StatusFile {
        StatusFile {
            status: state.status,
            step: state.step,
            target: self.target,
            timestamp: now(),
            saved: state.saved.clone(),
            partial: state.partial.clone(),
            reason: (!state.reason.is_empty()).then(|| state.reason.clone()),
            warnings: self.counts.warnings,
            anomalies: self.counts.anomalies.clone(),
        }
    }

    fn saved(&self) -> String {
        match self.recorded {
            None => "no step is recorded".to_owned(),
            Some(step) => format!(
                "metrics up to step {step} are in `{}`",
                self.metrics.path.display()
            ),
        }
    }
}

pub(super) fn pretty(value: &impl Serialize) -> String {
    // Strings, numbers and maps of strings always serialise.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use serde_json::json;

    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_error_of_a_full_disk_says_what_is_safe() {
        let temp = tempfile::tempdir().unwrap();
        let mut folder = RunFolder::create(&temp.path().join("run"), 5).unwrap();
        folder
            .record(&StepMetrics {
                step: 1,
                ..StepMetrics::default()
            })
            .unwrap();
        folder.metrics.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = folder
            .record(&StepMetrics {
                step: 2,
                ..StepMetrics::default()
            })
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("cannot write") && error.contains("metrics.jsonl"),
            "{error}"
        );
        assert!(
            error.contains("No space left") && error.contains("metrics up to step 1 are in"),
            "{error}"
        );
    }

    fn status(folder: &RunFolder) -> Value {
        let text = fs::read_to_string(folder.path().join("status.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn on_a_full_disk_a_status_overwrites_the_old_one() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(&temp.path().join("run"), 5).unwrap();
        let failed = RunStatus {
            status: Status::Failed,
            reason: "no space ".repeat(1000),
            saved: vec!["actor".to_owned()],
            ..RunStatus::running(2)
        };
        // A folder in place of the new file: as on a full disk, it cannot be created.
        let aside = folder.path().join(".status.json.partial");
        fs::create_dir(&aside).unwrap();
        folder.set_status(&failed).unwrap();
        let written = status(&folder);
        assert_eq!(
            (&written["status"], &written["step"]),
            (&"failed".into(), &2.into())
        );
        assert_eq!(written["saved"], json!(["actor"]));
        let reason = written["reason"].as_str().unwrap();
        assert!(reason.ends_with('…') && reason.len() < BLOCK, "{reason}");
        // A shorter text leaves no remainder of a longer one.
        folder.set_status(&RunStatus::running(3)).unwrap();
        assert_eq!(status(&folder)["step"], 3);
        assert!(status(&folder).get("reason").is_none());
        fs::remove_file(folder.path().join("status.json")).unwrap();
        assert!(folder.set_status(&failed).is_err());
    }

    #[test]
    fn a_status_that_cannot_be_written_leaves_no_partial_file() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(&temp.path().join("run"), 5).unwrap();
        let path = folder.path().join("status.json");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(folder.set_status(&RunStatus::running(1)).is_err());
        assert!(!folder.path().join(".status.json.partial").exists());
    }

    #[test]
    fn the_status_of_a_run_in_progress_has_its_step() {
        let temp = tempfile::tempdir().unwrap();
        let mut folder = RunFolder::create(&temp.path().join("run"), 5).unwrap();
        let at = |step| StepMetrics {
            step,
            ..StepMetrics::default()
        };
        folder.record(&at(1)).unwrap();
        assert_eq!(
            (&status(&folder)["status"], &status(&folder)["step"]),
            (&"running".into(), &1.into())
        );
        // Not at each step: less than a second has passed.
        folder.record(&at(2)).unwrap();
        folder.noted = folder.noted.and_then(|at| at.checked_sub(UPDATE_INTERVAL));
        folder.record(&at(3)).unwrap();
        assert_eq!(status(&folder)["step"], 3);
    }

    #[test]
    fn an_existing_folder_is_rejected_even_if_empty() {
        let temp = tempfile::tempdir().unwrap();
        assert!(matches!(
            RunFolder::create(temp.path(), 5),
            Err(RunError::FolderExists { .. })
        ));
        let folder = RunFolder::create(&temp.path().join("a/b"), 5).unwrap();
        folder.discard();
        assert!(!temp.path().join("a/b").exists());
    }
}
