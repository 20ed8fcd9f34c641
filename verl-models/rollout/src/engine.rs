//! The interface of rollout engines: what they are asked, what they answer, and [`RolloutEngine`] itself.

use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_kernels::random::DrawKey;

use super::stop::TextDecoder;
use crate::cancel::Cancel;
use crate::native::NativeEngine;

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
    /// Ends the call between two decoding steps. Not a setting of files: the caller sets it.
    #[serde(skip)]
    #[schemars(skip)]
    pub cancel: Option<Cancel>,
}

impl SamplingSettings {
    /// Reports whether the call was cancelled; engines call it before each decoding step.
    ///
    /// # Errors
    /// [`RolloutError::Cancelled`].
    pub fn check_cancelled(&self) -> Result<(), RolloutError> {
        match &self.cancel {
            Some(cancel) if cancel.is_cancelled() => Err(RolloutError::Cancelled),
            _ => Ok(()),
        }
    }
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
            cancel: None,
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
    /// [`SamplingSettings::cancel`] ended the call.
    #[error("the rollout was cancelled; responses that were not complete are lost")]
    Cancelled,
    /// The engine has no complete version of the weights.
    #[error("engine `{engine}` has no weights; load a version before you sample")]
    NotLoaded {
        /// The engine.
        engine: String,
    },
    /// The engine sleeps.
    #[error("engine `{engine}` sleeps; wake it before you load weights or sample")]
    Asleep {
        /// The engine.
        engine: String,
    },
    /// The engine sampled from other weights than those of the policy.
    #[error(
        "engine `{engine}` sampled from the weights of {sampled}, but the policy has those of {expected}; load this version into it"
    )]
    Stale {
        /// The engine.
        engine: String,
        /// The version that it sampled from.
        sampled: Version,
        /// The version of the policy.
        expected: Version,
    },
    /// The model cannot pass on its weights.
    #[error("the weights of this model cannot be read by an engine outside its process")]
    NoTensors,
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

/// A state of a policy's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Version {
    /// Optimiser steps that led to the weights.
    pub step: u64,
    /// Number of this state. It is different after every change of weights, of any policy in the process: a restored
    /// snapshot has its old step, but a new number.
    pub generation: u64,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} (generation {})", self.step, self.generation)
    }
}

/// What an engine reports during a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Sampling begins; the first event of a call.
    Started {
        /// The weights that all responses come from.
        version: Version,
    },
    /// A response is complete. Responses arrive in any order.
    Done {
        /// Position of the request.
        request: usize,
        /// The weights that made the response.
        version: Version,
        /// The response.
        output: RolloutOutput,
    },
}

/// Where the events of a call go; an error ends the call.
pub type EventSink<'a> = dyn FnMut(Event) -> Result<(), RolloutError> + 'a;

/// Where complete responses go, each with the position of its request; an error ends the call.
pub type OutputSink<'a> = dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError> + 'a;

/// A model of this process, prepared for repeated sampling: weights are packed once, and calls reuse them. It keeps the
/// weights that the model had when it was prepared.
pub trait PreparedModel: Send {
    /// Samples all `requests`; `on_done(index, output)` is called when each one is complete, in any order. The response
    /// to a request depends only on its prompt, key and limit, never on other requests; on a GPU this is true up to
    /// rounding, which depends on how many of them are left.
    ///
    /// # Errors
    /// See [`RolloutError`]; an error that `on_done` returns ends the rollout. After any error the next call is
    /// unaffected.
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError>;
}

/// A weight as an engine outside the process gets it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightTensor<'a> {
    /// Name as in a checkpoint.
    pub name: &'a str,
    /// Type of its numbers as in safetensors files, such as `F32`.
    pub dtype: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its numbers, row by row, little-endian.
    pub bytes: &'a [u8],
}

/// The weights that an engine loads.
pub trait EngineWeights {
    /// The model, prepared for sampling in this process. It shares memory with the model where it can.
    ///
    /// # Errors
    /// [`RolloutError::Device`] if the weights cannot be read.
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError>;

    /// Passes every weight to `each`, for an engine outside the process.
    ///
    /// # Errors
    /// [`RolloutError::NoTensors`] if the model does not support it, which is the default; an error of `each`.
    fn tensors(
        &self,
        _each: &mut dyn FnMut(WeightTensor<'_>) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        Err(RolloutError::NoTensors)
    }
}

/// Samples responses from the version of the weights that it loaded last.
///
/// An engine keeps what it prepared between calls, and serves nothing before a complete version was loaded. Whoever owns
/// it loads again after every change of the weights; [`Version`] shows what it has.
pub trait RolloutEngine: Send {
    /// Its name in settings and messages.
    fn name(&self) -> &str;

    /// The version that it would sample from; `None` before the first one is complete, after a failed load, and after
    /// sleep if it gave the weights up.
    fn version(&self) -> Option<Version>;

    /// Replaces the weights. After an error the engine has none.
    ///
    /// # Errors
    /// [`RolloutError::Asleep`]; weights that cannot be read or sent.
    fn load(&mut self, version: Version, weights: &dyn EngineWeights) -> Result<(), RolloutError>;

    /// Samples all `requests`; see [`PreparedModel::generate`] and [`Event`]. [`SamplingSettings::cancel`] ends the call
    /// between two decoding steps; the engine can be used again.
    ///
    /// # Errors
    /// [`RolloutError::NotLoaded`], [`RolloutError::Asleep`]; as [`PreparedModel::generate`].
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        sink: &mut EventSink<'_>,
    ) -> Result<(), RolloutError>;

    /// Frees the memory of caches and prepared weights until [`RolloutEngine::wake`]. Does nothing if it sleeps.
    fn sleep(&mut self);

    /// Ends [`RolloutEngine::sleep`]. Does nothing if it is awake.
    ///
    /// # Errors
    /// Memory that is not available any more.
    fn wake(&mut self) -> Result<(), RolloutError>;
}

/// Which engine to use: a name, and how one is started.
#[derive(Clone)]
pub struct EngineChoice {
    name: String,
    start: Arc<dyn Fn() -> Box<dyn RolloutEngine> + Send + Sync>,
}

impl EngineChoice {
    /// The engine that `start` returns. Choices with equal names share one engine of a policy, so a name has to contain
    /// what distinguishes two engines of one kind.
    pub fn new(
        name: impl Into<String>,
        start: impl Fn() -> Box<dyn RolloutEngine> + Send + Sync + 'static,
    ) -> Self {
        EngineChoice {
            name: name.into(),
            start: Arc::new(start),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A new engine, without weights.
    pub fn start(&self) -> Box<dyn RolloutEngine> {
        (self.start)()
    }
}

/// The [native engine](NativeEngine).
impl Default for EngineChoice {
    fn default() -> Self {
        EngineChoice::new(NativeEngine::NAME, || Box::new(NativeEngine::default()))
    }
}

impl fmt::Debug for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EngineChoice").field(&self.name).finish()
    }
}
