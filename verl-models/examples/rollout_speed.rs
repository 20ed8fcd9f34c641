//! Tokens a second of the batched engine on this machine's CPU, for two shapes with random weights:
//! `cargo run --release -p verl-models --example rollout_speed [part of a name]`.
#![expect(clippy::print_stdout, reason = "a program that prints its result")]

use std::time::Instant;

use burn::tensor::Device;
use verl_models::blocks::attention::Heads;
use verl_models::blocks::rope::{RopeConfig, RopeScaling};
use verl_models::decoder::{Decoder, DecoderConfig};
use verl_models::random::{DrawKey, Purpose, open_unit_f32};
use verl_models::rollout::EngineKind;
use verl_models::rollout::engine::{RolloutError, RolloutRequest, SamplingSettings};

/// 260 thousand parameters.
fn small() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 512,
        hidden_size: 64,
        intermediate_size: 172,
        layers: 5,
        heads: Heads {
            query: 8,
            key_value: 4,
            dim: 8,
        },
        max_tokens: 512,
        norm_epsilon: 1e-5,
        rope: RopeConfig {
            theta: 10_000.0,
            scaling: RopeScaling::Default,
        },
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        tied_head: true,
        initializer_range: 0.1,
    }
}

/// 135 million parameters.
fn medium() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 49_152,
        hidden_size: 576,
        intermediate_size: 1536,
        layers: 30,
        heads: Heads {
            query: 9,
            key_value: 3,
            dim: 64,
        },
        max_tokens: 2048,
        ..small()
    }
}

fn key(row: u64) -> DrawKey {
    DrawKey {
        seed: 17,
        purpose: Purpose::Rollout,
        step: 0,
        row,
        attempt: 0,
    }
}

/// `prompts` prompts of `prompt_tokens`, `samples` responses of exactly `new_tokens` each; best of three.
fn measure(
    name: &str,
    config: DecoderConfig,
    [prompts, samples, prompt_tokens, new_tokens]: [usize; 4],
) -> Result<(), RolloutError> {
    if std::env::args()
        .nth(1)
        .is_some_and(|part| !name.contains(&part))
    {
        return Ok(());
    }
    let decoder = Decoder::fresh(config, &Device::flex(), |name, count| {
        let stream = key(name.len() as u64).stream();
        let draw = |block: usize| {
            stream
                .block(0, block as u32)
                .map(|w| 3.4 * (open_unit_f32(w) - 0.5))
        };
        (0..count.div_ceil(4)).flat_map(draw).take(count).collect()
    });
    let requests: Vec<RolloutRequest> = (0..prompts * samples)
        .map(|row| RolloutRequest {
            prompt: (0..prompt_tokens)
                .map(|t| ((row / samples * 31 + t * 7) % 500) as u32)
                .collect(),
            key: key(row as u64),
            max_new_tokens: new_tokens,
        })
        .collect();
    let settings = SamplingSettings::default();
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        EngineKind::Batched.generate(&decoder, &requests, &settings, &mut |_, _| Ok(()))?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    let tokens = (requests.len() * new_tokens) as f64;
    println!(
        "{name}: {:.1} ms, {:.0} tokens/s",
        best * 1e3,
        tokens / best
    );
    Ok(())
}

fn main() -> Result<(), RolloutError> {
    measure(
        "260K shape, 64 prompts of 16, 64 new",
        small(),
        [64, 1, 16, 64],
    )?;
    measure(
        "260K shape, 8 prompts of 16 x 8, 64 new",
        small(),
        [8, 8, 16, 64],
    )?;
    measure(
        "135M shape, 8 prompts of 32, 32 new",
        medium(),
        [8, 1, 32, 32],
    )?;
    measure(
        "135M shape, 2 prompts of 32 x 4, 32 new",
        medium(),
        [2, 4, 32, 32],
    )
}
