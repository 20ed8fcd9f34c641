//! Replicas against a single model, bit for bit.

mod failures;
mod values;

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{DType, Device, Tensor};
use safetensors::SafeTensors;
use verl_decoder::decoder::Decoder;
use verl_kernels::random::{DrawKey, Purpose};
use verl_kernels::scoring::Extras;
use verl_reshard::synchronise;
use verl_rollout::engine::{RolloutOutput, RolloutRequest, SamplingSettings};

use super::*;
use crate::model::{
    ListedTokens, ModelInterface, PackedListed, PackedScores, PolicyModel, ScoreRow, TrainedModel,
};
use crate::policy::Policy;
use crate::toy::{Toy, bits, rows, sequences};

const VOCAB: usize = 700;

/// A model whose embedding has several tasks, so that slices divide it.
fn toy(dtype: DType) -> Toy {
    Toy::new(VOCAB, 96, 64).cast(dtype)
}

fn optimizer() -> Option<OptimizerConfig> {
    Some(OptimizerConfig {
        learning_rate: 1e-2,
        max_grad_norm: Some(0.5),
        ..OptimizerConfig::default()
    })
}

fn settings(replicas: usize, sharding: Sharding) -> ReplicaSettings {
    ReplicaSettings {
        threads: Some(1),
        sharding,
        ..ReplicaSettings::new(replicas)
    }
}

/// Numbers of replicas and ways to divide their state; five micro-batches leave a short last round for most of them.
fn cases() -> impl Iterator<Item = ReplicaSettings> {
    let counts = [1, 2, 3, 4, 7];
    let both = [Sharding::Optimizer, Sharding::Gradients];
    counts
        .into_iter()
        .flat_map(move |count| both.map(|sharding| settings(count, sharding)))
}

/// Prompts and responses of the micro-batches of an optimiser step: ragged, one without a response.
const MICROS: [&[(usize, usize)]; 5] = [
    &[(3, 8), (6, 2)],
    &[(2, 5), (1, 11), (4, 0)],
    &[(9, 1)],
    &[(20, 30), (3, 3)],
    &[(1, 1), (5, 9)],
];

type Sequences = Vec<(Vec<u32>, Vec<u32>)>;

fn micros(step: usize) -> Vec<Sequences> {
    let shifted = |(micro, lengths): (usize, &&[(usize, usize)])| {
        let mut sequences = sequences(lengths, VOCAB as u32);
        for (prompt, response) in &mut sequences {
            for id in prompt.iter_mut().chain(response) {
                *id = (*id + (step * 131 + micro * 17) as u32) % VOCAB as u32;
            }
        }
        sequences
    };
    MICROS.iter().enumerate().map(shifted).collect()
}

fn loss(micro: usize, scores: PackedScores) -> Tensor<1> {
    let loss = -scores.log_probs.sum() * (1.0 + micro as f32) / 7.0;
    match scores.entropies {
        Some(entropies) => loss - entropies.sum() * 0.1,
        None => loss,
    }
}

/// Optimiser steps in rounds as long as the model's; the bits of losses and norms.
fn train(policy: &mut dyn PolicyModel, steps: std::ops::Range<usize>) -> Vec<u64> {
    let mut numbers = Vec::new();
    for step in steps {
        let micros = micros(step);
        let all: Vec<Vec<ScoreRow<'_>>> = micros.iter().map(|micro| rows(micro)).collect();
        let length = policy.round_len();
        for (index, round) in all.chunks(length).enumerate() {
            let first = index * length;
            let select = |micro: usize, row: usize, token: usize| {
                (first + micro + row + token).is_multiple_of(3) || token < 2
            };
            let loss = |micro, scores| loss(first + micro, scores);
            let losses = policy.accumulate_round(round, &select, 0.9, true, &loss);
            numbers.extend(losses.expect("finite losses"));
        }
        let report = policy.optimizer_step().expect("finite gradients");
        assert!(report.clipped && report.grad_norm > 0.0);
        numbers.push(report.grad_norm);
    }
    numbers.into_iter().map(f64::to_bits).collect()
}

