//! The interface of models that engines sample and policies train.

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use verl_decoder::blocks::linear::linear;
use verl_decoder::decoder::Decoder;
use verl_decoder::error::ModelError;
use verl_decoder::padded::padded_hidden;

use crate::batched::Batched;
use crate::engine::{
    OutputSink, PreparedModel, RolloutError, RolloutOutput, RolloutRequest, SamplingSettings,
};

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
        padded_hidden(ids, lengths, |ids| self.hidden(ids))
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
    /// The default is the plain engine ([`rollout::eager`](crate::eager)), which recomputes the entire prefix
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
        crate::eager::generate(self, requests, settings, on_done)
    }

    /// The model with its current weights, prepared for repeated sampling. Every call gives the same bits as
    /// [`ModelInterface::generate`], which the default calls; a model that packs its weights overrides it.
    ///
    /// # Errors
    /// The weights cannot be read.
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        Ok(Box::new(Unpacked(self.clone())))
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

/// A model that packs nothing: it shares the weights of the original.
struct Unpacked<M>(M);

impl<M: ModelInterface> PreparedModel for Unpacked<M> {
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        self.0.generate(requests, settings, on_done)
    }
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

impl ModelInterface for Decoder {
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn max_tokens(&self) -> usize {
        self.config.max_tokens
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        Decoder::hidden(self, ids)
    }

    fn packs(&self) -> bool {
        Decoder::packs(self)
    }

    fn hidden_packed(&self, ids: Tensor<1, Int>, lengths: &[usize]) -> Tensor<2> {
        Decoder::hidden_packed(self, ids, lengths)
    }

    fn head(&self) -> Tensor<2> {
        Decoder::head(self)
    }

    /// Uses [`batched`](crate::batched).
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        self.prepare()?.generate(requests, settings, on_done)
    }

    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        Ok(Box::new(Batched::new(self)?))
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        self.save_as(dir, self.save_dtype)
    }
}
