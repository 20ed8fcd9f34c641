//! Sampling: tokens a second, milliseconds a step, and the share of the memory bandwidth.

use serde::Serialize;

use super::shape::multiplied;
use super::{BenchError, Ceilings, Times, at_least, peak_bytes, repeat};
use crate::compiled;
use crate::decoder::Decoder;
use crate::model::ModelInterface;
use crate::random::{DrawKey, Purpose};
use crate::rollout::engine::{RolloutRequest, SamplingSettings};

/// What is sampled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutWork {
    /// Responses.
    pub sequences: usize,
    /// Tokens of a prompt.
    pub prompt_tokens: usize,
    /// Tokens of each response, exactly.
    pub new_tokens: usize,
    /// Responses of a prompt.
    pub shared_prompts: usize,
    /// Runs that are timed.
    pub runs: usize,
}

impl Default for RolloutWork {
    fn default() -> Self {
        RolloutWork {
            sequences: 128,
            prompt_tokens: 128,
            new_tokens: 256,
            shared_prompts: 1,
            runs: 3,
        }
    }
}

/// What sampling took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutFigures {
    /// The work.
    pub work: RolloutWork,
    /// Tokens sampled in a run.
    pub tokens: usize,
    /// Tokens sampled in a second, prompts included in the time.
    pub tokens_per_s: f64,
    /// A run.
    pub run: Times,
    /// The prompts and the first token of each response.
    pub prompts_ms: f64,
    /// A step after that: one token for every response.
    pub step_ms: f64,
    /// Bytes that a step cannot avoid to read: weights once, keys and values of half the responses.
    pub step_bytes: f64,
    /// Their share of what the device can read in that time.
    pub bandwidth_share: f64,
    /// Bytes held at most.
    pub peak_bytes: Option<u64>,
    /// What the device can do.
    pub ceilings: Ceilings,
}

/// Samples responses of a fixed length at temperature 1.
///
/// # Errors
/// Sizes of nothing; what the engine refuses.
pub fn rollout(
    decoder: &Decoder,
    work: &RolloutWork,
    ceilings: &Ceilings,
) -> Result<RolloutFigures, BenchError> {
    at_least("sequences", work.sequences, 1)?;
    at_least("prompt_tokens", work.prompt_tokens, 1)?;
    at_least("new_tokens", work.new_tokens, 2)?;
    at_least("shared_prompts", work.shared_prompts, 1)?;
    let device = decoder.head().device();
    let settings = SamplingSettings::default();
    let sample = |new_tokens: usize| {
        let requests = requests(decoder, work, new_tokens);
        let settings = settings.clone();
        move || decoder.generate(&requests, &settings, &mut |_, _| Ok(()))
    };
    let whole = sample(work.new_tokens);
    let run = repeat(&device, 1, work.runs, || {
        let sampled = whole();
        // Every kernel was launched once: what is counted besides must not be in the times.
        compiled::tally();
        sampled
    })?;
    let prompts = repeat(&device, 1, work.runs, sample(1))?;
    let steps = (work.new_tokens - 1) as f64;
    let step_ms = (run.median_ms - prompts.median_ms) / steps;
    let step_bytes = step_bytes(decoder, work);
    let tokens = work.sequences * work.new_tokens;
    Ok(RolloutFigures {
        tokens,
        tokens_per_s: tokens as f64 / run.median_ms * 1e3,
        prompts_ms: prompts.median_ms,
        step_ms,
        step_bytes,
        bandwidth_share: step_bytes / (step_ms * 1e6) / ceilings.copy_gb_s,
        peak_bytes: peak_bytes(&device),
        ceilings: *ceilings,
        run,
        work: work.clone(),
    })
}

pub(super) fn requests(
    decoder: &Decoder,
    work: &RolloutWork,
    new_tokens: usize,
) -> Vec<RolloutRequest> {
    let vocab = decoder.vocab_size() as u64;
    (0..work.sequences)
        .map(|row| {
            let key = |row: usize, purpose| DrawKey {
                seed: 17,
                purpose,
                step: 0,
                row: row as u64,
                attempt: 0,
            };
            let words = key(row / work.shared_prompts, Purpose::Data).stream();
            let id = |at: usize| (u64::from(words.word(at as u32, 0)) % vocab) as u32;
            RolloutRequest {
                prompt: (0..work.prompt_tokens).map(id).collect(),
                key: key(row, Purpose::Rollout),
                max_new_tokens: new_tokens,
            }
        })
        .collect()
}

fn step_bytes(decoder: &Decoder, work: &RolloutWork) -> f64 {
    let config = &decoder.config;
    let element = decoder.head().dtype().size() as f64;
    let heads = config.heads;
    let token = (2 * config.layers * heads.key_value * heads.dim) as f64;
    let length = work.prompt_tokens as f64 + work.new_tokens as f64 / 2.0;
    element * (multiplied(config).0 + token * length * work.sequences as f64)
}
