//! Panics, errors and lost replicas: one error that names the cause, and nothing changes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Int;
use verl_rollout::engine::{EngineWeights, RolloutError};

use super::*;

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
        .prepare()
        .unwrap()
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
    let stopped = many.prepare().unwrap().generate(
        &requests[..4],
        &SamplingSettings::default(),
        &mut |_, _| {
            calls.fetch_add(1, Ordering::SeqCst);
            Err(RolloutError::Stopped("enough".into()))
        },
    );
    assert_eq!(stopped.unwrap_err().to_string(), "enough");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let long = RolloutRequest {
        prompt: vec![1; 64],
        ..requests[0].clone()
    };
    let refused = many.prepare().unwrap().generate(
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
