//! A model with its optimiser, as stages use it.

pub(crate) mod listed;

use std::path::Path;

use burn::tensor::{Device, Tensor};
use verl_kernels as kernels;
use verl_kernels::scoring::{Extras, TokenScores};
use verl_rollout::engine::{EngineWeights, PreparedModel, RolloutError, WeightTensor};

use crate::model::{
    ListedTokens, ModelError, ModelInterface, PackedListed, PackedScores, PolicyModel, ScoreRow,
    Scores, TopTokens, TrainedModel,
};
use crate::optim::{OptimizerConfig, OptimizerConfigError};
use crate::packing::{Layout, Packed, TrainingBatch};
use crate::rows::{self, Call, CallLimits, PackedCall, TRAIN_CHUNK};
use crate::trained::{Backward, Trained, trained_model};

/// A model with an optimiser, or a frozen one without.
///
/// The module inside never tracks gradients; a tracking module that shares its buffers is created for each micro-batch.
/// So rollouts and scores read the weights that training writes, without a copy, and an optimiser step writes in place
/// unless a snapshot still uses the old weights.
pub struct Policy<M: ModelInterface> {
    pub(crate) trained: Trained<M>,
}

impl<M: ModelInterface> Policy<M> {
    /// Wraps a module; without optimiser settings it is frozen.
    ///
    /// # Errors
    /// An invalid setting of the optimiser.
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
    /// Panics if an earlier optimiser step panicked.
    pub fn module(&self) -> &M {
        self.trained.module()
    }

    /// Writes the optimiser's state (moments, master weights, step counts) to a safetensors file.
    ///
    /// # Errors
    /// The model is frozen, or the file cannot be written.
    pub fn save_optimizer(&self, path: &Path) -> Result<(), ModelError> {
        self.trained.save_optimizer(path)
    }

    /// Reads the file that [`Policy::save_optimizer`] wrote; on an error nothing changes.
    ///
    /// # Errors
    /// The model is frozen, or the file cannot be read or belongs to another model.
    pub fn load_optimizer(&mut self, path: &Path) -> Result<(), ModelError> {
        self.trained.load_optimizer(path)
    }
}

/// How calls without gradient score their tokens.
#[derive(Debug, Clone, Copy)]
struct Scoring {
    temperature: f64,
    extras: Extras,
    limits: CallLimits,
}

