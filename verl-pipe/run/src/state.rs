//! Snapshots of all models and stages, restoring them, and saving models.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use verl_plan::schedule::placement::Place;
use verl_words::resource::{Snapshot, StoredState, WeightsVersion};

use crate::error::RunError;
use crate::runner::Run;
use crate::watch::{Wait, WaitGuard};
use crate::worker::hosted::failed;
use crate::worker::{Answer, Query, SnapshotHandle};

/// State of all models and stages between two steps. The state itself stays with the workers, until this and all its
/// clones are dropped; only the run that made it can restore it.
#[derive(Debug, Clone)]
pub struct RunSnapshot {
    /// Number of completed steps.
    pub step: u64,
    /// Versions of models by name.
    pub models: BTreeMap<String, WeightsVersion>,
    /// Versions of stages that have state, by name.
    pub stages: BTreeMap<String, WeightsVersion>,
    /// The snapshot that each worker keeps.
    workers: Vec<Arc<SnapshotHandle>>,
    /// States of stages of the host pool, by name.
    hosts: BTreeMap<String, Snapshot>,
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

impl Run {
    /// State of all models and stages, between two steps.
    ///
    /// # Errors
    /// If a state cannot be read.
    pub fn snapshot(&mut self) -> Result<RunSnapshot, RunError> {
        self.snapshot_by(false)
    }

    /// Like [`Run::snapshot`], but cheap enough for every step: hashes of versions can be empty.
    ///
    /// # Errors
    /// If a state cannot be read.
    pub fn quick_snapshot(&mut self) -> Result<RunSnapshot, RunError> {
        self.snapshot_by(true)
    }

    fn snapshot_by(&mut self, quick: bool) -> Result<RunSnapshot, RunError> {
        let kept = self.workers.iter().map(|worker| {
            let handle = SnapshotHandle::new(worker.dropped().clone());
            Arc::new(handle)
        });
        let kept: Vec<Arc<SnapshotHandle>> = kept.collect();
        let mut snapshot = RunSnapshot {
            step: self.step,
            models: BTreeMap::new(),
            stages: BTreeMap::new(),
            workers: kept.clone(),
            hosts: BTreeMap::new(),
        };
        let waiting = self.begin_state(self.step + 1, Place::Group(0));
        let query = |group: usize| Query::Snapshot {
            id: kept[group].id,
            quick,
        };
        for answer in waiting.finish(self.ask_workers(query))? {
            let Answer::Snapshot { models, stages } = answer else {
                continue;
            };
            snapshot.models.extend(models);
            snapshot.stages.extend(stages);
        }
        // Stages of the host pool are idle, so their state is read on this thread.
        let _waiting = self.begin_state(self.step + 1, Place::Host);
        let activity_reporter = self.watch.activity_reporter();
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let Some(stage) = host.idle() else {
                continue;
            };
            let name = &names[*index];
            let state = activity_reporter.at(name, || stage.snapshot());
            let state = state.map_err(|e| failed("stage", name, "snapshot", e))?;
            if let Some(state) = state {
                snapshot.stages.insert(name.clone(), state.version.clone());
                snapshot.hosts.insert(name.clone(), state);
            }
        }
        Ok(snapshot)
    }

