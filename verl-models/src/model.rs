//! The seam between models and everything that trains or samples them.
//!
//! [`ModelInterface`] is what an author of a model implements: a burn `Module` with a forward pass. [`Policy`] wraps
//! it with weights' versions, an optimiser and a tokenizer, and offers the object-safe [`PolicyModel`], which is all
//! that stages know.
//!
//! [`ValueInterface`] and [`ValueModel`] are the same for models that give numbers instead of tokens: critics and reward
//! models, wrapped by [`Critic`].
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

/// A causal language model on burn. Implement it for a `#[derive(Module)]` struct of your own to train it.
///
/// Dims: `B` rows, `S` tokens of a row (right-padded inside a call), `D` width, `V` vocabulary.
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

    /// Whether [`ModelInterface::hidden_packed`] is faster than padding. On the CPU it must then give a sequence the same
    /// bits whatever lies beside it: calls are not filled up to one size there.
    fn packs(&self) -> bool {
        false
    }

    /// [`ModelInterface::hidden`] of sequences of these lengths, each at least 1, that lie one after the other. By default
    /// they are padded to the longest.
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
    /// By default the plain engine ([`rollout::eager`](crate::rollout::eager)), which recomputes the whole prefix for
    /// each token; a model with a KV cache overrides it.
    ///
    /// # Errors
    /// A request longer than the context, settings that make no sense; or what `on_done` returned.
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        crate::rollout::eager::generate(self, requests, settings, on_done)
    }

    /// How the optimiser treats the parameter with this name and rank: by default vectors (norms, biases) do not decay.
    fn parameter_group(&self, _name: &str, rank: usize) -> ParameterGroup {
        ParameterGroup::of_rank(rank)
    }

    /// Writes the model into `dir`.
    ///
    /// # Errors
    /// When files cannot be written.
    fn save(&self, dir: &Path) -> Result<(), ModelError>;
}

/// [`ModelInterface::hidden_packed`] by padding.
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

/// Log-probs (and what else was asked for) of the response tokens of a row, full softmax, logits divided by the temperature.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    /// Nats, one a response token.
    pub log_probs: Vec<f32>,
    /// Nats, one a response token; empty where it was not asked for.
    pub entropies: Vec<f32>,
    /// Σ_v π(v)², one a response token; empty where it was not asked for.
    pub sum_pi_squared: Vec<f32>,
}

/// Differentiable log-probs of a micro-batch, packed: the selected response tokens of all rows one after the other.
pub struct PackedScores {
    /// `[N]` nats.
    pub log_probs: Tensor<1>,
    /// `[N]` nats, where asked for. Differentiable.
    pub entropies: Option<Tensor<1>>,
    /// Row of each token; `len = N`.
    pub rows: Vec<usize>,
}

/// What one optimiser step did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepReport {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate used.
    pub learning_rate: f64,
    /// Whether the gradient was scaled down.
    pub clipped: bool,
}

/// A language model with optimiser, as stages use it; object-safe. Implemented by [`Policy`](crate::policy::Policy).
pub trait PolicyModel: TrainedModel {
    /// See [`ModelInterface::generate`].
    ///
    /// # Errors
    /// As there.
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

    /// Forward of `rows`, `loss` of the packed scores of the tokens where `select(row, token)` holds, backward, and
    /// gradients added to the accumulators in f32. Returns the loss value.
    ///
    /// # Errors
    /// As [`PolicyModel::score`]; a non-finite loss or gradient (accumulators are then as before).
    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        entropies: bool,
        loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError>;

    /// The `top_k` most probable tokens of the vocabulary in the place of each response token, without gradient. The
    /// result of a row does not depend on the other rows. A model that only says how probable given tokens are refuses.
    ///
    /// # Errors
    /// As [`PolicyModel::score`]; a `top_k` of 0 or above the size of the vocabulary; a temperature that is not positive.
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

    /// As [`PolicyModel::accumulate`], with log-probs of the tokens that are listed in the place of each response token.
    ///
    /// # Errors
    /// As there; lists that do not fit the rows. A model that only scores what was said refuses.
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

    /// This model with ILQL's heads, where it has them.
    fn ilql(&mut self) -> Option<&mut dyn IlqlModel> {
        None
    }
}

/// What can go wrong with a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A sequence that does not fit the context.
    #[error("row {row} has {tokens} tokens, but the model's context holds {limit}")]
    TooLong {
        /// Position of the row.
        row: usize,
        /// Its tokens, prompt and response.
        tokens: usize,
        /// Longest sequence.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("row {row} holds token id {id}, but the vocabulary ends at {limit}")]
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
    #[error("{what} is not finite ({value}); the weights stay as they were")]
    NonFinite {
        /// Loss, or the name of a parameter's gradient.
        what: String,
        /// The value.
        value: f64,
    },
    /// A loss that is not one number.
    #[error("the loss has {values} values, but a backward pass needs exactly 1")]
    LossShape {
        /// Elements of the tensor.
        values: usize,
    },
    /// Lists of tokens that do not fit the rows.
    #[error(
        "row {row} lists {got} tokens of the vocabulary, but {top_k} for each of its {tokens} response tokens are needed"
    )]
    Listed {
        /// Position of the row.
        row: usize,
        /// Ids listed.
        got: usize,
        /// Ids a response token.
        top_k: usize,
        /// Response tokens.
        tokens: usize,
    },
    /// More tokens were asked for than there are, or none.
    #[error("the {top_k} most probable tokens were asked for, but the vocabulary has 1 to {limit}")]
    TopK {
        /// Tokens asked for.
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
    /// Something that this kind of model does not do.
    #[error("this model does not tell {what}; use one that does, such as a decoder of a folder")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// A model without optimiser was asked to train.
    #[error("the model is frozen: it was declared without an optimiser")]
    Frozen,
    /// Reading or writing files failed.
    #[error("cannot {action} `{path}`: {reason}")]
    File {
        /// What was tried: read, write.
        action: &'static str,
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// Loading a folder failed; the message lists everything that is wrong with it.
    #[error("{0}")]
    Load(String),
}
