//! [`TraceDir`]: reads the trace of a run. It never writes, and can read the folder of a run in progress.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::{fmt, fs};

use verl_rules::format::Side;
use verl_words::batch::Batch;
use verl_words::diagnostic::quoted;

use crate::files::documents::{
    Layout, StageFile, StageManifest, StepManifest, TraceFormat, parse, stage_file,
};
use crate::files::error::TraceError;
use crate::files::stage_reader::read_stage_if;

/// The trace of a run.
///
/// ```no_run
/// use verl_pipe::trace::files::TraceDir;
///
/// let trace = TraceDir::open("runs/run".as_ref())?;
/// for step in trace.steps() {
///     let reward = trace.stage(step, "reward")?;
///     println!("step {step}: {} slices", reward.outputs.len());
/// }
/// # Ok::<(), verl_pipe::trace::files::TraceError>(())
/// ```
#[derive(Debug, Clone)]
pub struct TraceDir {
    layout: Layout,
    format: TraceFormat,
    /// Complete steps when the trace was opened. A run in progress may write a newer manifest of a step, but never
    /// removes a file, so all files listed here remain readable.
    steps: BTreeMap<u64, StepManifest>,
    /// Steps with an unusable `step.json`; no step is in both maps.
    damaged: BTreeMap<u64, TraceError>,
    notes: Vec<String>,
}

/// A recorded step.
#[derive(Debug, Clone)]
pub struct StepTrace {
    /// Content of `step.json`.
    pub manifest: StepManifest,
    /// Stages in the order of execution.
    pub stages: Vec<StageTrace>,
    /// Unusable files of the step; empty if [`TraceDir::step`] read it.
    pub damaged: Vec<DamagedFile>,
}

/// An unusable file of a trace: damaged, misplaced, missing or in another format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedFile {
    /// The step of the file; the first one for a statistics file.
    pub step: u64,
    /// The stage, for a stage file.
    pub stage: Option<String>,
    /// What is wrong with it, with the path.
    pub error: TraceError,
}

impl fmt::Display for DamagedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.step)?;
        if let Some(stage) = &self.stage {
            write!(f, ", stage `{stage}`")?;
        }
        write!(f, ": {}", self.error)
    }
}

/// A recorded stage of a step.
#[derive(Debug, Clone)]
pub struct StageTrace {
    /// Metadata of the file.
    pub manifest: StageManifest,
    /// Input, by slice.
    pub inputs: Vec<SliceTrace>,
    /// Output, by slice, with rows in declared order.
    pub outputs: Vec<SliceTrace>,
}

/// Rows of one slice.
#[derive(Debug, Clone, PartialEq)]
pub struct SliceTrace {
    /// Wave that a source's call drew; 0 for any other stage.
    pub wave: u64,
    /// Number of the slice.
    pub slice: usize,
    /// Its rows among the stage's input rows of the step.
    pub rows: std::ops::Range<usize>,
    /// The rows; keys have the stage's own names.
    pub batch: Batch,
}

impl TraceDir {
    /// Opens the trace in a run folder. Incomplete steps and steps with an unusable `step.json` are left out;
    /// [`TraceDir::notes`] lists them.
    ///
    /// # Errors
    /// No trace in the folder; an unknown format.
    pub fn open(run_dir: &Path) -> Result<TraceDir, TraceError> {
        let layout = Layout::of_run(run_dir);
        let path = layout.format();
        let text = fs::read_to_string(&path).map_err(|e| TraceError::NoTrace {
            dir: run_dir.to_owned(),
            reason: format!("`trace/format.json` cannot be read ({e})"),
        })?;
        let format = parse(&path, &text)?;
        let mut trace = TraceDir {
            layout,
            format,
            steps: BTreeMap::new(),
            damaged: BTreeMap::new(),
            notes: Vec::new(),
        };
        trace.find_steps();
        Ok(trace)
    }

