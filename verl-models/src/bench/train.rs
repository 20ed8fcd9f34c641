//! Training: tokens per second and the share of the matrix rate.

use serde::Serialize;
use verl_decoder::decoder::{Decoder, DecoderConfig};
use verl_kernels::compiled;
use verl_kernels::device::DeviceKind;
use verl_kernels::random::{DrawKey, Purpose};

use super::shape::multiplied;
use super::{
    BenchError, Ceilings, Times, at_least, fits_on, peak_bytes, repeat, requests_fit, seconds,
};
use crate::memory::{Usage, footprint};
use crate::model::{PolicyModel, ScoreRow, TrainedModel};
use crate::optim::OptimizerConfig;
use crate::policy::Policy;

/// The training data and how it is processed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainWork {
    /// Rows per step.
    pub rows: usize,
    /// Predicted tokens of the longest row; one more token precedes them.
    pub tokens: usize,
    /// Rows per micro-batch.
    pub micro_rows: usize,
    /// Whether row lengths are mixed, uniform from a quarter of `tokens` up; otherwise every row has `tokens`.
    pub mixed: bool,
    /// Whether the backward pass recomputes the activations inside layers.
    pub recompute: bool,
    /// Timed steps.
    pub runs: usize,
}

impl Default for TrainWork {
    fn default() -> Self {
        TrainWork {
            rows: 8,
            tokens: 1024,
            micro_rows: 8,
            mixed: false,
            recompute: false,
            runs: 5,
        }
    }
}

/// Measurements of a step: forward, backward and AdamW, including log-probs and entropies of every token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainFigures {
    /// The work.
    pub work: TrainWork,
    /// Times of a step.
    pub step: Times,
    /// The optimiser's part of it: the norm, and AdamW.
    pub optimizer_ms: f64,
    /// Tokens per second, without padding.
    pub tokens_per_s: f64,
    /// Share of the tokens in model calls that are padding.
    pub padding_share: f64,
    /// Minimum operations per token, in 10⁹.
    pub gflop_per_token: f64,
    /// Share of a large product's rate.
    pub matrix_share: f64,
    /// The last loss.
    pub loss: f64,
    /// Peak memory, in bytes.
    pub peak_bytes: Option<u64>,
    /// The device's peak rates.
    pub ceilings: Ceilings,
}

/// Trains a decoder on random rows; every token but the first is predicted.
///
/// # Errors
/// Sizes that are zero or exceed the context or the memory; errors of training.
pub fn train(
    mut decoder: Decoder,
    work: &TrainWork,
    ceilings: &Ceilings,
) -> Result<TrainFigures, BenchError> {
    at_least("--rows", work.rows, 1)?;
    at_least("--tokens", work.tokens, 2)?;
    at_least("--micro", work.micro_rows, 1)?;
    at_least("--runs", work.runs, 1)?;
    within_context(&decoder.config, work.tokens)?;
    let least = least(work);
    requests_fit(work.rows as f64, least, "`--rows`")?;
    let rows = work.rows.min(work.micro_rows);
    activations_fit(&decoder, work.recompute, rows, least, "`--micro`")?;
    decoder.model.recompute = work.recompute;
    let device = decoder.head().device();
    let (config, packs) = (decoder.config.clone(), decoder.packs());
    let mut policy = Policy::new(decoder, Some(optimizer()))?;
    let responses = responses(&config, work);
    let rows: Vec<ScoreRow<'_>> = responses
        .iter()
        .map(|tokens| ScoreRow {
            prompt: &tokens[..1],
            response: &tokens[1..],
        })
        .collect();
    let (mut last, mut optimizer_s) = (f64::NAN, Vec::new());
    let step = repeat(&device, 2, work.runs, || {
        last = 0.0;
        for rows in rows.chunks(work.micro_rows) {
            last += policy.accumulate(rows, &|_, _| true, 1.0, true, &mut |packed| {
                let entropies = packed
                    .entropies
                    .unwrap_or_else(|| packed.log_probs.zeros_like());
                -packed.log_probs.mean() - 1e-3 * entropies.mean()
            })?;
        }
        optimizer_s.push(seconds(&device, || policy.optimizer_step().map(drop))?);
        // Every kernel has been launched once: stop counting, because counting would distort the times.
        compiled::tally();
        Ok::<(), BenchError>(())
    })?;
    let lengths: Vec<usize> = rows.iter().map(|row| row.response.len()).collect();
    let tokens: usize = lengths.iter().sum();
    let padded: usize = lengths
        .chunks(work.micro_rows)
        .map(|lengths| lengths.len() * lengths.iter().max().unwrap_or(&0))
        .sum();
    let computed = if packs { tokens } else { padded };
    let operations: f64 = lengths
        .iter()
        .map(|&length| operations(&config, length))
        .sum();
    let second = 1e-3 * step.median_ms;
    Ok(TrainFigures {
        tokens_per_s: tokens as f64 / second,
        padding_share: 1.0 - tokens as f64 / computed as f64,
        gflop_per_token: operations / tokens as f64 * 1e-9,
        matrix_share: operations / second * 1e-12 / ceilings.product_tflop_s,
        optimizer_ms: Times::of(optimizer_s.split_off(2)).median_ms,
        loss: last,
        peak_bytes: peak_bytes(&device),
        ceilings: *ceilings,
        step,
        work: work.clone(),
    })
}

