//! Replicas against a single model, bit for bit; failures of replicas.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use safetensors::SafeTensors;
use verl_decoder::decoder::Decoder;
use verl_kernels::random::{DrawKey, Purpose};
use verl_kernels::scoring::Extras;
use verl_rollout::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};

use super::*;
use crate::critic::Critic;
use crate::model::{
    ListedTokens, ModelInterface, PackedListed, PackedScores, PackedValues, PolicyModel, ScoreRow,
    TrainedModel, ValueInterface, ValueModel,
};
use crate::policy::Policy;
use crate::toy::{Toy, bits, numbers, rows, sequences};

const VOCAB: usize = 700;

/// Two-piece tasks in the embedding, so that slices divide parameters; ragged rows, and one without a response.
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
        let done = policy.generate(&requests, &settings, &mut |index, output| {
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

/// A value model in which a row uses one parameter or the other, so that a micro-batch may have no gradient of one.
#[derive(Module, Debug)]
struct Branches {
    odd: Param<Tensor<1>>,
    even: Param<Tensor<1>>,
    never: Param<Tensor<1>>,
}

impl Branches {
    fn new() -> Self {
        let weights = |count: usize, salt| {
            let data = TensorData::new(numbers(count, salt), [count]);
            Param::from_tensor(Tensor::from_data(data, &Device::flex()))
        };
        Branches {
            odd: weights(40_000, 5),
            even: weights(90, 6),
            never: weights(7, 7),
        }
    }
}

impl ValueInterface for Branches {
    fn vocab_size(&self) -> usize {
        90
    }
    fn max_tokens(&self) -> usize {
        64
    }
    fn values(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let [b, s] = ids.dims();
        let flat = ids.reshape([b * s]);
        let first = flat.clone().into_data().iter::<i64>().next();
        let weights = match first.is_some_and(|id| id % 2 == 1) {
            true => self.odd.val(),
            false => self.even.val(),
        };
        // The sign of a zero gradient is part of its bits.
        (weights.select(0, flat) * -1.0).reshape([b, s])
    }
    fn save(&self, _dir: &Path) -> Result<(), ModelError> {
        Ok(())
    }
}

#[test]
fn parameters_without_a_gradient_are_left_alone_as_by_a_single_critic() {
    // First ids of the micro-batches of each step.
    let steps: [&[u32]; 5] = [
        &[1, 2, 3, 4],
        &[2, 4, 6],
        &[1, 1, 1, 8],
        &[5],
        &[2, 3, 2, 3, 2],
    ];
    let train = |critic: &mut dyn ValueModel| {
        let mut numbers = Vec::new();
        for firsts in steps {
            let rows: Vec<Vec<u32>> = firsts.iter().map(|first| vec![*first, first + 7]).collect();
            let micros: Vec<Vec<ScoreRow<'_>>> = rows
                .iter()
                .map(|prompt| {
                    vec![ScoreRow {
                        prompt,
                        response: &[9, 11, 80],
                    }]
                })
                .collect();
            for round in micros.chunks(critic.round_len()) {
                let loss = |_: usize, packed: PackedValues| {
                    (packed.values.clone() * packed.values * 0.3).sum()
                };
                let losses = critic
                    .accumulate_round(round, &|_, _, _| true, &loss)
                    .unwrap();
                numbers.extend(losses);
                let loss = |_: usize, scores: Tensor<1>| (scores - 2.0).sum();
                numbers.extend(critic.accumulate_scores_round(round, &loss).unwrap());
            }
            numbers.push(critic.optimizer_step().unwrap().grad_norm);
        }
        let numbers: Vec<u64> = numbers.into_iter().map(f64::to_bits).collect();
        (numbers, critic.weights_hash(), stored(critic))
    };
    // Rounds of losses and scores interleave as the rounds are long, so each length has its own reference.
    let reference = |length: usize| {
        let mut single = Rounds {
            critic: Critic::new(Branches::new(), optimizer()).unwrap(),
            length,
        };
        train(&mut single)
    };
    for settings in cases() {
        let mut many = ReplicatedCritic::new(Branches::new(), optimizer(), &settings).unwrap();
        assert!(
            train(&mut many) == reference(settings.replicas),
            "{settings:?}"
        );
        let rows = [[1, 5], [7, 8], [3, 9]];
        let rows = rows.each_ref().map(|prompt| ScoreRow {
            prompt,
            response: &[4, 6],
        });
        let single = Critic::new(many.module().clone(), None).unwrap();
        assert_eq!(many.values(&rows).unwrap(), single.values(&rows).unwrap());
        assert_eq!(many.scores(&rows).unwrap(), single.scores(&rows).unwrap());
    }
}

/// A single critic that is given longer rounds.
struct Rounds {
    critic: Critic<Branches>,
    length: usize,
}

impl TrainedModel for Rounds {
    fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        self.critic.optimizer_step()
    }
    fn optimizer_steps(&self) -> u64 {
        self.critic.optimizer_steps()
    }
    fn round_len(&self) -> usize {
        self.length
    }
    fn weights_hash(&self) -> String {
        self.critic.weights_hash()
    }
    fn snapshot(&self) -> Box<dyn Any + Send + Sync> {
        self.critic.snapshot()
    }
    fn restore(&mut self, snapshot: &(dyn Any + Send + Sync)) -> bool {
        self.critic.restore(snapshot)
    }
    fn store(&self, snapshot: &(dyn Any + Send + Sync)) -> Result<Option<Vec<u8>>, ModelError> {
        self.critic.store(snapshot)
    }
    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        self.critic.save(dir)
    }
    fn vocab_size(&self) -> usize {
        self.critic.vocab_size()
    }
    fn max_tokens(&self) -> usize {
        self.critic.max_tokens()
    }
}