    fn find_steps(&mut self) {
        let Ok(entries) = fs::read_dir(self.layout.steps()) else {
            return;
        };
        let names = entries
            .flatten()
            .filter_map(|e| e.file_name().into_string().ok());
        let numbered = names.filter_map(|name| Some((name.parse().ok()?, name)));
        let mut found: Vec<(u64, String)> = numbered.collect();
        found.sort_unstable();
        for (step, name) in found {
            let dir = self.layout.step(step);
            if dir.file_name().is_none_or(|own| *own != *name) {
                self.notes.push(format!(
                    "folder `{name}` is skipped: the folder of step {step} must be named `{}`",
                    dir.file_name().unwrap_or_default().to_string_lossy()
                ));
                continue;
            }
            match self.read_manifest(step) {
                Ok(Some(manifest)) => drop(self.steps.insert(step, manifest)),
                Ok(None) => self.notes.push(format!(
                    "step {step} is incomplete and is skipped: the run ended in the middle of it or is still writing it"
                )),
                Err(error) => {
                    self.notes.push(format!("step {step} is skipped: {error}"));
                    self.damaged.insert(step, error);
                }
            }
        }
    }

    /// Reads and checks `step.json` in the folder of `step`; `None` if there is none.
    fn read_manifest(&self, step: u64) -> Result<Option<StepManifest>, TraceError> {
        let path = self.layout.manifest(step);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(TraceError::file("read", &path, error)),
        };
        let text = std::str::from_utf8(&bytes).map_err(|e| TraceError::damaged(&path, e))?;
        let manifest: StepManifest = parse(&path, text)?;
        if manifest.step != step {
            return Err(TraceError::Misplaced {
                path,
                found: format!("step {}", manifest.step),
                expected: format!("step {step}"),
            });
        }
        self.check_stages(&path, &manifest.stages)?;
        Ok(Some(manifest))
    }

    /// Checks that a step lists stages of this run, each once and with its file name.
    fn check_stages(&self, path: &Path, files: &[StageFile]) -> Result<(), TraceError> {
        let mut seen = BTreeSet::new();
        for StageFile { stage, file, .. } in files {
            let known = || self.format.stages.iter().map(|known| known.name.as_str());
            let wrong = if !known().any(|known| known == stage) {
                let known = quoted(known());
                format!("it lists stage `{stage}`, but the stages of the run are {known}")
            } else if !seen.insert(stage) {
                format!("it lists stage `{stage}` twice")
            } else if *file != stage_file(stage) {
                let own = stage_file(stage);
                format!("it lists `{file}` as the file of stage `{stage}` instead of `{own}`")
            } else {
                continue;
            };
            return Err(TraceError::damaged(path, wrong));
        }
        Ok(())
    }

    /// Content of `format.json`: pipeline, seed, stages in order.
    pub fn format(&self) -> &TraceFormat {
        &self.format
    }

    /// Paths of the trace.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Notes for the user, such as incomplete steps.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Steps that were recorded in full, in ascending order.
    pub fn steps(&self) -> Vec<u64> {
        self.steps.keys().copied().collect()
    }

    /// Steps with an unusable `step.json`, in ascending order.
    pub fn damaged_steps(&self) -> impl Iterator<Item = DamagedFile> + '_ {
        self.damaged.iter().map(|(step, error)| DamagedFile {
            step: *step,
            stage: None,
            error: error.clone(),
        })
    }

    /// Content of `step.json` of a recorded step.
    ///
    /// # Errors
    /// [`TraceError::NoStep`]; what is wrong with an unusable `step.json`.
    pub fn manifest(&self, step: u64) -> Result<&StepManifest, TraceError> {
        if let Some(error) = self.damaged.get(&step) {
            return Err(error.clone());
        }
        self.steps.get(&step).ok_or_else(|| TraceError::NoStep {
            dir: self.layout.dir.clone(),
            step,
            known: match self.steps.len() {
                0 => "no complete step".to_owned(),
                _ => format!("steps {}", ranges(self.steps.keys().copied())),
            },
        })
    }

    /// A recorded step with all its stages.
    ///
    /// # Errors
    /// [`TraceError::NoStep`]; a file that is damaged, misplaced or in another format.
    pub fn step(&self, step: u64) -> Result<StepTrace, TraceError> {
        let mut read = self.step_as_found(step)?;
        match read.damaged.is_empty() {
            true => Ok(read),
            false => Err(read.damaged.swap_remove(0).error),
        }
    }

    /// A recorded step with the stages that can be read; [`StepTrace::damaged`] lists the others.
    ///
    /// # Errors
    /// [`TraceError::NoStep`]; no stage of the step can be read.
    pub fn step_as_found(&self, step: u64) -> Result<StepTrace, TraceError> {
        let manifest = self.manifest(step)?.clone();
        let (mut stages, mut damaged) = (Vec::new(), Vec::new());
        for file in &manifest.stages {
            match self.read(step, file) {
                Ok(stage) => stages.push(stage),
                Err(error) => damaged.push(DamagedFile {
                    step,
                    stage: Some(file.stage.clone()),
                    error,
                }),
            }
        }
        match damaged.first() {
            Some(first) if stages.is_empty() => Err(first.error.clone()),
            _ => Ok(StepTrace {
                manifest,
                stages,
                damaged,
            }),
        }
    }

    /// Reads a stage file listed in `step.json`, and checks that it belongs at its path.
    fn read(&self, step: u64, file: &StageFile) -> Result<StageTrace, TraceError> {
        let path = self.layout.step(step).join(&file.file);
        let known = self.format.stages.iter();
        let kind = known.clone().find(|known| known.name == file.stage);
        let kind = kind.map_or("", |known| known.kind.as_str());
        let seed = self.format.seed;
        read_stage_if(&path, |manifest| {
            let describe = |step, stage: &str, kind: &str, seed| {
                format!("stage `{stage}` (kind `{kind}`) of step {step} of a run with seed {seed}")
            };
            let found = describe(
                manifest.step,
                &manifest.stage,
                &manifest.kind,
                manifest.seed,
            );
            let expected = describe(step, &file.stage, kind, seed);
            match found == expected {
                true => Ok(()),
                false => Err(TraceError::Misplaced {
                    path: path.clone(),
                    found,
                    expected,
                }),
            }
        })
    }

    /// One stage of a recorded step.
    ///
    /// # Errors
    /// A step or stage that was not recorded; a file that is damaged, misplaced or in another format.
    pub fn stage(&self, step: u64, stage: &str) -> Result<StageTrace, TraceError> {
        let manifest = self.manifest(step)?;
        let file = manifest.stages.iter().find(|file| file.stage == stage);
        let file = file.ok_or_else(|| TraceError::NoStage {
            step,
            stage: stage.to_owned(),
            known: match manifest.stages.as_slice() {
                [] => "none".to_owned(),
                files => quoted(files.iter().map(|f| f.stage.as_str())),
            },
        })?;
        self.read(step, file)
    }
}

impl StepTrace {
    /// The stage `name`, if it was recorded.
    pub fn stage(&self, name: &str) -> Option<&StageTrace> {
        self.stages
            .iter()
            .find(|stage| stage.manifest.stage == name)
    }
}

impl StageTrace {
    /// Slices of one side.
    pub fn side(&self, side: Side) -> &[SliceTrace] {
        match side {
            Side::Input => &self.inputs,
            Side::Output => &self.outputs,
        }
    }

    /// All rows of one side as one batch, in declared order; `None` if there is no slice.
    pub fn rows(&self, side: Side) -> Option<Batch> {
        let parts: Vec<Batch> = self.side(side).iter().map(|s| s.batch.clone()).collect();
        Batch::concat(&parts).ok()
    }
}

/// `1–3, 7`.
pub fn ranges(numbers: impl Iterator<Item = u64>) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.1 + 1 == number => run.1 = number,
            _ => runs.push((number, number)),
        }
    }
    let texts = runs.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}–{last}"),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[path = "trace_dir_tests.rs"]
pub(crate) mod tests;

#[cfg(test)]
#[path = "misplaced_tests.rs"]
mod misplaced;
