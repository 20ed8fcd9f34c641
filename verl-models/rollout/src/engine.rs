//! The inputs and outputs of rollout engines.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_kernels::random::DrawKey;

use super::stop::TextDecoder;
use crate::interface::ModelInterface;

/// One response to sample.
///
/// Adjacent requests with equal prompts share the prompt's keys and values.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutRequest {
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// The key that, with position and token, determines the random draws of this response.
    pub key: DrawKey,
    /// Most tokens to sample, end-of-sequence included. A response that reaches the end of the model's context first
    /// ends there, with [`FinishReason::Context`].
    pub max_new_tokens: usize,
}

impl RolloutRequest {
    /// Most tokens of the response in a context of `max_tokens`: the requested number, or as many as fit after the
    /// prompt.
    pub(crate) fn room(&self, max_tokens: usize) -> usize {
        let left = max_tokens.saturating_sub(self.prompt.len());
        self.max_new_tokens.min(left)
    }

    /// Why a response ends that fills its room in a context of `max_tokens`.
    pub(crate) fn limit(&self, max_tokens: usize) -> FinishReason {
        match self.room(max_tokens) < self.max_new_tokens {
            true => FinishReason::Context,
            false => FinishReason::Length,
        }
    }
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
    /// Keeps tokens whose probability is at least this share of the most probable one's; 0 keeps all.
    pub min_p: f64,
    /// Divides positive logits of seen tokens and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Ids that end a response; the id is kept as its last token.
    pub eos_ids: Vec<u32>,
    /// Token-id sequences that end a response and are kept at its end. ([`SamplingSettings::stop_texts`] are matched
    /// against decoded text instead.)
    pub stop_ids: Vec<Vec<u32>>,
    /// Texts that end a response as soon as its text, including special tokens, contains one; they need
    /// [`Self::text_decoder`].
    pub stop_texts: Vec<String>,
    /// Decodes a response to text. Not a setting of files: the owner of the tokenizer sets it.
    #[serde(skip)]
    #[schemars(skip)]
    pub text_decoder: Option<TextDecoder>,
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
            text_decoder: None,
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
    /// The end of the model's context was reached before the token limit.
    Context,
}

impl FinishReason {
    /// Whether the response was cut off instead of having ended.
    #[must_use]
    pub fn is_cut(self) -> bool {
        matches!(self, FinishReason::Length | FinishReason::Context)
    }
}

/// A sampled response.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutOutput {
    /// Token ids, end-of-sequence included.
    pub tokens: Vec<u32>,
    /// Log-probs under the sampling distribution, nats; 0 when greedy, which leaves no choice.
    pub sampling_log_probs: Vec<f32>,
    /// Log-probs under the full softmax of the model's own logits divided by the temperature (by 1 when greedy), nats:
    /// no penalty, no truncation, no forbidden id, so that a trainer's recomputation agrees with them.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Errors of a rollout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// A prompt that leaves no room for a token.
    #[error(
        "request {request}: a prompt of {prompt} tokens leaves no room for a response in the context of {limit} tokens"
    )]
    TooLong {
        /// Position of the request.
        request: usize,
        /// Prompt tokens.
        prompt: usize,
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
    #[error("request {request} contains token id {id}, but the vocabulary ends at {limit}")]
    TokenId {
        /// Position of the request.
        request: usize,
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
    /// A setting out of its range.
    #[error("sampling setting `{setting}` {reason}")]
    Setting {
        /// Its name.
        setting: &'static str,
        /// The rule that it violates.
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
    /// The device could not run the model or return the logits.
    #[error("the logits could not be read from the device: {reason}")]
    Device {
        /// The backend's error.
        reason: String,
    },
    /// A replica of the model panicked.
    #[error("replica {replica} of the model failed: {reason}")]
    Replica {
        /// Its number, from 0.
        replica: usize,
        /// Why.
        reason: String,
    },
    /// The consumer of results stopped the rollout.
    #[error("{0}")]
    Stopped(Box<dyn std::error::Error + Send + Sync>),
}

/// Rejects requests that a model with this vocabulary and context cannot answer, before anything is computed.
///
/// # Errors
/// [`RolloutError::EmptyPrompt`], [`RolloutError::TokenId`], [`RolloutError::TooLong`] for the first such request.
pub fn check_requests(
    requests: &[RolloutRequest],
    vocab_size: usize,
    max_tokens: usize,
) -> Result<(), RolloutError> {
    for (request, asked) in requests.iter().enumerate() {
        let prompt = asked.prompt.len();
        if prompt == 0 {
            return Err(RolloutError::EmptyPrompt { request });
        }
        if let Some(&id) = asked.prompt.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(RolloutError::TokenId {
                request,
                id,
                limit: vocab_size,
            });
        }
        let room = asked.room(max_tokens);
        if prompt > max_tokens || (room == 0 && asked.max_new_tokens > 0) {
            return Err(RolloutError::TooLong {
                request,
                prompt,
                limit: max_tokens,
            });
        }
    }
    Ok(())
}

/// A way to sample from a model.
pub trait RolloutEngine<M: ModelInterface> {
    /// Name for tables and configuration.
    const NAME: &'static str;

    /// Samples all `requests`; `on_done(index, output)` is called when each one is complete, in any order. The response
    /// to a request depends only on its prompt, key and limit, never on other requests; on a GPU this is true up to
    /// rounding, which depends on how many of them are left.
    ///
    /// # Errors
    /// See [`RolloutError`]; an error that `on_done` returns ends the rollout.
    fn generate(
        model: &M,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError>;
}
