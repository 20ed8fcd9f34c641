//! Properties that hold for every registered estimator and loss: a new one is covered by its line in the registry.
//!
//! 1 what lies on observations does not matter · 2 nor do empty rows · 3 nor how a mini-batch is cut · 4 nor the order of
//! rows · 5 nor where observations lie · 6 on policy the ratio is 1 · 7, 8 centring and leave-one-out · 9 the KL
//! estimators · 10 whitening · 11 equal rewards carry no signal. The same for every preset of the rollout correction.

#[path = "properties/advantages.rs"]
mod advantages;
#[path = "properties/rollout_correction.rs"]
mod rollout_correction;
#[path = "properties/rows.rs"]
mod rows;

#[path = "properties/offline.rs"]
mod offline;

#[path = "properties/preferences.rs"]
mod preferences;

use burn::tensor::{DType, Device, Tensor, TensorData};
use proptest::prelude::*;
use verl_algos::kl::KlEstimator;
use verl_algos::losses::{MetricSum, OTHER_LOSSES, Objective, POLICY_LOSSES, TokenLoss};
use verl_algos::{Aggregation, Counts, MicroBatch, MiniBatch, masked};

/// Rounding of another order of summation.
const TOLERANCE: f64 = 1e-9;

#[track_caller]
fn close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        let bound = TOLERANCE * e.abs().max(1.0);
        assert!((g - e).abs() <= bound, "{got:?} against {expected:?}");
    }
}

// ---- numbers

