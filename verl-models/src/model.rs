//! The interface between models and everything that trains or samples them.
//!
//! A model's author implements [`ModelInterface`]: a burn `Module` with a forward pass. [`Policy`] wraps it with an
//! optimiser and offers the object-safe [`PolicyModel`], which is all that stages use.
//!
//! [`ValueInterface`] and [`ValueModel`] are the counterparts for models that output numbers instead of tokens: critics
//! and reward models, wrapped by [`Critic`].
//!
//! [`Critic`]: crate::critic::Critic
//! [`Policy`]: crate::policy::Policy

mod listed;
mod round;
mod trained;
mod value;

use std::any::Any;

use burn::tensor::Tensor;
use verl_rollout::engine::{
    EngineWeights, OutputSink, RolloutError, RolloutRequest, SamplingSettings,
};

pub use verl_decoder::error::ModelError;
pub use verl_kernels::scoring::Extras;
pub use verl_rollout::interface::{ModelInterface, ParameterGroup};

pub use listed::{ListedTokens, PackedListed, TopTokens};
pub use round::{Round, RoundError, SelectInRound};
pub use trained::TrainedModel;
pub use value::{PackedValues, ValueInterface, ValueModel};

/// One sequence to be scored or trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreRow<'a> {
    /// Prompt token ids, at least one.
    pub prompt: &'a [u32],
    /// Response token ids, possibly none.
    pub response: &'a [u32],
}

impl ScoreRow<'_> {
    /// Tokens of prompt and response.
    pub(crate) fn len(&self) -> usize {
        self.prompt.len() + self.response.len()
    }
}

/// Log-probs (and other requested statistics) of the response tokens of a row, under the full softmax of logits divided
/// by the temperature.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    /// Nats, one per response token.
    pub log_probs: Vec<f32>,
    /// Nats, one per response token; empty if not requested.
    pub entropies: Vec<f32>,
    /// Σ_v π(v)², one per response token; empty if not requested.
    pub sum_pi_squared: Vec<f32>,
}

/// Differentiable log-probs of a micro-batch, packed: the selected response tokens of all rows, concatenated.
pub struct PackedScores {
    /// `[N]` nats.
    pub log_probs: Tensor<1>,
    /// `[N]` nats, if requested. Differentiable.
    pub entropies: Option<Tensor<1>>,
    /// Row of each token; `len = N`.
    pub rows: Vec<usize>,
}

/// The outcome of an optimiser step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepReport {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub learning_rate: f64,
    /// Whether the gradient was scaled down.
    pub clipped: bool,
}

/// A language model with its optimiser, as stages use it; object-safe. Implemented by
/// [`Policy`](crate::policy::Policy). Whoever needs more than this interface downcasts it, which [`Any`] allows.
pub trait PolicyModel: TrainedModel + EngineWeights + Any {
    /// Samples from the current weights, once: nothing is kept for the next call. [`SampledPolicy`] keeps what it can.
    ///
    /// # Errors
    /// As [`ModelInterface::generate`].
    ///
    /// [`SampledPolicy`]: crate::sampled::SampledPolicy
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        self.prepare()?.generate(requests, settings, on_done)
    }

    /// Log-probs of the responses without gradient. The result of a row does not depend on the other rows.
    ///
    /// # Errors
    /// A row longer than the context; an id outside the vocabulary.
    fn score(
        &self,
        rows: &[ScoreRow<'_>],
        temperature: f64,
        extras: Extras,
    ) -> Result<Vec<Scores>, ModelError>;

    /// Runs `rows` forward, computes `loss` on the packed scores of the tokens for which `select(row, token)` is true,
    /// runs backward, and adds the gradients to the f32 accumulators. Returns the loss.
    ///
    /// # Errors
    /// As [`PolicyModel::score`]; a non-finite loss or gradient (the accumulators are then unchanged).
    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        entropies: bool,
        loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError>;

    /// [`PolicyModel::accumulate`] for each micro-batch of a round, which a model with replicas computes at the same time.
    /// `loss` is called with the position of the micro-batch. Returns the losses in the order of the round.
    ///
    /// # Errors
    /// As [`PolicyModel::accumulate`]: the first one in the order of the round.
    fn accumulate_round(
        &mut self,
        round: &Round<'_>,
        select: &SelectInRound<'_>,
        temperature: f64,
        entropies: bool,
        loss: &(dyn Fn(usize, PackedScores) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        round::one_by_one(round.len(), |micro| {
            self.accumulate(
                &round[micro],
                &|row, token| select(micro, row, token),
                temperature,
                entropies,
                &mut |packed| loss(micro, packed),
            )
        })
    }

    /// The `top_k` most probable tokens of the vocabulary at the position of each response token, without gradient. The
    /// result of a row does not depend on the other rows. A model that can only score given tokens returns an error.
    ///
    /// # Errors
    /// As [`PolicyModel::score`]; a `top_k` of 0 or above the size of the vocabulary; a temperature that is not
    /// positive.
    fn top_tokens(
        &self,
        _rows: &[ScoreRow<'_>],
        _top_k: usize,
        _temperature: f64,
    ) -> Result<Vec<TopTokens>, ModelError> {
        Err(ModelError::Unsupported {
            what: "the most probable tokens",
        })
    }

    /// As [`PolicyModel::accumulate`], with log-probs of the tokens listed at the position of each response token.
    ///
    /// # Errors
    /// As [`PolicyModel::accumulate`]; lists that do not match the rows. A model that can only score given tokens
    /// returns an error.
    fn accumulate_listed(
        &mut self,
        _rows: &[ScoreRow<'_>],
        _listed: &ListedTokens<'_>,
        _select: &dyn Fn(usize, usize) -> bool,
        _temperature: f64,
        _loss: &mut dyn FnMut(PackedListed) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        Err(ModelError::Unsupported {
            what: "log-probs of listed tokens",
        })
    }

    /// [`PolicyModel::accumulate_listed`] for each micro-batch of a round, as [`PolicyModel::accumulate_round`]; `listed` has
    /// the lists of each micro-batch.
    ///
    /// # Errors
    /// As [`PolicyModel::accumulate_listed`]: the first one in the order of the round.
    fn accumulate_listed_round(
        &mut self,
        round: &Round<'_>,
        listed: &[ListedTokens<'_>],
        select: &SelectInRound<'_>,
        temperature: f64,
        loss: &(dyn Fn(usize, PackedListed) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        round::one_by_one(round.len(), |micro| {
            self.accumulate_listed(
                &round[micro],
                &listed[micro],
                &|row, token| select(micro, row, token),
                temperature,
                &mut |packed| loss(micro, packed),
            )
        })
    }
}
