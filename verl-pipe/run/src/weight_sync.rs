//! Weights of models between device groups: a group that reads a model of another group has a copy, which follows it.
//!
//! Whatever may change the weights of a model makes its copies stale: a call that updates it, restoring a snapshot, recalling
//! a state. Before a call that reads a stale copy, the weights travel from the model's home in checked buckets, and the copy
//! switches to them when all have arrived. So no call ever sees a part of a version. Within a group nothing is copied.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::stage::Access;

use crate::error::RunError;
use crate::runner::Run;
use crate::worker::{Answer, Query};

/// Size of a bucket (bytes): large enough that messages cost nothing, small enough to overlap reading and writing.
const BUCKET_BYTES: usize = 64 << 20;

/// Copies of models in other groups than their homes.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Group and model of each copy of a model that some stage updates.
    followers: BTreeSet<(usize, String)>,
    /// How often the weights of each model with copies may have changed.
    changes: BTreeMap<String, u64>,
    /// Those whose weights may differ from the model's.
    stale: BTreeSet<(usize, String)>,
    /// Time and size of the transfers since they were last taken.
    pub(super) cost: SyncCost,
}

/// What transfers of weights have cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct SyncCost {
    pub seconds: f64,
    pub bytes: u64,
}

impl Copies {
    pub(super) fn of(schedule: &Schedule) -> Copies {
        let models = schedule.plan().models().iter();
        let trained = models.filter(|model| !model.updaters.is_empty());
        let followers: BTreeSet<(usize, String)> = trained
            .flat_map(|model| {
                let groups = model.copies.iter().map(|(group, _)| *group);
                groups.map(|group| (group, model.name.clone()))
            })
            .collect();
        Copies {
            // The home may have loaded other weights than the copies, for example random ones.
            stale: followers.clone(),
            changes: BTreeMap::new(),
            followers,
            cost: SyncCost::default(),
        }
    }

    /// The weights of `model` may have changed.
    fn changed(&mut self, model: &str) {
        *self.changes.entry(model.to_owned()).or_default() += 1;
        let copies = self.followers.iter().filter(|(_, name)| name == model);
        self.stale.extend(copies.cloned());
    }

    /// The weights of any model may have changed.
    pub(super) fn all_changed(&mut self) {
        self.stale = self.followers.clone();
    }

    /// All copies in `group` were loaded anew.
    pub(super) fn stale_in(&mut self, group: usize) {
        let copies = self.followers.iter().filter(|(own, _)| *own == group);
        self.stale.extend(copies.cloned());
    }

    /// The copies that `stage` reads, with the number of changes of their models so far.
    pub(super) fn read_by(&self, schedule: &Schedule, stage: usize) -> Vec<(String, u64)> {
        let Place::Group(group) = schedule.places()[stage] else {
            return Vec::new();
        };
        let models = schedule.plan().stages()[stage].spec().models.iter();
        let copies = models.filter(|(model, _)| self.followers.contains(&(group, model.clone())));
        let count = |model: &String| self.changes.get(model).copied().unwrap_or_default();
        copies
            .map(|(model, _)| (model.clone(), count(model)))
            .collect()
    }

    /// Whether there are any.
    pub(super) fn exist(&self) -> bool {
        !self.followers.is_empty()
    }
}

impl Run {
    /// Whether no copy that `stage` reads waits for a home that runs a call.
    pub(super) fn can_sync(&self, stage: usize, busy: &[bool]) -> bool {
        let Place::Group(group) = self.schedule.places()[stage] else {
            return true;
        };
        let models = &self.schedule.plan().stages()[stage].spec().models;
        models.iter().all(|(model, _)| {
            let is_stale = || self.copies.stale.contains(&(group, model.clone()));
            let home = self.schedule.home(model).unwrap_or_default();
            home == group || !busy[home] || !is_stale()
        })
    }

    /// After a call of `stage`: the copies of the models that it updates are stale.
    pub(super) fn note_changed_weights(&mut self, stage: usize) {
        let models = &self.schedule.plan().stages()[stage].spec().models;
        for (model, access) in models {
            if *access == Access::Update {
                self.copies.changed(model);
            }
        }
    }

    /// Before a call of `stage`: brings the copies that it reads up to date.
    ///
    /// # Errors
    /// The weights cannot be sent, or a worker is lost. The copies then have the weights that they had.
    pub(super) fn sync_copies_of(&mut self, stage: usize) -> Result<(), RunError> {
        while let Err(error) = self.sync_copies_once(stage) {
            self.revive_any(error)?;
        }
        Ok(())
    }

    /// As [`Run::sync_copies_of`], without starting lost workers again.
    pub(super) fn sync_copies_once(&mut self, stage: usize) -> Result<(), RunError> {
        if self.copies.stale.is_empty() {
            return Ok(());
        }
        let Place::Group(group) = self.schedule.places()[stage] else {
            return Ok(());
        };
        let schedule = self.schedule.clone();
        let models = &schedule.plan().stages()[stage].spec().models;
        for (model, _) in models {
            let copy = (group, model.clone());
            if self.copies.stale.contains(&copy) {
                let since = Instant::now();
                let bytes = self.send_weights(model, group)?;
                self.copies.cost.bytes += bytes;
                self.copies.cost.seconds += since.elapsed().as_secs_f64();
                self.copies.stale.remove(&copy);
            }
        }
        Ok(())
    }

    /// Sends the weights of `model` from its home to its copy in `group`; returns their size. While the copy accepts a
    /// bucket, the home reads the next one.
    fn send_weights(&mut self, model: &str, group: usize) -> Result<u64, RunError> {
        let home = self.schedule.home(model).unwrap_or_default();
        let model = model.to_owned();
        let open = Query::OpenWeights {
            model: model.clone(),
            bucket_bytes: BUCKET_BYTES,
        };
        let answer = self.workers[home].ask(open, self.deadline)?;
        let Answer::Manifest(manifest) = answer else {
            return Err(self.unexpected(home));
        };
        let mut bytes = 0;
        let buckets = manifest.buckets;
        let begin = Query::BeginWeights {
            model: model.clone(),
            manifest,
        };
        let mut accepting = self.workers[group].send(begin)?;
        for bucket in 0..buckets {
            let read = Query::ReadBucket {
                model: model.clone(),
                bucket,
            };
            let answer = self.workers[home].ask(read, self.deadline)?;
            let Answer::Bucket(read) = answer else {
                return Err(self.unexpected(home));
            };
            bytes += read.bytes.len() as u64;
            self.workers[group].receive(accepting, self.deadline)?;
            accepting = self.workers[group].send(Query::AcceptBucket {
                model: model.clone(),
                bucket: read,
            })?;
        }
        self.workers[group].receive(accepting, self.deadline)?;
        let finish = Query::FinishWeights { model };
        self.workers[group].ask(finish, self.deadline)?;
        Ok(bytes)
    }

    /// The error for a worker that gave an answer to another query.
    pub(super) fn unexpected(&self, group: usize) -> RunError {
        RunError::Lost {
            worker: self.schedule.groups()[group].name.clone(),
            reason: "it answered another query than it was asked".to_owned(),
        }
    }
}
