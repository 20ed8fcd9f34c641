//! A complete GRPO step without the pipeline engine: sampling, rewards, reference, update.

use std::time::Instant;

use burn::tensor::{Device, Tensor, TensorData};
use serde::Serialize;
use verl_decoder::decoder::Decoder;
use verl_kernels::compiled;
use verl_kernels::scoring::Extras;
use verl_rollout::engine::SamplingSettings;

use super::rollout::requests;
use super::train::{activations_fit, optimizer};
use super::{
    BenchError, Ceilings, RolloutWork, Times, at_least, peak_bytes, requests_fit, seconds,
    within_context,
};
use crate::model::{PolicyModel, ScoreRow, Scores, TrainedModel};
use crate::policy::Policy;

/// Largest accepted weight of the KL: losses, gradients and their squares stay well within the range of f32.
pub const LARGEST_BETA: f64 = 1e6;

/// What a step is made of.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepWork {
    /// Prompts.
    pub prompts: usize,
    /// Responses per prompt.
    pub samples: usize,
    /// Tokens of a prompt.
    pub prompt_tokens: usize,
    /// Tokens of each response, exactly.
    pub new_tokens: usize,
    /// Rows per micro-batch.
    pub micro_rows: usize,
    /// Weight of the KL to the reference, at most [`LARGEST_BETA`]; 0 uses no reference.
    pub beta: f64,
    /// Timed steps.
    pub runs: usize,
}

impl Default for StepWork {
    fn default() -> Self {
        StepWork {
            prompts: 16,
            samples: 8,
            prompt_tokens: 128,
            new_tokens: 256,
            micro_rows: 16,
            beta: 0.0,
            runs: 3,
        }
    }
}

/// Measurements of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepFigures {
    /// The work.
    pub work: StepWork,
    /// Times of a step.
    pub step: Times,
    /// Sampling, in the median step.
    pub generate_ms: f64,
    /// Log-probs of the reference.
    pub reference_ms: f64,
    /// Forward, backward and AdamW.
    pub update_ms: f64,
    /// Tokens sampled per second of the complete step.
    pub tokens_per_s: f64,
    /// From the call of this function to the end of the first step.
    pub first_step_ms: f64,
    /// Peak memory, in bytes.
    pub peak_bytes: Option<u64>,
    /// The device's peak rates.
    pub ceilings: Ceilings,
}

/// Runs steps whose reward is the parity of the sum of a response's ids.
///
/// The loss is −Â r with r = π / sg(π) (one optimiser step for each rollout), plus beta · k3 against the reference.
///
/// # Errors
/// Sizes that are zero or exceed the context or the memory; errors of sampling and training.
pub fn step(
    decoder: Decoder,
    work: &StepWork,
    ceilings: &Ceilings,
) -> Result<StepFigures, BenchError> {
    at_least("--prompts", work.prompts, 1)?;
    at_least("--samples", work.samples, 1)?;
    at_least("--prompt", work.prompt_tokens, 1)?;
    at_least("--new", work.new_tokens, 1)?;
    at_least("--micro", work.micro_rows, 1)?;
    at_least("--runs", work.runs, 1)?;
    if !(0.0..=LARGEST_BETA).contains(&work.beta) {
        return Err(BenchError::Beta { value: work.beta });
    }
    within_context(&decoder.config, work.prompt_tokens, work.new_tokens)?;
    let tokens = work.prompt_tokens + work.new_tokens;
    let rows = work.prompts as f64 * work.samples as f64;
    requests_fit(rows, tokens, "`--prompts` or `--samples`")?;
    let rows = work.micro_rows.min(work.prompts * work.samples);
    activations_fit(&decoder, decoder.model.recompute, rows, tokens, "`--micro`")?;
    let started = Instant::now();
    let device = decoder.head().device();
    let reference = (work.beta != 0.0)
        .then(|| Policy::new(decoder.clone(), None))
        .transpose()?;
    let mut policy = Policy::new(decoder, Some(optimizer()))?;
    let mut parts = vec![one(&mut policy, reference.as_ref(), work, &device)?];
    let first_step_ms = 1e3 * started.elapsed().as_secs_f64();
    // Stop counting, because counting would distort the times.
    compiled::tally();
    for _ in 0..work.runs {
        parts.push(one(&mut policy, reference.as_ref(), work, &device)?);
    }
    let mut timed = parts.split_off(1);
    timed.sort_by(|a, b| total(a).total_cmp(&total(b)));
    let [generate, scored, updated] = timed[timed.len() / 2];
    let step = Times::of(timed.iter().map(total).collect());
    let tokens = work.prompts * work.samples * work.new_tokens;
    Ok(StepFigures {
        tokens_per_s: tokens as f64 / step.median_ms * 1e3,
        generate_ms: 1e3 * generate,
        reference_ms: 1e3 * scored,
        update_ms: 1e3 * updated,
        first_step_ms,
        peak_bytes: peak_bytes(&device),
        ceilings: *ceilings,
        step,
        work: work.clone(),
    })
}

