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
mod trained;
mod value;

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Int, Tensor};

use crate::blocks::linear::linear;
use crate::ilql::IlqlModel;
use crate::rollout::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};
use crate::rows;
pub use crate::scoring::Extras;

pub use listed::{ListedTokens, PackedListed, TopTokens};
pub use trained::TrainedModel;
pub use value::{PackedValues, ValueInterface, ValueModel};

/// A causal language model on burn. Implement it for your own `#[derive(Module)]` struct to train it.
///
/// Dims: `B` rows, `S` tokens per row (right-padded inside a call), `D` width, `V` vocabulary.
pub trait ModelInterface: Module + 'static {
    /// Size of the vocabulary, `V`.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens, prompt and response together.
    fn max_tokens(&self) -> usize;

    /// Final hidden states, after the last norm.
    ///
    /// Rows are right-padded with any id; position s must not depend on positions after s.
    ///
    /// # Shapes
    /// `ids`: `[B, S]`; result: `[B, S, D]`
    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3>;

    /// Whether [`ModelInterface::hidden_packed`] is faster than padding. If so, on the CPU a sequence must get the same
    /// bits whatever the other sequences are, because calls there are not padded to a fixed size.
    fn packs(&self) -> bool {
        false
    }

    /// [`ModelInterface::hidden`] of concatenated sequences of these lengths, each at least 1. By default they are
    /// padded to the longest.
    ///
    /// # Shapes
    /// `ids`: `[N]`, with `N` the sum of `lengths`; result: `[N, D]`
    fn hidden_packed(&self, ids: Tensor<1, Int>, lengths: &[usize]) -> Tensor<2> {
        padded_hidden(self, ids, lengths)
    }

    /// Weight of the output head, so that logits are `hidden · headᵀ`. A tied model returns its embedding.
    ///
    /// # Shapes
    /// result: `[V, D]`
    fn head(&self) -> Tensor<2>;

    /// Logits of every position.
    ///
    /// # Shapes
    /// `ids`: `[B, S]`; result: `[B, S, V]`
    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let hidden = self.hidden(ids);
        let [b, s, d] = hidden.dims();
        let head = self.head();
        let v = head.dims()[0];
        let hidden = hidden.reshape([b * s, d]);
        linear(hidden, head).reshape([b, s, v])
    }

    /// Samples responses; `on_done(index, output)` is called as soon as each request is complete, in any order.
    ///
    /// The default is the plain engine ([`rollout::eager`](crate::rollout::eager)), which recomputes the entire prefix
    /// for each token; a model with a KV cache overrides it.
    ///
    /// # Errors
    /// A request is longer than the context, settings are invalid, or `on_done` returned an error.
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        crate::rollout::eager::generate(self, requests, settings, on_done)
    }

    /// How the optimiser treats the parameter with this name and rank. By default vectors (norms, biases) do not decay.
    fn parameter_group(&self, _name: &str, rank: usize) -> ParameterGroup {
        ParameterGroup::of_rank(rank)
    }

    /// Writes the model to `dir`.
    ///
    /// # Errors
    /// Files cannot be written.
    fn save(&self, dir: &Path) -> Result<(), ModelError>;
}

/// [`ModelInterface::hidden_packed`] implemented by padding.
pub(crate) fn padded_hidden<M: ModelInterface>(
    model: &M,
    ids: Tensor<1, Int>,
    lengths: &[usize],
) -> Tensor<2> {
    let device = ids.device();
    let (places, sources, width) = rows::padding(lengths);
    let ids = ids.select(0, rows::indices(sources, &device));
    let hidden = model.hidden(ids.reshape([lengths.len(), width]));
    let [b, s, d] = hidden.dims();
    let places = rows::indices(places, &device);
    hidden.reshape([b * s, d]).select(0, places)
}

/// How the optimiser treats a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterGroup {
    /// Whether weight decay applies.
    pub decays: bool,
    /// Factor on the learning rate; 0 freezes.
    pub learning_rate_scale: f64,
}

impl ParameterGroup {
    /// Matrices decay, vectors (norms, biases) do not.
    pub fn of_rank(rank: usize) -> Self {
        ParameterGroup {
            decays: rank >= 2,
            ..ParameterGroup::default()
        }
    }
}

impl Default for ParameterGroup {
    fn default() -> Self {
        ParameterGroup {
            decays: true,
            learning_rate_scale: 1.0,
        }
    }
}

/// One sequence to be scored or trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreRow<'a> {
    /// Prompt token ids, at least one.
    pub prompt: &'a [u32],
    /// Response token ids, possibly none.
    pub response: &'a [u32],
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
/// [`Policy`](crate::policy::Policy).
pub trait PolicyModel: TrainedModel {
    /// See [`ModelInterface::generate`].
    ///
    /// # Errors
    /// As [`ModelInterface::generate`].
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError>;

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

    /// This model as one with ILQL's heads, if it has them.
    fn ilql(&mut self) -> Option<&mut dyn IlqlModel> {
        None
    }
}

/// Errors of a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A sequence that is longer than the context.
    #[error("row {row} has {tokens} tokens, but the model's context is limited to {limit}")]
    TooLong {
        /// Position of the row.
        row: usize,
        /// Its tokens, prompt and response.
        tokens: usize,
        /// Longest sequence.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("row {row} contains token id {id}, but the vocabulary ends at {limit}")]
    TokenId {
        /// Position of the row.
        row: usize,
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// A prompt without tokens.
    #[error(
        "row {row} has an empty prompt; a causal model needs at least one token before the response"
    )]
    EmptyPrompt {
        /// Position of the row.
        row: usize,
    },
    /// A loss or gradient that is not finite; nothing was changed.
    #[error("{what} is not finite ({value}); the weights are unchanged")]
    NonFinite {
        /// Loss, or the name of a parameter's gradient.
        what: String,
        /// The value.
        value: f64,
    },
    /// A loss that is not a single number.
    #[error("the loss has {values} values, but a backward pass needs exactly 1")]
    LossShape {
        /// Elements of the tensor.
        values: usize,
    },
    /// Lists of tokens that do not match the rows.
    #[error(
        "row {row} lists {got} tokens of the vocabulary, but needs {top_k} for each of its {tokens} response tokens"
    )]
    Listed {
        /// Position of the row.
        row: usize,
        /// Ids listed.
        got: usize,
        /// Ids needed per response token.
        top_k: usize,
        /// Response tokens.
        tokens: usize,
    },
    /// More tokens were requested than the vocabulary has, or none.
    #[error(
        "the {top_k} most probable tokens were requested, but the vocabulary allows 1 to {limit}"
    )]
    TopK {
        /// Tokens requested.
        top_k: usize,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// A temperature by which logits cannot be divided.
    #[error("the temperature is {temperature}, but it must be positive")]
    Temperature {
        /// The temperature.
        temperature: f64,
    },
    /// An operation that this kind of model does not support.
    #[error(
        "this model does not provide {what}; use one that does, such as a decoder from a model folder"
    )]
    Unsupported {
        /// What was requested.
        what: &'static str,
    },
    /// A model without optimiser was asked to train.
    #[error("the model is frozen: it was declared without an optimiser")]
    Frozen,
    /// Reading or writing files failed.
    #[error("cannot {action} `{path}`: {reason}")]
    File {
        /// The failed action: read, write.
        action: &'static str,
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// Loading a folder failed; the message lists all problems.
    #[error("{0}")]
    Load(String),
}
