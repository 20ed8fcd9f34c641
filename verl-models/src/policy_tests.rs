use burn::module::Module;
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int};
use verl_decoder::decoder::Decoder;
use verl_decoder::hf::SaveDType;
use verl_decoder::parameters::{cast, visit_parameters};
use verl_kernels::random::{DrawKey, Purpose};
use verl_rollout::engine::{RolloutRequest, SamplingSettings};

use super::*;
use crate::bench::preset;
use crate::optim::{GradientAccumulator, Schedule, TrainableParameters};
use crate::toy::{Toy, bits, close, rows, sequences};

/// Rounding of f32 logits of size 1 under two orders of addition.
const ROUNDING: f32 = 2e-5;

fn frozen(toy: Toy) -> Policy<Toy> {
    Policy::new(toy, None).expect("a frozen model has no settings")
}

fn trained(toy: Toy) -> Policy<Toy> {
    let config = OptimizerConfig {
        learning_rate: 1e-2,
        schedule: Schedule::Constant { warmup_steps: 2 },
        ..OptimizerConfig::default()
    };
    Policy::new(toy, Some(config)).expect("valid settings")
}

fn all(_row: usize, _token: usize) -> bool {
    true
}

/// −Σ (1 + row) log π − 0.1 Σ H.
fn loss(scores: PackedScores) -> Tensor<1> {
    let device = scores.log_probs.device();
    let weights: Vec<f32> = scores.rows.iter().map(|&row| 1.0 + row as f32).collect();
    let weights = Tensor::<1>::from_data(weights.as_slice(), &device);
    let loss = -(scores.log_probs * weights).sum();
    match scores.entropies {
        Some(entropies) => loss - entropies.sum() * 0.1,
        None => loss,
    }
}

/// Log-probs and entropies of a row from the logits of the complete sequence, without padding.
fn plain(toy: &Toy, row: &ScoreRow<'_>, temperature: f64) -> (Tensor<1>, Tensor<1>) {
    let ids: Vec<i32> = row
        .prompt
        .iter()
        .chain(row.response)
        .map(|&id| id as i32)
        .collect();
    let (p, t) = (row.prompt.len(), row.response.len());
    let device = toy.gain.val().device();
    let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device);
    let logits = toy.forward(ids.clone().unsqueeze::<2>());
    let v = logits.dims()[2];
    let logits = logits.slice([0..1, p - 1..p + t - 1, 0..v]).reshape([t, v]);
    let log_p = log_softmax(logits.div_scalar(temperature), 1);
    let targets = ids.slice(p..p + t).reshape([t, 1]);
    let entropies = -(log_p.clone().exp() * log_p.clone()).sum_dim(1);
    (
        log_p.gather(1, targets).reshape([t]),
        entropies.reshape([t]),
    )
}

fn values(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().iter().collect()
}

fn gradients(policy: &Policy<Toy>) -> Vec<Vec<f32>> {
    let training = policy.trained.training.as_ref().expect("a trained policy");
    let sums = training.accumulator.sums().iter();
    sums.map(|sum| sum.clone().map(values).unwrap_or_default())
        .collect()
}

#[test]
fn scores_match_those_of_each_single_unpadded_sequence() {
    let toy = Toy::new(29, 12, 64);
    let policy = frozen(toy);
    let sequences = sequences(&[(1, 1), (5, 9), (3, 0), (20, 30), (2, 7)], 29);
    let rows = rows(&sequences);
    for temperature in [1.0, 0.6] {
        let scores = policy
            .score(&rows, temperature, Extras::ENTROPIES)
            .expect("valid rows");
        assert_eq!(scores[2], Scores::default());
        for (row, scores) in rows
            .iter()
            .zip(&scores)
            .filter(|(row, _)| !row.response.is_empty())
        {
            let (log_probs, entropies) = plain(policy.module(), row, temperature);
            close(&scores.log_probs, &values(log_probs), ROUNDING);
            close(&scores.entropies, &values(entropies), ROUNDING);
        }
    }
    let without = policy.score(&rows, 1.0, Extras::NONE).expect("valid rows");
    let bare = |scores: &Scores| scores.entropies.is_empty() && scores.sum_pi_squared.is_empty();
    assert!(without.iter().all(bare));
}

