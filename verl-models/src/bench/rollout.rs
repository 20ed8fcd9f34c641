//! Sampling: tokens a second, milliseconds a step, and the share of the memory bandwidth.

use serde::Serialize;

use super::shape::multiplied;
use super::{
    BenchError, Ceilings, Times, at_least, can_be_listed, peak_bytes, repeat, within_context,
};
use crate::compiled;
use crate::decoder::Decoder;
use crate::model::ModelInterface;
use crate::random::{DrawKey, Purpose};
use crate::rollout::engine::{RolloutRequest, SamplingSettings};
use crate::rollout::row_steps;

/// What is sampled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutWork {
    /// Responses.
    pub sequences: usize,
    /// Tokens of a prompt, of the longest where they are mixed.
    pub prompt_tokens: usize,
    /// Tokens of each response, exactly; of the longest where they are mixed.
    pub new_tokens: usize,
    /// Whether prompts have between a sixteenth and all of their tokens and responses between a 64th and all of theirs,
    /// each length as often as any other; otherwise all have all.
    pub mixed: bool,
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
            mixed: false,
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
    /// A step after that: one token for every response under way.
    pub step_ms: f64,
    /// Share of the rows' steps that gave no token: rows that were free, or whose response had ended.
    pub idle_share: f64,
    /// Bytes that a step cannot avoid to read, on average: weights once, keys and values of half the responses.
    pub step_bytes: f64,
    /// Their share of what the device can read in that time.
    pub bandwidth_share: f64,
    /// Bytes held at most.
    pub peak_bytes: Option<u64>,
    /// What the device can do.
    pub ceilings: Ceilings,
}

/// Samples responses of known lengths at temperature 1.
///
/// # Errors
/// Sizes of nothing, or larger than the context or the memory; what the engine refuses.
pub fn rollout(
    decoder: &Decoder,
    work: &RolloutWork,
    ceilings: &Ceilings,
) -> Result<RolloutFigures, BenchError> {
    at_least("--sequences", work.sequences, 1)?;
    at_least("--prompt", work.prompt_tokens, 1)?;
    at_least("--new", work.new_tokens, 2)?;
    at_least("--samples", work.shared_prompts, 1)?;
    at_least("--runs", work.runs, 1)?;
    within_context(&decoder.config, work.prompt_tokens, work.new_tokens)?;
    let least = least(work, work.prompt_tokens, PROMPT_PARTS);
    can_be_listed(work.sequences as f64, least, "`--sequences`")?;
    let device = decoder.head().device();
    let settings = SamplingSettings::default();
    // Counts steps of the last run.
    let sample = |requests: &[RolloutRequest]| {
        row_steps::take();
        decoder.generate(requests, &settings, &mut |_, _| Ok(()))
    };
    let whole = requests(decoder, work);
    let first: Vec<RolloutRequest> = whole
        .iter()
        .map(|request| RolloutRequest {
            max_new_tokens: 1,
            ..request.clone()
        })
        .collect();
    let run = repeat(&device, 1, work.runs, || {
        let sampled = sample(&whole);
        // Every kernel was launched once: what is counted besides must not be in the times.
        compiled::tally();
        sampled
    })?;
    let taken = row_steps::take();
    let prompts = repeat(&device, 1, work.runs, || sample(&first))?;
    let begun = row_steps::take();
    let steps = taken.steps.saturating_sub(begun.steps).max(1) as f64;
    let step_ms = (run.median_ms - prompts.median_ms) / steps;
    let step_bytes = step_bytes(decoder, &whole, steps);
    let tokens = whole.iter().map(|request| request.max_new_tokens).sum();
    Ok(RolloutFigures {
        tokens,
        tokens_per_s: tokens as f64 / run.median_ms * 1e3,
        prompts_ms: prompts.median_ms,
        step_ms,
        idle_share: taken.idle_share(),
        step_bytes,
        bandwidth_share: step_bytes / (step_ms * 1e6) / ceilings.copy_gb_s,
        peak_bytes: peak_bytes(&device),
        ceilings: *ceilings,
        run,
        work: work.clone(),
    })
}

pub(super) fn requests(decoder: &Decoder, work: &RolloutWork) -> Vec<RolloutRequest> {
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
            // The last position is that of no id.
            let prompt = length(
                work,
                work.prompt_tokens,
                PROMPT_PARTS,
                words.word(u32::MAX, 0),
            );
            let own = key(row, Purpose::Data).stream();
            RolloutRequest {
                prompt: (0..prompt).map(id).collect(),
                key: key(row, Purpose::Rollout),
                max_new_tokens: length(work, work.new_tokens, 64, own.word(u32::MAX, 1)),
            }
        })
        .collect()
}

/// The shortest of mixed prompts is this part of the longest.
const PROMPT_PARTS: usize = 16;

/// `most` tokens, or where lengths are mixed a part of them.
fn least(work: &RolloutWork, most: usize, parts: usize) -> usize {
    if work.mixed {
        (most / parts).max(1)
    } else {
        most
    }
}

/// From the least on to `most` tokens, by a random word.
fn length(work: &RolloutWork, most: usize, parts: usize, word: u32) -> usize {
    let least = least(work, most, parts);
    least + word as usize % (most - least + 1)
}

/// Bytes of a step after the first tokens.
fn step_bytes(decoder: &Decoder, requests: &[RolloutRequest], steps: f64) -> f64 {
    let config = &decoder.config;
    let element = decoder.head().dtype().size() as f64;
    let heads = config.heads;
    let token = (2 * config.layers * heads.key_value * heads.dim) as f64;
    let read = |request: &RolloutRequest| {
        let new = request.max_new_tokens as f64;
        (new - 1.0) * (request.prompt.len() as f64 + new / 2.0)
    };
    let tokens: f64 = requests.iter().map(read).sum();
    element * (multiplied(config).0 + token * tokens / steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{preset, random_decoder};
    use burn::tensor::{DType, Device};

    #[test]
    fn mixed_lengths_are_spread_evenly() {
        let decoder = random_decoder(preset("tiny").unwrap(), &Device::flex(), DType::F32);
        let work = RolloutWork {
            sequences: 400,
            prompt_tokens: 32,
            new_tokens: 64,
            mixed: true,
            shared_prompts: 4,
            runs: 1,
        };
        let mixed = requests(&decoder, &work);
        let prompts: Vec<usize> = mixed.iter().map(|request| request.prompt.len()).collect();
        let new: Vec<usize> = mixed.iter().map(|request| request.max_new_tokens).collect();
        for (lengths, least, most) in [(&prompts, 2, 32), (&new, 1, 64)] {
            assert_eq!(lengths.iter().min(), Some(&least));
            assert_eq!(lengths.iter().max(), Some(&most));
            let mean = lengths.iter().sum::<usize>() as f64 / 400.0;
            let middle = (least + most) as f64 / 2.0;
            assert!((mean - middle).abs() < 0.1 * most as f64, "{mean}");
        }
        for group in mixed.chunks(4) {
            assert!(group.iter().all(|own| own.prompt == group[0].prompt));
        }
        assert!(
            new.chunks(4).any(|own| own[0] != own[1]),
            "responses of a prompt differ in length"
        );
        assert_eq!(mixed, requests(&decoder, &work), "the draws are the work's");
        let alike = RolloutWork {
            mixed: false,
            ..work
        };
        for request in requests(&decoder, &alike) {
            assert_eq!((request.prompt.len(), request.max_new_tokens), (32, 64));
        }
    }
}