impl ValueModel for Rounds {
    fn values(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<Vec<f32>>, ModelError> {
        self.critic.values(rows)
    }
    fn scores(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<f32>, ModelError> {
        self.critic.scores(rows)
    }
    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        loss: &mut dyn FnMut(PackedValues) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.critic.accumulate(rows, select, loss)
    }
    fn accumulate_scores(
        &mut self,
        rows: &[ScoreRow<'_>],
        loss: &mut dyn FnMut(Tensor<1>) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.critic.accumulate_scores(rows, loss)
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
        // As bytes of two replicas to three, which have other parameter ids.
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

/// The first two micro-batches of an optimiser step, with this loss in the second.
fn second_loss(
    policy: &mut dyn PolicyModel,
    second: impl Fn(PackedScores) -> Tensor<1> + Sync,
) -> Result<Vec<f64>, RoundError> {
    let micros = micros(0);
    let all: Vec<Vec<ScoreRow<'_>>> = micros.iter().map(|micro| rows(micro)).collect();
    policy.accumulate_round(
        &all[..2],
        &|_, _, _| true,
        1.0,
        false,
        &|micro, scores| match micro {
            1 => second(scores),
            _ => loss(micro, scores),
        },
    )
}

#[test]
fn a_panic_names_the_replica_and_changes_nothing() {
    for settings in cases().filter(|settings| settings.replicas > 1) {
        let mut many = ReplicatedPolicy::new(toy(DType::F32), optimizer(), &settings).unwrap();
        train(&mut many, 0..1);
        let before = stored(&many);
        let refused = second_loss(&mut many, |_| panic!("no loss today")).unwrap_err();
        assert_eq!(refused.micro, 1);
        assert_eq!(
            refused.to_string(),
            "replica 1 of the model failed: it panicked: no loss today; the weights are unchanged"
        );
        assert!(stored(&many) == before);
        // The next optimiser step is computed as if nothing had happened, in the next epoch of the group.
        let mut single = Policy::new(toy(DType::F32), optimizer()).unwrap();
        assert_eq!(train(&mut single, 0..1).len(), MICROS.len() + 1);
        assert_eq!(train(&mut many, 1..2), train(&mut single, 1..2));
        assert_eq!(many.replicas.epoch, 1);
    }
}

#[test]
fn the_first_error_of_a_round_is_reported_and_later_micro_batches_are_left_out() {
    let broken = |scores: PackedScores| (scores.log_probs * 0.0).log().sum();
    let mut single = Policy::new(toy(DType::F32), optimizer()).unwrap();
    let expected = second_loss(&mut single, broken).unwrap_err();
    assert_eq!(expected.micro, 1);
    let expected_norm = single.optimizer_step().unwrap().grad_norm;
    for settings in cases() {
        let mut many = ReplicatedPolicy::new(toy(DType::F32), optimizer(), &settings).unwrap();
        let refused = second_loss(&mut many, broken).unwrap_err();
        assert_eq!(
            (refused.micro, refused.to_string()),
            (1, expected.to_string())
        );
        assert_eq!(many.optimizer_step().unwrap().grad_norm, expected_norm);
        // Rows that the model cannot read.
        let long = [
            vec![ScoreRow {
                prompt: &[1],
                response: &[2],
            }],
            vec![ScoreRow {
                prompt: &[1; 99],
                response: &[2],
            }],
        ];
        let refused = many
            .accumulate_round(&long, &|_, _, _| true, 1.0, false, &loss)
            .unwrap_err();
        assert!(matches!(refused.error, ModelError::TooLong { row: 0, .. }));
        assert_eq!(refused.micro, 1);
        let mut frozen = ReplicatedPolicy::new(toy(DType::F32), None, &settings).unwrap();
        let refused = second_loss(&mut frozen, broken).unwrap_err();
        assert!(matches!(refused.error, ModelError::Frozen));
        assert!(matches!(frozen.optimizer_step(), Err(ModelError::Frozen)));
    }
}

#[test]
fn gradients_that_overflow_are_named() {
    let overflow = |scores: PackedScores| scores.log_probs.sum() * 3e19;
    let add = |policy: &mut dyn PolicyModel| {
        // Each gradient is finite, the sum of their squares is not.
        second_loss(policy, overflow)
            .map(drop)
            .and_then(|()| second_loss(policy, overflow))
            .map(drop)
    };
    let mut single = Policy::new(toy(DType::F32), optimizer()).unwrap();
    let expected = match add(&mut single) {
        Ok(()) => single.optimizer_step().unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    assert!(expected.contains("gradient of `"), "{expected}");
    for settings in cases() {
        let mut many = ReplicatedPolicy::new(toy(DType::F32), optimizer(), &settings).unwrap();
        let before = stored(&many);
        let found = match add(&mut many) {
            Ok(()) => many.optimizer_step().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert_eq!(found, expected);
        assert!(stored(&many) == before);
    }
}

#[test]
fn a_replica_that_fails_in_the_optimiser_step_changes_nothing() {
    type Break = fn(&mut Replicas<Toy>);
    // A panic, because its sums are missing; an exchange that does not happen.
    let faults: [(Break, &str); 2] = [
        (
            |replicas| replicas.replicas[1].state.sums.clear(),
            "replica 1 of the model failed: it panicked",
        ),
        (
            |replicas| replicas.replicas[1].state.member.abort(),
            "the group was aborted",
        ),
    ];
    for (fault, expected) in faults {
        let mut many = ReplicatedPolicy::new(
            toy(DType::F32),
            optimizer(),
            &settings(3, Sharding::Gradients),
        )
        .unwrap();
        train(&mut many, 0..1);
        let before = stored(&many);
        second_loss(&mut many, |scores| scores.log_probs.sum()).unwrap();
        fault(&mut many.replicas);
        let error = many.optimizer_step().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(stored(&many) == before);
        assert_eq!(many.replicas.epoch, 1);
        let mut single = Policy::new(toy(DType::F32), optimizer()).unwrap();
        train(&mut single, 0..1);
        assert_eq!(train(&mut many, 1..2), train(&mut single, 1..2));
    }
}

/// Panics while it reads a row that begins with token 13.
#[derive(Module, Debug)]
struct Fragile {
    toy: Toy,
}

impl ModelInterface for Fragile {
    fn vocab_size(&self) -> usize {
        self.toy.vocab_size()
    }
    fn max_tokens(&self) -> usize {
        self.toy.max_tokens()
    }
    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let width = ids.dims()[1];
        let all: Vec<i64> = ids.clone().into_data().iter().collect();
        assert!(all.chunks(width).all(|row| row[0] != 13), "token 13");
        self.toy.hidden(ids)
    }
    fn head(&self) -> Tensor<2> {
        self.toy.head()
    }
    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        ModelInterface::save(&self.toy, dir)
    }
}

#[test]
fn calls_without_gradient_name_the_replica_that_panics() {
    let fragile = Fragile {
        toy: toy(DType::F32),
    };
    let many = ReplicatedPolicy::new(fragile, None, &settings(3, Sharding::Optimizer)).unwrap();
    let prompts = [[1], [2], [3], [4], [13], [5]];
    let rows = prompts.each_ref().map(|prompt| ScoreRow {
        prompt,
        response: &[7, 8],
    });
    let error = many
        .score(&rows, 1.0, Extras::NONE)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("replica 2 of the model failed: it panicked: token 13"),
        "{error}"
    );
    assert_eq!(many.score(&rows[..4], 1.0, Extras::NONE).unwrap().len(), 4);

    let requests = prompts.map(|prompt| RolloutRequest {
        prompt: prompt.to_vec(),
        key: DrawKey {
            seed: 1,
            purpose: Purpose::Rollout,
            step: 0,
            row: u64::from(prompt[0]),
            attempt: 0,
        },
        max_new_tokens: 3,
    });
    let seen = Mutex::new(Vec::new());
    let error = many
        .generate(&requests, &SamplingSettings::default(), &mut |index, _| {
            seen.lock().unwrap().push(index);
            Ok(())
        })
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("replica 2 of the model failed: it panicked: token 13"),
        "{error}"
    );
    assert!(seen.lock().unwrap().iter().all(|index| *index < 4));
    // The error of the receiver ends all replicas.
    let calls = AtomicUsize::new(0);
    let stopped = many.generate(&requests[..4], &SamplingSettings::default(), &mut |_, _| {
        calls.fetch_add(1, Ordering::SeqCst);
        Err(RolloutError::Stopped("enough".into()))
    });
    assert_eq!(stopped.unwrap_err().to_string(), "enough");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let long = RolloutRequest {
        prompt: vec![1; 64],
        ..requests[0].clone()
    };
    let refused = many.generate(
        &[requests[0].clone(), long],
        &SamplingSettings::default(),
        &mut |_, _| Ok(()),
    );
    assert!(matches!(
        refused,
        Err(RolloutError::TooLong { request: 1, .. })
    ));
}

#[test]
fn invalid_settings_are_refused() {
    let new = |replicas, optimizer| {
        ReplicatedPolicy::new(toy(DType::F32), optimizer, &ReplicaSettings::new(replicas))
    };
    let error = |found: Result<ReplicatedPolicy<Toy>, ReplicaError>| match found {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    assert!(error(new(0, None)).contains("at least 1"));
    let negative = OptimizerConfig {
        learning_rate: -1.0,
        ..OptimizerConfig::default()
    };
    assert!(error(new(2, Some(negative))).contains("learning_rate"));
    assert_eq!(error(new(2, None)), "");
}
