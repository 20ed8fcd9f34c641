//! One suite for all rollout engines: each samples the same as the plain engine, and fulfils the contract of
//! `PreparedModel`.

#![expect(
    clippy::disallowed_methods,
    reason = "tests compare with the standard library's functions within a tolerance"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{Device, Int, Tensor, TensorData};
use verl_decoder::blocks::attention::Heads;
use verl_decoder::blocks::rope::{RopeConfig, RopeScaling};
use verl_decoder::decoder::{Decoder, DecoderConfig};
use verl_kernels::random::{DrawKey, Purpose};
use verl_rollout::batched::{Arithmetic, Batched};
use verl_rollout::engine::{
    FinishReason, OutputSink, PreparedModel, RolloutError, RolloutOutput, RolloutRequest,
    SamplingSettings,
};
use verl_rollout::interface::ModelInterface;
use verl_rollout::stop::TextDecoder;
use verl_rollout::{Cancel, Decoding};

/// Difference between log-probs of an engine and of a fresh forward pass: f32 sums in a different order.
const LOG_PROB_TOLERANCE: f64 = 1e-4;
/// Logits this close may be ranked differently by engines.
const TIE: f32 = 1e-5;
const CONTEXT: usize = 96;

/// Llama's shape: no biases, untied head, grouped heads whose width is not a multiple of a register.
fn llama() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 61,
        hidden_size: 24,
        intermediate_size: 44,
        layers: 2,
        heads: Heads {
            query: 4,
            key_value: 2,
            dim: 6,
        },
        max_tokens: CONTEXT,
        norm_epsilon: 1e-5,
        rope: RopeConfig {
            theta: 10_000.0,
            scaling: RopeScaling::Default,
        },
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        tied_head: false,
        initializer_range: 0.3,
    }
}

/// A decoder with weights that are not small, so that its distributions are neither flat nor deterministic.
fn decoder(config: DecoderConfig) -> Decoder {
    decoder_on(&Device::flex(), config)
}

fn decoder_on(device: &Device, config: DecoderConfig) -> Decoder {
    let seed = config.hidden_size as u64;
    Decoder::fresh(config, device, |name, count| {
        let row = name.bytes().fold(0, |hash: u64, byte| {
            hash.wrapping_mul(31).wrapping_add(u64::from(byte))
        });
        let stream = DrawKey {
            seed,
            purpose: Purpose::Init,
            step: 0,
            row,
            attempt: 0,
        }
        .stream();
        (0..count)
            .map(|i| stream.normal(0, i as u32) as f32)
            .collect()
    })
}

/// The shape of every family, and one that is too large for a core's cache.
fn decoders() -> Vec<(&'static str, Decoder)> {
    let qwen2 = DecoderConfig {
        qkv_bias: true,
        tied_head: true,
        ..llama()
    };
    let qwen3 = DecoderConfig {
        qk_norm: true,
        heads: Heads {
            query: 2,
            key_value: 1,
            dim: 32,
        },
        ..llama()
    };
    let yarn = DecoderConfig {
        rope: RopeConfig {
            theta: 100.0,
            scaling: RopeScaling::Yarn {
                factor: 6.0,
                magnitude: 1.2,
                beta_fast: 4.0,
                beta_slow: 0.5,
                original_context: CONTEXT / 6,
                truncate: true,
            },
        },
        ..llama()
    };
    let large = DecoderConfig {
        vocab_size: 1001,
        hidden_size: 192,
        intermediate_size: 512,
        layers: 3,
        heads: Heads {
            query: 6,
            key_value: 3,
            dim: 40,
        },
        output_bias: true,
        mlp_bias: true,
        initializer_range: 0.1,
        ..llama()
    };
    [
        ("llama", llama()),
        ("qwen2", qwen2),
        ("qwen3", qwen3),
        ("large", large),
        ("yarn", yarn),
    ]
    .map(|(name, config)| (name, decoder(config)))
    .into()
}

fn request(prompt: Vec<u32>, row: u64, max_new_tokens: usize) -> RolloutRequest {
    RolloutRequest {
        prompt,
        key: DrawKey {
            seed: 9,
            purpose: Purpose::Rollout,
            step: 2,
            row,
            attempt: 0,
        },
        max_new_tokens,
    }
}

