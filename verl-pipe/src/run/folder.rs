//! The run folder: everything that a run leaves behind, self-contained.
//!
//! `pipe schema --run-file NAME` tells the fields of each.
//!
//! | file | content |
//! |---|---|
//! | `config.toml` | the pipeline with every setting stated |
//! | `config.schema.json` | what may stand in it, for editors; where a registry is known |
//! | `plan.txt` | the checked graph |
//! | `versions.json` | versions of the crates, the platform and the features of its processor |
//! | `data.json` | origin, rows and fingerprint of each data set |
//! | `metrics.jsonl` | one flat object a step: `step`, `epoch`, `timestamp` (seconds since 1970 UTC), and metrics by name |
//! | `samples.jsonl` | a few rows a step (`kind` `training`) and what observers gave |
//! | `model/<name>/` | models at the end of the run |
//! | `trace/` | statistics of every edge, steps in full, anomalies; see [`format`](crate::trace::format) |
//! | `schema.json` | keys, shapes and meanings of the pipeline, where steps or stages are traced in full |
//! | `stall.json` | what the run waited for when nothing came for long; see [`stall`](crate::run::stall) |
//! | `start.json` | how long everything took until the first step was done, and which kernels were compiled for it |
//! | `status.json` | see [`RunState`] |
//!
//! A line is written with one call and cut off again where the disk refuses a part of it; `status.json` and models
//! are written aside and renamed, so that what is there is whole. On a full disk a new `status.json` is written over the
//! old one, in the room that it has.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::run::error::RunError;
use crate::run::held::hold;
use crate::run::metrics::{StepMetrics, now};
pub use crate::run::records::Status;
use crate::run::records::{DataFile, DataOrigin, SampleLine, StartFile, StatusFile, VersionsFile};
use crate::run::runner::Run;

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

    fn file(&self, target: u64) -> StatusFile {
        StatusFile {
            status: self.status,
            step: self.step,
            target,
            timestamp: now(),
            saved: self.saved.clone(),
            partial: self.partial.clone(),
            reason: (!self.reason.is_empty()).then(|| self.reason.clone()),
        }
    }
}

/// A file to which whole lines are added.
#[derive(Debug)]
struct Lines {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Lines {
    fn create(path: PathBuf) -> Result<Lines, RunError> {
        let opened = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = opened.map_err(|e| file_error("create", &path, e, NOTHING))?;
        Ok(Lines { path, file, len: 0 })
    }

    fn add(&mut self, value: &impl Serialize) -> io::Result<()> {
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

const NOTHING: &str = "nothing has run yet";

/// Time between two notes of the step in `status.json`.
const BETWEEN_NOTES: Duration = Duration::from_secs(1);

/// Bytes that a file of any size has on its disk: one block.
const BLOCK: usize = 4096;

fn file_error(action: &'static str, path: &Path, reason: io::Error, saved: &str) -> RunError {
    RunError::File {
        action,
        path: path.to_owned(),
        reason,
        saved: saved.to_owned(),
    }
}

/// The folder of one run; made by it and never shared.
#[derive(Debug)]
pub struct RunFolder {
    dir: PathBuf,
    metrics: Lines,
    samples: Lines,
    /// Last step whose metrics are in the file.
    recorded: Option<u64>,
    /// When the step was noted in `status.json`.
    noted: Option<Instant>,
    target: u64,
}

impl RunFolder {
    /// Makes the folder `dir` for a run of `target` steps.
    ///
    /// # Errors
    /// [`RunError::FolderExists`] when there is anything at `dir`; [`RunError::File`] when it cannot be made.
    pub fn create(dir: &Path, target: u64) -> Result<RunFolder, RunError> {
        if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(|e| file_error("create", parent, e, NOTHING))?;
        }
        match fs::create_dir(dir) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(RunError::FolderExists {
                    path: dir.to_owned(),
                });
            }
            Err(e) => return Err(file_error("create", dir, e, NOTHING)),
        }
        let lines = |name: &str| Lines::create(dir.join(name));
        let files =
            lines("metrics.jsonl").and_then(|metrics| Ok((metrics, lines("samples.jsonl")?)));
        let (metrics, samples) = files.inspect_err(|_| drop(fs::remove_dir_all(dir)))?;
        hold(&metrics.file);
        let folder = RunFolder {
            dir: dir.to_owned(),
            metrics,
            samples,
            recorded: None,
            noted: None,
            target,
        };
        if let Err(error) = folder.set_state(&RunState::running(0)) {
            folder.discard();
            return Err(error);
        }
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Removes the folder of a run that never ran.
    pub fn discard(self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!("cannot remove `{}`: {error}", self.dir.display());
        }
    }