    /// Restores `snapshot`: all later steps are bit-identical to those that followed it.
    ///
    /// # Errors
    /// If it was made by another run, or a model or stage rejects its state.
    pub fn restore(&mut self, snapshot: &RunSnapshot) -> Result<(), RunError> {
        let query = |group: usize| Query::Restore {
            id: snapshot.workers.get(group).map_or(0, |kept| kept.id),
        };
        self.copies.all_changed();
        self.ask_workers(query)?;
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let (Some(stage), Some(state)) = (host.idle(), snapshot.hosts.get(&names[*index]))
            else {
                continue;
            };
            stage
                .restore(state)
                .map_err(|e| failed("stage", &names[*index], "restore", e))?;
        }
        self.step = snapshot.step;
        self.left.clear();
        self.rebase_recovery()
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
        let waiting = self.begin_state(snapshot.step + 1, Place::Group(0));
        let query = |group: usize| Query::Store {
            id: snapshot.workers.get(group).map_or(0, |kept| kept.id),
            known: known.clone(),
            trained_only: false,
        };
        let mut state = RunState {
            step: snapshot.step,
            ..RunState::default()
        };
        for answer in waiting.finish(self.ask_workers(query))? {
            if let Answer::Stored { models, stages } = answer {
                state.models.extend(models);
                state.stages.extend(stages);
            }
        }
        let _waiting = self.begin_state(snapshot.step + 1, Place::Host);
        let activity_reporter = self.watch.activity_reporter();
        let names = self.stage_names();
        for (index, host) in &mut self.hosts {
            let name = &names[*index];
            let (Some(stage), Some(own)) = (host.idle(), snapshot.hosts.get(name)) else {
                continue;
            };
            let stored = activity_reporter.at(name, || stage.store(own));
            let stored = stored.map_err(|e| failed("stage", name, "store", e))?;
            let version = own.version.clone();
            state.stages.insert(name.clone(), (version, stored));
        }
        Ok(state)
    }

    /// Restores a state that was stored on disk. Models and stages that it does not contain stay unchanged.
    ///
    /// # Errors
    /// If a model or stage rejects its state.
    pub fn recall(&mut self, state: &RunState) -> Result<(), RunError> {
        self.copies.all_changed();
        self.ask_workers(|_| Query::Recall {
            models: state.models.clone(),
            stages: state.stages.clone(),
        })?;
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
        self.rebase_recovery()
    }

    /// Versions of all models' weights.
    ///
    /// # Errors
    /// If a worker is lost.
    pub fn versions(&mut self) -> Result<BTreeMap<String, WeightsVersion>, RunError> {
        let waiting = self.begin_state(self.step + 1, Place::Group(0));
        let answers = waiting.finish(self.ask_workers(|_| Query::Versions))?;
        let versions = answers.into_iter().filter_map(|answer| match answer {
            Answer::Versions(versions) => Some(versions),
            _ => None,
        });
        Ok(versions.flatten().collect())
    }

    /// Sends a query to the worker of each group, which all work on it at the same time, and waits for the answers.
    ///
    /// # Errors
    /// The first error.
    pub(super) fn ask_workers(
        &mut self,
        query: impl Fn(usize) -> Query,
    ) -> Result<Vec<Answer>, RunError> {
        let groups = self.workers.iter_mut().enumerate();
        let pending: Vec<_> = groups
            .map(|(group, worker)| worker.send(query(group)))
            .collect();
        let mut answers = Vec::with_capacity(pending.len());
        for (group, pending) in pending.into_iter().enumerate() {
            let worker = &mut self.workers[group];
            let answer = pending.and_then(|pending| worker.receive(pending, self.deadline));
            answers.push(match answer {
                Ok(answer) => answer,
                Err(error) => {
                    self.revive(group, error)?;
                    self.ask(group, query(group))?
                }
            });
        }
        Ok(answers)
    }

    /// Sends a query to the worker of `group` and waits for the answer; a process that is lost is started again.
    ///
    /// # Errors
    /// If the query is refused, or the worker is lost.
    pub(super) fn ask(&mut self, group: usize, query: Query) -> Result<Answer, RunError> {
        loop {
            match self.workers[group].ask(query.clone(), self.deadline) {
                Ok(answer) => return Ok(answer),
                Err(error) => self.revive(group, error)?,
            }
        }
    }

    /// Starts a wait for the state of models and stages before step `step`.
    fn begin_state(&self, step: u64, place: Place) -> WaitGuard {
        self.watch.begin(Wait {
            step,
            who: "the run".to_owned(),
            pending: "its state at the start".to_owned(),
            on: match place {
                Place::Host => "the run's own thread".to_owned(),
                Place::Group(_) => self.groups_name(),
            },
            deadline: self.deadline,
        })
    }

    /// Saves model `name` to `dir`, which is created.
    ///
    /// # Errors
    /// If there is no such model or it cannot be written.
    pub fn save_model(&mut self, name: &str, dir: &Path) -> Result<(), RunError> {
        let Some(group) = self.schedule.home(name) else {
            return Err(failed("model", name, "save", "there is no such model"));
        };
        let query = Query::Save {
            model: name.to_owned(),
            dir: PathBuf::from(dir),
        };
        self.ask(group, query).map(drop)
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