proptest! {
    #[test]
    fn whitened_numbers_have_mean_0_and_variance_1(values in prop::collection::vec(-1e3f64..1e3, 2..40)) {
        let variance = masked::variance(&values).unwrap();
        prop_assume!(variance > 1.0);
        let white = masked::whiten(&values).unwrap();
        prop_assert!(masked::mean(&white).abs() < 1e-6);
        prop_assert!((masked::variance(&white).unwrap() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn k2_and_k3_are_never_negative(delta in -50f64..50.0) {
        for name in ["k2", "k3", "k3_unclamped", "abs"] {
            let kl = KlEstimator::parse(name).unwrap();
            prop_assert!(kl.value(delta, 0.0) >= 0.0);
            prop_assert_eq!(kl.value(0.3, 0.3), 0.0);
        }
    }
}

#[test]
fn estimators_average_to_the_true_kl() {
    // Expectation over a small vocabulary, exactly: k1 and the unclamped k3 are unbiased.
    let (p, q) = ([0.5f64, 0.3, 0.2], [0.2f64, 0.5, 0.3]);
    let expectation = |name: &str| -> f64 {
        let kl = KlEstimator::parse(name).unwrap();
        let each = p.iter().zip(&q);
        each.map(|(p, q)| p * kl.value(p.ln(), q.ln())).sum()
    };
    let truth: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
    for name in ["k1", "k3", "k3_unclamped"] {
        assert!((expectation(name) - truth).abs() < 1e-12, "{name}");
    }
}

// ---- losses

/// A mini-batch, and the log-probs and entropies of its tokens.
#[derive(Debug, Clone)]
struct Tokens {
    batch: MiniBatch,
    log_probs: Vec<f64>,
    entropies: Vec<f64>,
}

fn tokens() -> impl Strategy<Value = Tokens> {
    let lengths = prop::collection::vec(0usize..5, 2..6);
    lengths
        .prop_filter("some token", |lengths| lengths.iter().any(|n| *n > 0))
        .prop_flat_map(|lengths| {
            let each = lengths.iter().enumerate();
            let rows: Vec<usize> = each.flat_map(|(b, &n)| std::iter::repeat_n(b, n)).collect();
            let n = rows.len();
            let column = move |range: std::ops::Range<f64>| prop::collection::vec(range, n);
            (
                (Just(rows), Just(lengths.len())),
                column(-3.0..-0.01),
                column(-3.0..-0.01),
                column(-2.0..2.0),
                column(-3.0..-0.01),
                column(0.0..2.0),
                column(0.0..2.0),
            )
        })
        .prop_map(
            |((rows, num_rows), log_probs, old, advantages, reference, weights, entropies)| {
                let counts = Counts::declared(rows.len(), num_rows);
                let batch = MiniBatch {
                    rows,
                    counts,
                    old_log_probs: Some(old),
                    advantages: Some(advantages),
                    ref_log_probs: Some(reference),
                    rollout_weights: Some(weights),
                    ..MiniBatch::default()
                };
                Tokens {
                    batch,
                    log_probs,
                    entropies,
                }
            },
        )
}

fn losses() -> impl Iterator<Item = Box<dyn TokenLoss>> {
    POLICY_LOSSES
        .iter()
        .chain(OTHER_LOSSES)
        .map(|(_, make)| make())
}

fn aggregations() -> impl Iterator<Item = Aggregation> {
    let parse = |name: &&str| Aggregation::parse(name, Some(7.0)).unwrap();
    Aggregation::NAMES.iter().map(parse)
}

fn tensor(values: Vec<f64>) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(
        TensorData::new(values, [len]),
        (&Device::flex(), DType::F64),
    )
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as::<f64>().unwrap()
}

/// Loss, gradients in log-probs and entropies, metrics, when the rows are cut at `parts`.
fn evaluate(
    tokens: &Tokens,
    objective: &Objective,
    parts: &[Vec<usize>],
) -> (f64, Vec<f64>, Vec<MetricSum>) {
    let prepared = objective.prepare(&tokens.batch).unwrap();
    let n = tokens.log_probs.len();
    let (mut loss, mut grads, mut metrics) = (0.0, vec![0.0; 2 * n], Vec::new());
    for part in parts {
        let own: Vec<usize> = (0..n)
            .filter(|t| part.contains(&tokens.batch.rows[*t]))
            .collect();
        let leaf = |values: &[f64]| {
            tensor(own.iter().map(|&t| values[t]).collect())
                .autodiff()
                .require_grad()
        };
        let (log_probs, entropies) = (leaf(&tokens.log_probs), leaf(&tokens.entropies));
        let micro = MicroBatch {
            entropies: Some(entropies.clone()),
            ..MicroBatch::new(own.clone(), log_probs.clone())
        };
        let partial = prepared.loss(&micro).unwrap();
        MetricSum::add_to(&mut metrics, partial.read_metrics().unwrap());
        let gradients = partial.loss.backward();
        for (offset, leaf) in [(0, log_probs), (n, entropies)] {
            if let Some(grad) = leaf.grad(&gradients) {
                own.iter()
                    .zip(read(grad))
                    .for_each(|(&t, g)| grads[offset + t] = g);
            }
        }
        loss += read(partial.loss)[0];
    }
    (loss, grads, metrics)
}

fn whole(tokens: &Tokens) -> Vec<Vec<usize>> {
    vec![tokens.batch.rows.clone()]
}

fn metric(metrics: &[MetricSum], name: &str) -> f64 {
    metrics
        .iter()
        .find(|m| m.name == name)
        .map_or(0.0, MetricSum::value)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn losses_do_not_depend_on_the_cut((tokens, cuts) in tokens().prop_flat_map(|tokens| {
        let rows = tokens.batch.counts.sequences.unwrap();
        (Just(tokens), prop::collection::vec(0usize..3, rows))
    })) {
        for aggregation in aggregations() {
            for loss in losses() {
                let name = loss.name();
                let objective = Objective::new(aggregation).with_boxed(0.7, loss);
                let (value, grad, metrics) = evaluate(&tokens, &objective, &whole(&tokens));
                let part = |p| (0..cuts.len()).filter(|b| cuts[*b] == p).collect();
                let cut = [part(0), part(1), part(2)];
                let single: Vec<Vec<usize>> = (0..cuts.len()).map(|b| vec![b]).collect();
                for parts in [&cut[..], &single[..]] {
                    let (cut_value, cut_grad, cut_metrics) = evaluate(&tokens, &objective, parts);
                    close(&[cut_value], &[value]);
                    close(&cut_grad, &grad);
                    for m in &metrics {
                        let got = metric(&cut_metrics, m.name);
                        prop_assert!((got - m.value()).abs() < TOLERANCE, "{} {}", name, m.name);
                    }
                }
            }
        }
    }

    #[test]
    fn losses_do_not_depend_on_the_order_of_rows(tokens in tokens()) {
        let last = tokens.batch.counts.sequences.unwrap() - 1;
        let mut reversed = tokens.clone();
        reversed.batch.rows = tokens.batch.rows.iter().rev().map(|b| last - b).collect();
        let columns = [
            &mut reversed.batch.old_log_probs,
            &mut reversed.batch.advantages,
            &mut reversed.batch.ref_log_probs,
            &mut reversed.batch.rollout_weights,
        ];
        columns.into_iter().flatten().for_each(|column| column.reverse());
        reversed.log_probs.reverse();
        reversed.entropies.reverse();
        for aggregation in aggregations() {
            for loss in losses() {
                let objective = Objective::new(aggregation).with_boxed(1.0, loss);
                let (value, grad, _) = evaluate(&tokens, &objective, &whole(&tokens));
                let (other, mut other_grad, _) = evaluate(&reversed, &objective, &whole(&reversed));
                close(&[other], &[value]);
                let n = tokens.log_probs.len();
                other_grad[..n].reverse();
                other_grad[n..].reverse();
                close(&other_grad, &grad);
            }
        }
    }

    #[test]
    fn empty_rows_change_nothing(tokens in tokens()) {
        // With declared counts, rows without action tokens may lie anywhere: they only shift the row numbers.
        let mut shifted = tokens.clone();
        shifted.batch.rows = tokens.batch.rows.iter().map(|b| 2 * b + 1).collect();
        for aggregation in aggregations() {
            for loss in losses() {
                let objective = Objective::new(aggregation).with_boxed(1.0, loss);
                let plain = evaluate(&tokens, &objective, &whole(&tokens));
                let other = evaluate(&shifted, &objective, &whole(&shifted));
                prop_assert_eq!(plain, other);
            }
        }
    }

    #[test]
    fn on_policy_the_ratio_is_1_and_all_share_a_gradient(mut tokens in tokens()) {
        tokens.batch.old_log_probs = Some(tokens.log_probs.clone());
        tokens.batch.rollout_weights = None;
        let advantages = tokens.batch.advantages.clone().unwrap();
        let lengths = tokens.batch.row_lengths();
        let rows = lengths.iter().filter(|n| **n > 0).count() as f64;
        tokens.batch.counts = Counts::LOCAL;
        let each = advantages.iter().zip(&tokens.batch.rows);
        let expected: Vec<f64> = each.map(|(a, &b)| -a / lengths[b] as f64 / rows).collect();
        for (_, make) in POLICY_LOSSES {
            let objective = Objective::new(Aggregation::SeqMeanTokenMean).with_boxed(1.0, make());
            let (_, grad, metrics) = evaluate(&tokens, &objective, &whole(&tokens));
            close(&grad[..expected.len()], &expected);
            for name in ["pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"] {
                prop_assert_eq!(metric(&metrics, name), 0.0);
            }
        }
    }

    #[test]
    fn gradients_are_those_of_finite_differences(tokens in tokens(), at in any::<prop::sample::Index>()) {
        const STEP: f64 = 1e-6;
        let at = at.index(tokens.log_probs.len());
        for loss in losses() {
            // A detached ratio makes the gradient another one than that of the value, on purpose.
            if matches!(loss.name(), "cispo_loss" | "gspo_loss") {
                continue;
            }
            let name = loss.name();
            let objective = Objective::new(Aggregation::SeqMeanTokenMean).with_boxed(1.0, loss);
            let (_, grad, _) = evaluate(&tokens, &objective, &whole(&tokens));
            let moved = |step: f64| {
                let mut tokens = tokens.clone();
                tokens.log_probs[at] += step;
                evaluate(&tokens, &objective, &whole(&tokens)).0
            };
            let slopes = [(moved(STEP) - moved(0.0)) / STEP, (moved(0.0) - moved(-STEP)) / STEP];
            // At a kink the two slopes differ, and the gradient is one of them.
            let near = slopes.iter().any(|slope| (slope - grad[at]).abs() < 1e-4);
            prop_assert!(near, "{}: {} against {:?}", name, grad[at], slopes);
        }
    }
}