/// Prompts of many lengths, some of them shared by three consecutive requests.
fn requests(count: usize) -> Vec<RolloutRequest> {
    (0..count)
        .map(|index| {
            let prompt = if index % 9 < 3 { index / 9 * 9 } else { index };
            let tokens = 1 + (prompt * 7) % 71;
            let ids = (0..tokens).map(|t| ((prompt * 31 + t * 17) % 61) as u32);
            request(ids.collect(), index as u64, 4 + index % 20)
        })
        .collect()
}

/// A way to decode, or batches with a given arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Kind(Decoding),
    By(Arithmetic),
}

const EAGER: Engine = Engine::Kind(Decoding::Eager);

/// Every engine, the reference first.
fn engines() -> Vec<Engine> {
    let kinds = Decoding::ALL.iter().map(|&kind| Engine::Kind(kind));
    kinds.chain([Engine::By(Arithmetic::Tensors)]).collect()
}

impl Engine {
    fn generate(
        self,
        decoder: &Decoder,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        match self {
            Engine::Kind(kind) => kind.generate(decoder, requests, settings, on_done),
            Engine::By(arithmetic) => {
                Batched::by(arithmetic, decoder)?.generate(requests, settings, on_done)
            }
        }
    }
}

#[test]
fn a_model_on_the_cpu_is_sampled_by_loops() {
    assert_eq!(Arithmetic::of(&decoder(llama())), Arithmetic::Host);
}

fn generate(
    engine: Engine,
    decoder: &Decoder,
    requests: &[RolloutRequest],
    settings: &SamplingSettings,
) -> Result<Vec<RolloutOutput>, RolloutError> {
    let mut outputs: Vec<Option<RolloutOutput>> = vec![None; requests.len()];
    engine.generate(decoder, requests, settings, &mut |index, output| {
        assert!(
            outputs[index].replace(output).is_none(),
            "request {index} was answered twice"
        );
        Ok(())
    })?;
    Ok(outputs
        .into_iter()
        .map(|output| output.expect("every request is answered"))
        .collect())
}

/// Logits of a forward pass over prompt and response, for each token of the response.
fn forward(decoder: &Decoder, request: &RolloutRequest, output: &RolloutOutput) -> Vec<Vec<f32>> {
    let ids = request.prompt.iter().chain(&output.tokens);
    let ids: Vec<i32> = ids.map(|&id| id as i32).collect();
    let data = TensorData::new(ids.clone(), [1, ids.len()]);
    let logits = decoder.forward(Tensor::<2, Int>::from_data(data, &Device::flex()));
    let logits = logits.into_data().try_to_vec::<f32>().unwrap();
    let rows = logits
        .chunks(decoder.vocab_size())
        .skip(request.prompt.len() - 1);
    rows.take(output.tokens.len())
        .map(<[f32]>::to_vec)
        .collect()
}

fn log_softmax(logits: &[f32], temperature: f64, token: u32) -> f64 {
    let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / temperature).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scaled.iter().map(|l| (l - max).exp()).sum();
    scaled[token as usize] - max - sum.ln()
}

fn greedy() -> SamplingSettings {
    SamplingSettings {
        temperature: 0.0,
        ..SamplingSettings::default()
    }
}

#[test]
fn greedy_equals_the_plain_engine() {
    for (name, decoder) in decoders() {
        let requests = requests(12);
        let want = generate(EAGER, &decoder, &requests, &greedy()).unwrap();
        for engine in engines() {
            let got = generate(engine, &decoder, &requests, &greedy()).unwrap();
            for ((request, got), want) in requests.iter().zip(&got).zip(&want) {
                let differs = got
                    .tokens
                    .iter()
                    .zip(&want.tokens)
                    .position(|(a, b)| a != b);
                let Some(place) = differs else {
                    assert_eq!(got.tokens.len(), want.tokens.len());
                    continue;
                };
                let logits = &forward(&decoder, request, want)[place];
                let [a, b] = [got, want].map(|o| logits[o.tokens[place] as usize]);
                assert!((a - b).abs() < TIE, "{engine:?} on {name}: {a} against {b}");
            }
        }
    }
}