#[test]
fn greedy_is_scored_with_temperature_one() {
    let policy = frozen(Toy::new(29, 12, 64));
    let sequences = sequences(&[(4, 6)], 29);
    let greedy = policy
        .score(&rows(&sequences), 0.0, Extras::ENTROPIES)
        .expect("valid rows");
    assert_eq!(
        greedy,
        policy
            .score(&rows(&sequences), 1.0, Extras::ENTROPIES)
            .expect("valid rows")
    );
}

#[test]
fn a_row_scores_the_same_bits_alone_and_among_others() {
    let policy = frozen(Toy::new(331, 48, 300));
    let lengths: Vec<_> = (0..64)
        .map(|i| (1 + i * 13 % 70, 1 + i * 37 % 190))
        .collect();
    let sequences = sequences(&lengths, 331);
    let rows = rows(&sequences);
    let together = policy
        .score(&rows, 0.9, Extras::ENTROPIES)
        .expect("valid rows");
    let reversed: Vec<_> = rows.iter().rev().copied().collect();
    let backwards = policy
        .score(&reversed, 0.9, Extras::ENTROPIES)
        .expect("valid rows");
    for (i, row) in rows.iter().enumerate() {
        let alone = policy
            .score(&[*row], 0.9, Extras::ENTROPIES)
            .expect("valid rows");
        for other in [&together[i], &backwards[63 - i]] {
            assert_eq!(bits(&alone[0].log_probs), bits(&other.log_probs), "row {i}");
            assert_eq!(bits(&alone[0].entropies), bits(&other.entropies), "row {i}");
        }
    }
}

#[test]
fn threads_change_no_bit() {
    // Products of this size are split among threads.
    let sequences = sequences(&[(40, 90), (100, 60), (9, 150), (64, 100)], 700);
    let run = || {
        let mut policy = trained(Toy::new(700, 96, 256));
        let rows = rows(&sequences);
        let scores = policy
            .score(&rows, 1.0, Extras::ENTROPIES)
            .expect("valid rows");
        policy
            .accumulate(&rows, &all, 1.0, true, &mut loss)
            .expect("a finite loss");
        policy.optimizer_step().expect("finite gradients");
        (scores, policy.weights_hash())
    };
    let with_threads = |num_threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .build();
        pool.expect("a thread pool").install(run)
    };
    let one = with_threads(1);
    for num_threads in [2, 3, 8] {
        assert!(with_threads(num_threads) == one, "{num_threads} threads");
    }
}

#[test]
fn gradients_match_the_composed_loss_over_selected_tokens() {
    let sequences = sequences(&[(3, 8), (6, 2), (2, 5), (1, 11)], 29);
    let rows = rows(&sequences);
    // No token of row 1, and not the last ones of row 3.
    let select = |row: usize, token: usize| row != 1 && (row != 3 || token < 4) && token % 3 != 1;
    let mut policy = trained(Toy::new(29, 12, 64));
    let value = policy
        .accumulate(&rows, &select, 0.7, true, &mut |scores| {
            assert_eq!(scores.rows, [0, 0, 0, 0, 0, 2, 2, 2, 3, 3, 3]);
            loss(scores)
        })
        .expect("a finite loss");

    let toy = policy.module().clone().train();
    let mut expected = Tensor::<1>::zeros([1], &toy.gain.val().device());
    for (i, row) in rows.iter().enumerate() {
        let (log_probs, entropies) = plain(&toy, row, 0.7);
        let chosen: Vec<f32> = (0..row.response.len())
            .map(|token| f32::from(u8::from(select(i, token))))
            .collect();
        let chosen = Tensor::<1>::from_data(chosen.as_slice(), &log_probs.device());
        expected = expected
            - (log_probs * chosen.clone()).sum() * (1.0 + i as f32)
            - (entropies * chosen).sum() * 0.1;
    }
    close(&[value as f32], &values(expected.clone().inner()), 1e-3);
    let mut collected = GradientAccumulator::default();
    let parameters = TrainableParameters::new(policy.module());
    collected
        .add(&parameters, &toy, expected.backward())
        .expect("finite gradients");
    let names: Vec<_> = parameters.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["embedding", "query", "value", "gain"]);
    for (got, expected) in gradients(&policy).iter().zip(collected.sums()) {
        close(got, &expected.clone().map(values).unwrap_or_default(), 1e-3);
    }
}