fn total(parts: &[f64; 3]) -> f64 {
    parts.iter().sum()
}

/// Seconds of sampling, of the reference and of the update.
fn one(
    policy: &mut Policy<Decoder>,
    reference: Option<&Policy<Decoder>>,
    work: &StepWork,
    device: &Device,
) -> Result<[f64; 3], BenchError> {
    let asked = RolloutWork {
        sequences: work.prompts * work.samples,
        prompt_tokens: work.prompt_tokens,
        new_tokens: work.new_tokens,
        mixed: false,
        shared_prompts: work.samples,
        runs: 1,
    };
    let requests = requests(policy.module(), &asked);
    let mut responses = vec![Vec::new(); requests.len()];
    let settings = SamplingSettings::default();
    let generate = seconds(device, || {
        policy.generate(&requests, &settings, &mut |at, output| {
            responses[at] = output.tokens;
            Ok(())
        })
    })?;
    let advantages = advantages(&responses, work.samples);
    let rows: Vec<ScoreRow<'_>> = requests
        .iter()
        .zip(&responses)
        .map(|(request, response)| ScoreRow {
            prompt: &request.prompt,
            response,
        })
        .collect();
    let mut reference_scores: Option<Vec<Scores>> = None;
    let scored = seconds(device, || match reference {
        Some(reference) => reference.score(&rows, 1.0, Extras::NONE).map(|scores| {
            reference_scores = Some(scores);
        }),
        None => Ok(()),
    })?;
    let count = (work.prompts * work.samples * work.new_tokens) as f64;
    let updated = seconds(device, || {
        for (at, micro) in rows.chunks(work.micro_rows).enumerate() {
            let first = at * work.micro_rows;
            policy.accumulate(micro, &|_, _| true, 1.0, false, &mut |packed| {
                let loss_device = packed.log_probs.device();
                let constant = |values: Vec<f32>| {
                    let length = values.len();
                    Tensor::<1>::from_data(TensorData::new(values, [length]), &loss_device)
                };
                let weights = packed.rows.iter().map(|row| advantages[first + row]);
                let ratio = (packed.log_probs.clone() - packed.log_probs.clone().detach()).exp();
                let mut loss = -(ratio * constant(weights.collect())).sum();
                if let Some(scores) = &reference_scores {
                    let reference = scores[first..first + micro.len()].iter();
                    let reference = reference.flat_map(|scores| scores.log_probs.clone());
                    let apart = constant(reference.collect()) - packed.log_probs;
                    let k3 = apart.clone().exp() - apart - 1.0;
                    loss = loss + k3.sum() * work.beta;
                }
                loss / count
            })?;
        }
        policy.optimizer_step().map(drop)
    })?;
    Ok([generate, scored, updated])
}

/// Rewards minus the mean of their group, over its standard deviation.
fn advantages(responses: &[Vec<u32>], samples: usize) -> Vec<f32> {
    let reward = |response: &Vec<u32>| (response.iter().sum::<u32>() % 2) as f32;
    let rewards: Vec<f32> = responses.iter().map(reward).collect();
    rewards
        .chunks(samples)
        .flat_map(|group| {
            let mean = group.iter().sum::<f32>() / group.len() as f32;
            let square = group.iter().map(|r| (r - mean).powi(2)).sum::<f32>();
            let deviation = (square / group.len() as f32).sqrt();
            group.iter().map(move |r| (r - mean) / (deviation + 1e-4))
        })
        .collect()
}
