use burn::module::{Module, Param};
use burn::tensor::{Int, TensorData};

use super::*;
use crate::model::{ModelInterface, ParameterGroup};
use crate::optim::{GradientAccumulator, Schedule, TrainableParameters};
use crate::toy::{Toy, bits, close, numbers, rows, sequences};

/// Rounding of f32 values of size 1 under two orders of addition.
const ROUNDING: f32 = 2e-5;

/// A toy with a head of one number.
#[derive(Module, Debug)]
struct ToyValues {
    toy: Toy,
    head: Param<Tensor<1>>,
}

impl ToyValues {
    fn new(vocab: usize, width: usize, max_tokens: usize) -> Self {
        let head = TensorData::new(numbers(width, 9), [width]);
        ToyValues {
            toy: Toy::new(vocab, width, max_tokens),
            head: Param::from_tensor(Tensor::from_data(head, &Device::flex())),
        }
    }
}

impl ValueInterface for ToyValues {
    fn vocab_size(&self) -> usize {
        self.toy.vocab_size()
    }

    fn max_tokens(&self) -> usize {
        self.toy.max_tokens()
    }

    fn values(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let head = self.head.val().unsqueeze::<3>();
        (self.toy.hidden(ids) * head).sum_dim(2).squeeze_dim(2)
    }

    fn parameter_group(&self, _name: &str, rank: usize) -> ParameterGroup {
        ParameterGroup::of_rank(rank)
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        ModelInterface::save(&self.toy, dir)
    }
}

fn frozen(model: ToyValues) -> Critic<ToyValues> {
    Critic::new(model, None).expect("a frozen model has no settings")
}

fn trained(model: ToyValues) -> Critic<ToyValues> {
    let config = OptimizerConfig {
        learning_rate: 1e-2,
        schedule: Schedule::Constant { warmup_steps: 2 },
        ..OptimizerConfig::default()
    };
    Critic::new(model, Some(config)).expect("valid settings")
}

fn all(_row: usize, _token: usize) -> bool {
    true
}

/// Σ (1 + row) (V − 1)².
fn loss(packed: PackedValues) -> Tensor<1> {
    let weights: Vec<f32> = packed.rows.iter().map(|&row| 1.0 + row as f32).collect();
    let weights = Tensor::<1>::from_data(weights.as_slice(), &packed.values.device());
    let error = packed.values - 1.0;
    (error.clone() * error * weights).sum()
}

/// Σ s² − s₀, of the scores.
fn score_loss(scores: Tensor<1>) -> Tensor<1> {
    (scores.clone() * scores.clone()).sum() - scores.slice(0..1)
}

/// Values of all positions of a single row without padding: hidden states times head.
fn plain(model: &ToyValues, row: &ScoreRow<'_>) -> Tensor<1> {
    let ids: Vec<i32> = [row.prompt, row.response]
        .concat()
        .iter()
        .map(|&id| id as i32)
        .collect();
    let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &model.head.val().device());
    let hidden = model.toy.hidden(ids.unsqueeze::<2>());
    let [_, s, d] = hidden.dims();
    let head = model.head.val().reshape([d, 1]);
    hidden.reshape([s, d]).matmul(head).reshape([s])
}

/// Values of the states in which the response tokens are chosen.
fn plain_values(model: &ToyValues, row: &ScoreRow<'_>) -> Tensor<1> {
    let first = row.prompt.len() - 1;
    plain(model, row).slice(first..first + row.response.len())
}

fn plain_score(model: &ToyValues, row: &ScoreRow<'_>) -> Tensor<1> {
    let last = row.prompt.len() + row.response.len() - 1;
    plain(model, row).slice(last..last + 1)
}

fn numbers_of(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().iter().collect()
}

fn gradients(critic: &Critic<ToyValues>) -> Vec<Vec<f32>> {
    let training = critic.trained.training.as_ref().expect("a trained critic");
    let sums = training.accumulator.sums().iter();
    sums.map(|sum| sum.clone().map(numbers_of).unwrap_or_default())
        .collect()
}

#[test]
fn values_match_those_of_each_single_unpadded_sequence() {
    let critic = frozen(ToyValues::new(29, 12, 64));
    let sequences = sequences(&[(1, 1), (5, 9), (3, 0), (20, 30), (2, 7)], 29);
    let rows = rows(&sequences);
    let values = critic.values(&rows).expect("valid rows");
    let scores = critic.scores(&rows).expect("valid rows");
    assert_eq!(scores.len(), rows.len());
    for ((row, values), score) in rows.iter().zip(&values).zip(&scores) {
        if row.response.is_empty() {
            assert!(values.is_empty());
        } else {
            let expected = numbers_of(plain_values(critic.module(), row));
            close(values, &expected, ROUNDING);
        }
        let expected = numbers_of(plain_score(critic.module(), row));
        close(&[*score], &expected, ROUNDING);
    }
}

