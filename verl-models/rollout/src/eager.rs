//! Plain decoding: the entire prefix is recomputed for each token. The reference against which other engines are
//! tested, and how every model without another one is sampled: it needs only [`ModelInterface::hidden`] and the head.
//!
//! Each request is decoded on its own, so other requests cannot change its bits.

use burn::tensor::{Int, Tensor, TensorData};
use verl_decoder::blocks::linear::linear;

use super::engine::{
    FinishReason, OutputSink, RolloutError, RolloutRequest, SamplingSettings, check_requests,
};
use super::row::Row;
use super::sampling::Sampler;
use super::stop::StopRules;
use crate::interface::ModelInterface;

/// Samples responses one token at a time; see [`PreparedModel::generate`].
///
/// # Errors
/// The same as [`PreparedModel::generate`].
///
/// [`PreparedModel::generate`]: crate::engine::PreparedModel::generate
pub fn generate<M: ModelInterface>(
    model: &M,
    requests: &[RolloutRequest],
    settings: &SamplingSettings,
    on_done: &mut OutputSink<'_>,
) -> Result<(), RolloutError> {
    let mut sampler = Sampler::new(settings)?;
    let rules = StopRules::new(settings)?;
    check_requests(requests, model.vocab_size(), model.max_tokens())?;
    // The snapshot shares the weights and records no graph.
    let (model, max_tokens) = (model.valid(), model.max_tokens());
    for (index, request) in requests.iter().enumerate() {
        let mut row = Row::new(index, request, settings, max_tokens);
        let mut finish = (row.limit() == 0).then_some(FinishReason::Length);
        while finish.is_none() {
            settings.check_cancelled()?;
            let prefix = [request.prompt.as_slice(), row.tokens()].concat();
            finish = row.advance(&next_logits(&model, &prefix)?, &mut sampler, &rules)?;
        }
        if let Some(finish) = finish {
            on_done(index, row.into_output(finish))?;
        }
    }
    Ok(())
}

/// Logits of the token after `prefix`: `[V]`.
///
/// # Errors
/// [`RolloutError::Device`].
pub fn next_logits<M: ModelInterface>(model: &M, prefix: &[u32]) -> Result<Vec<f32>, RolloutError> {
    let head = model.head();
    let ids: Vec<i32> = prefix.iter().map(|&id| id as i32).collect();
    let ids = TensorData::new(ids, [1, prefix.len()]);
    let hidden = model.hidden(Tensor::<2, Int>::from_data(ids, &head.device()));
    let [_, tokens, width] = hidden.dims();
    // [1, S, D] -> [1, D]: only the last position goes through the head.
    let last = hidden.slice([0..1, tokens - 1..tokens]).reshape([1, width]);
    read(linear(last, head))
}

/// Reads a matrix into host memory, row by row.
pub fn read(tensor: Tensor<2>) -> Result<Vec<f32>, RolloutError> {
    let device = |reason: String| RolloutError::Device { reason };
    tensor
        .try_into_data_as::<f32>()
        .map_err(|error| device(error.to_string()))?
        .try_into_vec::<f32>()
        .map_err(|error| device(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::RolloutOutput;
    use crate::toy::{Toy, VOCAB};
    use verl_kernels::random::{DrawKey, Purpose};

    fn request(prompt: &[u32], row: u64) -> RolloutRequest {
        RolloutRequest {
            prompt: prompt.to_vec(),
            key: DrawKey {
                seed: 5,
                purpose: Purpose::Rollout,
                step: 1,
                row,
                attempt: 0,
            },
            max_new_tokens: 12,
        }
    }

    fn outputs(requests: &[RolloutRequest], settings: &SamplingSettings) -> Vec<RolloutOutput> {
        let mut outputs = vec![None; requests.len()];
        generate(&Toy::new(3), requests, settings, &mut |index, output| {
            outputs[index] = Some(output);
            Ok(())
        })
        .unwrap();
        outputs.into_iter().map(Option::unwrap).collect()
    }

    /// Log-probs of a response from one forward pass over prompt and response.
    fn forward_log_probs(prompt: &[u32], response: &[u32], temperature: f64) -> Vec<f64> {
        let ids: Vec<i32> = prompt.iter().chain(response).map(|&id| id as i32).collect();
        let data = TensorData::new(ids.clone(), [1, ids.len()]);
        let model = Toy::new(3);
        let logits = model.forward(Tensor::from_data(data, &model.head().device()));
        let logits = logits.into_data().try_to_vec::<f32>().unwrap();
        let rows = logits.chunks(VOCAB).skip(prompt.len() - 1);
        rows.zip(response)
            .map(|(row, &token)| {
                let scaled: Vec<f64> = row.iter().map(|&l| f64::from(l) / temperature).collect();
                let sum: f64 = scaled.iter().map(|l| l.exp()).sum();
                scaled[token as usize] - sum.ln()
            })
            .collect()
    }

    #[test]
    fn log_probs_are_those_of_a_fresh_forward() {
        let requests = [request(&[1, 2, 3], 0), request(&[4], 1)];
        let settings = SamplingSettings {
            temperature: 0.7,
            top_k: 3,
            ..SamplingSettings::default()
        };
        for (request, output) in requests.iter().zip(outputs(&requests, &settings)) {
            let expected = forward_log_probs(&request.prompt, &output.tokens, 0.7);
            assert_eq!(expected.len(), 12);
            assert_eq!(output.finish, FinishReason::Length);
            for ((got, expected), sampling) in output
                .log_probs
                .iter()
                .zip(&expected)
                .zip(&output.sampling_log_probs)
            {
                assert!((f64::from(*got) - expected).abs() < 1e-5);
                assert!(sampling >= got);
            }
        }
    }

    #[test]
    fn other_requests_do_not_matter() {
        let requests: Vec<_> = (0..5).map(|row| request(&[row as u32, 2], row)).collect();
        let settings = SamplingSettings::default();
        let together = outputs(&requests, &settings);
        for (request, output) in requests.iter().zip(&together) {
            assert_eq!(
                &outputs(std::slice::from_ref(request), &settings)[0],
                output
            );
        }
        assert_ne!(outputs(&[request(&[0, 2], 77)], &settings)[0], together[0]);
    }

    #[test]
    fn the_consumer_can_end_a_rollout() {
        let requests = [request(&[1], 0), request(&[2], 1)];
        let mut seen = 0;
        let result = generate(
            &Toy::new(3),
            &requests,
            &SamplingSettings::default(),
            &mut |_, _| {
                seen += 1;
                Err(RolloutError::Stopped("enough".into()))
            },
        );
        assert_eq!(result.unwrap_err().to_string(), "enough");
        assert_eq!(seen, 1);
    }

    #[test]
    fn no_new_tokens_is_an_empty_response() {
        let asked = RolloutRequest {
            max_new_tokens: 0,
            ..request(&[1], 0)
        };
        let output = &outputs(&[asked], &SamplingSettings::default())[0];
        assert_eq!(
            (output.tokens.len(), output.finish),
            (0, FinishReason::Length)
        );
    }
}
