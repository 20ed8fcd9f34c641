//! [`Hosted`]: the models and stages of one device group, and what a worker does with them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use verl_plan::schedule::placement::{Place, Schedule};
use verl_reshard::{SyncError, WeightSink, WeightSource};
use verl_words::data::DataLoaderInterface;
use verl_words::panics::catch_panic;
use verl_words::resource::{ModelResource, ResourceError, Snapshot, WeightsVersion};
use verl_words::stage::{Models, Stage, StageError, StartContext};

use crate::call_error::out_of_memory;
use crate::channel::{CallFailure, CallReport, Out, call_stage};
use crate::error::RunError;
use crate::watch::ActivityReporter;
use crate::worker::QueryFailure;
use crate::worker::message::{Answer, DeviceCall, Query, StoredStates, Versions};

/// Opened data sets by name.
pub(crate) type OpenData = BTreeMap<String, Arc<dyn DataLoaderInterface>>;

/// The models and stages of a device group, owned by its worker.
pub(crate) struct Hosted {
    schedule: Arc<Schedule>,
    group: usize,
    /// Models whose home is this group, and copies.
    models: Models,
    /// Which of them are copies.
    copies: BTreeSet<String>,
    /// Weights that are being sent, by model.
    sources: BTreeMap<String, Box<dyn WeightSource>>,
    stages: BTreeMap<usize, Box<dyn Stage>>,
    snapshots: BTreeMap<u64, GroupSnapshot>,
    reporter: ActivityReporter,
}

/// The state of a group's models and stages at one moment.
struct GroupSnapshot {
    models: BTreeMap<String, Snapshot>,
    stages: BTreeMap<usize, Snapshot>,
}

/// Actions of [`RunError::State`] on weights that travel.
pub(crate) const SEND: &str = "send the weights of";
pub(crate) const RECEIVE: &str = "receive the weights of";

/// A kind of model whose weights do not travel.
#[derive(Debug, thiserror::Error)]
#[error("this kind of model does not implement `weight_source` and `weight_sink`")]
struct NotSynced;

/// The first request to a worker.
pub(crate) const TO_LOAD: &str = "to load models and start stages";

impl Hosted {
    /// Loads the models of group `group` and starts its stages, with panics and out-of-memory conditions as errors.
    pub(crate) fn load(
        schedule: Arc<Schedule>,
        group: usize,
        data: &OpenData,
        reporter: ActivityReporter,
    ) -> Result<Hosted, RunError> {
        let loaded = catch_panic(|| load(&schedule, group, data));
        let (models, stages) = match loaded {
            Ok(Ok(loaded)) => loaded,
            Ok(Err(error)) => {
                let during = format!("when asked {TO_LOAD}");
                let full = out_of_memory(&schedule, group, None, during, &error.to_string());
                return Err(full.unwrap_or(error));
            }
            Err(message) => return Err(panicked(&schedule, group, TO_LOAD, &message)),
        };
        let copies = schedule.models_at(group).filter(|(_, is_copy)| *is_copy);
        Ok(Hosted {
            copies: copies.map(|(decl, _)| decl.name.clone()).collect(),
            sources: BTreeMap::new(),
            schedule,
            group,
            models,
            stages,
            snapshots: BTreeMap::new(),
            reporter,
        })
    }

    /// Runs a call; `None` if the stage is not one of this group.
    pub(crate) fn call(
        &mut self,
        call: DeviceCall,
        out: Out<'_>,
    ) -> Option<(CallReport, Result<(), CallFailure>)> {
        let stage = self.stages.get_mut(&call.stage)?;
        let name = self.schedule.plan().stages()[call.stage].name();
        let (input, wave, env) = (call.input, call.wave, &call.env);
        Some(call_stage(
            stage.as_mut(),
            name,
            input,
            wave,
            env,
            &mut self.models,
            out,
        ))
    }

    /// Answers a query; a panic is a failure after which the state is unknown.
    pub(crate) fn answer(&mut self, query: Query) -> Result<Answer, QueryFailure> {
        let what = query.what();
        match catch_panic(|| self.answer_query(query)) {
            Ok(answer) => answer.map_err(QueryFailure::Refused),
            Err(message) => {
                let error = panicked(&self.schedule, self.group, what, &message);
                Err(QueryFailure::Panicked(error))
            }
        }
    }

