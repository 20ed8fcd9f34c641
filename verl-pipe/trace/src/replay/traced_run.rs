//! The folder of a traced run, opened for inspection: its pipeline, its recorded steps, and a run to replay them in.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use verl_declare::registry::Registry;
use verl_plan::plan_to_inspect;
use verl_plan::schedule::placement::Schedule;
use verl_rules::Anomaly;
use verl_run::error::RunError;
use verl_run::runner::{Run, RunOptions, RunState};
use verl_words::diagnostic::{Diagnostic, Findings, nearest};
use verl_words::resource::TokenTexts;

use crate::files::{
    RecordedStep, StateRef, StepStart, TraceDir, TraceError, altered_keys, read_recorded,
};
use crate::replay::{ReplayError, describe_changed_data};

/// Why a traced run cannot be inspected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Not a run folder.
    #[error("`{}` is not a run folder: {reason}{}", .dir.display(), .near.as_ref().map(|near| format!("; did you mean `{near}`?")).unwrap_or_default())]
    NoRun {
        /// As given.
        dir: PathBuf,
        /// What is missing.
        reason: String,
        /// The run in the same folder with the nearest name.
        near: Option<String>,
    },
    /// This version does not accept the run's resolved configuration.
    #[error("this version does not accept the configuration of the run:\n{}", Findings(.0.clone()))]
    Config(Vec<Diagnostic>),
    /// Models or data of the run are gone, so nothing of it can be run again.
    #[error("nothing can be run again, because models or data of the run are missing:\n{}", Findings(.0.clone()))]
    Gone(Vec<Diagnostic>),
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A step that was not recorded, and the nearest that was.
    #[error("{source}{}", .near.map(|near| format!("; the nearest is step {near}")).unwrap_or_default())]
    Step {
        /// What the trace says.
        source: TraceError,
        /// The nearest recorded step.
        near: Option<u64>,
    },
    /// The step cannot be replayed.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// The run cannot be started for a replay.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The run cannot be started for a replay, and its data were changed.
    #[error("{source}\nthe data were changed since the run: {}", .changed.join("; "))]
    OtherData {
        /// Why it cannot be started.
        source: RunError,
        /// The changed data sets, in words.
        changed: Vec<String>,
    },
    /// A sample that the stage does not have.
    #[error("stage `{stage}` of step {step} has no sample `{sample}`{help}")]
    Sample {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// As given.
        sample: String,
        /// The nearest samples.
        help: String,
    },
}

impl InspectError {
    /// Code of the error; `docs/errors/<CODE>.md` says what happened and what to do.
    pub fn code(&self) -> &'static str {
        match self {
            InspectError::NoRun { .. } => "T010",
            InspectError::Config(_) | InspectError::Gone(_) => "T011",
            InspectError::Trace(error) | InspectError::Step { source: error, .. } => error.code(),
            InspectError::Replay(error) => error.code(),
            InspectError::Run(error) | InspectError::OtherData { source: error, .. } => {
                error.code()
            }
            InspectError::Sample { .. } => "T012",
        }
    }
}

/// A run folder with its trace.
pub struct TracedRun {
    dir: PathBuf,
    schedule: Schedule,
    /// What is wrong with the models and data of the run.
    gone: Vec<Diagnostic>,
    trace: TraceDir,
}

impl TracedRun {
    /// Opens the folder of a run whose kinds `registry` knows; loads no weights. Missing models and data are reported
    /// by [`TracedRun::gone`]; only a replay needs them ([`TracedRun::start`]).
    ///
    /// # Errors
    /// Not a run folder, with the nearest one; a configuration or trace of another version.
    pub fn open(dir: &Path, registry: &Registry) -> Result<TracedRun, InspectError> {
        let (schedule, gone) = schedule_of(dir, registry)?;
        Ok(TracedRun::of(dir, schedule, gone, TraceDir::open(dir)?))
    }

