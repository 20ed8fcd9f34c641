//! What rollout engines take and give.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::ModelInterface;
use crate::random::DrawKey;

/// One response to sample.
///
/// Requests whose prompts are equal and neighbours share the prompt's keys and values.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutRequest {
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// What the random draws of this response are a function of, apart from position and token.
    pub key: DrawKey,
    /// Most tokens to sample, end-of-sequence included.
    pub max_new_tokens: usize,
}

/// How to sample. The distribution is: repetition penalty, then temperature, then top-k, top-p, min-p, renormalised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingSettings {
    /// Divides logits; 0 is greedy.
    pub temperature: f64,
    /// Keeps the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
    pub top_p: f64,
    /// Keeps tokens at least this share of the most probable one; 0 keeps all.
    pub min_p: f64,
    /// Divides positive logits of seen tokens and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Ids that end a response; the id is kept as its last token.
    pub eos_ids: Vec<u32>,
    /// Token-id sequences that end a response; kept at its end. (Stop strings are turned into a test on decoded text
    /// by [`SamplingSettings::stop_texts`].)
    pub stop_ids: Vec<Vec<u32>>,
    /// Texts that end a response as soon as its decoded text contains one.
    pub stop_texts: Vec<String>,
    /// Forbids the end-of-sequence ids until this many tokens are sampled.
    pub min_new_tokens: usize,
}

impl Default for SamplingSettings {
    fn default() -> Self {
        SamplingSettings {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            eos_ids: Vec::new(),
            stop_ids: Vec::new(),
            stop_texts: Vec::new(),
            min_new_tokens: 0,
        }
    }
}

/// Why a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-sequence id was sampled.
    Eos,
    /// A stop text or stop id sequence appeared.
    Stop,
    /// The token limit was reached.
    Length,
}

/// A sampled response.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutOutput {
    /// Token ids, end-of-sequence included.
    pub tokens: Vec<u32>,
    /// Log-probs under the distribution that was sampled from, nats.
    pub sampling_log_probs: Vec<f32>,
    /// Log-probs under the full softmax of logits divided by the temperature (by 1 when greedy), nats.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// What a rollout can refuse.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// A prompt that leaves no room.
    #[error(
        "request {request}: prompt of {prompt} tokens and {new} new ones exceed the context of {limit}"
    )]
    TooLong {
        /// Position of the request.
        request: usize,
        /// Prompt tokens.
        prompt: usize,
        /// Tokens asked for.
        new: usize,
        /// Longest sequence.
        limit: usize,
    },
    /// A prompt without tokens.
    #[error("request {request} has an empty prompt")]
    EmptyPrompt {
        /// Position of the request.
        request: usize,
    },
    /// A token id outside the vocabulary.
    #[error("request {request} holds token id {id}, but the vocabulary ends at {limit}")]
    TokenId {
        /// Position of the request.
        request: usize,
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// A setting that makes no sense.
    #[error("sampling setting `{setting}` {reason}")]
    Setting {
        /// Its name.
        setting: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Logits that are not finite.
    #[error("request {request}: logits are not finite after {tokens} tokens")]
    NonFinite {
        /// Position of the request.
        request: usize,
        /// Tokens sampled so far.
        tokens: usize,
    },
    /// The consumer of results asked to end.
    #[error("{0}")]
    Stopped(Box<dyn std::error::Error + Send + Sync>),
}

/// A way to sample from a model.
pub trait RolloutEngine<M: ModelInterface> {
    /// Name for tables and configuration.
    const NAME: &'static str;

    /// Samples all `requests`; `on_done(index, output)` is called as each one is complete, in any order. What is
    /// sampled for a request depends on its prompt, key and limit alone, never on its neighbours.
    ///
    /// # Errors
    /// See [`RolloutError`]; what `on_done` returned ends the rollout.
    fn generate(
        model: &M,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError>;
}
