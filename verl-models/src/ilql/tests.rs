use std::path::PathBuf;

use burn::tensor::TensorData;
use verl_decoder::parameters::{fill_parameters, visit_parameters};
use verl_kernels::random::{DrawKey, Purpose, normals};
use verl_rollout::engine::RolloutOutput;

use super::*;
use crate::model::{ScoreRow, TrainedModel};
use crate::optim::OptimizerConfig;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tiny-random-llama-tied")
}

fn fresh(beta: f64) -> IlqlDecoder {
    IlqlDecoder::load(&folder(), &Device::flex(), beta, 3).unwrap()
}

/// A model whose heads have random weights everywhere.
fn with_random_heads(beta: f64) -> IlqlDecoder {
    let mut model = fresh(beta);
    model.heads = fill_parameters(model.heads, burn::tensor::DType::F32, |name, shape| {
        let draws = normals(9, name, shape.iter().product());
        let draws: Vec<f32> = draws.into_iter().map(|draw| 0.3 * draw).collect();
        Some(TensorData::new(draws, shape.to_vec()))
    });
    model
}

fn trained(module: IlqlDecoder) -> IlqlPolicy {
    let config = OptimizerConfig {
        learning_rate: 1e-2,
        ..OptimizerConfig::default()
    };
    IlqlPolicy::new(module, Some(config)).unwrap()
}

/// Every parameter's name and values.
fn parameters<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    visit_parameters(model, |name, _, read| {
        all.push((name.to_owned(), read().iter::<f32>().collect()));
    });
    all
}

fn requests() -> Vec<RolloutRequest> {
    (0..5)
        .map(|row| RolloutRequest {
            prompt: vec![3 + row as u32, 7],
            key: DrawKey {
                seed: 5,
                purpose: Purpose::Rollout,
                step: 1,
                row,
                attempt: 0,
            },
            max_new_tokens: 6,
        })
        .collect()
}

fn responses(model: &IlqlDecoder, settings: &SamplingSettings) -> Vec<RolloutOutput> {
    let mut outputs = vec![None; 5];
    model
        .generate(&requests(), settings, &mut |index, output| {
            outputs[index] = Some(output);
            Ok(())
        })
        .unwrap();
    outputs.into_iter().map(Option::unwrap).collect()
}

const ROWS: [ScoreRow<'static>; 2] = [
    ScoreRow {
        prompt: &[3, 4],
        response: &[5, 6, 7],
    },
    ScoreRow {
        prompt: &[8],
        response: &[9],
    },
];

/// Pulls every output towards 1.
fn loss(packed: PackedIlql) -> Tensor<1> {
    let square = |x: Tensor<1>| ((x - 1.0).powi_scalar(2)).sum();
    let qs = packed.qs.into_iter().map(|q| {
        let n = q.shape().num_elements();
        square(q.reshape([n]))
    });
    let values = square(packed.values) + packed.logits.powi_scalar(2).sum() * 0.1;
    qs.fold(values, |sum, q| sum + q)
}

#[test]
fn fresh_heads_do_not_change_sampling() {
    let settings = SamplingSettings {
        temperature: 0.8,
        ..SamplingSettings::default()
    };
    let (plain, shifted) = (
        responses(&fresh(0.0), &settings),
        responses(&fresh(2.0), &settings),
    );
    for (plain, shifted) in plain.iter().zip(&shifted) {
        assert_eq!(plain.tokens, shifted.tokens);
        for (a, b) in plain.log_probs.iter().zip(&shifted.log_probs) {
            assert!((a - b).abs() < 1e-4, "{a} is not {b}");
        }
    }
}

#[test]
fn greedy_tokens_are_the_best_under_the_shifted_logits() {
    let model = with_random_heads(3.0);
    let settings = SamplingSettings {
        temperature: 0.0,
        ..SamplingSettings::default()
    };
    let outputs = responses(&model, &settings);
    assert_ne!(outputs, responses(&with_random_heads(0.0), &settings));
    for (request, output) in requests().iter().zip(&outputs) {
        let all = [request.prompt.as_slice(), &output.tokens].concat();
        let ids: Vec<i32> = all.iter().map(|id| *id as i32).collect();
        let length = ids.len();
        let ids = TensorData::new(ids, [1, length]);
        let hidden = model.hidden(Tensor::from_data(ids, &Device::flex()));
        let hidden: Tensor<2> = hidden.squeeze_dim(0);
        let numbers = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        let logits = numbers(hidden.clone().matmul(model.head().transpose()));
        let values = numbers(model.heads.value.forward(hidden.clone()));
        let targets = model.heads.target_qs(hidden).into_iter().map(numbers);
        let targets: Vec<Vec<f32>> = targets.collect();
        let v = model.vocab_size();
        for (t, token) in output.tokens.iter().enumerate() {
            let state = request.prompt.len() + t - 1;
            let own = &logits[state * v..(state + 1) * v];
            let sum: f32 = own.iter().map(|logit| logit.exp()).sum();
            let score = |id: usize| {
                let q = targets[0][state * v + id].min(targets[1][state * v + id]);
                own[id] - sum.ln() + 3.0 * (q - values[state])
            };
            let best = (0..v).map(score).fold(f32::NEG_INFINITY, f32::max);
            assert!(score(*token as usize) > best - 1e-3);
            let log_prob = own[*token as usize] - sum.ln();
            assert!((log_prob - output.log_probs[t]).abs() < 1e-4);
        }
    }
}

