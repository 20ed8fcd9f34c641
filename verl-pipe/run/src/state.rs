//! Snapshots of all models and stages, restoring them, and saving models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use verl_plan::schedule::placement::Place;
use verl_words::resource::{ModelResource, ResourceError, Snapshot, StoredState, WeightsVersion};

use crate::error::RunError;
use crate::runner::Run;
use crate::watch::{ActivityReporter, Wait, WaitGuard};
use crate::worker::WorkerState;

/// State of all models and stages between two steps.
#[derive(Debug, Clone)]
pub struct RunSnapshot {
    /// Number of completed steps.
    pub step: u64,
    /// Models by name.
    pub models: BTreeMap<String, Snapshot>,
    /// Stages that have state, by name.
    pub stages: BTreeMap<String, Snapshot>,
}

/// State of all models and stages between two steps in a form that can be stored on disk: the version, and the state
/// itself if it was requested and exists.
#[derive(Debug, Clone, Default)]
pub struct RunState {
    /// Number of completed steps.
    pub step: u64,
    /// Models by name.
    pub models: BTreeMap<String, (WeightsVersion, Option<StoredState>)>,
    /// Stages that have state, by name.
    pub stages: BTreeMap<String, (WeightsVersion, Option<StoredState>)>,
}

/// Models and stages of a worker, by name and by index.
type WorkerSnapshots = (BTreeMap<String, Snapshot>, BTreeMap<usize, Snapshot>);

/// Takes the snapshot of a model.
type OfModel = fn(&mut dyn ModelResource) -> Result<Snapshot, ResourceError>;

impl Run {
    /// State of all models and stages, between two steps.
    ///
    /// # Errors
    /// If a state cannot be read.
    pub fn snapshot(&mut self) -> Result<RunSnapshot, RunError> {
        self.snapshot_by(|model| model.snapshot())
    }

    /// Like [`Run::snapshot`], but cheap enough for every step: hashes of versions can be empty.
    ///
    /// # Errors
    /// If a state cannot be read.
    pub fn quick_snapshot(&mut self) -> Result<RunSnapshot, RunError> {
        self.snapshot_by(|model| model.quick_snapshot())
    }

