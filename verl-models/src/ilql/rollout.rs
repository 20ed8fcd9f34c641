//! Sampling from a policy whose logits are shifted by the heads. The entire prefix is recomputed for each token, as in
//! [`rollout::eager`](verl_rollout::eager). Each request is decoded separately, several of them in parallel.

use burn::tensor::{Int, Tensor, TensorData};
use rayon::prelude::*;
use verl_decoder::blocks::linear::linear;
use verl_kernels::device::DeviceKind;
use verl_rollout::eager::read;
use verl_rollout::engine::{
    FinishReason, OutputSink, PreparedModel, RolloutError, RolloutOutput, RolloutRequest,
    SamplingSettings, check_requests,
};
use verl_rollout::row::Row;
use verl_rollout::sampling::Sampler;
use verl_rollout::stop::StopRules;

use super::IlqlDecoder;
use crate::model::ModelInterface;

/// Requests that are decoded before their outputs are passed to the consumer.
const WAVE: usize = 64;

/// A model whose policy is sampled with shifted logits. It packs nothing.
pub(super) struct Shifted(pub IlqlDecoder);

impl PreparedModel for Shifted {
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        let model = &self.0;
        Sampler::new(settings)?;
        StopRules::new(settings)?;
        check_requests(requests, model.vocab_size(), model.max_tokens())?;
        let on_cpu = DeviceKind::of(&model.head().device()).is_host();
        for start in (0..requests.len()).step_by(WAVE) {
            let wave = start..requests.len().min(start + WAVE);
            // Modules are `Send` but not `Sync`.
            let jobs: Vec<_> = wave.clone().map(|index| (index, model.clone())).collect();
            let respond = |(index, model): (usize, IlqlDecoder)| {
                respond(&model, index, &requests[index], settings)
            };
            let outputs: Vec<_> = if on_cpu {
                jobs.into_par_iter().map(respond).collect()
            } else {
                jobs.into_iter().map(respond).collect()
            };
            for (index, output) in wave.zip(outputs) {
                on_done(index, output?)?;
            }
        }
        Ok(())
    }
}

/// The response to one request.
fn respond(
    model: &IlqlDecoder,
    index: usize,
    request: &RolloutRequest,
    settings: &SamplingSettings,
) -> Result<RolloutOutput, RolloutError> {
    let mut sampler = Sampler::new(settings)?;
    let rules = StopRules::new(settings)?;
    let mut row = Row::new(index, request, settings, model.max_tokens());
    let mut log_probs = Vec::new();
    let mut finish = (row.limit() == 0).then_some(FinishReason::Length);
    loop {
        if let Some(finish) = finish {
            return Ok(RolloutOutput {
                log_probs,
                ..row.into_output(finish)
            });
        }
        settings.check_cancelled()?;
        let prefix = [request.prompt.as_slice(), row.tokens()].concat();
        let (own, shifted) = next_logits(model, &prefix)?;
        finish = row.advance(&shifted, &mut sampler, &rules)?;
        let token = row.last_token().unwrap_or(0);
        log_probs.push(log_prob(&own, token, settings.temperature));
    }
}

/// The policy's logits for the token after `prefix`, and the shifted logits: `[V]` each.
fn next_logits(model: &IlqlDecoder, prefix: &[u32]) -> Result<(Vec<f32>, Vec<f32>), RolloutError> {
    let head = model.head();
    let ids: Vec<i32> = prefix.iter().map(|&id| id as i32).collect();
    let ids = TensorData::new(ids, [1, prefix.len()]);
    let hidden = model.hidden(Tensor::<2, Int>::from_data(ids, &head.device()));
    let [_, tokens, width] = hidden.dims();
    let last = hidden.slice([0..1, tokens - 1..tokens]).reshape([1, width]);
    let logits = linear(last.clone(), head);
    let shifted = model.heads.shifted(logits.clone(), last, model.beta);
    Ok((read(logits)?, read(shifted)?))
}

/// Log-prob of a token under the full softmax of logits / temperature (1 when greedy).
fn log_prob(logits: &[f32], token: u32, temperature: f64) -> f32 {
    let temperature = if temperature == 0.0 { 1.0 } else { temperature };
    let scaled = |logit: &f32| f64::from(*logit) / temperature;
    let largest = logits.iter().map(scaled).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|l| libm::exp(scaled(l) - largest)).sum();
    (scaled(&logits[token as usize]) - largest - libm::log(sum)) as f32
}
