//! Model resources: what stages share that does not travel on edges (weights, optimiser state, caches).
//!
//! The engine knows a model only through [`ModelResource`]: a version, snapshots, export. Stages downcast to the
//! concrete type through [`StageContext::model`](crate::stage::StageContext::model).

use std::any::Any;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::stage::ConfigError;

use verl_reshard::{WeightSink, WeightSource};

pub use verl_reshard::WeightsVersion;

/// State of a resource or a stage at one moment; what follows after restoring it is bit-equal.
#[derive(Clone)]
pub struct Snapshot {
    /// Version of the weights inside.
    pub version: WeightsVersion,
    /// The state, which only the type that made it can read.
    pub state: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Snapshot({})", self.version)
    }
}

/// State in a form that can be stored on disk, and read by any version of the type that made it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StoredState {
    /// Tensors, in the safetensors format; may be empty.
    pub tensors: Vec<u8>,
    /// Everything that is not a tensor.
    pub about: Value,
}

/// An error of a resource.
#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// A snapshot that another type made.
    #[error("the snapshot was made by another run or another kind of model")]
    ForeignSnapshot,
    /// A kind of model whose state cannot be stored on disk.
    #[error(
        "the state of this kind of model cannot be stored on disk: it does not implement `store` and `recall`"
    )]
    NotStored,
    /// Loading, saving or computing failed.
    #[error("{0}")]
    Failed(#[serde(with = "crate::error_text")] Box<dyn std::error::Error + Send + Sync>),
}

/// Why a model cannot be loaded onto a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceRefusal {
    /// The name is not a valid device on any machine.
    #[error("{0}")]
    Unknown(String),
    /// This machine or this build does not have it.
    #[error("{0}")]
    Absent(String),
    /// It is present, but lacks what models need.
    #[error("{0}")]
    Unusable(String),
}

/// A model as the engine sees it. It lives on the worker thread of its device group.
pub trait ModelResource: Any + Send {
    /// Current version of the weights.
    fn version(&self) -> WeightsVersion;
    /// Optimiser steps taken since the model was loaded: the step of [`ModelResource::version`] without its hash, which
    /// may cost a pass over all weights.
    fn optimizer_steps(&self) -> u64 {
        self.version().step
    }
    /// Human-readable text of token ids; `None` if the model has no tokenizer.
    fn text_of(&self, _tokens: &[u32]) -> Option<String> {
        None
    }
    /// Weights, moments and schedule position.
    ///
    /// # Errors
    /// When the state cannot be read back.
    fn snapshot(&mut self) -> Result<Snapshot, ResourceError>;
    /// As [`ModelResource::snapshot`], cheap enough for every step: the version's hash may be empty.
    ///
    /// # Errors
    /// When the state cannot be read back.
    fn quick_snapshot(&mut self) -> Result<Snapshot, ResourceError> {
        self.snapshot()
    }
    /// The weights of this moment, without optimiser state, in buckets of `bucket_bytes`, for a copy of the model in another
    /// device group; `version` labels them. `None` if the kind does not support copies that follow a trained model.
    ///
    /// # Errors
    /// When the weights cannot be read.
    fn weight_source(
        &mut self,
        _version: WeightsVersion,
        _bucket_bytes: usize,
    ) -> Result<Option<Box<dyn WeightSource>>, ResourceError> {
        Ok(None)
    }
    /// This copy as the receiver of such weights; `None` if the kind does not support that. It switches when all have
    /// arrived.
    fn weight_sink(&mut self) -> Option<&mut dyn WeightSink> {
        None
    }
    /// Restores a snapshot of this model.
    ///
    /// # Errors
    /// When another kind of model made the snapshot.
    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ResourceError>;
    /// Converts a snapshot of this model into a form for storage on disk; `None` if the kind does not support that.
    ///
    /// # Errors
    /// When another kind of model made the snapshot, or it cannot be read back.
    fn store(&mut self, _snapshot: &Snapshot) -> Result<Option<StoredState>, ResourceError> {
        Ok(None)
    }
    /// Converts `stored`, which [`ModelResource::store`] returned, back into the snapshot; `version` is its version.
    ///
    /// # Errors
    /// When it belongs to another model, or this kind of model does not support storage.
    fn recall(
        &mut self,
        _version: &WeightsVersion,
        _stored: &StoredState,
    ) -> Result<Snapshot, ResourceError> {
        Err(ResourceError::NotStored)
    }
    /// Writes the model into `dir`, in its own folder format (for decoders a Hugging Face folder).
    ///
    /// # Errors
    /// When the folder cannot be written.
    fn save(&mut self, dir: &Path) -> Result<(), ResourceError>;
    /// For downcasting.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// The texts of token ids, which a reader of a trace needs.
pub trait TokenTexts: Any + Send + Sync {
    /// The text of one token, special ones included; empty for an unknown id.
    fn token(&self, id: u32) -> String;

    /// The text of several tokens, special ones included.
    fn text(&self, ids: &[u32]) -> String {
        ids.iter().map(|id| self.token(*id)).collect()
    }
}

/// Converts texts into a model's tokens and back; loaded when a pipeline is checked. Stages downcast it through
/// [`PreviewContext::texts`](crate::stage::PreviewContext::texts).
#[derive(Clone)]
pub struct Texts(pub Arc<dyn TokenTexts>);

impl fmt::Debug for Texts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Texts")
    }
}