/// Weights, moments and step counts, by name.
fn stored(model: &dyn TrainedModel) -> BTreeMap<String, Vec<u8>> {
    let snapshot = model.snapshot();
    content(&bytes(model, snapshot.as_ref()))
}

fn bytes(model: &dyn TrainedModel, snapshot: &(dyn Any + Send + Sync)) -> Vec<u8> {
    let stored = model.store(snapshot).expect("a snapshot");
    stored.expect("bytes")
}

fn content(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let counts = header.metadata().clone().unwrap_or_default().into_iter();
    let counts = counts.map(|(name, count)| (format!("count of {name}"), count.into_bytes()));
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let tensors = tensors
        .iter()
        .map(|(name, view)| (name.to_owned(), view.data().to_vec()));
    let tensors: Vec<_> = tensors.collect();
    tensors.into_iter().chain(counts).collect()
}

fn hashes<M: Module>(replicas: &Replicas<M>) -> Vec<String> {
    let each = replicas.replicas.iter();
    each.map(|replica| replica.state.trained.weights_hash())
        .collect()
}

#[test]
fn ten_optimiser_steps_have_the_bits_of_a_single_policy() {
    for dtype in [DType::F32, DType::BF16] {
        for frozen in ["", "query"] {
            let toy = || toy(dtype).freezing(frozen);
            let mut single = Policy::new(toy(), optimizer()).unwrap();
            let expected = train(&mut single, 0..10);
            let start = Policy::new(toy(), None).unwrap().weights_hash();
            assert_ne!(single.weights_hash(), start);
            for settings in cases() {
                let mut many = ReplicatedPolicy::new(toy(), optimizer(), &settings).unwrap();
                assert_eq!(many.round_len(), settings.replicas);
                assert_eq!(train(&mut many, 0..10), expected, "{settings:?}");
                let hash = single.weights_hash();
                assert_eq!(hashes(&many.replicas), vec![hash; settings.replicas]);
                assert_eq!(many.optimizer_steps(), 10);
                assert!(stored(&many) == stored(&single), "{settings:?}");
            }
            if dtype == DType::BF16 {
                break;
            }
        }
    }
}

#[test]
fn states_are_divided() {
    for settings in cases() {
        let mut many = ReplicatedPolicy::new(toy(DType::F32), optimizer(), &settings).unwrap();
        train(&mut many, 0..1);
        let micro = &micros(0)[0];
        many.accumulate(&rows(micro), &|_, _| true, 1.0, false, &mut |scores| {
            loss(0, scores)
        })
        .unwrap();
        let replicas = &many.replicas;
        let total = replicas.layout.len();
        let mut moments = 0;
        for (replica, slice) in replicas.replicas.iter().zip(replicas.layout.slices()) {
            let sums = match settings.sharding {
                Sharding::Optimizer => total,
                Sharding::Gradients => slice.len(),
            };
            assert_eq!(replica.state.sums.len(), sums);
            let training = replica.state.trained.training.as_ref().unwrap();
            let (own, _) = training.optimizer.content(&training.parameters);
            let own: usize = own.iter().map(|(_, data)| data.num_elements()).sum();
            assert_eq!(own, 2 * slice.len());
            moments += own;
        }
        assert_eq!(moments, 2 * total);
    }
}

#[test]
fn rows_and_responses_have_the_bits_of_a_single_policy() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tiny-random-qwen3");
    let decoder = Decoder::load(&folder, &Device::flex()).unwrap();
    let lengths: Vec<_> = (0..23).map(|i| (1 + i * 13 % 17, i * 7 % 19)).collect();
    let sequences = sequences(&lengths, decoder.config.vocab_size as u32);
    check_reads(decoder, &rows(&sequences));
    let sequences = crate::toy::sequences(&lengths, VOCAB as u32);
    check_reads(toy(DType::F32), &rows(&sequences));
}