#[test]
fn a_value_is_the_score_of_the_tokens_before_it() {
    let critic = frozen(ToyValues::new(29, 12, 64));
    let sequences = sequences(&[(5, 9)], 29);
    let row = rows(&sequences)[0];
    let values = critic.values(&[row]).expect("a valid row");
    let states: Vec<_> = (0..9)
        .map(|token| ScoreRow {
            response: &row.response[..token],
            ..row
        })
        .collect();
    let scores = critic.scores(&states).expect("valid rows");
    close(&values[0], &scores, ROUNDING);
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let critic = frozen(ToyValues::new(331, 48, 300));
    let lengths: Vec<_> = (0..64)
        .map(|i| (1 + i * 13 % 70, 1 + i * 37 % 190))
        .collect();
    let sequences = sequences(&lengths, 331);
    let rows = rows(&sequences);
    let reversed: Vec<_> = rows.iter().rev().copied().collect();
    let values = critic.values(&rows).expect("valid rows");
    let backwards = critic.values(&reversed).expect("valid rows");
    let scores = critic.scores(&rows).expect("valid rows");
    let scores_backwards = critic.scores(&reversed).expect("valid rows");
    for (i, row) in rows.iter().enumerate() {
        let alone = critic.values(&[*row]).expect("a valid row");
        assert_eq!(bits(&alone[0]), bits(&values[i]), "row {i}");
        assert_eq!(bits(&alone[0]), bits(&backwards[63 - i]), "row {i}");
        let alone = critic.scores(&[*row]).expect("a valid row");
        assert_eq!(bits(&alone), bits(&scores[i..=i]), "row {i}");
        assert_eq!(bits(&alone), bits(&scores_backwards[63 - i..=63 - i]));
    }
}