    /// Drops snapshots.
    pub(crate) fn forget(&mut self, ids: &[u64]) {
        for id in ids {
            self.snapshots.remove(id);
        }
    }

    fn answer_query(&mut self, query: Query) -> Result<Answer, RunError> {
        match query {
            Query::Snapshot { id, quick } => self.snapshot(id, quick),
            Query::Restore { id } => self.restore(id),
            Query::Store {
                id,
                known,
                trained_only,
            } => self.store(id, &known, trained_only),
            Query::Recall { models, stages } => self.recall(&models, &stages),
            Query::Versions => {
                let reporter = &self.reporter;
                let own = self.models.iter();
                let own = own.filter(|(name, _)| !self.copies.contains(*name));
                let versions =
                    own.map(|(name, model)| (name.clone(), reporter.at(name, || model.version())));
                Ok(Answer::Versions(versions.collect()))
            }
            Query::OptimizerSteps => {
                let own = self.models.iter();
                let own = own.filter(|(name, _)| !self.copies.contains(*name));
                let steps = own.map(|(name, model)| (name.clone(), model.optimizer_steps()));
                Ok(Answer::OptimizerSteps(steps.collect()))
            }
            Query::Texts { tokens } => {
                let mut models = self.models.values();
                let texts = models.find_map(|model| {
                    let texts = tokens.iter().map(|tokens| model.text_of(tokens));
                    texts.collect::<Option<Vec<String>>>()
                });
                Ok(Answer::Texts(texts))
            }
            Query::OpenWeights {
                model,
                bucket_bytes,
            } => {
                let own = self.model(&model, SEND)?;
                let version = WeightsVersion {
                    step: own.optimizer_steps(),
                    hash: String::new(),
                };
                let source = own.weight_source(version, bucket_bytes);
                let source = source.map_err(|e| failed("model", &model, SEND, e))?;
                let source = source.ok_or_else(|| failed("model", &model, SEND, NotSynced))?;
                let manifest = source.manifest().clone();
                if manifest.buckets > 0 {
                    self.sources.insert(model, source);
                }
                Ok(Answer::Manifest(manifest))
            }
            Query::ReadBucket { model, bucket } => {
                let source = self.sources.get(&model);
                let source =
                    source.ok_or_else(|| failed("model", &model, SEND, SyncError::NotBegun))?;
                let read = source.bucket(bucket);
                let read = read.map_err(|e| failed("model", &model, SEND, e))?;
                if bucket + 1 == source.manifest().buckets {
                    self.sources.remove(&model);
                }
                Ok(Answer::Bucket(Box::new(read)))
            }
            Query::BeginWeights { model, manifest } => {
                self.receive(&model, |sink| sink.begin(&manifest))
            }
            Query::AcceptBucket { model, bucket } => {
                self.receive(&model, |sink| sink.accept(&bucket))
            }
            Query::FinishWeights { model } => self.receive(&model, |sink| sink.finish().map(drop)),
            Query::Save { model, dir } => {
                let own = self.model(&model, "save")?;
                own.save(&dir)
                    .map_err(|e| failed("model", &model, "save", e))?;
                Ok(Answer::Done)
            }
        }
    }

    fn model(
        &mut self,
        name: &str,
        action: &'static str,
    ) -> Result<&mut dyn ModelResource, RunError> {
        let found = self.models.get_mut(name);
        let found = found.ok_or_else(|| failed("model", name, action, "there is no such model"))?;
        Ok(found.as_mut())
    }

    fn receive(
        &mut self,
        model: &str,
        work: impl FnOnce(&mut dyn WeightSink) -> Result<(), SyncError>,
    ) -> Result<Answer, RunError> {
        let sink = self.model(model, RECEIVE)?.weight_sink();
        let sink = sink.ok_or_else(|| failed("model", model, RECEIVE, NotSynced))?;
        work(sink).map_err(|e| failed("model", model, RECEIVE, e))?;
        Ok(Answer::Done)
    }

