//! Model resources: what stages share that does not travel on edges (weights, optimiser state, caches).
//!
//! The engine knows of a model only what stands in [`ModelResource`]: a version, snapshots, export. Stages downcast
//! to the concrete type through [`StageContext::model`](crate::stage::StageContext::model).

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Which weights: the number of optimiser steps taken and a hash of their content.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WeightsVersion {
    /// Optimiser steps taken since the model was loaded.
    pub step: u64,
    /// Hash of the weights' bytes, in hexadecimal; empty where it was not computed.
    pub hash: String,
}

impl fmt::Display for WeightsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = self.hash.get(..12).unwrap_or(&self.hash);
        write!(f, "{}@{short}", self.step)
    }
}

/// State of a resource or a stage at one moment; restoring it makes what follows bit-equal.
#[derive(Clone)]
pub struct Snapshot {
    /// Version of the weights inside.
    pub version: WeightsVersion,
    /// The state, known only to the type that made it.
    pub state: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Snapshot({})", self.version)
    }
}

/// What a resource can refuse.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// A snapshot that another type made.
    #[error("the snapshot was not made by this kind of model")]
    ForeignSnapshot,
    /// Loading, saving or computing failed.
    #[error("{0}")]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

/// A model as the engine sees it. It lives on the worker thread of its device group.
pub trait ModelResource: Any + Send {
    /// Version of the weights now.
    fn version(&self) -> WeightsVersion;
    /// Weights, moments and schedule position.
    ///
    /// # Errors
    /// When the state cannot be read back.
    fn snapshot(&mut self) -> Result<Snapshot, ResourceError>;
    /// Back to a snapshot of this model.
    ///
    /// # Errors
    /// When the snapshot is of another kind.
    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ResourceError>;
    /// Writes the model into `dir`, in its own folder format (for decoders a Hugging Face folder).
    ///
    /// # Errors
    /// When the folder cannot be written.
    fn save(&mut self, dir: &Path) -> Result<(), ResourceError>;
    /// For downcasting.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// What a model declaration tells without loading weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ModelInfo {
    /// Number of parameters.
    pub num_parameters: u64,
    /// Bytes of weights as held on the device.
    pub weight_bytes: u64,
    /// Bytes of master weights, moments and gradients while training; 0 for a frozen model.
    pub training_bytes: u64,
    /// Bytes of keys and values per token of context.
    pub kv_bytes_per_token: u64,
    /// Longest context in tokens.
    pub max_tokens: usize,
    /// One line about it, for `pipe plan`.
    pub summary: String,
    /// What stages take it for, as a noun, for example `policy`; empty where that is not told.
    pub role: &'static str,
}
