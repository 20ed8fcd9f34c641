//! A decoder with the heads of implicit language Q-learning (ILQL), which give values of states and of every token in
//! them.
//!
//! | what | here |
//! |---|---|
//! | V, two Q and their slow copies Q̂ on the decoder's hidden states | [`IlqlHeads`] |
//! | decoder and heads as one module | [`IlqlDecoder`] |
//! | sampling from softmax(log π + β (min Q̂ − V)) | [`ModelInterface::generate`] of [`IlqlDecoder`] |
//! | training, object-safe | [`IlqlModel`], implemented by [`IlqlPolicy`] |
//!
//! Source: Snell et al. 2023, arXiv:2206.11871. The shapes of the heads and their shared trunk follow trlX's ILQL
//! model.

mod heads;
mod model;
mod rollout;

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use verl_decoder::decoder::Decoder;
use verl_decoder::hf::LoadError;
use verl_decoder::parameters::{load_parameters, save_parameters};
use verl_rollout::engine::{
    OutputSink, PreparedModel, RolloutError, RolloutRequest, SamplingSettings,
};

use crate::model::{ModelError, ModelInterface, ParameterGroup};

pub use heads::{Head, IlqlHeads, Q_HEADS};
pub use model::{IlqlModel, IlqlPolicy, PackedIlql};

/// File of the heads in a saved folder, next to those of the decoder.
pub const HEADS_FILE: &str = "ilql_heads.safetensors";

/// A decoder with ILQL's heads. Its own logits are the policy π; it samples from logits shifted by the heads.
#[derive(Module, Debug)]
pub struct IlqlDecoder {
    /// The policy, whose hidden states the heads read.
    pub decoder: Decoder,
    /// Values of states and tokens.
    pub heads: IlqlHeads,
    /// Weight β of the advantages in sampling, at least 0; 0 samples from the policy itself.
    #[module(skip)]
    pub beta: f64,
}

impl IlqlDecoder {
    /// Adds fresh heads to a decoder, drawn with the seed. They always output 0, so the model samples like the decoder.
    pub fn on(decoder: Decoder, beta: f64, seed: u64) -> Self {
        let device = decoder.head().device();
        let (width, vocab) = (decoder.config.hidden_size, decoder.config.vocab_size);
        IlqlDecoder {
            heads: IlqlHeads::fresh(width, vocab, seed, &device),
            decoder,
            beta,
        }
    }

    /// Replaces the heads with those in `dir`; does nothing if `dir` has none.
    ///
    /// # Errors
    /// The file cannot be read or belongs to other heads.
    pub fn with_heads_of(mut self, dir: &Path) -> Result<Self, ModelError> {
        let file = dir.join(HEADS_FILE);
        if file.exists() {
            self.heads = load_parameters(self.heads, &file)?;
        }
        Ok(self)
    }

    /// Loads the model of a Hugging Face folder, in f32, with its heads or, if it has none, with fresh ones.
    ///
    /// # Errors
    /// As [`Decoder::load`]; the heads cannot be read.
    pub fn load(dir: &Path, device: &Device, beta: f64, seed: u64) -> Result<Self, ModelError> {
        let decoder = Decoder::load(dir, device);
        let decoder = decoder.map_err(|error: LoadError| ModelError::Load(error.to_string()))?;
        IlqlDecoder::on(decoder, beta, seed).with_heads_of(dir)
    }
}

impl ModelInterface for IlqlDecoder {
    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    fn max_tokens(&self) -> usize {
        self.decoder.max_tokens()
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.decoder.hidden(ids)
    }

    fn head(&self) -> Tensor<2> {
        self.decoder.head()
    }

    /// Samples from softmax(log π + β (min Q̂ − V)); the returned log-probs are those of π, so that they agree with a
    /// trainer's recomputation.
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        self.prepare()?.generate(requests, settings, on_done)
    }

    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        if self.beta == 0.0 {
            return self.decoder.prepare();
        }
        Ok(Box::new(rollout::Shifted(self.valid())))
    }

    /// Q̂ follows Q and is never trained.
    fn parameter_group(&self, name: &str, rank: usize) -> ParameterGroup {
        let follows = name.starts_with("heads.target_qs");
        ParameterGroup {
            learning_rate_scale: if follows { 0.0 } else { 1.0 },
            ..ParameterGroup::of_rank(rank)
        }
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        self.decoder.save(dir)?;
        save_parameters(&self.heads, &dir.join(HEADS_FILE))
    }
}

#[cfg(test)]
mod tests;