    fn stage_name(&self, index: usize) -> &str {
        self.schedule.plan().stages()[index].name()
    }

    fn snapshot(&mut self, id: u64, quick: bool) -> Result<Answer, RunError> {
        let of_model = |model: &mut dyn ModelResource| match quick {
            true => model.quick_snapshot(),
            false => model.snapshot(),
        };
        let mut models = BTreeMap::new();
        for (name, model) in &mut self.models {
            // A copy gets its weights from the model's home.
            if self.copies.contains(name) {
                continue;
            }
            let snapshot = self.reporter.at(name, || of_model(model.as_mut()));
            let snapshot = snapshot.map_err(|e| failed("model", name, "snapshot", e))?;
            models.insert(name.clone(), snapshot);
        }
        let mut stages = BTreeMap::new();
        for (index, stage) in &mut self.stages {
            let name = self.schedule.plan().stages()[*index].name();
            let snapshot = self.reporter.at(name, || stage.snapshot());
            let snapshot = snapshot.map_err(|e| failed("stage", name, "snapshot", e))?;
            stages.extend(snapshot.map(|snapshot| (*index, snapshot)));
        }
        let version =
            |(name, snapshot): (&String, &Snapshot)| (name.clone(), snapshot.version.clone());
        let answer = Answer::Snapshot {
            models: models.iter().map(version).collect(),
            stages: stages
                .iter()
                .map(|(index, snapshot)| {
                    (self.stage_name(*index).to_owned(), snapshot.version.clone())
                })
                .collect(),
        };
        self.snapshots.insert(id, GroupSnapshot { models, stages });
        Ok(answer)
    }

    /// The snapshot `id`, taken out so that models can be changed meanwhile.
    fn take_snapshot(&mut self, id: u64, action: &'static str) -> Result<GroupSnapshot, RunError> {
        let group = &self.schedule.groups()[self.group].name;
        let unknown = || {
            failed(
                "device group",
                group,
                action,
                ResourceError::ForeignSnapshot,
            )
        };
        self.snapshots.remove(&id).ok_or_else(unknown)
    }

    fn restore(&mut self, id: u64) -> Result<Answer, RunError> {
        let snapshot = self.take_snapshot(id, "restore")?;
        let restored = self.restore_from(&snapshot);
        self.snapshots.insert(id, snapshot);
        restored.map(|()| Answer::Done)
    }

    fn restore_from(&mut self, snapshot: &GroupSnapshot) -> Result<(), RunError> {
        for (name, model) in &mut self.models {
            if let Some(state) = snapshot.models.get(name) {
                model
                    .restore(state)
                    .map_err(|e| failed("model", name, "restore", e))?;
            }
        }
        for (index, stage) in &mut self.stages {
            if let Some(state) = snapshot.stages.get(index) {
                let name = self.schedule.plan().stages()[*index].name();
                stage
                    .restore(state)
                    .map_err(|e| failed("stage", name, "restore", e))?;
            }
        }
        Ok(())
    }

    fn store(&mut self, id: u64, known: &Versions, trained_only: bool) -> Result<Answer, RunError> {
        let snapshot = self.take_snapshot(id, "store")?;
        let mut snapshot = snapshot;
        if trained_only {
            let plan = self.schedule.plan();
            let trained = plan
                .models()
                .iter()
                .filter(|model| !model.updaters.is_empty());
            let trained: BTreeSet<&String> = trained.map(|model| &model.name).collect();
            snapshot.models.retain(|name, _| trained.contains(name));
        }
        let stored = self.store_from(&snapshot, known);
        self.snapshots.insert(id, snapshot);
        stored.map(|(models, stages)| Answer::Stored { models, stages })
    }

