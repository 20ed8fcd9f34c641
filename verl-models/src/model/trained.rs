//! What language models and models of values have in common: weights and an optimiser.

use std::any::Any;
use std::path::Path;

use super::{ModelError, StepReport};

/// Weights with an optimiser, unless they are frozen; object-safe.
pub trait TrainedModel: Send {
    /// Clips the accumulated gradient by its global norm, steps the optimiser, clears the accumulators.
    ///
    /// # Errors
    /// A gradient that is not finite (weights stay as they were); a frozen model.
    fn optimizer_step(&mut self) -> Result<StepReport, ModelError>;

    /// Optimiser steps taken.
    fn optimizer_steps(&self) -> u64;

    /// Hash of the weights' bytes, in hexadecimal.
    fn weights_hash(&self) -> String;

    /// Weights, moments, step count; cheap where buffers can be shared.
    fn snapshot(&self) -> Box<dyn Any + Send + Sync>;

    /// Back to a snapshot of the same model; false when it is of another kind.
    fn restore(&mut self, snapshot: &(dyn Any + Send + Sync)) -> bool;

    /// A snapshot of this model as bytes in the safetensors format; `None` where it is of another kind, or the model
    /// offers none.
    ///
    /// # Errors
    /// Weights of a type that safetensors does not have.
    fn store(&self, _snapshot: &(dyn Any + Send + Sync)) -> Result<Option<Vec<u8>>, ModelError> {
        Ok(None)
    }

    /// The snapshot that `store` made the bytes of; `None` where the model offers none.
    ///
    /// # Errors
    /// Bytes that are no such snapshot, or are of another model.
    fn recall(&self, _bytes: &[u8]) -> Result<Option<Box<dyn Any + Send + Sync>>, ModelError> {
        Ok(None)
    }

    /// Writes weights and configuration into `dir`. Of weights that are narrower than f32 those of the optimiser, which are
    /// f32, are written; a type of the folder that is narrower rounds them to the module's own.
    ///
    /// # Errors
    /// When files cannot be written.
    fn save(&self, dir: &Path) -> Result<(), ModelError>;

    /// Size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens.
    fn max_tokens(&self) -> usize;
}