fn check_reads<M: ModelInterface>(module: M, rows: &[ScoreRow<'_>]) {
    let single = Policy::new(module.clone(), None).unwrap();
    let requests: Vec<RolloutRequest> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| RolloutRequest {
            prompt: row.prompt.to_vec(),
            key: DrawKey {
                seed: 3,
                purpose: Purpose::Rollout,
                step: 1,
                row: index as u64,
                attempt: 0,
            },
            max_new_tokens: 1 + index % 9,
        })
        .collect();
    let generate = |policy: &dyn PolicyModel| {
        let mut outputs = vec![None; requests.len()];
        let settings = SamplingSettings::default();
        let done =
            policy
                .prepare()
                .unwrap()
                .generate(&requests, &settings, &mut |index, output| {
                    assert!(outputs[index].replace(output).is_none());
                    Ok(())
                });
        done.unwrap();
        let outputs: Option<Vec<RolloutOutput>> = outputs.into_iter().collect();
        outputs.expect("every request is answered")
    };
    let texts = generate(&single);
    let scores = single.score(rows, 0.8, Extras::ENTROPIES).unwrap();
    let top = single.top_tokens(rows, 3, 0.8).unwrap();
    for settings in cases() {
        let many = ReplicatedPolicy::new(module.clone(), None, &settings).unwrap();
        let found = many.score(rows, 0.8, Extras::ENTROPIES).unwrap();
        for (found, expected) in found.iter().zip(&scores) {
            assert_eq!(bits(&found.log_probs), bits(&expected.log_probs));
            assert_eq!(bits(&found.entropies), bits(&expected.entropies));
        }
        assert_eq!(many.top_tokens(rows, 3, 0.8).unwrap(), top);
        let found = generate(&many);
        for (found, expected) in found.iter().zip(&texts) {
            assert_eq!(found, expected);
            assert_eq!(bits(&found.log_probs), bits(&expected.log_probs));
        }
        assert_eq!(
            (
                found.len(),
                many.score(&[], 1.0, Extras::NONE).unwrap().len()
            ),
            (texts.len(), 0)
        );
    }
}

#[test]
fn listed_tokens_train_with_the_bits_of_a_single_policy() {
    let micros = micros(0);
    let all: Vec<Vec<ScoreRow<'_>>> = micros.iter().map(|micro| rows(micro)).collect();
    let train = |policy: &mut dyn PolicyModel| {
        let length = policy.round_len();
        for (index, round) in all.chunks(length).enumerate() {
            let lists = round.iter().map(|rows| ListedTokens {
                top_k: 1,
                rows: rows.iter().map(|row| row.response).collect(),
            });
            let lists: Vec<ListedTokens<'_>> = lists.collect();
            let loss = |micro: usize, packed: PackedListed| {
                packed.log_probs.sum() * (1.0 + (index * length + micro) as f32)
            };
            policy
                .accumulate_listed_round(round, &lists, &|_, _, _| true, 0.7, &loss)
                .unwrap();
        }
        policy.optimizer_step().unwrap();
        stored(policy)
    };
    let expected = train(&mut Policy::new(toy(DType::F32), optimizer()).unwrap());
    for settings in cases() {
        let mut many = ReplicatedPolicy::new(toy(DType::F32), optimizer(), &settings).unwrap();
        assert!(train(&mut many) == expected, "{settings:?}");
    }
}

