//! Properties that hold for every registered estimator, loss and token filter: a new one is covered by its line in the
//! registry.
//!
//! 1 observations have no effect · 2 nor do empty rows · 3 nor does the division of a mini-batch · 4 nor the order of
//! rows · 5 nor the positions of observations · 6 on policy the ratio is 1 · 7, 8 centring and leave-one-out · 9 the KL
//! estimators · 10 whitening · 11 equal rewards carry no signal · 12 resuming continues with the same bits. The same
//! for every preset of the rollout correction.

#![expect(
    clippy::disallowed_methods,
    reason = "tests compare with the standard library's functions within a tolerance"
)]

mod advantages;
mod resume;
mod rollout_correction;
mod rows;

mod offline;

mod preferences;

use burn::tensor::{DType, Device, Tensor, TensorData};
use proptest::prelude::*;
use verl_algos::kl::{KlEstimator, KlEstimatorName};
use verl_algos::losses::{
    MetricSum, OTHER_LOSSES, Objective, POLICY_LOSSES, TOKEN_FILTERS, TokenFilter, TokenLoss,
};
use verl_algos::{Aggregation, AggregationName, Counts, MicroBatch, MiniBatch, Ragged, masked};

/// Rounding differences between orders of summation.
const TOLERANCE: f64 = 1e-9;

#[track_caller]
fn close(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        let bound = TOLERANCE * e.abs().max(1.0);
        assert!((g - e).abs() <= bound, "{got:?} differs from {expected:?}");
    }
}

/// Whether a gradient matches a slope of finite differences, up to a share of it if it is above 1: the steps leave an
/// error.
fn is_slope(grad: f64, slope: f64, share: f64) -> bool {
    (slope - grad).abs() < share * grad.abs().max(1.0)
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
            let kl = kl_estimator(name);
            prop_assert!(kl.value(delta, 0.0) >= 0.0);
            prop_assert_eq!(kl.value(0.3, 0.3), 0.0);
        }
    }
}

fn kl_estimator(name: &str) -> KlEstimator {
    name.parse::<KlEstimatorName>().unwrap().into()
}

#[test]
fn estimators_average_to_the_true_kl() {
    // Expectation over a small vocabulary, exactly: k1 and the unclamped k3 are unbiased.
    let (p, q) = ([0.5f64, 0.3, 0.2], [0.2f64, 0.5, 0.3]);
    let expectation = |name: &str| -> f64 {
        let kl = kl_estimator(name);
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
        .prop_filter("at least one token", |lengths| {
            lengths.iter().any(|n| *n > 0)
        })
        .prop_flat_map(|lengths| {
            let each = lengths.iter().enumerate();
            let rows: Vec<usize> = each.flat_map(|(b, &n)| std::iter::repeat_n(b, n)).collect();
            let n = rows.len();
            let column = move |range: std::ops::Range<f64>| prop::collection::vec(range, n);
            (
                (Just(rows), Just(lengths.len())),
                prop::array::uniform4(column(-3.0..-0.01)),
                prop::array::uniform3(column(-2.0..2.0)),
                prop::array::uniform2(column(0.0..2.0)),
                column(0.0..1.0),
            )
        })
        .prop_map(|((rows, num_rows), log_probs, reals, positive, draws)| {
            let [log_probs, old, reference, sampled] = log_probs;
            let [advantages, old_values, returns] = reals;
            let [weights, entropies] = positive;
            let batch = MiniBatch {
                counts: Counts::declared(rows.len(), num_rows),
                old_log_probs: Some(old),
                advantages: Some(advantages),
                ref_log_probs: Some(reference),
                rollout_weights: Some(weights),
                rollout_log_probs: Some(sampled),
                current_log_probs: Some(log_probs.clone()),
                current_entropies: Some(entropies.clone()),
                draws: Some(draws),
                old_values: Some(old_values),
                returns: Some(returns),
                rows,
                ..MiniBatch::default()
            };
            Tokens {
                batch,
                log_probs,
                entropies,
            }
        })
}

/// Every column of a mini-batch; a new one has to be listed here.
fn columns(batch: &mut MiniBatch) -> Vec<&mut Vec<f64>> {
    let MiniBatch {
        rows: _,
        counts: _,
        old_log_probs,
        advantages,
        ref_log_probs,
        rollout_weights,
        rollout_log_probs,
        current_log_probs,
        current_entropies,
        draws,
        old_values,
        returns,
        preferences: _,
    } = batch;
    let columns = [
        old_log_probs,
        advantages,
        ref_log_probs,
        rollout_weights,
        rollout_log_probs,
        current_log_probs,
        current_entropies,
        draws,
        old_values,
        returns,
    ];
    columns.into_iter().flatten().collect()
}

fn losses() -> impl Iterator<Item = Box<dyn TokenLoss>> {
    POLICY_LOSSES
        .iter()
        .chain(OTHER_LOSSES)
        .map(|(_, make)| make())
}

/// Every loss with every aggregation, with all its tokens and with those that every filter keeps.
fn objectives(coef: f64) -> Vec<(&'static str, Objective)> {
    let filters = || -> Vec<Box<dyn TokenFilter>> {
        let each = TOKEN_FILTERS.iter().map(|(name, make)| (name, make()));
        each.map(|(name, filter)| {
            assert_eq!(filter.name(), *name);
            filter
        })
        .collect()
    };
    let mut objectives = Vec::new();
    for aggregation in aggregations() {
        for (name, make) in POLICY_LOSSES.iter().chain(OTHER_LOSSES) {
            let objective = || Objective::new(aggregation);
            objectives.push((*name, objective().with_boxed(coef, make())));
            let filtered = objective().with_boxed_filters(coef, make(), filters());
            objectives.push((*name, filtered));
        }
    }
    objectives
}

fn aggregations() -> impl Iterator<Item = Aggregation> {
    let named = |name: &AggregationName| Aggregation::named(*name, Some(7.0)).unwrap();
    AggregationName::ALL.iter().map(named)
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

/// Loss, gradients with respect to log-probs and entropies, and metrics, with the rows divided into `parts`.
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
            values: Some(log_probs.clone()),
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
        .find(|m| m.name() == name)
        .map_or(0.0, MetricSum::value)
}

/// Every metric with the same value, to rounding.
fn same_metrics(
    loss: &str,
    got: &[MetricSum],
    expected: &[MetricSum],
) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), expected.len());
    for m in expected {
        let own = got.iter().find(|own| own.id == m.id);
        let own = own.map_or(f64::NAN, MetricSum::value);
        let same = (own - m.value()).abs() < TOLERANCE * m.value().abs().max(1.0);
        prop_assert!(
            same,
            "{} {}: {} differs from {}",
            loss,
            m.name(),
            own,
            m.value()
        );
    }
    Ok(())
}