/// Scores the rows of one padded call, in the order of its rows.
fn score_call<M: ModelInterface>(
    module: &M,
    call: &Call,
    rows: &[ScoreRow<'_>],
    device: &Device,
    scoring: Scoring,
) -> Vec<Scores> {
    let mut packed = Packed::default();
    for (place, &row) in call.rows.iter().enumerate() {
        for token in 0..rows[row].response.len() {
            packed.push(place * call.width, place, &rows[row], token);
        }
    }
    let tokens = packed.rows.len();
    let chunk = scoring.limits.product_len(call, tokens);
    packed.pad(tokens.next_multiple_of(chunk));
    let picked = call.rows.iter().map(|&row| &rows[row]);
    let ids = rows::padded_ids(picked, call.height, call.width, device);
    let hidden = module.hidden(ids);
    let [b, s, d] = hidden.dims();
    let hidden = hidden.reshape([b * s, d]);
    let Scoring {
        temperature,
        extras,
        ..
    } = scoring;
    let found = packed.score(hidden, module.head(), device, temperature, extras, chunk);
    scores_of(&packed, found, call.rows.len())
}

/// Scores the rows of one packed call, in the order of its rows.
fn score_packed<M: ModelInterface>(
    module: &M,
    call: &PackedCall,
    rows: &[ScoreRow<'_>],
    device: &Device,
    scoring: Scoring,
) -> Vec<Scores> {
    let mut packed = Packed::default();
    let mut start = 0;
    for (place, &row) in call.rows.iter().enumerate() {
        for token in 0..rows[row].response.len() {
            packed.push(start, place, &rows[row], token);
        }
        start += call.lengths[place];
    }
    let picked = call.rows.iter().map(|&row| &rows[row]);
    let mut ids = rows::packed_ids(picked.zip(call.lengths.iter().copied()));
    ids.resize(call.lengths.iter().sum(), 0);
    let [chunk, tokens] = scoring.limits.packed_product(packed.rows.len());
    packed.pad(tokens);
    let hidden = module.hidden_packed(kernels::indices(ids, device), &call.lengths);
    let Scoring {
        temperature,
        extras,
        ..
    } = scoring;
    let found = packed.score(hidden, module.head(), device, temperature, extras, chunk);
    scores_of(&packed, found, call.rows.len())
}

/// The scores of each row of a call.
fn scores_of(packed: &Packed, found: TokenScores, rows: usize) -> Vec<Scores> {
    let mut scores = vec![Scores::default(); rows];
    let mut fill = |found: Option<Tensor<1>>, of: fn(&mut Scores) -> &mut Vec<f32>| {
        let Some(found) = found else { return };
        for (&place, value) in packed.rows.iter().zip(found.into_data().iter::<f32>()) {
            of(&mut scores[place]).push(value);
        }
    };
    fill(Some(found.log_probs), |scores| &mut scores.log_probs);
    fill(found.entropies, |scores| &mut scores.entropies);
    fill(found.sum_pi_squared, |scores| &mut scores.sum_pi_squared);
    scores
}

/// The backward pass of [`PolicyModel::accumulate`].
///
/// # Errors
/// As [`PolicyModel::accumulate`].
pub(crate) fn backward<M: ModelInterface>(
    trained: &Trained<M>,
    rows: &[ScoreRow<'_>],
    select: &dyn Fn(usize, usize) -> bool,
    temperature: f64,
    entropies: bool,
    loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
) -> Result<Backward, ModelError> {
    check(trained, rows)?;
    trained.check_trainable()?;
    let layout = Layout::of(trained.module());
    let Some(batch) = TrainingBatch::new(rows, select, layout) else {
        return Ok(Backward::NOTHING);
    };
    trained.backward(|module, device| {
        let hidden = batch.hidden(module, rows, device);
        let packed = batch.packed;
        let extras = Extras {
            entropies,
            ..Extras::NONE
        };
        let head = module.head();
        let scores = packed.score(hidden, head, device, temperature, extras, TRAIN_CHUNK);
        loss(PackedScores {
            log_probs: scores.log_probs,
            entropies: scores.entropies,
            rows: packed.rows,
        })
    })
}

/// Refuses rows that the model cannot read.
pub(crate) fn check<M: ModelInterface>(
    trained: &Trained<M>,
    rows: &[ScoreRow<'_>],
) -> Result<(), ModelError> {
    let module = trained.module();
    rows::check(rows, module.vocab_size(), module.max_tokens())
}

impl<M: ModelInterface> EngineWeights for Policy<M> {
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        self.module().prepare()
    }

    fn tensors(
        &self,
        each: &mut dyn FnMut(WeightTensor<'_>) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        self.trained.tensors(each)
    }
}

impl<M: ModelInterface> PolicyModel for Policy<M> {
    fn score(
        &self,
        rows: &[ScoreRow<'_>],
        temperature: f64,
        extras: Extras,
    ) -> Result<Vec<Scores>, ModelError> {
        check(&self.trained, rows)?;
        let device = self.trained.device();
        let limits = CallLimits::of(&device);
        let scoring = Scoring {
            temperature,
            extras,
            limits,
        };
        let mut results = vec![Scores::default(); rows.len()];
        let mut keep = |rows: &[usize], scores: Vec<Scores>| {
            for (&row, scores) in rows.iter().zip(scores) {
                results[row] = scores;
            }
        };
        if self.module().packs() {
            let shared = rows::shared_lens(rows);
            let calls = rows::packed_calls(rows::input_lens(rows), &shared, limits);
            let scores = self.trained.run_calls(&calls, |module, call| {
                score_packed(module, call, rows, &device, scoring)
            });
            for (call, scores) in calls.iter().zip(scores) {
                keep(&call.rows, scores);
            }
        } else {
            let calls = rows::calls(rows, self.max_tokens(), limits);
            let scores = self.trained.run_calls(&calls, |module, call| {
                score_call(module, call, rows, &device, scoring)
            });
            for (call, scores) in calls.iter().zip(scores) {
                keep(&call.rows, scores);
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
        let done = backward(&self.trained, rows, select, temperature, entropies, loss)?;
        self.trained.add(done)
    }

    fn top_tokens(
        &self,
        rows: &[ScoreRow<'_>],
        top_k: usize,
        temperature: f64,
    ) -> Result<Vec<TopTokens>, ModelError> {
        check(&self.trained, rows)?;
        listed::top_tokens(&self.trained, rows, top_k, temperature)
    }

    fn accumulate_listed(
        &mut self,
        rows: &[ScoreRow<'_>],
        listed: &ListedTokens<'_>,
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        loss: &mut dyn FnMut(PackedListed) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        let done = listed::backward(&self.trained, rows, listed, select, temperature, loss)?;
        self.trained.add(done)
    }
}

trained_model!(Policy<M>, trained, M: ModelInterface);

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
