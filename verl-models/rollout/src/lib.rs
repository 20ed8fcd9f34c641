//! Rollout engines (prompts in, sampled responses out), and the interface of the models that they sample.
//!
//! This crate knows neither file formats nor optimisers.
//!
//! | Engine | Models | How |
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
#[cfg(feature = "cuda")]
mod device;
pub mod eager;
pub mod engine;
mod host;
pub mod interface;
mod race;
pub mod row;
pub mod row_steps;
pub mod sampling;
pub mod stop;
mod tensor;

#[cfg(test)]
mod toy;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_decoder::decoder::Decoder;

use self::engine::{RolloutEngine, RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};

/// The engine that samples from a decoder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// Recomputes the prefix for each token; slow, the reference.
    Eager,
    /// Continuous batching with a KV cache.
    #[default]
    Batched,
}

impl EngineKind {
    /// Every engine, the reference first.
    pub const ALL: &[EngineKind] = &[EngineKind::Eager, EngineKind::Batched];

    /// Name in tables and configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Eager => <eager::Eager as RolloutEngine<Decoder>>::NAME,
            EngineKind::Batched => <batched::Batched as RolloutEngine<Decoder>>::NAME,
        }
    }

    /// Samples with this engine; see [`RolloutEngine::generate`].
    ///
    /// # Errors
    /// The same as [`RolloutEngine::generate`].
    pub fn generate(
        self,
        decoder: &Decoder,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        match self {
            EngineKind::Eager => eager::Eager::generate(decoder, requests, settings, on_done),
            EngineKind::Batched => batched::Batched::generate(decoder, requests, settings, on_done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_have_the_names_that_files_give_them() {
        for engine in EngineKind::ALL {
            let text = serde_json::to_value(engine).unwrap();
            assert_eq!(text, serde_json::json!(engine.name()));
        }
    }
}
