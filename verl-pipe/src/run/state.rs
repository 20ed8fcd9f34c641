//! Going back: snapshots of all models and stages, and saving models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::resource::{Snapshot, WeightsVersion};
use crate::run::error::RunError;
use crate::run::runner::Run;
use crate::run::worker::WorkerState;

/// State of all models and stages between two steps.
#[derive(Debug, Clone)]
pub struct RunSnapshot {
    /// Steps that were done.
    pub step: u64,
    /// Models by name.
    pub models: BTreeMap<String, Snapshot>,
    /// Stages by name, those that have state.
    pub stages: BTreeMap<String, Snapshot>,
}
/// Models and stages of a worker, by name and by index.
type WorkerSnapshots = (BTreeMap<String, Snapshot>, BTreeMap<usize, Snapshot>);

impl Run {
    /// State of all models and stages, between two steps.
    ///
    /// # Errors
    /// When one cannot be read back.
    pub fn snapshot(&mut self) -> Result<RunSnapshot, RunError> {
        let names = self.stage_names();
        let deadline = self.deadline;
        let (models, on_worker) =
            self.worker
                .ask("to take snapshots", deadline, move |state| {
                    snapshot_worker(state, &names)
                })??;
        let mut stages: BTreeMap<String, Snapshot> = on_worker
            .into_iter()
            .map(|(index, state)| (self.name(index).to_owned(), state))
            .collect();
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let Some(stage) = host.resting() else {
                continue;
            };
            let state = stage
                .snapshot()
                .map_err(|e| failed("stage", &names[*index], "snapshot", e))?;
            stages.extend(state.map(|state| (names[*index].clone(), state)));
        }
        Ok(RunSnapshot {
            step: self.step,
            models,
            stages,
        })
    }

    /// Back to `snapshot`: what follows is bit-equal to what followed then.
    ///
    /// # Errors
    /// When a model or stage refuses its part.
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
            let (Some(stage), Some(state)) = (host.resting(), snapshot.stages.get(&names[*index]))
            else {
                continue;
            };
            stage
                .restore(state)
                .map_err(|e| failed("stage", &names[*index], "restore", e))?;
        }
        self.step = snapshot.step;
        Ok(())
    }

    /// Versions of all models' weights.
    ///
    /// # Errors
    /// When the worker is lost.
    pub fn versions(&mut self) -> Result<BTreeMap<String, WeightsVersion>, RunError> {
        let deadline = self.deadline;
        self.worker.ask("to tell versions", deadline, |state| {
            state
                .models
                .iter()
                .map(|(name, model)| (name.clone(), model.version()))
                .collect()
        })
    }

    /// Saves model `name` into `dir`, which is made.
    ///
    /// # Errors
    /// When there is no such model or it cannot be written.
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
            .plan
            .stages
            .iter()
            .map(|stage| stage.name.clone())
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

fn snapshot_worker(state: &mut WorkerState, names: &[String]) -> Result<WorkerSnapshots, RunError> {
    let mut models = BTreeMap::new();
    for (name, model) in &mut state.models {
        let snapshot = model
            .snapshot()
            .map_err(|e| failed("model", name, "snapshot", e))?;
        models.insert(name.clone(), snapshot);
    }
    let mut stages = BTreeMap::new();
    for (index, stage) in &mut state.stages {
        let snapshot = stage
            .snapshot()
            .map_err(|e| failed("stage", &names[*index], "snapshot", e))?;
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