#[test]
fn micro_batches_add_up() {
    let sequences = sequences(&[(3, 8), (6, 2), (2, 5)], 29);
    let rows = rows(&sequences);
    let mut whole = trained(Toy::new(29, 12, 64));
    let mut parts = trained(Toy::new(29, 12, 64));
    let mut sum = |scores: PackedScores| -scores.log_probs.sum();
    let expected = whole
        .accumulate(&rows, &all, 1.0, false, &mut sum)
        .expect("finite");
    let mut got = 0.0;
    for row in &rows {
        got += parts
            .accumulate(&[*row], &all, 1.0, false, &mut sum)
            .expect("finite");
    }
    assert!((got - expected).abs() < 1e-4);
    for (got, expected) in gradients(&parts).iter().zip(&gradients(&whole)) {
        close(got, expected, 1e-4);
    }
    let whole = whole.optimizer_step().expect("finite").grad_norm;
    let parts = parts.optimizer_step().expect("finite").grad_norm;
    assert!((whole - parts).abs() < 1e-4 * whole);
}

#[test]
fn an_empty_selection_gives_no_gradient() {
    let mut policy = trained(Toy::new(29, 12, 64));
    let sequences = sequences(&[(3, 8), (4, 0)], 29);
    let rows = rows(&sequences);
    let mut never = |_: PackedScores| unreachable!("there are no scores to compute a loss from");
    assert_eq!(
        policy
            .accumulate(&rows, &|_, _| false, 1.0, false, &mut never)
            .ok(),
        Some(0.0)
    );
    let before = policy.weights_hash();
    let report = policy.optimizer_step().expect("nothing to refuse");
    assert_eq!((report.grad_norm, report.clipped), (0.0, false));
    assert_eq!(policy.weights_hash(), before);
}

#[test]
fn non_finite_losses_and_gradients_are_named_and_change_nothing() {
    let mut policy = trained(Toy::new(29, 12, 64));
    let sequences = sequences(&[(3, 8)], 29);
    let rows = rows(&sequences);
    policy
        .accumulate(&rows, &all, 1.0, true, &mut loss)
        .expect("finite");
    let (weights, sums) = (policy.weights_hash(), gradients(&policy));
    let mut refused = |loss: &mut dyn FnMut(PackedScores) -> Tensor<1>| {
        let error = policy
            .accumulate(&rows, &all, 1.0, false, loss)
            .expect_err("not finite");
        assert_eq!(gradients(&policy), sums);
        assert_eq!(policy.weights_hash(), weights);
        error.to_string()
    };
    assert_eq!(
        refused(&mut |scores| (scores.log_probs * 0.0).log().sum()),
        "loss is not finite (-inf); the weights are unchanged"
    );
    // The root is 0, its slope is not finite.
    let message = refused(&mut |scores| (scores.log_probs * 0.0).sqrt().sum());
    assert!(
        message.starts_with("gradient of `embedding` is not finite"),
        "{message}"
    );
}

#[test]
fn non_scalar_losses_are_refused_and_constant_ones_have_no_gradient() {
    let mut policy = trained(Toy::new(29, 12, 64));
    let sequences = sequences(&[(3, 8)], 29);
    let rows = rows(&sequences);
    let many = policy.accumulate(&rows, &all, 1.0, false, &mut |scores| scores.log_probs);
    assert!(matches!(many, Err(ModelError::LossShape { values: 8 })));
    let constant = |_: PackedScores| Tensor::<1>::from_data([2.5], &Device::flex());
    let value = policy.accumulate(&rows, &all, 1.0, false, &mut { constant });
    assert_eq!(value.ok(), Some(2.5));
    let detached = |scores: PackedScores| scores.log_probs.detach().sum();
    assert!(
        policy
            .accumulate(&rows, &all, 1.0, false, &mut { detached })
            .is_ok()
    );
    let training = policy.trained.training.as_ref().expect("a trained policy");
    assert!(training.accumulator.is_empty());
}

