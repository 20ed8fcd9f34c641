//! Rollout engines (prompts in, sampled responses out), and the interface of the models that they sample.
//!
//! This crate knows neither file formats nor optimisers.
//!
//! A [`RolloutEngine`](engine::RolloutEngine) is an object that loads a version of a policy's weights and then samples
//! from it. The [native engine](native) samples in this process; how depends on the model:
//!
//! | Decoding | Models | How |
//! |---|---|---|
//! | [`eager`] | all | recomputes the prefix for each token; the reference |
//! | [`batched`] | [`Decoder`] | continuous batching with a KV cache; on an NVIDIA GPU a step is a captured graph that draws its tokens there |

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

pub mod batched;
mod cancel;
#[cfg(feature = "cuda")]
mod device;
pub mod eager;
pub mod engine;
mod host;
pub mod interface;
pub mod native;
mod race;
pub mod row;
pub mod row_steps;
pub mod sampling;
pub mod stop;
mod tensor;

#[cfg(test)]
mod toy;

use verl_decoder::decoder::Decoder;

use self::engine::{OutputSink, RolloutError, RolloutRequest, SamplingSettings};

pub use self::cancel::Cancel;

/// How a decoder is sampled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Decoding {
    /// Recomputes the prefix for each token; slow, the reference.
    Eager,
    /// Continuous batching with a KV cache.
    #[default]
    Batched,
}

impl Decoding {
    /// All of them, the reference first.
    pub const ALL: &[Decoding] = &[Decoding::Eager, Decoding::Batched];

    /// Samples in this way, once; see [`PreparedModel::generate`](engine::PreparedModel::generate).
    ///
    /// # Errors
    /// The same as [`PreparedModel::generate`](engine::PreparedModel::generate).
    pub fn generate(
        self,
        decoder: &Decoder,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        match self {
            Decoding::Eager => eager::generate(decoder, requests, settings, on_done),
            Decoding::Batched => batched::generate(decoder, requests, settings, on_done),
        }
    }
}
