//! What the engine and a worker say to each other. Messages contain data only, so they can be sent to another process.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use verl_reshard::{Bucket, WeightsManifest};
use verl_words::batch::Batch;
use verl_words::resource::{StoredState, WeightsVersion};

use crate::channel::CallEnv;

/// Versions by name.
pub(crate) type Versions = BTreeMap<String, WeightsVersion>;

/// Versions by name, with the states themselves where they were requested and exist.
pub(crate) type StoredStates = BTreeMap<String, (WeightsVersion, Option<StoredState>)>;

/// A call of a stage on a worker.
pub(crate) struct DeviceCall {
    /// Unique within the run.
    pub call: u64,
    /// Index of the stage.
    pub stage: usize,
    pub input: Batch,
    /// Wave of a source's call, otherwise 0.
    pub wave: u64,
    pub env: Arc<CallEnv>,
}

/// A request with an answer. Models are those whose home is the worker's group, except where weights are received.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Query {
    /// Keeps the state of models and stages under `id`; a quick one need not compute hashes. Answer: `Snapshot`.
    Snapshot { id: u64, quick: bool },
    /// Restores the snapshot `id`. Answer: `Done`.
    Restore { id: u64 },
    /// Converts the snapshot `id` for storage, except for models whose version is in `known`, or that no stage trains.
    /// Answer: `Stored`.
    Store {
        id: u64,
        known: Versions,
        trained_only: bool,
    },
    /// Restores states that were stored. Answer: `Done`.
    Recall {
        models: StoredStates,
        stages: StoredStates,
    },
    /// Versions of the models. Answer: `Versions`.
    Versions,
    /// Optimiser steps of the models. Answer: `OptimizerSteps`.
    OptimizerSteps,
    /// Texts of token ids, by the first model that can decode them. Answer: `Texts`.
    Texts { tokens: Vec<Vec<u32>> },
    /// Keeps the current weights of a model, to be read in buckets. Answer: `Manifest`.
    OpenWeights { model: String, bucket_bytes: usize },
    /// A bucket of the weights that were opened; the last one closes them. Answer: `Bucket`.
    ReadBucket { model: String, bucket: usize },
    /// A copy of a model starts to receive weights. Answer: `Done`.
    BeginWeights {
        model: String,
        manifest: WeightsManifest,
    },
    /// The copy receives a bucket. Answer: `Done`.
    AcceptBucket { model: String, bucket: Box<Bucket> },
    /// The copy switches to the weights that have arrived. Answer: `Done`.
    FinishWeights { model: String },
    /// Writes a model into a folder. Answer: `Done`.
    Save { model: String, dir: PathBuf },
}

/// The answer to a [`Query`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// It was done.
    Done,
    /// Versions of models and of stages that have state.
    Snapshot { models: Versions, stages: Versions },
    /// States of models and stages.
    Stored {
        models: StoredStates,
        stages: StoredStates,
    },
    /// Versions of models.
    Versions(Versions),
    /// Optimiser steps of models.
    OptimizerSteps(BTreeMap<String, u64>),
    /// What the weights consist of.
    Manifest(WeightsManifest),
    /// A part of the weights.
    Bucket(Box<Bucket>),
    /// Texts, if a model can decode tokens.
    Texts(Option<Vec<String>>),
}

impl Query {
    /// What is asked; completes "when asked …".
    pub(crate) fn what(&self) -> &'static str {
        match self {
            Query::Snapshot { .. } => "to take snapshots",
            Query::Restore { .. } => "to restore snapshots",
            Query::Store { .. } => "to store its state",
            Query::Recall { .. } => "to recall its state",
            Query::Versions => "to read versions",
            Query::OptimizerSteps => "to count optimiser steps",
            Query::Texts { .. } => "to read samples",
            Query::OpenWeights { .. } | Query::ReadBucket { .. } => "to send weights",
            Query::BeginWeights { .. }
            | Query::AcceptBucket { .. }
            | Query::FinishWeights { .. } => "to receive weights",
            Query::Save { .. } => "to save a model",
        }
    }
}