    /// Writes a text file; for what stands before the first step.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write_text(&self, name: &str, text: &str) -> Result<(), RunError> {
        let path = self.dir.join(name);
        fs::write(&path, text).map_err(|e| file_error("write", &path, e, &self.saved()))
    }

    /// Writes `data.json` and `versions.json`.
    ///
    /// # Errors
    /// When the disk refuses.
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
            optimised: !cfg!(debug_assertions),
        };
        self.write_text("versions.json", &pretty(&all))
    }

    /// Writes `start.json`.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write_start(&self, start: &StartFile) -> Result<(), RunError> {
        self.write_text("start.json", &pretty(start))
    }

    /// Adds a line to `metrics.jsonl`.
    ///
    /// # Errors
    /// When the disk refuses; the message tells what is safe.
    pub fn record(&mut self, metrics: &StepMetrics) -> Result<(), RunError> {
        let written = self.metrics.add(&metrics.to_json());
        written.map_err(|e| file_error("write", &self.metrics.path, e, &self.saved()))?;
        self.recorded = Some(metrics.step);
        self.note(metrics.step);
        Ok(())
    }

    /// Brings the step in `status.json` up to date, once a second at most.
    fn note(&mut self, step: u64) {
        if self.noted.is_some_and(|at| at.elapsed() < BETWEEN_NOTES) {
            return;
        }
        self.noted = Some(Instant::now());
        if let Err(error) = self.set_state(&RunState::running(step)) {
            // Should the disk be full, the next line of metrics tells.
            tracing::debug!("{error}");
        }
    }

    /// Adds samples of `step` to `samples.jsonl`.
    ///
    /// # Errors
    /// As [`RunFolder::record`].
    pub fn sample(&mut self, step: u64, samples: &[Value]) -> Result<(), RunError> {
        for sample in samples {
            let mut fields = match sample {
                Value::Object(fields) => fields.clone(),
                other => serde_json::Map::from_iter([("sample".to_owned(), other.clone())]),
            };
            // The step is the engine's to tell.
            fields.shift_remove("step");
            let line = SampleLine { step, fields };
            let written = self.samples.add(&line);
            written.map_err(|e| file_error("write", &self.samples.path, e, &self.saved()))?;
        }
        Ok(())
    }

    /// Saves model `name` into `model/<name>`, written aside first.
    ///
    /// # Errors
    /// When it cannot be written; then there is no folder of that name.
    pub fn save_model(&self, run: &mut Run, name: &str) -> Result<PathBuf, RunError> {
        let models = self.dir.join("model");
        let (aside, dir) = (models.join(format!(".{name}.partial")), models.join(name));
        fs::create_dir_all(&models).map_err(|e| file_error("create", &models, e, &self.saved()))?;
        let written = run.save_model(name, &aside);
        if written.is_err() {
            // Half a model is of no use, and its bytes may be what the disk lacks for `status.json`.
            if aside.exists()
                && let Err(error) = fs::remove_dir_all(&aside)
            {
                tracing::warn!("cannot remove `{}`: {error}", aside.display());
            }
            // Refused where another model lies in it, which is as it should be.
            let _ = fs::remove_dir(&models);
        }
        written?;
        // Where only this fails, the model stays where it was written.
        fs::rename(&aside, &dir).map_err(|e| file_error("rename", &aside, e, &self.saved()))?;
        Ok(dir)
    }

    /// Writes `status.json`.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn set_state(&self, state: &RunState) -> Result<(), RunError> {
        let aside = self.dir.join(".status.json.partial");
        let path = self.dir.join("status.json");
        let text = pretty(&state.file(self.target));
        let written = fs::write(&aside, text).and_then(|()| fs::rename(&aside, &path));
        let Err(reason) = written else {
            return Ok(());
        };
        let _ = fs::remove_file(&aside);
        let mut short = state.clone();
        short.reason = shortened(&state.reason, BLOCK / 4);
        over_write(&path, &pretty(&short.file(self.target)))
            .map_err(|_| file_error("write", &path, reason, &self.saved()))
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