    fn snapshot_by(&mut self, of_model: OfModel) -> Result<RunSnapshot, RunError> {
        let names = self.stage_names();
        let deadline = self.deadline;
        let (waiting, activity_reporter) = self.begin_state(self.step + 1, Place::Group(0));
        let (models, on_worker) = waiting.finish(
            self.worker
                .ask("to take snapshots", deadline, move |state| {
                    snapshot_worker(state, &names, of_model, &activity_reporter)
                })
                .flatten(),
        )?;
        // Stages of the host pool are idle, so their state is read on this thread.
        let (_waiting, activity_reporter) = self.begin_state(self.step + 1, Place::Host);
        let mut stages: BTreeMap<String, Snapshot> = on_worker
            .into_iter()
            .map(|(index, state)| (self.name(index).to_owned(), state))
            .collect();
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let Some(stage) = host.idle() else {
                continue;
            };
            let state = activity_reporter.at(&names[*index], || stage.snapshot());
            let state = state.map_err(|e| failed("stage", &names[*index], "snapshot", e))?;
            stages.extend(state.map(|state| (names[*index].clone(), state)));
        }
        Ok(RunSnapshot {
            step: self.step,
            models,
            stages,
        })
    }

    /// Restores `snapshot`: all later steps are bit-identical to those that followed it.
    ///
    /// # Errors
    /// If a model or stage rejects its state.
    pub fn restore(&mut self, snapshot: &RunSnapshot) -> Result<(), RunError> {
        let names = self.stage_names();
        let deadline = self.deadline;
        let all = snapshot.clone();
        self.worker
            .ask("to restore snapshots", deadline, move |state| {
                restore_worker(state, &names, &all)
            })??;
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let (Some(stage), Some(state)) = (host.idle(), snapshot.stages.get(&names[*index]))
            else {
                continue;
            };
            stage
                .restore(state)
                .map_err(|e| failed("stage", &names[*index], "restore", e))?;
        }
        self.step = snapshot.step;
        self.left.clear();
        Ok(())
    }

    /// State of all models and stages in a form that can be stored on disk. With `full` it includes the states
    /// themselves, except for models whose version is in `known`.
    ///
    /// # Errors
    /// If a state cannot be read.
    pub fn state(
        &mut self,
        full: bool,
        known: &BTreeMap<String, WeightsVersion>,
    ) -> Result<RunState, RunError> {
        if !full {
            let models = self.versions()?.into_iter();
            return Ok(RunState {
                step: self.step,
                models: models.map(|(n, version)| (n, (version, None))).collect(),
                stages: BTreeMap::new(),
            });
        }
        let snapshot = self.snapshot()?;
        self.store(&snapshot, known)
    }

    /// Converts a snapshot of this run to a form that can be stored on disk, like [`Run::state`] with `full`.
    ///
    /// # Errors
    /// If a state cannot be read.
    pub fn store(
        &mut self,
        snapshot: &RunSnapshot,
        known: &BTreeMap<String, WeightsVersion>,
    ) -> Result<RunState, RunError> {
        let (names, deadline) = (self.stage_names(), self.deadline);
        let (all, known) = (snapshot.clone(), known.clone());
        let (waiting, activity_reporter) = self.begin_state(snapshot.step + 1, Place::Group(0));
        let (models, mut stages) = waiting.finish(
            self.worker
                .ask("to store its state", deadline, move |state| {
                    store_worker(state, &names, &all, &known, &activity_reporter)
                })
                .flatten(),
        )?;
        let (_waiting, activity_reporter) = self.begin_state(snapshot.step + 1, Place::Host);
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let name = &names[*index];
            let (Some(stage), Some(own)) = (host.idle(), snapshot.stages.get(name)) else {
                continue;
            };
            let stored = activity_reporter.at(name, || stage.store(own));
            let stored = stored.map_err(|e| failed("stage", name, "store", e))?;
            stages.insert(name.clone(), (own.version.clone(), stored));
        }
        Ok(RunState {
            step: snapshot.step,
            models,
            stages,
        })
    }

    /// Restores a state that was stored on disk. Models and stages that it does not contain stay unchanged.
    ///
    /// # Errors
    /// If a model or stage rejects its state.
    pub fn recall(&mut self, state: &RunState) -> Result<(), RunError> {
        let (names, deadline, all) = (self.stage_names(), self.deadline, state.clone());
        self.worker
            .ask("to recall its state", deadline, move |worker| {
                recall_worker(worker, &names, &all)
            })??;
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let name = &names[*index];
            if let (Some(stage), Some((version, Some(stored)))) =
                (host.idle(), state.stages.get(name))
            {
                let recalled = stage.recall(version, stored);
                recalled
                    .and_then(|snapshot| stage.restore(&snapshot))
                    .map_err(|e| failed("stage", name, "recall", e))?;
            }
        }
        self.step = state.step;
        Ok(())
    }

    /// Versions of all models' weights.
    ///
    /// # Errors
    /// If the worker is lost.
    pub fn versions(&mut self) -> Result<BTreeMap<String, WeightsVersion>, RunError> {
        let deadline = self.deadline;
        let (waiting, activity_reporter) = self.begin_state(self.step + 1, Place::Group(0));
        waiting.finish(self.worker.ask("to read versions", deadline, move |state| {
            let models = state.models.iter();
            models
                .map(|(name, model)| (name.clone(), activity_reporter.at(name, || model.version())))
                .collect()
        }))
    }

    /// Starts a wait for the state of models and stages before step `step`, and returns the reporter of whose state is
    /// being read.
    fn begin_state(&self, step: u64, place: Place) -> (WaitGuard, ActivityReporter) {
        let waiting = self.watch.begin(Wait {
            step,
            who: "the run".to_owned(),
            pending: "its state at the start".to_owned(),
            on: match place {
                Place::Host => "the run's own thread".to_owned(),
                Place::Group(_) => format!("device group {}", self.schedule().groups()[0].name),
            },
            deadline: self.deadline,
        });
        (waiting, self.watch.activity_reporter())
    }

    /// Saves model `name` to `dir`, which is created.
    ///
    /// # Errors
    /// If there is no such model or it cannot be written.
    pub fn save_model(&mut self, name: &str, dir: &Path) -> Result<(), RunError> {
        let deadline = self.deadline;
        let (name, dir) = (name.to_owned(), PathBuf::from(dir));
        self.worker.ask("to save a model", deadline, move |state| {
            let model = state
                .models
                .get_mut(&name)
                .ok_or_else(|| failed("model", &name, "save", "there is no such model"))?;
            model
                .save(&dir)
                .map_err(|e| failed("model", &name, "save", e))
        })?
    }

    fn stage_names(&self) -> Vec<String> {
        self.schedule()
            .plan()
            .stages()
            .iter()
            .map(|stage| stage.name().to_owned())
            .collect()
    }
}

