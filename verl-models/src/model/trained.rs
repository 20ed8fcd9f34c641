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

    /// Writes weights and configuration into `dir`.
    ///
    /// # Errors
    /// When files cannot be written.
    fn save(&self, dir: &Path) -> Result<(), ModelError>;

    /// Size of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens.
    fn max_tokens(&self) -> usize;
}