#[test]
fn snapshots_move_between_any_numbers_of_replicas() {
    let mut single = Policy::new(toy(DType::BF16), optimizer()).unwrap();
    train(&mut single, 0..2);
    let of_single = bytes(&single, single.snapshot().as_ref());
    let before = single.snapshot();
    let expected = (train(&mut single, 2..4), single.weights_hash());
    let module = Policy::new(toy(DType::BF16), None).unwrap();
    let check = |many: &mut ReplicatedPolicy<Toy>| {
        assert_eq!((train(many, 2..4), many.weights_hash()), expected);
    };
    for sharding in [Sharding::Optimizer, Sharding::Gradients] {
        let new = |count| {
            ReplicatedPolicy::new(
                module.module().clone(),
                optimizer(),
                &settings(count, sharding),
            )
        };
        let (mut two, mut three) = (new(2).unwrap(), new(3).unwrap());
        // From a single model, as bytes.
        let recalled = two.recall(&of_single).unwrap().expect("a snapshot");
        assert!(two.restore(recalled.as_ref()));
        let of_two = two.snapshot();
        assert!(stored(&two) == content(&of_single));
        check(&mut two);
        // Its own, also with gradients that are then discarded.
        two.accumulate(&rows(&micros(0)[0]), &|_, _| true, 1.0, false, &mut |s| {
            loss(0, s)
        })
        .unwrap();
        assert!(two.restore(of_two.as_ref()));
        check(&mut two);
        // As bytes of two replicas, to three.
        let moved = bytes(&two, of_two.as_ref());
        assert!(content(&moved) == content(&of_single));
        let recalled = three.recall(&moved).unwrap().expect("a snapshot");
        assert!(three.restore(recalled.as_ref()));
        check(&mut three);
        // Without bytes, to replicas of the same module.
        let mut four = new(4).unwrap();
        assert!(four.restore(of_two.as_ref()));
        check(&mut four);
        // A snapshot of another kind or module changes nothing.
        let hash = four.weights_hash();
        assert!(!four.restore(&5) && !four.restore(before.as_ref()));
        let frozen = ReplicatedPolicy::new(toy(DType::BF16), None, &settings(2, sharding)).unwrap();
        assert!(!four.restore(frozen.snapshot().as_ref()));
        assert_eq!(four.weights_hash(), hash);
    }
}

#[test]
fn the_saved_module_has_the_optimisers_weights() {
    let mut single = Policy::new(toy(DType::BF16), optimizer()).unwrap();
    train(&mut single, 0..2);
    let exported = |module: Toy| {
        let weights = crate::weights::Weights::of(&module).named.into_iter();
        weights
            .map(|(_, weight)| weight.into_data())
            .collect::<Vec<_>>()
    };
    let expected = exported(single.trained.exported());
    for settings in cases() {
        let mut many = ReplicatedPolicy::new(toy(DType::BF16), optimizer(), &settings).unwrap();
        train(&mut many, 0..2);
        assert_eq!(exported(many.replicas.exported()), expected);
    }
}

#[test]
fn weights_travel_between_any_numbers_of_replicas() {
    let version = || WeightsVersion {
        step: 3,
        hash: String::new(),
    };
    let mut single = Policy::new(toy(DType::BF16), optimizer()).unwrap();
    train(&mut single, 0..3);
    let mut three = ReplicatedPolicy::new(
        toy(DType::BF16),
        optimizer(),
        &settings(3, Sharding::Gradients),
    )
    .unwrap();
    // A single policy with moments of its own, and what it becomes with the weights of the other.
    let mut expected = Policy::new(toy(DType::BF16), optimizer()).unwrap();
    train(&mut expected, 5..7);
    train(&mut three, 5..7);
    let source = single.weight_source(version(), 1 << 16).unwrap();
    let source = source.expect("a source");
    for sink in [&mut expected as &mut dyn TrainedModel, &mut three] {
        let sink = sink.weight_sink().expect("a sink");
        assert_eq!(synchronise(&*source, sink).unwrap(), version());
    }
    assert_eq!(hashes(&three.replicas), vec![single.weights_hash(); 3]);
    assert_eq!(train(&mut three, 7..9), train(&mut expected, 7..9));
    assert_eq!(three.weights_hash(), expected.weights_hash());
    // And back, to a frozen model.
    let source = three.weight_source(version(), 1 << 16).unwrap();
    let mut frozen = Policy::new(toy(DType::BF16), None).unwrap();
    let sink = frozen.weight_sink().expect("a sink");
    synchronise(&*source.expect("a source"), sink).unwrap();
    assert_eq!(frozen.weights_hash(), three.weights_hash());
}