fn failed(
    what: &'static str,
    name: &str,
    action: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> RunError {
    RunError::State {
        what,
        name: name.to_owned(),
        action,
        source: source.into(),
    }
}

fn snapshot_worker(
    state: &mut WorkerState,
    names: &[String],
    of_model: OfModel,
    activity_reporter: &ActivityReporter,
) -> Result<WorkerSnapshots, RunError> {
    let mut models = BTreeMap::new();
    for (name, model) in &mut state.models {
        let snapshot = activity_reporter.at(name, || of_model(model.as_mut()));
        let snapshot = snapshot.map_err(|e| failed("model", name, "snapshot", e))?;
        models.insert(name.clone(), snapshot);
    }
    let mut stages = BTreeMap::new();
    for (index, stage) in &mut state.stages {
        let snapshot = activity_reporter.at(&names[*index], || stage.snapshot());
        let snapshot = snapshot.map_err(|e| failed("stage", &names[*index], "snapshot", e))?;
        stages.extend(snapshot.map(|snapshot| (*index, snapshot)));
    }
    Ok((models, stages))
}

fn restore_worker(
    state: &mut WorkerState,
    names: &[String],
    all: &RunSnapshot,
) -> Result<(), RunError> {
    for (name, model) in &mut state.models {
        if let Some(snapshot) = all.models.get(name) {
            model
                .restore(snapshot)
                .map_err(|e| failed("model", name, "restore", e))?;
        }
    }
    for (index, stage) in &mut state.stages {
        if let Some(snapshot) = all.stages.get(&names[*index]) {
            stage
                .restore(snapshot)
                .map_err(|e| failed("stage", &names[*index], "restore", e))?;
        }
    }
    Ok(())
}

/// States of models and stages with their versions, by name.
type Stored = BTreeMap<String, (WeightsVersion, Option<StoredState>)>;

fn store_worker(
    state: &mut WorkerState,
    names: &[String],
    all: &RunSnapshot,
    known: &BTreeMap<String, WeightsVersion>,
    activity_reporter: &ActivityReporter,
) -> Result<(Stored, Stored), RunError> {
    let (mut models, mut stages) = (Stored::new(), Stored::new());
    for (name, model) in &mut state.models {
        let Some(snapshot) = all.models.get(name) else {
            continue;
        };
        let is_known =
            !snapshot.version.hash.is_empty() && known.get(name) == Some(&snapshot.version);
        let stored = match is_known {
            true => None,
            false => activity_reporter
                .at(name, || model.store(snapshot))
                .map_err(|e| failed("model", name, "store", e))?,
        };
        models.insert(name.clone(), (snapshot.version.clone(), stored));
    }
    for (index, stage) in &mut state.stages {
        let name = &names[*index];
        if let Some(snapshot) = all.stages.get(name) {
            let stored = activity_reporter.at(name, || stage.store(snapshot));
            let stored = stored.map_err(|e| failed("stage", name, "store", e))?;
            stages.insert(name.clone(), (snapshot.version.clone(), stored));
        }
    }
    Ok((models, stages))
}

fn recall_worker(
    worker: &mut WorkerState,
    names: &[String],
    all: &RunState,
) -> Result<(), RunError> {
    for (name, model) in &mut worker.models {
        if let Some((version, Some(stored))) = all.models.get(name) {
            model
                .recall(version, stored)
                .and_then(|snapshot| model.restore(&snapshot))
                .map_err(|e| failed("model", name, "recall", e))?;
        }
    }
    for (index, stage) in &mut worker.stages {
        let name = &names[*index];
        if let Some((version, Some(stored))) = all.stages.get(name) {
            stage
                .recall(version, stored)
                .and_then(|snapshot| stage.restore(&snapshot))
                .map_err(|e| failed("stage", name, "recall", e))?;
        }
    }
    Ok(())
}
