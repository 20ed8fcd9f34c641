//! Sampling: tokens per second, milliseconds per step, and the share of the memory bandwidth.

use serde::Serialize;
use verl_decoder::decoder::Decoder;
use verl_kernels::compiled;
use verl_kernels::random::{DrawKey, Purpose};
use verl_rollout::engine::{RolloutRequest, SamplingSettings};
use verl_rollout::row_steps;

use super::shape::multiplied;
use super::{
    BenchError, Ceilings, Times, at_least, peak_bytes, repeat, requests_fit, within_context,
};
use crate::model::ModelInterface;

/// What is sampled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutWork {
    /// Responses.
    pub sequences: usize,
    /// Tokens of each prompt; of the longest prompt where lengths are mixed.
    pub prompt_tokens: usize,
    /// Tokens of each response, exactly; of the longest response where lengths are mixed.
    pub new_tokens: usize,
    /// Whether lengths are mixed: uniform from 1/16 of `prompt_tokens` up for prompts and from 1/64 of `new_tokens` up
    /// for responses. Otherwise every sequence has the full length.
    pub mixed: bool,
    /// Responses per prompt.
    pub shared_prompts: usize,
    /// Timed runs.
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

/// Measurements of sampling.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutFigures {
    /// The work.
    pub work: RolloutWork,
    /// Tokens sampled per run.
    pub tokens: usize,
    /// Tokens sampled per second; the time includes the prompts.
    pub tokens_per_s: f64,
    /// Times of a run.
    pub run: Times,
    /// The prompts and the first token of each response.
    pub prompts_ms: f64,
    /// A step after that: one token for every unfinished response.
    pub step_ms: f64,
    /// Share of the rows' steps that produced no token, because the row was free or its response had ended.
    pub idle_share: f64,
    /// Bytes that a step must read on average: the weights once, and the keys and values of the prompts and of half of
    /// each response.
    pub step_bytes: f64,
    /// Share of what the device can read in that time.
    pub bandwidth_share: f64,
    /// Peak memory, in bytes.
    pub peak_bytes: Option<u64>,
    /// The device's peak rates.
    pub ceilings: Ceilings,
}

/// Samples responses of known lengths at temperature 1.
///
/// # Errors
/// Sizes that are zero or exceed the context or the memory; errors of the engine.
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
    requests_fit(work.sequences as f64, least, "`--sequences`")?;
    let device = decoder.head().device();
    let settings = SamplingSettings::default();
    // Counts the steps of the last run only.
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
        // Every kernel has been launched once: stop counting, because counting would distort the times.
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
            // No id uses the last position.
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

/// The shortest mixed prompt is the longest divided by this.
const PROMPT_PARTS: usize = 16;

/// The shortest length: `most` tokens, or `most / parts` where lengths are mixed.
fn least(work: &RolloutWork, most: usize, parts: usize) -> usize {
    if work.mixed {
        (most / parts).max(1)
    } else {
        most
    }
}

/// A length between the shortest and `most` tokens, chosen by a random word.
fn length(work: &RolloutWork, most: usize, parts: usize, word: u32) -> usize {
    let least = least(work, most, parts);
    least + word as usize % (most - least + 1)
}

/// Average bytes that a step after the first tokens reads.
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
    fn mixed_lengths_are_uniform() {
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
        assert_eq!(
            mixed,
            requests(&decoder, &work),
            "the draws depend only on the work"
        );
        let alike = RolloutWork {
            mixed: false,
            ..work
        };
        for request in requests(&decoder, &alike) {
            assert_eq!((request.prompt.len(), request.max_new_tokens), (32, 64));
        }
    }
}