#[test]
fn a_step_repeats_from_a_snapshot() {
    let sequences = sequences(&[(3, 8), (6, 2)], 29);
    let rows = rows(&sequences);
    let step = |policy: &mut Policy<Toy>| {
        policy
            .accumulate(&rows, &all, 1.0, true, &mut loss)
            .expect("finite");
        policy.optimizer_step().expect("finite")
    };
    let mut policy = trained(Toy::new(29, 12, 64));
    let start = policy.weights_hash();
    step(&mut policy);
    step(&mut policy);
    let before = policy.weights_hash();
    assert_ne!(before, start);
    let snapshot = policy.snapshot();
    let first = (step(&mut policy), step(&mut policy), policy.weights_hash());
    // A restore discards gradients that were accumulated but not stepped.
    policy
        .accumulate(&rows, &all, 1.0, true, &mut loss)
        .expect("finite");
    assert!(policy.restore(snapshot.as_ref()));
    assert_eq!(policy.weights_hash(), before);
    assert_eq!(policy.optimizer_steps(), 2);
    let second = (step(&mut policy), step(&mut policy), policy.weights_hash());
    assert_eq!(first, second);
    assert_eq!(policy.optimizer_steps(), 4);
}

#[test]
fn a_stored_snapshot_restores_another_object_to_the_same_bits() {
    let sequences = sequences(&[(3, 8), (6, 2)], 29);
    let rows = rows(&sequences);
    let step = |policy: &mut Policy<Toy>| {
        policy
            .accumulate(&rows, &all, 1.0, true, &mut loss)
            .expect("finite");
        policy.optimizer_step().expect("finite");
        policy.weights_hash()
    };
    for dtype in [DType::F32, DType::BF16] {
        let toy = || Toy::new(29, 12, 64).cast(dtype);
        let mut policy = trained(toy());
        step(&mut policy);
        let snapshot = policy.snapshot();
        let bytes = policy
            .store(snapshot.as_ref())
            .expect("known types")
            .expect("its own");
        let hash = policy.weights_hash();
        let next = [step(&mut policy), step(&mut policy)];

        let mut other = trained(toy());
        let recalled = other
            .recall(&bytes)
            .expect("the same model")
            .expect("offered");
        assert!(other.restore(recalled.as_ref()));
        assert_eq!((other.weights_hash(), other.optimizer_steps()), (hash, 1));
        assert_eq!([step(&mut other), step(&mut other)], next);

        let refused = |policy: Policy<Toy>| policy.recall(&bytes).err().map(|e| e.to_string());
        let wider = refused(trained(Toy::new(31, 12, 64).cast(dtype))).expect("another size");
        assert!(
            wider.contains("another model") && wider.contains("embedding"),
            "{wider}"
        );
    }
    // Weights of another type are reported as such.
    let mut narrow = trained(Toy::new(29, 12, 64).cast(DType::BF16));
    step(&mut narrow);
    let bytes = narrow
        .store(narrow.snapshot().as_ref())
        .expect("known types")
        .expect("its own");
    let wider = trained(Toy::new(29, 12, 64)).recall(&bytes).err();
    let message = wider.map(|error| error.to_string()).unwrap_or_default();
    assert!(
        message.contains("its weights are BF16, but this model has F32"),
        "{message}"
    );
    let policy = frozen(Toy::new(29, 12, 64));
    let bytes = policy
        .store(policy.snapshot().as_ref())
        .expect("known types")
        .expect("its own");
    assert!(trained(Toy::new(29, 12, 64)).recall(&bytes).is_err());
    assert!(policy.store(&0_u8).expect("refuses").is_none());
}

#[test]
fn snapshots_of_other_models_are_refused() {
    let mut policy = trained(Toy::new(29, 12, 64));
    let before = policy.weights_hash();
    assert!(!policy.restore(&0_u8));
    assert!(!policy.restore(trained(Toy::new(31, 12, 64)).snapshot().as_ref()));
    assert!(!policy.restore(frozen(Toy::new(29, 12, 64)).snapshot().as_ref()));
    assert_eq!(policy.weights_hash(), before);
}