/// Packed tokens as rows, with an observation of `junk` after some, and at the start of every other row.
fn ragged(
    column: &[f64],
    rows: &[usize],
    num_rows: usize,
    after: &[bool],
    junk: f64,
) -> Ragged<f64> {
    let row = |b: usize| -> Vec<f64> {
        let mut row = vec![junk; b % 2];
        for t in (0..rows.len()).filter(|t| rows[*t] == b) {
            row.push(column[t]);
            row.extend(after[t].then_some(junk));
        }
        row
    };
    Ragged::from_rows((0..num_rows).map(row))
}

/// Gradient of a policy loss at ratio 1 under `seq-mean-token-mean`: −A/(L_b B) for losses with a ratio per token, and
/// with the row's mean advantage for losses with a ratio per row. The ratio of an entire response changes with each of
/// its tokens, so RLOO's gradient lacks the 1/L_b.
fn on_policy_gradient(name: &str, batch: &MiniBatch) -> Vec<f64> {
    let advantages = batch.advantages.as_deref().unwrap();
    let lengths = batch.row_lengths();
    let means = masked::row_means(advantages, &batch.rows, lengths.len()).unwrap();
    let num_rows = lengths.iter().filter(|n| **n > 0).count() as f64;
    let each = advantages.iter().zip(&batch.rows);
    each.map(|(a, &b)| match name {
        "gmpo" | "trl_gspo" => -means[b] / lengths[b] as f64 / num_rows,
        "trl_rloo" => -means[b] / num_rows,
        _ => -a / lengths[b] as f64 / num_rows,
    })
    .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn losses_do_not_depend_on_the_cut((tokens, cuts) in tokens().prop_flat_map(|tokens| {
        let rows = tokens.batch.counts.sequences.unwrap();
        (Just(tokens), prop::collection::vec(0usize..3, rows))
    })) {
        let part = |p| (0..cuts.len()).filter(|b| cuts[*b] == p).collect();
        let cut = [part(0), part(1), part(2)];
        let single: Vec<Vec<usize>> = (0..cuts.len()).map(|b| vec![b]).collect();
        for (name, objective) in objectives(0.7) {
            let (value, grad, metrics) = evaluate(&tokens, &objective, &whole(&tokens));
            for parts in [&cut[..], &single[..]] {
                let (cut_value, cut_grad, cut_metrics) = evaluate(&tokens, &objective, parts);
                close(&[cut_value], &[value]);
                close(&cut_grad, &grad);
                same_metrics(name, &cut_metrics, &metrics)?;
            }
        }
    }

    #[test]
    fn losses_do_not_depend_on_the_order_of_rows(tokens in tokens()) {
        let last = tokens.batch.counts.sequences.unwrap() - 1;
        let mut reversed = tokens.clone();
        reversed.batch.rows = tokens.batch.rows.iter().rev().map(|b| last - b).collect();
        columns(&mut reversed.batch).into_iter().for_each(|column| column.reverse());
        reversed.log_probs.reverse();
        reversed.entropies.reverse();
        for (name, objective) in objectives(1.0) {
            let (value, grad, metrics) = evaluate(&tokens, &objective, &whole(&tokens));
            let (other, mut other_grad, other_metrics) = evaluate(&reversed, &objective, &whole(&reversed));
            close(&[other], &[value]);
            let n = tokens.log_probs.len();
            other_grad[..n].reverse();
            other_grad[n..].reverse();
            close(&other_grad, &grad);
            same_metrics(name, &other_metrics, &metrics)?;
        }
    }

    #[test]
    fn empty_rows_change_nothing(tokens in tokens()) {
        // With declared counts, rows without action tokens may be anywhere: they only shift the row numbers.
        let mut shifted = tokens.clone();
        shifted.batch.rows = tokens.batch.rows.iter().map(|b| 2 * b + 1).collect();
        for (_, objective) in objectives(1.0) {
            let plain = evaluate(&tokens, &objective, &whole(&tokens));
            let other = evaluate(&shifted, &objective, &whole(&shifted));
            prop_assert_eq!(plain, other);
        }
    }

    #[test]
    fn losses_ignore_observations(
        (tokens, after) in tokens().prop_flat_map(|tokens| {
            let n = tokens.log_probs.len();
            (Just(tokens), prop::collection::vec(any::<bool>(), n))
        }),
        junk in prop::sample::select(vec![f64::NAN, f64::INFINITY, -1e10]),
    ) {
        let mut packed = tokens.clone();
        let rows = tokens.batch.rows.clone();
        let num_rows = tokens.batch.counts.sequences.unwrap();
        let with_observations = |column: &[f64]| ragged(column, &rows, num_rows, &after, junk);
        let ones = vec![1.0; rows.len()];
        let actions = ragged(&ones, &rows, num_rows, &after, 0.0).map(|_, _, m| m == 1.0);
        packed.batch.rows = actions.packed_rows();
        let others = [&mut packed.log_probs, &mut packed.entropies];
        for column in columns(&mut packed.batch).into_iter().chain(others) {
            *column = with_observations(column).select("column", &actions).unwrap();
        }
        for (name, objective) in objectives(1.0) {
            let plain = evaluate(&tokens, &objective, &whole(&tokens));
            let other = evaluate(&packed, &objective, &whole(&packed));
            prop_assert!(plain.0.is_finite() && plain.1.iter().all(|g| g.is_finite()), "{}", name);
            prop_assert_eq!(plain, other);
        }
    }

    #[test]
    fn on_policy_the_ratio_is_1_and_all_share_a_gradient(mut tokens in tokens()) {
        tokens.batch.old_log_probs = Some(tokens.log_probs.clone());
        tokens.batch.rollout_weights = None;
        tokens.batch.counts = Counts::LOCAL;
        for (name, make) in POLICY_LOSSES {
            let objective = Objective::new(Aggregation::SeqMeanTokenMean).with_boxed(1.0, make());
            let (_, grad, metrics) = evaluate(&tokens, &objective, &whole(&tokens));
            let expected = on_policy_gradient(name, &tokens.batch);
            let left_out = grad.iter().zip(&expected).filter(|(g, e)| **g == 0.0 && **e != 0.0).count();
            let left_out = left_out as f64 / expected.len() as f64;
            if *name == "clip_cov" {
                // The loss that leaves tokens out by a rule other than the ratio.
                prop_assert!((metric(&metrics, "pg_clipfrac") - left_out).abs() < TOLERANCE);
                let kept = grad.iter().zip(&expected).filter(|(g, _)| **g != 0.0);
                let (grad, expected): (Vec<f64>, Vec<f64>) = kept.unzip();
                close(&grad, &expected);
                continue;
            }
            close(&grad[..expected.len()], &expected);
            let clipped = metrics.iter().filter(|m| m.name().contains("clip"));
            for metric in clipped.chain(metrics.iter().filter(|m| m.name() == "ppo_kl")) {
                prop_assert_eq!(metric.value(), 0.0, "{} {}", name, metric.name());
            }
        }
    }

    #[test]
    fn gradients_are_those_of_finite_differences(tokens in tokens(), at in any::<prop::sample::Index>()) {
        const STEP: f64 = 1e-6;
        let at = at.index(tokens.log_probs.len());
        for loss in losses() {
            // A detached ratio makes the gradient differ from that of the value, on purpose.
            if matches!(loss.name(), "cispo_loss" | "dppo_kl_loss" | "dppo_tv_loss" | "gspo_loss" | "vespo_loss") {
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
            let near = slopes.iter().any(|slope| is_slope(grad[at], *slope, 1e-4));
            prop_assert!(near, "{}: {} differs from {:?}", name, grad[at], slopes);
        }
    }
}