#[test]
fn log_probs_agree_with_a_fresh_forward() {
    let settings = SamplingSettings {
        temperature: 0.8,
        top_k: 20,
        repetition_penalty: 1.2,
        ..SamplingSettings::default()
    };
    for (name, decoder) in decoders() {
        let requests = requests(10);
        for engine in engines() {
            let outputs = generate(engine, &decoder, &requests, &settings).unwrap();
            for (request, output) in requests.iter().zip(&outputs) {
                let rows = forward(&decoder, request, output);
                for ((logits, &token), &got) in
                    rows.iter().zip(&output.tokens).zip(&output.log_probs)
                {
                    let want = log_softmax(logits, 0.8, token);
                    let difference = (f64::from(got) - want).abs();
                    assert!(
                        difference < LOG_PROB_TOLERANCE,
                        "{engine:?} on {name}: {got} is not {want}"
                    );
                }
                assert_eq!(output.log_probs.len(), output.tokens.len());
                assert_eq!(output.sampling_log_probs.len(), output.tokens.len());
            }
        }
    }
}

#[test]
fn sampling_log_probs_are_normalised_over_the_kept_ids() {
    let settings = SamplingSettings {
        top_k: 5,
        ..SamplingSettings::default()
    };
    let decoder = decoder(llama());
    let requests = requests(6);
    for engine in engines() {
        for (request, output) in requests
            .iter()
            .zip(generate(engine, &decoder, &requests, &settings).unwrap())
        {
            let rows = forward(&decoder, request, &output);
            for ((logits, &token), &got) in rows
                .iter()
                .zip(&output.tokens)
                .zip(&output.sampling_log_probs)
            {
                let mut sorted = logits.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                let place = sorted
                    .iter()
                    .position(|&l| l == logits[token as usize])
                    .unwrap();
                assert!(place < 5);
                let want = log_softmax(&sorted[..5], 1.0, place as u32);
                assert!(
                    (f64::from(got) - want).abs() < LOG_PROB_TOLERANCE,
                    "{engine:?}"
                );
            }
        }
    }
}