#[test]
fn threads_change_no_bit() {
    let sequences = sequences(&[(40, 90), (100, 60), (9, 150)], 700);
    let run = || {
        let mut critic = trained(ToyValues::new(700, 96, 256));
        let rows = rows(&sequences);
        let values = critic.values(&rows).expect("valid rows");
        critic
            .accumulate(&rows, &all, &mut loss)
            .expect("a finite loss");
        critic
            .accumulate_scores(&rows, &mut score_loss)
            .expect("a finite loss");
        critic.optimizer_step().expect("finite gradients");
        (values, critic.weights_hash())
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

/// Checks that the accumulated gradients match those of `expected`, a loss composed on the differentiable model.
#[track_caller]
fn check_gradients(
    critic: &Critic<ToyValues>,
    value: f64,
    expected: impl FnOnce(&ToyValues) -> Tensor<1>,
) {
    let model = critic.module().clone().train();
    let expected = expected(&model);
    let composed = numbers_of(expected.clone().inner())[0];
    assert!(
        (value as f32 - composed).abs() < 1e-3,
        "{value}, {composed}"
    );
    let parameters = TrainableParameters::grouped(&model, &|name, rank| {
        ValueInterface::parameter_group(&model, name, rank)
    });
    let names: Vec<_> = parameters.iter().map(|p| p.name.as_str()).collect();
    let all = [
        "toy.embedding",
        "toy.query",
        "toy.value",
        "toy.gain",
        "head",
    ];
    assert_eq!(names, all);
    let mut collected = GradientAccumulator::default();
    collected
        .add(&parameters, &model, expected.backward())
        .expect("finite gradients");
    for (got, expected) in gradients(critic).iter().zip(collected.sums()) {
        let expected = expected.clone().map(numbers_of).unwrap_or_default();
        assert!(expected.iter().any(|g| *g != 0.0));
        close(got, &expected, 1e-3);
    }
}

#[test]
fn gradients_match_the_composed_loss_over_selected_tokens() {
    let sequences = sequences(&[(3, 8), (6, 2), (2, 5), (1, 11)], 29);
    let rows = rows(&sequences);
    // No token of row 1, and not the last ones of row 3.
    let select = |row: usize, token: usize| row != 1 && (row != 3 || token < 4) && token % 3 != 1;
    let mut critic = trained(ToyValues::new(29, 12, 64));
    let value = critic
        .accumulate(&rows, &select, &mut |packed| {
            assert_eq!(packed.rows, [0, 0, 0, 0, 0, 2, 2, 2, 3, 3, 3]);
            loss(packed)
        })
        .expect("a finite loss");
    check_gradients(&critic, value, |model| {
        let losses = rows.iter().enumerate().map(|(i, row)| {
            let chosen: Vec<f32> = (0..row.response.len())
                .map(|token| f32::from(u8::from(select(i, token))))
                .collect();
            let error = plain_values(model, row) - 1.0;
            let chosen = Tensor::<1>::from_data(chosen.as_slice(), &error.device());
            (error.clone() * error * chosen).sum() * (1.0 + i as f32)
        });
        losses.reduce(|a, b| a + b).expect("rows")
    });
}

#[test]
fn gradients_of_scores_match_the_composed_loss() {
    let sequences = sequences(&[(3, 8), (6, 0), (2, 5), (1, 11)], 29);
    let rows = rows(&sequences);
    let mut critic = trained(ToyValues::new(29, 12, 64));
    let value = critic
        .accumulate_scores(&rows, &mut score_loss)
        .expect("a finite loss");
    check_gradients(&critic, value, |model| {
        let scores = rows.iter().map(|row| plain_score(model, row));
        score_loss(Tensor::cat(scores.collect(), 0))
    });
}

#[test]
fn gradients_match_finite_differences() {
    const STEP: f32 = 1e-2;
    let sequences = sequences(&[(3, 4), (2, 6)], 29);
    let rows = rows(&sequences);
    let model = ToyValues::new(29, 12, 64);
    let mut critic = trained(model.clone());
    critic
        .accumulate(&rows, &all, &mut loss)
        .expect("a finite loss");
    critic
        .accumulate_scores(&rows, &mut score_loss)
        .expect("a finite loss");
    let grads = gradients(&critic);
    let total = |model: ToyValues| {
        let mut critic = trained(model);
        let values = critic.accumulate(&rows, &all, &mut loss).expect("finite");
        values
            + critic
                .accumulate_scores(&rows, &mut score_loss)
                .expect("finite")
    };
    let moved = |weight: Tensor<1>, at: usize, step: f32| {
        let mut values = numbers_of(weight);
        values[at] += step;
        Param::from_tensor(Tensor::from_data(values.as_slice(), &Device::flex()))
    };
    for (at, (of_gain, of_head)) in grads[3].iter().zip(&grads[4]).enumerate() {
        let with_gain = |step| {
            let mut model = model.clone();
            model.toy.gain = moved(model.toy.gain.val(), at, step);
            total(model)
        };
        let with_head = |step| {
            let mut model = model.clone();
            model.head = moved(model.head.val(), at, step);
            total(model)
        };
        let slope = |of: &dyn Fn(f32) -> f64| (of(STEP) - of(-STEP)) as f32 / (2.0 * STEP);
        for (slope, grad) in [(slope(&with_gain), of_gain), (slope(&with_head), of_head)] {
            // f32 losses of about 50 leave an error of 1e-3 in a difference over 2e-2.
            assert!((slope - grad).abs() < 5e-3, "{at}: {grad}, {slope}");
        }
    }
}

#[test]
fn micro_batches_add_up() {
    let sequences = sequences(&[(3, 8), (6, 2), (2, 5)], 29);
    let rows = rows(&sequences);
    let mut sum = |packed: PackedValues| (packed.values.clone() * packed.values).sum();
    let mut scores = |scores: Tensor<1>| (scores.clone() * scores).sum();
    let [mut whole, mut parts] = [(); 2].map(|()| trained(ToyValues::new(29, 12, 64)));
    let mut expected = whole.accumulate(&rows, &all, &mut sum).expect("finite");
    expected += whole.accumulate_scores(&rows, &mut scores).expect("finite");
    let mut got = 0.0;
    for row in &rows {
        got += parts.accumulate(&[*row], &all, &mut sum).expect("finite");
        got += parts
            .accumulate_scores(&[*row], &mut scores)
            .expect("finite");
    }
    assert!((got - expected).abs() < 1e-4);
    for (got, expected) in gradients(&parts).iter().zip(&gradients(&whole)) {
        close(got, expected, 1e-4);
    }
}

#[test]
fn an_empty_selection_gives_no_gradient() {
    let mut critic = trained(ToyValues::new(29, 12, 64));
    let sequences = sequences(&[(3, 8), (4, 0)], 29);
    let rows = rows(&sequences);
    let mut never = |_: PackedValues| unreachable!("there are no values to compute a loss from");
    let nothing = critic.accumulate(&rows, &|_, _| false, &mut never);
    assert_eq!(nothing.ok(), Some(0.0));
    let mut never = |_: Tensor<1>| unreachable!("there are no values to compute a loss from");
    assert_eq!(critic.accumulate_scores(&[], &mut never).ok(), Some(0.0));
    let before = critic.weights_hash();
    assert_eq!(critic.optimizer_step().expect("nothing").grad_norm, 0.0);
    assert_eq!(critic.weights_hash(), before);
}

#[test]
fn non_finite_and_non_scalar_losses_are_refused() {
    let mut critic = trained(ToyValues::new(29, 12, 64));
    let sequences = sequences(&[(3, 8)], 29);
    let rows = rows(&sequences);
    critic.accumulate(&rows, &all, &mut loss).expect("finite");
    let sums = gradients(&critic);
    let error = critic
        .accumulate(&rows, &all, &mut |packed| (packed.values * 0.0).log().sum())
        .expect_err("not finite");
    let text = "loss is not finite (-inf); the weights are unchanged";
    assert_eq!(error.to_string(), text);
    let error = critic
        .accumulate_scores(&rows, &mut |scores| (scores * 0.0).sqrt().sum())
        .expect_err("not finite");
    let text = error.to_string();
    assert!(
        text.starts_with("gradient of `toy.embedding` is not finite"),
        "{text}"
    );
    let many = critic.accumulate(&rows, &all, &mut |packed| packed.values);
    assert!(matches!(many, Err(ModelError::LossShape { values: 8 })));
    assert_eq!(gradients(&critic), sums);
}

#[test]
fn a_step_repeats_from_a_snapshot() {
    let sequences = sequences(&[(3, 8), (6, 2)], 29);
    let rows = rows(&sequences);
    let step = |critic: &mut Critic<ToyValues>| {
        critic.accumulate(&rows, &all, &mut loss).expect("finite");
        critic.optimizer_step().expect("finite")
    };
    let mut critic = trained(ToyValues::new(29, 12, 64));
    let start = critic.weights_hash();
    step(&mut critic);
    let before = critic.weights_hash();
    assert_ne!(before, start);
    let snapshot = critic.snapshot();
    let first = (step(&mut critic), step(&mut critic), critic.weights_hash());
    assert!(critic.restore(snapshot.as_ref()));
    assert_eq!(
        (critic.weights_hash(), critic.optimizer_steps()),
        (before, 1)
    );
    let second = (step(&mut critic), step(&mut critic), critic.weights_hash());
    assert_eq!(first, second);
    assert!(!critic.restore(&0_u8));
    let other = frozen(ToyValues::new(29, 12, 64)).snapshot();
    assert!(!critic.restore(other.as_ref()));
}

#[test]
fn the_optimisers_state_is_saved_and_loaded() {
    let sequences = sequences(&[(3, 8)], 29);
    let rows = rows(&sequences);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("optimizer.safetensors");
    let step = |critic: &mut Critic<ToyValues>| {
        critic.accumulate(&rows, &all, &mut loss).expect("finite");
        critic.optimizer_step().expect("finite");
    };
    let mut critic = trained(ToyValues::new(29, 12, 64));
    step(&mut critic);
    critic.save_optimizer(&path).expect("a writable folder");
    let mut other = trained(critic.module().clone());
    other.load_optimizer(&path).expect("the same model");
    step(&mut critic);
    step(&mut other);
    assert_eq!(other.weights_hash(), critic.weights_hash());
}

#[test]
fn frozen_models_and_bad_rows_are_refused() {
    let sequences = sequences(&[(3, 8)], 29);
    let good = rows(&sequences);
    let mut critic = frozen(ToyValues::new(29, 12, 64));
    let refused = critic.accumulate(&good, &all, &mut loss);
    assert!(matches!(refused, Err(ModelError::Frozen)));
    let refused = critic.accumulate_scores(&good, &mut score_loss);
    assert!(matches!(refused, Err(ModelError::Frozen)));
    assert!(matches!(critic.optimizer_step(), Err(ModelError::Frozen)));

    let mut critic = trained(ToyValues::new(29, 12, 8));
    let long = critic.values(&good);
    assert!(matches!(long, Err(ModelError::TooLong { tokens: 11, .. })));
    let long = critic.accumulate(&good, &all, &mut loss);
    assert!(matches!(long, Err(ModelError::TooLong { limit: 8, .. })));
    let empty = [(vec![], vec![3])];
    let empty = critic.scores(&rows(&empty));
    assert!(matches!(empty, Err(ModelError::EmptyPrompt { row: 0 })));
    let unknown = [(vec![29], vec![3])];
    let unknown = critic.accumulate_scores(&rows(&unknown), &mut score_loss);
    assert!(matches!(unknown, Err(ModelError::TokenId { id: 29, .. })));
}