    /// Combines the parts of a run folder.
    pub fn of(dir: &Path, schedule: Schedule, gone: Vec<Diagnostic>, trace: TraceDir) -> TracedRun {
        TracedRun {
            dir: dir.to_owned(),
            schedule,
            gone,
            trace,
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The run's pipeline, placed.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The trace.
    pub fn trace(&self) -> &TraceDir {
        &self.trace
    }

    /// Models and data of the run that are missing now, as findings.
    pub fn gone(&self) -> &[Diagnostic] {
        &self.gone
    }

    /// A recorded step, without the state at its start. [`RecordedStep::damaged`] lists its unusable files,
    /// [`RecordedStep::altered`] rows that are not those of the run.
    ///
    /// # Errors
    /// A step that was not recorded, with the nearest recorded one; a step without readable stages.
    pub fn step(&self, step: u64) -> Result<RecordedStep, InspectError> {
        let recorded = self
            .trace
            .step_as_found(step)
            .map_err(|source| match source {
                TraceError::NoStep { .. } => InspectError::Step {
                    near: self
                        .trace
                        .steps()
                        .into_iter()
                        .min_by_key(|known| known.abs_diff(step)),
                    source,
                },
                other => InspectError::Trace(other),
            })?;
        let after = self.trace.manifest(step + 1).ok();
        let (stats, _) = self.trace.stats_as_found(step..=step);
        let altered = altered_keys(&recorded, &stats);
        let mut recorded = RecordedStep::from_trace(recorded, after);
        recorded.altered = altered;
        recorded.stopped = self.stopped().filter(|anomaly| anomaly.step == step);
        if recorded.error.is_some() {
            recorded.error = self.end_of_run().or(recorded.error);
        }
        Ok(recorded)
    }

    /// The anomaly for which a rule ended the run, if it ended that way.
    pub fn stopped(&self) -> Option<Anomaly> {
        self.trace.stopped(&self.end_of_run()?)
    }

    /// The error that ended the run, from `status.json`.
    fn end_of_run(&self) -> Option<String> {
        let text = fs::read_to_string(self.dir.join("status.json")).ok()?;
        let status: serde_json::Value = serde_json::from_str(&text).ok()?;
        status.get("reason")?.as_str().map(str::to_owned)
    }

    /// A recorded step, with the state at its start if that was recorded.
    ///
    /// # Errors
    /// As [`TracedRun::step`]; a state that is damaged.
    pub fn step_with_state(&self, step: u64) -> Result<RecordedStep, InspectError> {
        let mut recorded = self.step(step)?;
        recorded.state = Some(self.state_before(step)?);
        Ok(recorded)
    }

    /// The state at the start of a recorded step, as far as it was recorded.
    ///
    /// # Errors
    /// A step that was not recorded; a state that is damaged.
    pub fn state_before(&self, step: u64) -> Result<StepStart, TraceError> {
        let manifest = self.trace.manifest(step)?;
        let read = |states: &BTreeMap<String, StateRef>| {
            let states = states.iter().map(|(name, state)| {
                let stored = self.trace.state(state)?;
                Ok((name.clone(), (state.version.clone(), stored)))
            });
            states.collect::<Result<BTreeMap<_, _>, TraceError>>()
        };
        Ok(StepStart::Stored(RunState {
            step: step.saturating_sub(1),
            models: read(&manifest.models)?,
            stages: read(&manifest.stage_states)?,
        }))
    }

    /// Starts the run again: models loaded, data opened, no step run, nothing written.
    ///
    /// # Errors
    /// [`InspectError::Gone`]; any other error of the start.
    pub fn start(&self) -> Result<Run, InspectError> {
        if !self.gone.is_empty() {
            return Err(InspectError::Gone(self.gone.clone()));
        }
        let schedule = self
            .schedule
            .plan()
            .schedule()
            .map_err(InspectError::Config)?;
        let started = Run::start(schedule, RunOptions::default());
        started.map_err(
            |source| match describe_changed_data(&self.dir, self.schedule.plan()) {
                changed if changed.is_empty() => source.into(),
                changed => InspectError::OtherData { source, changed },
            },
        )
    }

    /// Texts of the token ids of a stage (by its index in the plan): from its model's tokenizer, or from the first one
    /// of the pipeline.
    pub fn token_texts(&self, stage: usize) -> Option<Arc<dyn TokenTexts>> {
        let plan = self.schedule.plan();
        let own = plan.stages()[stage].spec().models.first();
        let models = &plan.pipe().models;
        let first = models
            .iter()
            .find(|model| own.is_some_and(|(name, _)| *name == model.name));
        let mut order = first.into_iter().chain(models);
        order.find_map(|model| model.factory.token_texts(plan.context()))
    }
}

/// The pipeline of the run in `dir`, placed, and what is wrong with its models and data; loads no weights.
///
/// # Errors
/// Not a run folder, with the nearest one; a configuration of another version.
pub fn schedule_of(
    dir: &Path,
    registry: &Registry,
) -> Result<(Schedule, Vec<Diagnostic>), InspectError> {
    check_run_folder(dir)?;
    let (plan, gone) = read_recorded(dir, registry)
        .and_then(|pipe| plan_to_inspect(&pipe))
        .map_err(InspectError::Config)?;
    Ok((plan.schedule().map_err(InspectError::Config)?, gone))
}

/// Checks that `dir` is a run folder.
///
/// # Errors
/// [`InspectError::NoRun`], with the nearest run.
pub fn check_run_folder(dir: &Path) -> Result<(), InspectError> {
    if dir.join("config.toml").is_file() {
        return Ok(());
    }
    let reason = match dir.is_dir() {
        true => "it contains no config.toml",
        false => "there is no such folder",
    };
    Err(InspectError::NoRun {
        dir: dir.to_owned(),
        reason: reason.to_owned(),
        near: near_run(dir),
    })
}

/// The run in the same folder as `dir` with the nearest name.
fn near_run(dir: &Path) -> Option<String> {
    let name = dir.file_name()?.to_str()?;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    let entries = fs::read_dir(parent.unwrap_or(Path::new("."))).ok()?;
    let runs: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.path().join("config.toml").is_file())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let near = nearest(name, runs.iter().map(String::as_str))?;
    Some(match parent {
        Some(parent) => parent.join(near).display().to_string(),
        None => near.to_owned(),
    })
}
