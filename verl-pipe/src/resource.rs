//! Model resources: what stages share that does not travel on edges (weights, optimiser state, caches).
//!
//! The engine knows of a model only what stands in [`ModelResource`]: a version, snapshots, export. Stages downcast
//! to the concrete type through [`StageContext::model`](crate::stage::StageContext::model).

use std::any::Any;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::stage::ConfigError;

/// Which weights: the number of optimiser steps taken and a hash of their content.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
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

/// State in a form that can be kept on disk, and read by any version of the type that made it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StoredState {
    /// Tensors, in the safetensors format; may be empty.
    pub tensors: Vec<u8>,
    /// What is not a tensor.
    pub about: Value,
}

/// What a resource can refuse.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// A snapshot that another type made.
    #[error("the snapshot was not made by this kind of model")]
    ForeignSnapshot,
    /// A kind of model whose state cannot be kept on disk.
    #[error(
        "the state of this kind of model cannot be kept on disk: it implements no `store` and `recall`"
    )]
    NotStored,
    /// Loading, saving or computing failed.
    #[error("{0}")]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

/// Why a model cannot be loaded onto a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceRefusal {
    /// No device is called so, whatever the machine.
    #[error("{0}")]
    Unknown(String),
    /// Another machine or another build has it.
    #[error("{0}")]
    Absent(String),
    /// It is here, but lacks what models need.
    #[error("{0}")]
    Unusable(String),
}

/// A model as the engine sees it. It lives on the worker thread of its device group.
pub trait ModelResource: Any + Send {
    /// Version of the weights now.
    fn version(&self) -> WeightsVersion;
    /// Optimiser steps taken since the model was loaded: the step of [`ModelResource::version`] without its hash, which
    /// may cost a pass over all weights.
    fn optimizer_steps(&self) -> u64 {
        self.version().step
    }
    /// Text of token ids, for people to read; `None` where the model has no tokenizer.
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
    /// Back to a snapshot of this model.
    ///
    /// # Errors
    /// When the snapshot is of another kind.
    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ResourceError>;
    /// A snapshot of this model in a form that can be kept on disk; `None` where this kind of model offers none.
    ///
    /// # Errors
    /// When the snapshot is of another kind or cannot be read back.
    fn store(&mut self, _snapshot: &Snapshot) -> Result<Option<StoredState>, ResourceError> {
        Ok(None)
    }
    /// The snapshot that [`ModelResource::store`] made `stored` of; `version` is the one it had.
    ///
    /// # Errors
    /// When it is of another model, or this kind of model offers none.
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

/// How token ids are written; what a reader of a trace needs of a model.
pub trait TokenTexts: Any + Send + Sync {
    /// The text of one token, special ones included; empty for an id that there is not.
    fn token(&self, id: u32) -> String;

    /// The text of several, special ones included.
    fn text(&self, ids: &[u32]) -> String {
        ids.iter().map(|id| self.token(*id)).collect()
    }
}

/// What turns texts into a model's tokens and back, loaded when a pipeline is checked. Stages downcast it through
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

/// What a model declaration tells without loading weights.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ModelInfo {
    /// Number of parameters.
    pub num_parameters: u64,
    /// Bytes of weights as held on the device.
    pub weight_bytes: u64,
    /// Bytes of the folder into which it is saved; where that is 0 it is not known, and `weight_bytes` stands for it.
    #[serde(skip)]
    pub saved_bytes: u64,
    /// Bytes of the optimiser's state while training, f32 copies of narrower weights and moments; 0 for a frozen model.
    pub optimizer_bytes: u64,
    /// Bytes of summed gradients while training; 0 for a frozen model.
    pub gradient_bytes: u64,
    /// Bytes of keys and values per token of context.
    pub kv_bytes_per_token: u64,
    /// What it takes on its device while it works.
    pub footprint: Footprint,
    /// A setting of it that would take less memory, as it is written; `None` where there is none.
    pub smaller: Option<&'static str>,
    /// Longest context in tokens.
    pub max_tokens: usize,
    /// One line about it, for `pipe plan`.
    pub summary: String,
    /// What stages take it for, as a noun, for example `policy`; empty where that is not told.
    pub role: &'static str,
    /// What its token ids mean, where that is told.
    #[serde(skip)]
    pub vocabulary: Option<Vocabulary>,
    /// Number of token ids that it can read, where that is told; 0 where it is not.
    #[serde(skip)]
    pub num_ids: usize,
    /// What turns texts into its tokens, where it has that.
    #[serde(skip)]
    pub texts: Option<Texts>,
    /// Why no prompt can be written by its chat template, where that is known.
    #[serde(skip)]
    pub no_template: Option<String>,
    /// Settings of it that are possible and probably not meant: the plan warns.
    #[serde(skip)]
    pub doubts: Vec<ConfigError>,
}

/// What a model takes on its device while it works, beside weights, optimiser state, and keys and values; zeros where that
/// is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Footprint {
    /// Least and most rows that a rollout has room for, a power of two between these; zeros: any number.
    pub cache_rows: [usize; 2],
    /// Share of the device's memory that keys and values may take: with less room a rollout has room for fewer rows.
    pub cache_share: Option<f64>,
    /// Bytes that a token keeps for the backward pass.
    pub kept_bytes_per_token: u64,
    /// Bytes of a token in the layer at work.
    pub layer_bytes_per_token: u64,
    /// Tokens of a call without gradient, at least.
    pub call_tokens: usize,
    /// Bytes of logits that are there at once, and of what the output head takes in training.
    pub logit_bytes: u64,
    /// Bytes of logits that training keeps of a token for the backward pass.
    pub kept_logit_bytes_per_token: u64,
    /// All of those at most.
    pub kept_logit_bytes: u64,
    /// Bytes of copies of weights that training keeps for the backward pass.
    pub copy_bytes: u64,
}

/// The kernels with which a model computes on the CPU, as far as they decide how results repeat.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CpuKernels {
    /// Vector registers that they use, such as `avx512`; left out where a kind of model does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registers: Option<String>,
    /// Name of the order in which they add. Kernels with the same name compute the same bits on every processor of an
    /// architecture, with any registers, caches and number of threads. Left out where a kind of model does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sums: Option<String>,
}

impl CpuKernels {
    /// What all of `kernels` agree on; nothing where there are none.
    pub(crate) fn common(kernels: impl IntoIterator<Item = CpuKernels>) -> CpuKernels {
        let both = |a: CpuKernels, b: CpuKernels| CpuKernels {
            registers: a
                .registers
                .filter(|name| b.registers.as_ref() == Some(name)),
            sums: a.sums.filter(|name| b.sums.as_ref() == Some(name)),
        };
        kernels.into_iter().reduce(both).unwrap_or_default()
    }
}

/// A device had no room for what was asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes that were asked for, where that is told.
    pub asked: Option<u64>,
}

/// What the token ids of a model mean, as far as another model must agree: which token each id is.
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
    /// The first id that is another token here, or none.
    pub fn reads(&self, written: &Vocabulary) -> Result<(), usize> {
        let other = (0..written.len()).find(|&id| self.0.get(id) != written.0.get(id));
        other.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_in_common_what_all_say() {
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