/// Features of the processor that decide which kernels run, and with them the last bits of results.
pub(crate) fn processor_features() -> Vec<&'static str> {
    let known = known_features().into_iter();
    known
        .filter_map(|(feature, found)| found.then_some(feature))
        .collect()
}

/// Features that kernels are chosen by, and whether the processor has them.
#[cfg(target_arch = "x86_64")]
fn known_features() -> Vec<(&'static str, bool)> {
    use std::arch::is_x86_feature_detected;
    vec![
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
    ]
}

/// Features that kernels are chosen by, and whether the processor has them.
#[cfg(target_arch = "aarch64")]
fn known_features() -> Vec<(&'static str, bool)> {
    use std::arch::is_aarch64_feature_detected;
    vec![
        ("neon", is_aarch64_feature_detected!("neon")),
        ("fp16", is_aarch64_feature_detected!("fp16")),
        ("dotprod", is_aarch64_feature_detected!("dotprod")),
        ("sve", is_aarch64_feature_detected!("sve")),
    ]
}

/// No kernels are chosen by features of other processors.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn known_features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

fn pretty(value: &impl Serialize) -> String {
    // Texts, numbers and tables of texts always print.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
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

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_told_with_what_is_safe() {
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
    fn a_status_that_finds_no_room_takes_that_of_the_old_one() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(&temp.path().join("run"), 5).unwrap();
        let failed = RunState {
            status: Status::Failed,
            reason: "no space ".repeat(1000),
            saved: vec!["actor".to_owned()],
            ..RunState::running(2)
        };
        // A folder in the place of the new file: as on a full disk, it cannot be made.
        let aside = folder.path().join(".status.json.partial");
        fs::create_dir(&aside).unwrap();
        folder.set_state(&failed).unwrap();
        let written = status(&folder);
        assert_eq!(
            (&written["status"], &written["step"]),
            (&"failed".into(), &2.into())
        );
        assert_eq!(written["saved"], json!(["actor"]));
        let reason = written["reason"].as_str().unwrap();
        assert!(reason.ends_with('…') && reason.len() < BLOCK, "{reason}");
        // A longer text before leaves nothing behind a shorter one.
        folder.set_state(&RunState::running(3)).unwrap();
        assert_eq!(status(&folder)["step"], 3);
        assert!(status(&folder).get("reason").is_none());
        fs::remove_file(folder.path().join("status.json")).unwrap();
        assert!(folder.set_state(&failed).is_err());
    }

    #[test]
    fn a_refused_status_leaves_nothing_half_written() {
        let temp = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(&temp.path().join("run"), 5).unwrap();
        let path = folder.path().join("status.json");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(folder.set_state(&RunState::running(1)).is_err());
        assert!(!folder.path().join(".status.json.partial").exists());
    }

    #[test]
    fn the_step_of_a_run_that_goes_on_is_told() {
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
        // Not at each step: a second has not gone.
        folder.record(&at(2)).unwrap();
        folder.noted = folder.noted.and_then(|at| at.checked_sub(BETWEEN_NOTES));
        folder.record(&at(3)).unwrap();
        assert_eq!(status(&folder)["step"], 3);
    }

    #[test]
    fn an_existing_folder_is_refused_even_when_empty() {
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