#[test]
fn frozen_models_and_parameters_do_not_change() {
    let sequences = sequences(&[(3, 8)], 29);
    let rows = rows(&sequences);
    let mut policy = frozen(Toy::new(29, 12, 64));
    let refused = policy.accumulate(&rows, &all, 1.0, false, &mut loss);
    assert!(matches!(refused, Err(ModelError::Frozen)));
    assert!(matches!(policy.optimizer_step(), Err(ModelError::Frozen)));
    assert_eq!(policy.optimizer_steps(), 0);

    let gain = |policy: &Policy<Toy>| values(policy.module().gain.val());
    for (toy, moves) in [
        (Toy::new(29, 12, 64), true),
        (Toy::new(29, 12, 64).freezing("gain"), false),
    ] {
        let mut policy = trained(toy);
        policy
            .accumulate(&rows, &all, 1.0, false, &mut loss)
            .expect("finite");
        policy.optimizer_step().expect("finite");
        assert_eq!(gain(&policy) != vec![1.0; 12], moves);
    }
}

#[test]
fn invalid_rows_are_refused_before_any_work() {
    let mut policy = trained(Toy::new(29, 12, 8));
    let sequences = [(vec![1, 2], vec![3]), (vec![1; 5], vec![2; 4])];
    let long = policy.score(&rows(&sequences), 1.0, Extras::NONE);
    assert!(matches!(
        long,
        Err(ModelError::TooLong {
            row: 1,
            tokens: 9,
            limit: 8
        })
    ));
    let sequences = [(vec![1, 29], vec![3])];
    let mut never = |_: PackedScores| unreachable!("the rows are refused");
    let id = policy.accumulate(&rows(&sequences), &all, 1.0, false, &mut never);
    assert!(matches!(
        id,
        Err(ModelError::TokenId {
            row: 0,
            id: 29,
            limit: 29
        })
    ));
    let sequences = [(vec![], vec![3])];
    let empty = policy.score(&rows(&sequences), 1.0, Extras::NONE);
    assert!(matches!(empty, Err(ModelError::EmptyPrompt { row: 0 })));
}

#[test]
fn bf16_weights_change_by_steps_smaller_than_their_spacing() {
    let config = OptimizerConfig {
        learning_rate: 1e-4,
        weight_decay: 0.0,
        ..OptimizerConfig::default()
    };
    let toy = Toy::new(29, 12, 64).cast(DType::BF16);
    let mut policy = Policy::new(toy, Some(config)).expect("valid settings");
    let sequences = sequences(&[(3, 8)], 29);
    let rows = rows(&sequences);
    let mut step = || {
        policy
            .accumulate(&rows, &all, 1.0, false, &mut loss)
            .expect("finite");
        policy.optimizer_step().expect("finite");
        policy.module().gain.val()
    };
    // Around 1 the spacing of bf16 is 1/256 above and 1/512 below.
    let first = step();
    assert_eq!(first.dtype(), DType::BF16);
    assert_eq!(values(first.cast(DType::F32)), vec![1.0; 12]);
    let last = (0..60).map(|_| step()).last().expect("steps were taken");
    let moved = values(last.cast(DType::F32))
        .iter()
        .filter(|x| **x != 1.0)
        .count();
    assert!(moved > 6, "only {moved} of 12 changed");
}

/// Weights of a decoder, in f32.
fn weights(decoder: &Decoder) -> Vec<Vec<f32>> {
    let mut found = Vec::new();
    visit_parameters(decoder, |_, _, read| {
        let data = read().convert_dtype(DType::F32);
        found.push(data.iter::<f32>().collect());
    });
    found
}

