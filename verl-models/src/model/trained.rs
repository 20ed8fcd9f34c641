//! What language models and value models have in common: weights and an optimiser.

use std::any::Any;
use std::path::Path;

use verl_reshard::{SyncError, WeightSink, WeightSource, WeightsVersion};

use super::{ModelError, StepReport};

/// Weights with an optimiser, unless they are frozen; object-safe.
pub trait TrainedModel: Send {
    /// Clips the accumulated gradient by its global norm, steps the optimiser, clears the accumulators.
    ///
    /// # Errors
    /// A gradient is not finite (the weights are then unchanged), or the model is frozen.
    fn optimizer_step(&mut self) -> Result<StepReport, ModelError>;

    /// Optimiser steps taken.
    fn optimizer_steps(&self) -> u64;

    /// Micro-batches that the model computes at the same time, and so those of a [round](super::Round); 1 unless the model
    /// has replicas. Results do not depend on it.
    fn round_len(&self) -> usize {
        1
    }

    /// Hash of the weights' bytes, in hexadecimal.
    fn weights_hash(&self) -> String;

    /// A snapshot of weights, moments and step count; cheap where buffers can be shared.
    fn snapshot(&self) -> Box<dyn Any + Send + Sync>;

    /// Restores a snapshot of the same model; returns `false` if it belongs to another kind of model.
    fn restore(&mut self, snapshot: &(dyn Any + Send + Sync)) -> bool;

    /// A snapshot of this model as bytes in the safetensors format; `None` if it belongs to another kind of model, or
    /// the model does not support this.
    ///
    /// # Errors
    /// Weights of a type that safetensors does not support.
    fn store(&self, _snapshot: &(dyn Any + Send + Sync)) -> Result<Option<Vec<u8>>, ModelError> {
        Ok(None)
    }

    /// The snapshot whose bytes `store` returned; `None` if the model does not support this.
    ///
    /// # Errors
    /// The bytes are not such a snapshot, or belong to another model.
    fn recall(&self, _bytes: &[u8]) -> Result<Option<Box<dyn Any + Send + Sync>>, ModelError> {
        Ok(None)
    }

    /// The weights of this moment, without optimiser state, in buckets of `bucket_bytes`, to be sent as `version`; `None` if
    /// the model does not support this. The source does not change when the model is trained.
    ///
    /// # Errors
    /// Weights of a type that cannot be sent; buckets smaller than a weight.
    fn weight_source(
        &self,
        _version: WeightsVersion,
        _bucket_bytes: usize,
    ) -> Result<Option<Box<dyn WeightSource>>, SyncError> {
        Ok(None)
    }

    /// This model as the receiver of weights of the same model; `None` if it does not support this. Between its calls the
    /// model can be used with the weights that it has. It switches in `finish`: an optimiser then keeps its moments, and
    /// drops accumulated gradients.
    fn weight_sink(&mut self) -> Option<&mut dyn WeightSink> {
        None
    }

    /// Writes weights and configuration to `dir`. For weights narrower than f32, the optimiser's f32 master weights are
    /// written; if the folder's type is narrower too, rounding gives the module's own weights.
    ///
    /// # Errors
    /// Files cannot be written.
    fn save(&self, dir: &Path) -> Result<(), ModelError>;

    /// Size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens.
    fn max_tokens(&self) -> usize;
}