/// Rejects rows that, with the token before them, exceed the context.
fn within_context(config: &DecoderConfig, tokens: usize) -> Result<(), BenchError> {
    let (whole, limit) = (tokens.saturating_add(1), config.max_tokens);
    if whole > limit {
        return Err(BenchError::Context {
            parts: format!("a row of {tokens} and the token before it"),
            tokens: whole,
            limit,
            options: "`--tokens`",
        });
    }
    Ok(())
}

/// Rejects a micro-batch whose activations for the backward pass do not fit on the device.
pub(super) fn activations_fit(
    decoder: &Decoder,
    recompute: bool,
    rows: usize,
    tokens: usize,
    options: &'static str,
) -> Result<(), BenchError> {
    let (device, dtype) = (decoder.head().device(), decoder.head().dtype());
    let usage = Usage {
        dtype,
        device: DeviceKind::of(&device).as_str(),
        scores_tokens: true,
        recompute,
    };
    let kept = footprint(&decoder.config, usage).kept_per_token;
    let bytes = rows as f64 * tokens as f64 * kept as f64;
    let work = format!("a micro-batch of {rows} rows of {tokens} tokens or more");
    fits_on(&device, work, bytes, options)
}

pub(super) fn optimizer() -> OptimizerConfig {
    OptimizerConfig {
        learning_rate: 1e-6,
        ..OptimizerConfig::default()
    }
}

/// Operations of a row's forward and backward pass: six per matrix element and token, and twelve per pair of tokens and
/// channel of attention, half of which a causal mask removes.
pub(super) fn operations(config: &DecoderConfig, tokens: usize) -> f64 {
    let tokens = tokens as f64;
    let channels = (config.layers * config.heads.query * config.heads.dim) as f64;
    tokens * (6.0 * multiplied(config).0 + 6.0 * channels * tokens)
}

/// Tokens of the shortest row.
fn least(work: &TrainWork) -> usize {
    if work.mixed {
        (work.tokens / 4).max(1)
    } else {
        work.tokens
    }
}

fn responses(config: &DecoderConfig, work: &TrainWork) -> Vec<Vec<u32>> {
    let vocab = config.vocab_size as u64;
    (0..work.rows)
        .map(|row| {
            let key = DrawKey {
                seed: 29,
                purpose: Purpose::Data,
                step: 0,
                row: row as u64,
                attempt: 0,
            };
            let words = key.stream();
            let least = least(work);
            let length = least + words.word(u32::MAX, 0) as usize % (work.tokens - least + 1);
            (0..=length as u32)
                .map(|at| (u64::from(words.word(at, 0)) % vocab) as u32)
                .collect()
        })
        .collect()
}