impl PartialEq for Texts {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// What is known about a declared model without loading weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ModelInfo {
    /// Number of parameters.
    pub num_parameters: u64,
    /// Bytes of the weights on the device.
    pub weight_bytes: u64,
    /// Bytes of the model folder into which it is saved; 0 if unknown: `weight_bytes` is used instead.
    #[serde(skip)]
    pub saved_bytes: u64,
    /// Bytes of the optimiser's state while training, f32 copies of narrower weights and moments; 0 for a frozen model.
    pub optimizer_bytes: u64,
    /// Bytes of summed gradients while training; 0 for a frozen model.
    pub gradient_bytes: u64,
    /// Bytes of keys and values per token of context.
    pub kv_bytes_per_token: u64,
    /// The memory that it needs on its device while it works.
    pub footprint: Footprint,
    /// A setting that would reduce its memory, as written in a pipeline file; `None` if there is none.
    pub smaller: Option<&'static str>,
    /// Longest context in tokens.
    pub max_tokens: usize,
    /// One line about it, for `pipe plan`.
    pub summary: String,
    /// Its role in stages, as a noun, for example `policy`; empty if unknown.
    pub role: &'static str,
    /// The meaning of its token ids, if known.
    #[serde(skip)]
    pub vocabulary: Option<Vocabulary>,
    /// Number of token ids that it can read; 0 if unknown.
    #[serde(skip)]
    pub num_ids: usize,
    /// Converts texts into its tokens, if it can.
    #[serde(skip)]
    pub texts: Option<Texts>,
    /// Why its chat template cannot write prompts, if it cannot.
    #[serde(skip)]
    pub no_template: Option<String>,
    /// Settings that are valid but probably not intended: the plan warns.
    #[serde(skip)]
    pub warnings: Vec<ConfigError>,
}

/// The memory that a model needs on its device while it works, in addition to weights, optimiser state, and keys and
/// values; zeros where it is unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Footprint {
    /// Minimum and maximum number of rows in a rollout, a power of two between these; zeros: any number.
    pub cache_rows: [usize; 2],
    /// Share of the device's memory that keys and values may use; with less memory, a rollout has fewer rows.
    pub cache_share: Option<f64>,
    /// Bytes kept per token for the backward pass.
    pub kept_bytes_per_token: u64,
    /// Bytes per token in the layer that is being computed.
    pub layer_bytes_per_token: u64,
    /// Minimum number of tokens of a call without gradient.
    pub call_tokens: usize,
    /// Bytes of logits that exist at once, and of the memory of the output head in training.
    pub logit_bytes: u64,
    /// Bytes of logits that training keeps per token for the backward pass.
    pub kept_logit_bytes_per_token: u64,
    /// Maximum of their total bytes.
    pub kept_logit_bytes: u64,
    /// Bytes of copies of weights that training keeps for the backward pass.
    pub copy_bytes: u64,
    /// Bytes that a rollout engine keeps between calls, such as packed weights; freed before training.
    pub engine_bytes: u64,
}

/// The kernels that a model uses on the CPU, as far as they affect whether results repeat.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CpuKernels {
    /// Vector registers that they use, such as `avx512`; omitted if a kind of model does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registers: Option<String>,
    /// Name of the order in which they add. Kernels with the same name compute the same bits on every processor of an
    /// architecture, with any registers, caches and number of threads. Omitted if a kind of model does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sums: Option<String>,
}

impl CpuKernels {
    /// What all of `kernels` have in common; nothing if there are none.
    pub fn common(kernels: impl IntoIterator<Item = CpuKernels>) -> CpuKernels {
        let both = |a: CpuKernels, b: CpuKernels| CpuKernels {
            registers: a
                .registers
                .filter(|name| b.registers.as_ref() == Some(name)),
            sums: a.sums.filter(|name| b.sums.as_ref() == Some(name)),
        };
        kernels.into_iter().reduce(both).unwrap_or_default()
    }
}

/// A device did not have enough memory for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shortage {
    /// The requested bytes, if known.
    pub asked: Option<u64>,
}

/// The meaning of a model's token ids, for comparison with another model: which token each id is.
///
/// ```
/// use verl_pipe::resource::Vocabulary;
///
/// let small = Vocabulary::new(["a", "b"]);
/// let large = Vocabulary::new(["a", "b", "c"]);
/// assert!(large.reads(&small).is_ok());
/// assert_eq!(small.reads(&large), Err(2));
/// assert_eq!(Vocabulary::new(["a", "c"]).reads(&small), Err(1));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary(Arc<[u64]>);

impl Vocabulary {
    /// The vocabulary in which id `i` is the `i`-th of `tokens`.
    pub fn new<T: Hash>(tokens: impl IntoIterator<Item = T>) -> Self {
        let hash = |token: T| {
            let mut hasher = DefaultHasher::new();
            token.hash(&mut hasher);
            hasher.finish()
        };
        Vocabulary(tokens.into_iter().map(hash).collect())
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no id.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether each id of `written` is the same token here.
    ///
    /// # Errors
    /// The first id that is another token here, or that does not exist here.
    pub fn reads(&self, written: &Vocabulary) -> Result<(), usize> {
        let other = (0..written.len()).find(|&id| self.0.get(id) != written.0.get(id));
        other.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_in_common_what_all_report() {
        let kernels = |registers: &str, sums: Option<&str>| CpuKernels {
            registers: Some(registers.to_owned()),
            sums: sums.map(str::to_owned),
        };
        let first = kernels("avx2", Some("fixed-1"));
        assert_eq!(CpuKernels::common([]), CpuKernels::default());
        assert_eq!(CpuKernels::common([first.clone(), first.clone()]), first);
        let silent = kernels("avx2", None);
        assert_eq!(CpuKernels::common([first.clone(), silent.clone()]), silent);
        assert_eq!(CpuKernels::common([silent.clone(), first.clone()]), silent);
        let other = kernels("avx2", Some("fixed-2"));
        assert_eq!(CpuKernels::common([first.clone(), other]), silent);
        let own = CpuKernels::default();
        assert_eq!(CpuKernels::common([first, own.clone()]), own);
    }
}