    fn store_from(
        &mut self,
        snapshot: &GroupSnapshot,
        known: &Versions,
    ) -> Result<(StoredStates, StoredStates), RunError> {
        let (mut models, mut stages) = (StoredStates::new(), StoredStates::new());
        for (name, model) in &mut self.models {
            let Some(state) = snapshot.models.get(name) else {
                continue;
            };
            let is_known =
                !state.version.hash.is_empty() && known.get(name) == Some(&state.version);
            let stored = match is_known {
                true => None,
                false => self
                    .reporter
                    .at(name, || model.store(state))
                    .map_err(|e| failed("model", name, "store", e))?,
            };
            models.insert(name.clone(), (state.version.clone(), stored));
        }
        for (index, stage) in &mut self.stages {
            if let Some(state) = snapshot.stages.get(index) {
                let name = self.schedule.plan().stages()[*index].name();
                let stored = self.reporter.at(name, || stage.store(state));
                let stored = stored.map_err(|e| failed("stage", name, "store", e))?;
                stages.insert(name.to_owned(), (state.version.clone(), stored));
            }
        }
        Ok((models, stages))
    }

    fn recall(&mut self, models: &StoredStates, stages: &StoredStates) -> Result<Answer, RunError> {
        for (name, model) in &mut self.models {
            if let Some((version, Some(stored))) =
                models.get(name).filter(|_| !self.copies.contains(name))
            {
                model
                    .recall(version, stored)
                    .and_then(|snapshot| model.restore(&snapshot))
                    .map_err(|e| failed("model", name, "recall", e))?;
            }
        }
        for (index, stage) in &mut self.stages {
            let name = self.schedule.plan().stages()[*index].name();
            if let Some((version, Some(stored))) = stages.get(name) {
                stage
                    .recall(version, stored)
                    .and_then(|snapshot| stage.restore(&snapshot))
                    .map_err(|e| failed("stage", name, "recall", e))?;
            }
        }
        Ok(Answer::Done)
    }
}

/// The error for the state of a model or stage that could not be read or changed.
pub(crate) fn failed(
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

/// The error for a worker that panicked when asked `what`.
fn panicked(schedule: &Schedule, group: usize, what: &str, message: &str) -> RunError {
    let during = format!("when asked {what}");
    out_of_memory(schedule, group, None, during, message).unwrap_or_else(|| RunError::Lost {
        worker: schedule.groups()[group].name.clone(),
        reason: format!("its thread panicked when asked {what}: {message}"),
    })
}

type Loaded = (Models, BTreeMap<usize, Box<dyn Stage>>);

fn load(schedule: &Schedule, group: usize, data: &OpenData) -> Result<Loaded, RunError> {
    let plan = schedule.plan();
    let devices = &schedule.groups()[group].devices;
    let mut models = Models::new();
    for (decl, is_copy) in schedule.models_at(group) {
        let factory = &decl.factory;
        let model = match is_copy {
            false => factory.load_replicas(&decl.name, devices, plan.context()),
            true => factory.load_copy(&decl.name, devices, plan.context()),
        };
        let model = model.map_err(|source| RunError::Load {
            name: decl.name.clone(),
            source,
        })?;
        models.insert(decl.name.clone(), model);
    }
    let mut stages = BTreeMap::new();
    for index in schedule.stages_at(Place::Group(group)) {
        stages.insert(index, start_stage(schedule, index, data, &mut models)?);
    }
    Ok((models, stages))
}

/// Builds and starts stage `index`.
pub(crate) fn start_stage(
    schedule: &Schedule,
    index: usize,
    data: &OpenData,
    models: &mut Models,
) -> Result<Box<dyn Stage>, RunError> {
    let planned = &schedule.plan().stages()[index];
    let stage = || planned.name().to_owned();
    let start = || {
        let mut made =
            planned
                .build(schedule.plan().context())
                .map_err(|errors| RunError::Build {
                    stage: stage(),
                    errors,
                })?;
        made.start(&mut StartContext { data, models })
            .map_err(|source| RunError::Start {
                stage: stage(),
                source: Box::new(source),
            })?;
        Ok(made)
    };
    // Stages of the host pool start on the caller's thread, where a panic would end the program.
    catch_panic(start).unwrap_or_else(|message| {
        Err(RunError::Start {
            stage: stage(),
            source: Box::new(StageError::failed(format!("it panicked: {message}"))),
        })
    })
}