#[test]
fn training_changes_all_but_the_targets_which_change_on_sync() {
    let mut policy = trained(fresh(1.0));
    let before = parameters(policy.module());
    // The last layer of fresh heads is zero, so the first step does not change the layers before it.
    for _ in 0..2 {
        let value = policy.accumulate_ilql(&ROWS, &|_, _| true, &mut loss);
        assert!(value.unwrap() > 0.0);
        assert!(policy.optimizer_step().unwrap().grad_norm > 0.0);
    }
    let after = parameters(policy.module());
    for ((name, old), (_, new)) in before.iter().zip(&after) {
        let target = name.starts_with("heads.target_qs");
        assert_eq!(old == new, target, "{name}");
    }
    policy.sync_targets(0.25).unwrap();
    let synced = parameters(policy.module());
    let find = |all: &[(String, Vec<f32>)], name: &str| {
        let mut named = all.iter().filter(|(own, _)| own == name);
        named.next().expect("a parameter").1.clone()
    };
    for (name, values) in &synced {
        if !name.starts_with("heads.target_qs") {
            assert_eq!(values, &find(&after, name));
            continue;
        }
        let (old, q) = (
            find(&after, name),
            find(&after, &name.replace("target_", "")),
        );
        for ((value, old), q) in values.iter().zip(old).zip(q) {
            assert!((value - (0.25 * q + 0.75 * old)).abs() < 1e-6, "{name}");
        }
    }
}

#[test]
fn packed_outputs_have_the_shapes_of_actions_and_states() {
    let mut policy = trained(with_random_heads(1.0));
    let vocab = policy.vocab_size();
    let select = |row: usize, token: usize| (row, token) != (0, 0);
    let mut seen = false;
    let value = policy.accumulate_ilql(&ROWS, &select, &mut |packed| {
        assert_eq!(packed.rows, [0, 1]);
        assert_eq!(packed.values.dims(), [5]);
        assert_eq!(packed.logits.dims(), [3, vocab]);
        assert_eq!(packed.qs.len(), Q_HEADS);
        for (q, target) in packed.qs.iter().zip(&packed.target_qs) {
            assert_eq!((q.dims(), target.dims()), ([3, vocab], [3]));
        }
        seen = true;
        loss(packed)
    });
    assert!(value.unwrap() > 0.0 && seen);
    let nothing = policy.accumulate_ilql(&ROWS, &|_, _| false, &mut loss);
    assert_eq!(nothing.unwrap(), 0.0);
    let mut frozen = IlqlPolicy::new(fresh(1.0), None).unwrap();
    let error = frozen.accumulate_ilql(&ROWS, &|_, _| true, &mut loss);
    assert!(error.unwrap_err().to_string().contains("frozen"));
    assert!(frozen.sync_targets(0.5).is_err());
}

#[test]
fn snapshots_restore_heads_and_targets() {
    let mut policy = trained(with_random_heads(1.0));
    let (before, hash) = (parameters(policy.module()), policy.weights_hash());
    let snapshot = policy.snapshot();
    policy
        .accumulate_ilql(&ROWS, &|_, _| true, &mut loss)
        .unwrap();
    policy.optimizer_step().unwrap();
    policy.sync_targets(0.5).unwrap();
    assert_ne!(policy.weights_hash(), hash);
    assert!(policy.restore(snapshot.as_ref()));
    assert_eq!(parameters(policy.module()), before);
    assert_eq!(policy.optimizer_steps(), 0);
}

#[test]
fn a_saved_folder_has_decoder_and_heads() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("model");
    let model = with_random_heads(1.0);
    model.save(&saved).unwrap();
    let again = IlqlDecoder::load(&saved, &Device::flex(), 1.0, 77).unwrap();
    assert_eq!(parameters(&again), parameters(&model));
    // The folder also loads as a plain decoder.
    let decoder = Decoder::load(&saved, &Device::flex()).unwrap();
    assert_eq!(parameters(&decoder), parameters(&model.decoder));
    std::fs::write(saved.join(HEADS_FILE), b"torn").unwrap();
    let error = IlqlDecoder::load(&saved, &Device::flex(), 1.0, 77).unwrap_err();
    assert!(error.to_string().contains(HEADS_FILE), "{error}");
}
