//! A model with its optimiser, as stages use it.

use std::any::Any;
use std::path::Path;

use burn::tensor::{Device, Tensor};

use crate::model::{
    ModelError, ModelInterface, PackedScores, PolicyModel, ScoreRow, Scores, StepReport,
    TrainedModel,
};
use crate::optim::{OptimizerConfig, OptimizerConfigError};
use crate::packing::{Packed, TrainingBatch};
use crate::rollout::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};
use crate::rows::{self, Call, CallLimits};
use crate::trained::Trained;

/// Tokens whose logits are in memory at once while training.
const TRAIN_CHUNK: usize = 256;

/// A model with an optimiser, or a frozen one without.
///
/// The module inside never tracks gradients; the one that does is made for each micro-batch and shares its buffers.
/// So rollouts and scores read the weights that training writes, without a copy, and an optimiser step writes in
/// place unless a snapshot holds the old weights.
pub struct Policy<M: ModelInterface> {
    trained: Trained<M>,
}

impl<M: ModelInterface> Policy<M> {
    /// Wraps a module; without optimiser settings it is frozen.
    ///
    /// # Errors
    /// A setting of the optimiser that makes no sense.
    pub fn new(
        module: M,
        optimizer: Option<OptimizerConfig>,
    ) -> Result<Self, OptimizerConfigError> {
        let trained = Trained::new(module, M::parameter_group, optimizer)?;
        Ok(Policy { trained })
    }

    /// The module, without autodiff.
    ///
    /// # Panics
    /// When an optimiser step panicked before.
    pub fn module(&self) -> &M {
        self.trained.module()
    }

    /// Writes the optimiser's state (moments, master weights, step counts) to a safetensors file.
    ///
    /// # Errors
    /// A frozen model; a file that cannot be written.
    pub fn save_optimizer(&self, path: &Path) -> Result<(), ModelError> {
        self.trained.save_optimizer(path)
    }

    /// Reads what [`Policy::save_optimizer`] wrote; on an error nothing changes.
    ///
    /// # Errors
    /// A frozen model; a file that cannot be read or is of another model.
    pub fn load_optimizer(&mut self, path: &Path) -> Result<(), ModelError> {
        self.trained.load_optimizer(path)
    }

    fn check(&self, rows: &[ScoreRow<'_>]) -> Result<(), ModelError> {
        rows::check(rows, self.vocab_size(), self.max_tokens())
    }
}

/// Scores the rows of one padded call, in the order of its rows.
fn score_call<M: ModelInterface>(
    module: &M,
    call: &Call,
    rows: &[ScoreRow<'_>],
    device: &Device,
    (temperature, entropies, limits): (f64, bool, CallLimits),
) -> Vec<Scores> {
    let mut packed = Packed::default();
    for (place, &row) in call.rows.iter().enumerate() {
        for token in 0..rows[row].response.len() {
            packed.push(place * call.width, place, &rows[row], token);
        }
    }
    let tokens = packed.rows.len();
    let chunk = limits.product_len(call, tokens);
    packed.pad(tokens.next_multiple_of(chunk));
    let picked = call.rows.iter().map(|&row| &rows[row]);
    let ids = rows::padded_ids(picked, call.height, call.width, device);
    let (log_probs, found) = packed.score(module, ids, device, temperature, entropies, chunk);
    let mut scores = vec![Scores::default(); call.rows.len()];
    for (&place, value) in packed.rows.iter().zip(log_probs.into_data().iter::<f32>()) {
        scores[place].log_probs.push(value);
    }
    if let Some(found) = found {
        for (&place, value) in packed.rows.iter().zip(found.into_data().iter::<f32>()) {
            scores[place].entropies.push(value);
        }
    }
    scores
}

impl<M: ModelInterface> PolicyModel for Policy<M> {
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        self.module().generate(requests, settings, on_done)
    }

    fn score(
        &self,
        rows: &[ScoreRow<'_>],
        temperature: f64,
        entropies: bool,
    ) -> Result<Vec<Scores>, ModelError> {
        self.check(rows)?;
        let device = self.trained.device();
        let limits = CallLimits::of(&device);
        let calls = rows::calls(rows, self.max_tokens(), limits);
        let scores = self.trained.run_calls(&calls, |module, call| {
            let settings = (temperature, entropies, limits);
            score_call(module, call, rows, &device, settings)
        });
        let mut results = vec![Scores::default(); rows.len()];
        for (call, scores) in calls.iter().zip(scores) {
            for (&row, scores) in call.rows.iter().zip(scores) {
                results[row] = scores;
            }
        }
        Ok(results)
    }

    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        entropies: bool,
        loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.check(rows)?;
        self.trained.check_trainable()?;
        let Some(batch) = TrainingBatch::new(rows, select) else {
            return Ok(0.0);
        };
        self.trained.accumulate(|module, device| {
            let picked = batch.rows.iter().map(|&row| &rows[row]);
            let ids = rows::padded_ids(picked, batch.rows.len(), batch.width, device);
            let packed = batch.packed;
            let (log_probs, entropies) =
                packed.score(module, ids, device, temperature, entropies, TRAIN_CHUNK);
            loss(PackedScores {
                log_probs,
                entropies,
                rows: packed.rows,
            })
        })
    }
}

impl<M: ModelInterface> TrainedModel for Policy<M> {
    fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        self.trained.optimizer_step()
    }

    fn optimizer_steps(&self) -> u64 {
        self.trained.optimizer_steps()
    }

    fn weights_hash(&self) -> String {
        self.trained.weights_hash()
    }

    fn snapshot(&self) -> Box<dyn Any + Send + Sync> {
        self.trained.snapshot()
    }

    fn restore(&mut self, snapshot: &(dyn Any + Send + Sync)) -> bool {
        self.trained.restore(snapshot)
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        self.module().save(dir)
    }

    fn vocab_size(&self) -> usize {
        self.module().vocab_size()
    }

    fn max_tokens(&self) -> usize {
        self.module().max_tokens()
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
