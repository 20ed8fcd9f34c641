//! The run folder: everything that a run leaves behind, self-contained.
//!
//! | file | content |
//! |---|---|
//! | `config.toml` | the pipeline with every setting stated |
//! | `plan.txt` | the checked graph |
//! | `versions.json` | versions of the crates and the platform |
//! | `data.json` | origin, rows and fingerprint of each data set |
//! | `metrics.jsonl` | one flat object a step: `step`, `epoch`, `timestamp` (seconds since 1970 UTC), and metrics by name |
//! | `samples.jsonl` | a few samples a step |
//! | `model/<name>/` | models at the end of the run |
//! | `status.json` | `running`, `finished`, `failed` or `cancelled`, with the step and the reason |
//!
//! A line is written with one call and cut off again where the disk refuses a part of it; `status.json` and models
//! are written aside and renamed, so that what is there is whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::run::error::RunError;
use crate::run::metrics::{StepMetrics, now};
use crate::run::runner::Run;

/// How far a run has come, as `status.json` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It runs, or its process was killed.
    Running,
    /// The target step was reached and models are saved.
    Finished,
    /// An error ended it.
    Failed,
    /// It was asked to end.
    Cancelled,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Status::Running => "running",
            Status::Finished => "finished",
            Status::Failed => "failed",
            Status::Cancelled => "cancelled",
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

    fn add(&mut self, value: &Value) -> io::Result<()> {
        let line = format!("{value}\n");
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
        let folder = RunFolder {
            dir: dir.to_owned(),
            metrics,
            samples,
            recorded: None,
            target,
        };
        if let Err(error) = folder.set_status(Status::Running, 0, "") {
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
        let data: serde_json::Map<String, Value> = run
            .data()
            .iter()
            .map(|(name, data)| {
                let entry = json!({"origin": data.origin(), "rows": data.len(), "fingerprint": data.fingerprint()});
                (name.clone(), entry)
            })
            .collect();
        self.write_text("data.json", &pretty(&Value::Object(data)))?;
        let mut all = serde_json::Map::new();
        all.insert("verl-pipe".to_owned(), env!("CARGO_PKG_VERSION").into());
        all.extend(
            versions
                .iter()
                .map(|(name, version)| (name.clone(), version.clone().into())),
        );
        all.insert("os".to_owned(), std::env::consts::OS.into());
        all.insert("arch".to_owned(), std::env::consts::ARCH.into());
        all.insert("optimised".to_owned(), (!cfg!(debug_assertions)).into());
        self.write_text("versions.json", &pretty(&Value::Object(all)))
    }

    /// Adds a line to `metrics.jsonl`.
    ///
    /// # Errors
    /// When the disk refuses; the message tells what is safe.
    pub fn record(&mut self, metrics: &StepMetrics) -> Result<(), RunError> {
        let written = self.metrics.add(&metrics.to_json());
        written.map_err(|e| file_error("write", &self.metrics.path, e, &self.saved()))?;
        self.recorded = Some(metrics.step);
        Ok(())
    }

    /// Adds samples of `step` to `samples.jsonl`.
    ///
    /// # Errors
    /// As [`RunFolder::record`].
    pub fn sample(&mut self, step: u64, samples: &[Value]) -> Result<(), RunError> {
        for sample in samples {
            let mut line = serde_json::Map::new();
            line.insert("step".to_owned(), step.into());
            match sample {
                Value::Object(fields) => line.extend(fields.clone()),
                other => drop(line.insert("sample".to_owned(), other.clone())),
            }
            let written = self.samples.add(&Value::Object(line));
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
        let written = run.save_model(name, &aside).and_then(|()| {
            fs::rename(&aside, &dir).map_err(|e| file_error("rename", &aside, e, &self.saved()))
        });
        if written.is_err() && aside.exists() {
            // Half a model is of no use, and its bytes may be what the disk lacks for `status.json`.
            if let Err(error) = fs::remove_dir_all(&aside) {
                tracing::warn!("cannot remove `{}`: {error}", aside.display());
            }
        }
        written.map(|()| dir)
    }

    /// Writes `status.json`.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn set_status(&self, status: Status, step: u64, reason: &str) -> Result<(), RunError> {
        let mut text = json!({"status": status.word(), "step": step, "target": self.target, "timestamp": now()});
        if let (Value::Object(fields), false) = (&mut text, reason.is_empty()) {
            fields.insert("reason".to_owned(), reason.into());
        }
        let (aside, path) = (
            self.dir.join(".status.json.partial"),
            self.dir.join("status.json"),
        );
        let written = fs::write(&aside, pretty(&text)).and_then(|()| fs::rename(&aside, &path));
        written.map_err(|e| file_error("write", &path, e, &self.saved()))
    }

    fn saved(&self) -> String {
        match self.recorded {
            None => "no step is recorded, and no model is saved".to_owned(),
            Some(step) => format!(
                "metrics up to step {step} are in `{}`; the models of this run are not saved",
                self.metrics.path.display()
            ),
        }
    }
}

fn pretty(value: &Value) -> String {
    // A JSON value always prints.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
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