#[test]
fn a_bf16_decoder_is_saved_from_the_optimisers_f32_weights() {
    let device = Device::flex();
    let config = preset("tiny").expect("a preset");
    let decoder = cast(Decoder::random(config, 3, &device), DType::BF16);
    let settings = OptimizerConfig {
        learning_rate: 1e-4,
        ..OptimizerConfig::default()
    };
    let mut policy = Policy::new(decoder, Some(settings)).expect("valid settings");
    let sequences = sequences(&[(3, 8), (2, 5)], 512);
    let rows = rows(&sequences);
    for _ in 0..3 {
        policy
            .accumulate(&rows, &all, 1.0, false, &mut loss)
            .expect("finite");
        policy.optimizer_step().expect("finite");
    }
    let own = weights(policy.module());
    let scratch = tempfile::tempdir().expect("a folder");
    let saved = |policy: &mut Policy<Decoder>, name: &str, dtype| {
        let dir = scratch.path().join(name);
        let module = policy.trained.module.as_mut().expect("present");
        module.save_dtype = dtype;
        policy.save(&dir).expect("saved");
        weights(&Decoder::load(&dir, &device).expect("a folder"))
    };
    // A folder in f32 has the trained weights: more precise than bf16, and equal to the module's own after rounding.
    let trained = saved(&mut policy, "f32", SaveDType::F32);
    assert_ne!(trained, own);
    let rounded = |values: &Vec<f32>| -> Vec<f32> {
        values
            .iter()
            .map(|value| half::bf16::from_f32(*value).to_f32())
            .collect()
    };
    assert_eq!(trained.iter().map(rounded).collect::<Vec<_>>(), own);
    assert_eq!(saved(&mut policy, "bf16", SaveDType::BF16), own);
    // A snapshot restores the f32 weights too.
    let snapshot = policy.snapshot();
    policy
        .accumulate(&rows, &all, 1.0, false, &mut loss)
        .expect("finite");
    policy.optimizer_step().expect("finite");
    assert_ne!(saved(&mut policy, "later", SaveDType::F32), trained);
    assert!(policy.restore(snapshot.as_ref()));
    assert_eq!(saved(&mut policy, "again", SaveDType::F32), trained);
    // Before the first step there are only the module's own weights.
    let fresh = cast(
        Decoder::load(&scratch.path().join("f32"), &device).expect("a folder"),
        DType::BF16,
    );
    let mut untrained = Policy::new(fresh, None).expect("no settings");
    assert_eq!(saved(&mut untrained, "untrained", SaveDType::F32), own);
}

#[test]
fn only_the_policy_owns_its_weights_after_training() {
    struct Unique;
    impl burn::module::ModuleMapper for Unique {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<Tensor<D>>,
        ) -> burn::module::Param<Tensor<D>> {
            param.map(|weight| {
                assert!(weight.can_mut(), "a step would copy this weight");
                weight
            })
        }
    }
    let sequences = sequences(&[(3, 8), (5, 2)], 29);
    let rows = rows(&sequences);
    let mut policy = trained(Toy::new(29, 12, 64));
    for _ in 0..2 {
        policy
            .score(&rows, 1.0, Extras::ENTROPIES)
            .expect("valid rows");
        policy
            .accumulate(&rows, &all, 1.0, true, &mut loss)
            .expect("finite");
        let trained = &mut policy.trained;
        trained.module = trained.module.take().map(|module| module.map(&mut Unique));
        policy.optimizer_step().expect("finite");
    }
}

#[test]
fn rollouts_report_the_log_probs_that_scoring_computes() {
    let policy = frozen(Toy::new(29, 12, 64));
    let key = |row| DrawKey {
        seed: 7,
        purpose: Purpose::Rollout,
        step: 0,
        row,
        attempt: 0,
    };
    let requests: Vec<_> = (0..4)
        .map(|row| RolloutRequest {
            prompt: vec![1 + row as u32, 5],
            key: key(row),
            max_new_tokens: 6,
        })
        .collect();
    for temperature in [0.0, 0.7, 1.0] {
        let settings = SamplingSettings {
            temperature,
            ..SamplingSettings::default()
        };
        let mut outputs = vec![None; requests.len()];
        policy
            .generate(&requests, &settings, &mut |index, output| {
                outputs[index] = Some(output);
                Ok(())
            })
            .expect("valid requests");
        for (request, output) in requests.iter().zip(outputs) {
            let output = output.expect("every request is answered");
            let row = ScoreRow {
                prompt: &request.prompt,
                response: &output.tokens,
            };
            let scores = policy
                .score(&[row], temperature, Extras::NONE)
                .expect("valid rows");
            close(&output.log_probs, &scores[0].log_probs, ROUNDING);
        }
    }
}