/// A row has the same bits on its own, among 63 others, and among more rows than fit at once.
#[test]
fn other_rows_change_no_bit() {
    let settings = SamplingSettings::default();
    for (name, decoder) in decoders() {
        let requests = requests(100);
        for engine in engines() {
            // The plain engine decodes each row on its own; a few rows suffice.
            let count = if engine == EAGER { 8 } else { 100 };
            let all = generate(engine, &decoder, &requests[..count], &settings).unwrap();
            let some = generate(engine, &decoder, &requests[..count.min(64)], &settings).unwrap();
            assert_eq!(some[..], all[..some.len()], "{engine:?} on {name}");
            for index in [0, 1, 5, 7, 30, 63, 99]
                .into_iter()
                .filter(|&index| index < count)
            {
                let alone =
                    generate(engine, &decoder, &requests[index..=index], &settings).unwrap();
                assert_eq!(
                    alone[0], all[index],
                    "{engine:?} on {name}, request {index}"
                );
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    for (name, decoder) in decoders() {
        let requests = requests(20);
        for engine in engines().into_iter().skip(1) {
            let with = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap();
                pool.install(|| {
                    generate(engine, &decoder, &requests, &SamplingSettings::default()).unwrap()
                })
            };
            assert_eq!(with(1), with(3), "{engine:?} on {name}");
        }
    }
}

/// A model that tracks gradients is sampled without tracking, with the same bits.
#[test]
fn a_model_in_training_is_sampled_the_same() {
    let plain = decoder(llama());
    let training = decoder_on(&Device::flex().autodiff(), llama());
    let settings = SamplingSettings::default();
    for engine in engines() {
        assert_eq!(
            generate(engine, &training, &requests(6), &settings).unwrap(),
            generate(engine, &plain, &requests(6), &settings).unwrap()
        );
    }
    assert_eq!(Arithmetic::of(&training), Arithmetic::Host);
}

#[test]
fn a_decoder_is_sampled_by_the_batched_engine() {
    let decoder = decoder(llama());
    let settings = SamplingSettings::default();
    let mut own = vec![None; 6];
    decoder
        .generate(&requests(6), &settings, &mut |index, output| {
            own[index] = Some(output);
            Ok(())
        })
        .unwrap();
    let own: Vec<RolloutOutput> = own.into_iter().flatten().collect();
    let batched = Engine::Kind(Decoding::Batched);
    assert_eq!(
        own,
        generate(batched, &decoder, &requests(6), &settings).unwrap()
    );
}

#[test]
fn samples_depend_on_their_keys() {
    let decoder = decoder(llama());
    let settings = SamplingSettings::default();
    let requests: Vec<RolloutRequest> = (0..6).map(|row| request(vec![3, 1, 4], row, 16)).collect();
    for engine in engines() {
        let first = generate(engine, &decoder, &requests, &settings).unwrap();
        assert_eq!(
            first,
            generate(engine, &decoder, &requests, &settings).unwrap()
        );
        let distinct: std::collections::HashSet<_> = first.iter().map(|o| &o.tokens).collect();
        assert_eq!(
            distinct.len(),
            requests.len(),
            "samples of one prompt differ"
        );
        let mut refilled = requests.clone();
        refilled
            .iter_mut()
            .for_each(|request| request.key.attempt = 1);
        let again = generate(engine, &decoder, &refilled, &settings).unwrap();
        assert!(first.iter().zip(&again).all(|(a, b)| a.tokens != b.tokens));
    }
}

#[test]
fn limits_and_stops_are_honoured() {
    let decoder = decoder(llama());
    let requests: Vec<RolloutRequest> = (0..40).map(|row| request(vec![5, 6], row, 30)).collect();
    let free = generate(EAGER, &decoder, &requests, &SamplingSettings::default()).unwrap();
    let eos = SamplingSettings {
        eos_ids: vec![7, 50],
        ..SamplingSettings::default()
    };
    let stop_ids = SamplingSettings {
        stop_ids: vec![free[0].tokens[3..5].to_vec()],
        ..SamplingSettings::default()
    };
    let text = |ids: &[u32]| ids.iter().map(|id| format!("<{id}>")).collect::<String>();
    let stop_texts = SamplingSettings {
        stop_texts: vec![text(&free[1].tokens[5..7])],
        text_decoder: Some(TextDecoder::new(text)),
        ..SamplingSettings::default()
    };
    for engine in engines() {
        for (settings, why) in [
            (&eos, FinishReason::Eos),
            (&stop_ids, FinishReason::Stop),
            (&stop_texts, FinishReason::Stop),
        ] {
            let outputs = generate(engine, &decoder, &requests, settings).unwrap();
            assert!(
                outputs.iter().any(|output| output.finish == why),
                "{engine:?}"
            );
            for (output, free) in outputs.iter().zip(&free) {
                // Stops truncate a response and change nothing before the cut.
                assert_eq!(output.tokens, free.tokens[..output.tokens.len()]);
                assert_eq!(
                    output.finish == FinishReason::Length,
                    output.tokens.len() == 30 && !ends(output, settings)
                );
                assert_eq!(
                    ends(output, settings),
                    output.finish != FinishReason::Length
                );
                let before = &output.tokens[..output.tokens.len() - 1];
                assert!(before.iter().all(|id| !settings.eos_ids.contains(id)));
            }
        }
        let nothing = generate(engine, &decoder, &[request(vec![1], 0, 0)], &eos).unwrap();
        assert!(nothing[0].tokens.is_empty());
        assert!(generate(engine, &decoder, &[], &eos).unwrap().is_empty());
    }
}

/// A stop text that starts and ends inside tokens, and one that spans several of them.
#[test]
fn stops_inside_tokens_end_all_engines_the_same() {
    let decoder = decoder(llama());
    let requests: Vec<RolloutRequest> = (0..40).map(|row| request(vec![5, 6], row, 30)).collect();
    let free = generate(EAGER, &decoder, &requests, &SamplingSettings::default()).unwrap();
    let text = |ids: &[u32]| ids.iter().map(|id| format!("<{id}>")).collect::<String>();
    let within = |row: usize, tokens: std::ops::Range<usize>| {
        let whole = text(&free[row].tokens[tokens]);
        whole[1..whole.len() - 1].to_owned()
    };
    let settings = SamplingSettings {
        stop_texts: vec![within(2, 4..6), within(3, 1..9)],
        text_decoder: Some(TextDecoder::new(text)),
        ..SamplingSettings::default()
    };
    let expected = generate(EAGER, &decoder, &requests, &settings).unwrap();
    for (row, longest) in [(2, 6), (3, 9)] {
        assert_eq!(expected[row].finish, FinishReason::Stop);
        assert!(expected[row].tokens.len() <= longest);
    }
    let ends = |outputs: &[RolloutOutput]| {
        let ends = outputs
            .iter()
            .map(|output| (output.tokens.clone(), output.finish));
        ends.collect::<Vec<_>>()
    };
    for engine in engines() {
        let outputs = generate(engine, &decoder, &requests, &settings).unwrap();
        assert_eq!(ends(&outputs), ends(&expected), "{engine:?}");
    }
}

#[test]
fn a_response_ends_at_the_end_of_the_context() {
    let decoder = decoder(llama());
    let prompts = [(90, 7), (95, 12), (90, 6), (60, 400)];
    let requests: Vec<RolloutRequest> = prompts
        .iter()
        .map(|&(prompt, new)| request(vec![5; prompt], prompt as u64, new))
        .collect();
    let within = |request: &RolloutRequest| RolloutRequest {
        max_new_tokens: CONTEXT - request.prompt.len(),
        ..request.clone()
    };
    let exact_requests: Vec<RolloutRequest> = requests.iter().map(within).collect();
    for engine in engines() {
        let settings = SamplingSettings::default();
        let cut = generate(engine, &decoder, &requests, &settings).unwrap();
        // The same as if no more tokens had been requested, except for the finish reason.
        let mut exact = generate(engine, &decoder, &exact_requests, &settings).unwrap();
        let pairs = requests.iter().zip(&exact_requests);
        for (output, (request, exact_request)) in exact.iter_mut().zip(pairs) {
            assert_eq!(output.finish, FinishReason::Length);
            if request.max_new_tokens > exact_request.max_new_tokens {
                output.finish = FinishReason::Context;
            }
        }
        assert_eq!(cut, exact);
        for (output, request) in cut.iter().zip(&requests) {
            assert_eq!(
                output.tokens.len() + request.prompt.len(),
                CONTEXT,
                "{engine:?}"
            );
        }
    }
}

/// Whether a response ends by one of the rules.
fn ends(output: &RolloutOutput, settings: &SamplingSettings) -> bool {
    let text: String = output.tokens.iter().map(|id| format!("<{id}>")).collect();
    output
        .tokens
        .last()
        .is_some_and(|id| settings.eos_ids.contains(id))
        || settings
            .stop_ids
            .iter()
            .any(|ids| output.tokens.ends_with(ids))
        || settings.stop_texts.iter().any(|stop| text.ends_with(stop))
}

#[test]
fn the_end_is_forbidden_until_min_new_tokens() {
    let decoder = decoder(llama());
    let settings = SamplingSettings {
        eos_ids: (0..40).collect(),
        min_new_tokens: 5,
        ..SamplingSettings::default()
    };
    for engine in engines() {
        for output in generate(engine, &decoder, &requests(10), &settings).unwrap() {
            assert!(output.tokens.len() >= 5 || output.finish == FinishReason::Length);
            assert!(output.tokens.iter().take(5).all(|&id| id >= 40));
        }
    }
}

/// Short responses are returned while long ones are still being sampled.
#[test]
fn results_are_streamed() {
    let decoder = decoder(llama());
    let limits = [20, 1, 9, 3];
    let requests: Vec<RolloutRequest> = limits
        .iter()
        .map(|&limit| request(vec![2, 3], limit as u64, limit))
        .collect();
    let mut order = Vec::new();
    Engine::Kind(Decoding::Batched)
        .generate(
            &decoder,
            &requests,
            &SamplingSettings::default(),
            &mut |index, _| {
                order.push(index);
                Ok(())
            },
        )
        .unwrap();
    assert_eq!(order, [1, 3, 2, 0]);
    for engine in engines() {
        let mut calls = 0;
        let stopped = engine.generate(
            &decoder,
            &requests,
            &SamplingSettings::default(),
            &mut |_, _| {
                calls += 1;
                Err(RolloutError::Stopped("enough".into()))
            },
        );
        assert_eq!(
            (stopped.unwrap_err().to_string().as_str(), calls),
            ("enough", 1)
        );
    }
}

#[test]
fn invalid_requests_are_refused() {
    let decoder = decoder(llama());
    for engine in engines() {
        let refused = |invalid: RolloutRequest, settings: &SamplingSettings| {
            let requests = [request(vec![1], 0, 1), invalid];
            let error = engine.generate(&decoder, &requests, settings, &mut |_, _| {
                panic!("nothing is sampled before the requests are checked")
            });
            error.unwrap_err().to_string()
        };
        let plain = SamplingSettings::default();
        assert_eq!(
            refused(request(vec![1; 96], 0, 7), &plain),
            "request 1: a prompt of 96 tokens leaves no room for a response in the context of 96 tokens"
        );
        assert_eq!(
            refused(request(vec![], 0, 7), &plain),
            "request 1 has an empty prompt"
        );
        assert_eq!(
            refused(request(vec![1, 61], 0, 7), &plain),
            "request 1 contains token id 61, but the vocabulary ends at 61"
        );
        let no_mass = SamplingSettings {
            top_p: 0.0,
            ..SamplingSettings::default()
        };
        assert_eq!(
            refused(request(vec![1], 0, 1), &no_mass),
            "sampling setting `top_p` must be above 0 and at most 1 (1 keeps all), got 0"
        );
    }
}

#[test]
fn non_finite_logits_name_the_request() {
    let config = DecoderConfig {
        initializer_range: f64::from(f32::MAX),
        ..llama()
    };
    let decoder = decoder(config);
    for engine in engines() {
        let error = generate(engine, &decoder, &requests(2), &SamplingSettings::default());
        assert_eq!(
            error.unwrap_err().to_string(),
            "request 0: logits are not finite after 0 tokens"
        );
    }
}

/// Weights that are packed once answer any calls with the bits of weights that are packed for each call: longer and
/// shorter ones, since the rotation may depend on the longest sequence; and calls after one that failed.
#[test]
fn a_prepared_decoder_answers_as_a_fresh_one() {
    for (name, decoder) in decoders() {
        for arithmetic in [Arithmetic::Host, Arithmetic::Tensors] {
            let mut prepared = Batched::by(arithmetic, &decoder).unwrap();
            for asked in [
                requests(4),
                requests(10),
                vec![request(vec![2, 3], 1, 9)],
                requests(4),
                Vec::new(),
            ] {
                let settings = SamplingSettings::default();
                let stopped = prepared.generate(&asked, &settings, &mut |_, _| {
                    Err(RolloutError::Stopped("enough".into()))
                });
                assert_eq!(stopped.is_err(), !asked.is_empty());
                let mut outputs = vec![None; asked.len()];
                prepared
                    .generate(&asked, &settings, &mut |index, output| {
                        outputs[index] = Some(output);
                        Ok(())
                    })
                    .unwrap();
                let got: Vec<RolloutOutput> = outputs.into_iter().flatten().collect();
                let want = generate(Engine::By(arithmetic), &decoder, &asked, &settings).unwrap();
                assert_eq!(got, want, "{name}, {arithmetic:?}");
            }
        }
    }
}

/// A call ends before the decoding step in which the token is found cancelled, in the middle of all responses.
#[test]
fn a_call_is_cancelled_between_two_steps() {
    let decoder = decoder(llama());
    let asked: Vec<RolloutRequest> = (0..3).map(|row| request(vec![3, 1, 4], row, 20)).collect();
    for engine in engines() {
        let checks = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&checks);
        let settings = SamplingSettings {
            cancel: Some(Cancel::new(move || {
                counted.fetch_add(1, Ordering::SeqCst) == 6
            })),
            ..SamplingSettings::default()
        };
        let mut done = 0;
        let ended = engine.generate(&decoder, &asked, &settings, &mut |_, _| {
            done += 1;
            Ok(())
        });
        assert_eq!(
            ended.unwrap_err().to_string(),
            "the rollout was cancelled; responses that were not complete are lost"
        );
        // No step was computed after the check, and none was complete before.
        assert_eq!((done, checks.load(Ordering::SeqCst)), (0, 7));
    }
}
