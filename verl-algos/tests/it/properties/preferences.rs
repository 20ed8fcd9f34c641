//! Properties of every preference loss, and of settings that no entry of the registry has.
//!
//! A mini-batch contains pairs: rows 2i and 2i + 1. Losses of unpaired rows read the same rows with a label each.

use burn::tensor::Tensor;
use proptest::prelude::*;
use verl_algos::losses::{
    Dpo, FDivergence, MetricSum, Objective, PREFERENCE_LOSSES, PreferenceLoss, PreferenceLossName,
    RowLoss,
};
use verl_algos::{Aggregation, Counts, CutUnit, MicroBatch, MiniBatch, Ragged};

use super::{TOLERANCE, close, is_slope, metric, read, tensor};

/// A mini-batch of pairs, and a model's outputs for its tokens.
#[derive(Debug, Clone)]
pub(crate) struct Pairs {
    batch: MiniBatch,
    log_probs: Vec<f64>,
    values: Vec<f64>,
    log_sum_sq_probs: Vec<f64>,
}

/// One row: a number of each kind for each token.
type Row = Vec<(f64, f64, f64, f64)>;

/// Two to four pairs of rows with one to four tokens, each with a label, each pair with a margin.
fn rows() -> impl Strategy<Value = (Vec<Row>, Vec<bool>, Vec<f64>)> {
    let token = (-3.0..-0.01, -3.0..-0.01, -2.0..2.0, -2.0..-0.01);
    let row = prop::collection::vec(token, 1..5).boxed();
    (2usize..5).prop_flat_map(move |num_pairs| {
        (
            prop::collection::vec(row.clone(), 2 * num_pairs),
            prop::collection::vec(any::<bool>(), 2 * num_pairs),
            prop::collection::vec(-1.0..1.0, num_pairs),
        )
    })
}

pub(crate) fn pairs() -> impl Strategy<Value = Pairs> {
    rows().prop_map(|(rows, desirable, margins)| Pairs::new(&rows, desirable, margins))
}

impl Pairs {
    fn new(rows: &[Row], desirable: Vec<bool>, margins: Vec<f64>) -> Pairs {
        let each = rows.iter().enumerate();
        let of_tokens = each.flat_map(|(b, row)| std::iter::repeat_n(b, row.len()));
        let tokens: Row = rows.concat();
        let mut batch = MiniBatch::new(of_tokens.collect());
        batch.counts = Counts::declared(tokens.len(), rows.len());
        batch.ref_log_probs = Some(tokens.iter().map(|t| t.1).collect());
        batch.preferences.desirable = Some(desirable);
        batch.preferences.margins = Some(margins);
        batch.preferences.kl_baseline = Some(0.3);
        batch.preferences.reward_shift = -0.2;
        let chosen = rows.iter().step_by(2).map(Vec::len);
        batch.preferences.num_chosen_tokens = Some(chosen.sum());
        Pairs {
            batch,
            log_probs: tokens.iter().map(|t| t.0).collect(),
            values: tokens.iter().map(|t| t.2).collect(),
            log_sum_sq_probs: tokens.iter().map(|t| t.3).collect(),
        }
    }

    fn num_rows(&self) -> usize {
        self.batch.counts.sequences.unwrap()
    }

    /// Log-probs and values of the tokens at `positions` as leaves, and the micro-batch that uses them.
    fn micro_batch(&self, positions: &[usize]) -> ([Tensor<1>; 2], MicroBatch) {
        let of = |column: &[f64]| tensor(positions.iter().map(|&t| column[t]).collect());
        let leaves = [&self.log_probs, &self.values].map(|c| of(c).autodiff().require_grad());
        let mut micro = MicroBatch::new(positions.to_vec(), leaves[0].clone());
        micro.values = Some(leaves[1].clone());
        micro.log_sum_sq_probs = Some(of(&self.log_sum_sq_probs));
        (leaves, micro)
    }

    /// Loss, gradients with respect to log-probs and values, and metrics, with the rows divided into `parts`.
    fn evaluate(&self, loss: &Objective, parts: &[Vec<usize>]) -> Evaluated {
        let prepared = loss.prepare(&self.batch).unwrap();
        let n = self.log_probs.len();
        let (mut loss, mut grads, mut metrics) = (0.0, vec![0.0; 2 * n], Vec::new());
        for part in parts {
            let own = |t: &usize| part.contains(&self.batch.rows[*t]);
            let own: Vec<usize> = (0..n).filter(own).collect();
            let (leaves, micro) = self.micro_batch(&own);
            let partial = prepared.loss(&micro).unwrap();
            MetricSum::add_to(&mut metrics, partial.read_metrics().unwrap());
            let gradients = partial.loss.backward();
            for (offset, leaf) in [0, n].into_iter().zip(&leaves) {
                if let Some(grad) = leaf.grad(&gradients) {
                    let each = own.iter().zip(read(grad));
                    each.for_each(|(&t, g)| grads[offset + t] = g);
                }
            }
            loss += read(partial.loss)[0];
        }
        (loss, grads, metrics)
    }

    pub(crate) fn whole(&self, loss: &Objective) -> Evaluated {
        self.evaluate(loss, std::slice::from_ref(&self.batch.rows))
    }
}

/// Loss, gradients, metrics.
pub(crate) type Evaluated = (f64, Vec<f64>, Vec<MetricSum>);

/// All registered losses, and DPO's with other settings.
fn losses() -> impl Iterator<Item = Box<dyn RowLoss>> {
    let beta = 0.7;
    let settings: [Dpo; 6] = [
        Dpo {
            ld_alpha: Some(0.3),
            ..Dpo::new(PreferenceLoss::Ipo)
        },
        Dpo {
            ld_alpha: Some(0.3),
            ..Dpo::new(PreferenceLoss::AOT)
        },
        Dpo {
            wpo: true,
            beta,
            ..Dpo::default()
        },
        Dpo {
            divergence: FDivergence::ForwardKl,
            ..Dpo::new(PreferenceLoss::AOT_UNPAIRED)
        },
        Dpo {
            divergence: FDivergence::JensenShannon,
            beta,
            ..Dpo::new(PreferenceLoss::ApoDown)
        },
        Dpo {
            divergence: FDivergence::Alpha { alpha: 0.5 },
            beta,
            ..Dpo::new(PreferenceLoss::NcaPair)
        },
    ];
    let registered = PREFERENCE_LOSSES.iter().map(|(name, make)| {
        let loss = make();
        assert_eq!(loss.name(), *name);
        loss
    });
    registered.chain(settings.map(|dpo| Box::new(dpo) as Box<dyn RowLoss>))
}

fn objective(loss: Box<dyn RowLoss>) -> Objective {
    Objective::new(Aggregation::default()).with_boxed_rows(0.7, loss)
}

/// All losses as objectives, by name.
pub(crate) fn objectives() -> impl Iterator<Item = (&'static str, Objective)> {
    losses().map(|loss| (loss.name(), objective(loss)))
}

/// The rows of each part, for parts of pairs.
fn parts(of_pairs: &[usize]) -> Vec<Vec<usize>> {
    let last = of_pairs.iter().max().copied().unwrap_or(0);
    let rows = |part: usize| {
        let own = (0..of_pairs.len()).filter(move |pair| of_pairs[*pair] == part);
        own.flat_map(|pair| [2 * pair, 2 * pair + 1]).collect()
    };
    (0..=last).map(rows).collect()
}

fn same(got: &Evaluated, expected: &Evaluated) {
    close(&[got.0], &[expected.0]);
    close(&got.1, &expected.1);
    for m in &expected.2 {
        let value = metric(&got.2, m.name());
        assert!((value - m.value()).abs() < TOLERANCE, "{}", m.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn preference_losses_do_not_depend_on_the_cut((pairs, cuts) in pairs().prop_flat_map(|pairs| {
        let num_pairs = pairs.num_rows() / 2;
        (Just(pairs), prop::collection::vec(0usize..3, num_pairs))
    })) {
        for (name, objective) in objectives() {
            let whole = pairs.whole(&objective);
            let single: Vec<usize> = (0..cuts.len()).collect();
            for cuts in [&cuts, &single] {
                let parts = parts(cuts);
                if objective.cut_unit() < CutUnit::MiniBatch || parts.len() == 1 {
                    same(&pairs.evaluate(&objective, &parts), &whole);
                    continue;
                }
                let (_, part) = pairs.micro_batch(&[0]);
                let refused = objective.prepare(&pairs.batch).unwrap().loss(&part);
                prop_assert!(refused.is_err(), "{}", name);
            }
        }
    }

    #[test]
    fn one_side_of_a_pair_is_not_a_micro_batch(pairs in pairs()) {
        let first: Vec<usize> = (0..pairs.batch.row_lengths()[0]).collect();
        for (name, objective) in objectives() {
            let (_, micro) = pairs.micro_batch(&first);
            let share = objective.prepare(&pairs.batch).unwrap().loss(&micro);
            prop_assert_eq!(share.is_ok(), objective.cut_unit() == CutUnit::Row, "{}", name);
        }
    }

    #[test]
    fn preference_losses_do_not_depend_on_the_order_of_pairs(((rows, labels, margins), order) in
        rows().prop_flat_map(|rows| {
            let order: Vec<usize> = (0..rows.2.len()).collect();
            (Just(rows), Just(order).prop_shuffle())
        })
    ) {
        let of_rows: Vec<usize> = order.iter().flat_map(|&p| [2 * p, 2 * p + 1]).collect();
        let shuffled: Vec<Row> = of_rows.iter().map(|&b| rows[b].clone()).collect();
        let shuffled = Pairs::new(
            &shuffled,
            of_rows.iter().map(|&b| labels[b]).collect(),
            order.iter().map(|&p| margins[p]).collect(),
        );
        let straight = Pairs::new(&rows, labels, margins);
        // Original positions of the shuffled tokens.
        let positions = |row: &usize| {
            let all = 0..straight.log_probs.len();
            all.filter(|&t| straight.batch.rows[t] == *row).collect::<Vec<_>>()
        };
        let places: Vec<usize> = of_rows.iter().flat_map(positions).collect();
        let n = places.len();
        for (_, objective) in objectives() {
            let mut expected = straight.whole(&objective);
            let both = places.iter().copied().chain(places.iter().map(|t| t + n));
            expected.1 = both.map(|t| expected.1[t]).collect();
            same(&shuffled.whole(&objective), &expected);
        }
    }

    #[test]
    fn pairs_without_tokens_change_nothing(pairs in pairs()) {
        // With declared counts, pairs of padding may be anywhere. Unpaired rows count by their labels instead.
        let mut padded = pairs.clone();
        padded.batch.rows = pairs.batch.rows.iter().map(|row| row / 2 * 4 + 2 + row % 2).collect();
        let margins = pairs.batch.preferences.margins.iter().flatten();
        padded.batch.preferences.margins = Some(margins.flat_map(|m| [9.0, *m]).collect());
        padded.batch.preferences.desirable = Some(vec![true; 2 * pairs.num_rows()]);
        for (_, objective) in objectives().filter(|(_, o)| o.cut_unit() != CutUnit::Row) {
            prop_assert_eq!(padded.whole(&objective), pairs.whole(&objective));
        }
    }

    #[test]
    fn rows_without_tokens_cost_unpaired_losses_a_constant(
        pairs in pairs(), after in 0usize..9, cuts in prop::collection::vec(0usize..2, 4)
    ) {
        // A row without tokens after any row: it has no gradient, and the shares still add up.
        let mut padded = pairs.clone();
        let after = after % (pairs.num_rows() + 1);
        padded.batch.rows = pairs.batch.rows.iter().map(|row| row + usize::from(*row >= after)).collect();
        padded.batch.preferences.margins = None;
        let labels = padded.batch.preferences.desirable.as_mut().unwrap();
        labels.insert(after, true);
        for (name, objective) in objectives().filter(|(_, o)| o.cut_unit() == CutUnit::Row) {
            let whole = padded.whole(&objective);
            let (loss, grad, _) = pairs.whole(&objective);
            close(&whole.1, &grad);
            // 1 − σ(−β z₀) over the declared number of rows, times the coefficient.
            let z0: f64 = if name == "kto" { 0.3 } else { 0.0 };
            let own = 0.7 / (1.0 + (-0.1 * z0).exp()) / pairs.num_rows() as f64;
            close(&[whole.0], &[loss + own]);
            let part = |row: &usize| cuts[row % cuts.len()];
            let rows = 0..pairs.num_rows() + 1;
            let parts: Vec<Vec<usize>> = (0..2)
                .map(|p| rows.clone().filter(|row| part(row) == p).collect())
                .collect();
            same(&padded.evaluate(&objective, &parts), &whole);
        }
    }

    #[test]
    fn preference_losses_ignore_observations(
        (rows, labels, margins) in rows(),
        junk in prop::sample::select(vec![f64::NAN, f64::INFINITY, -1e10]),
        actions in prop::collection::vec(any::<bool>(), 8),
    ) {
        // Rows with junk between their tokens, packed by their mask of actions.
        let is_action = |row: &Row| -> Vec<bool> {
            let spread = row.iter().zip(actions.iter().cycle());
            spread.flat_map(|(_, junk)| if *junk { vec![false, true] } else { vec![true] }).collect()
        };
        let mask = Ragged::<bool>::from_rows(rows.iter().map(is_action));
        let packed = |column: fn(&(f64, f64, f64, f64)) -> f64| {
            let spread = rows.iter().zip(mask.rows()).map(|(row, mask)| {
                let mut own = row.iter().map(column);
                let each = mask.iter().map(|m| if *m { own.next().unwrap() } else { junk });
                each.collect::<Vec<f64>>()
            });
            Ragged::<f64>::from_rows(spread).select("column", &mask).unwrap()
        };
        let clean = Pairs::new(&rows, labels, margins);
        let mut dirty = clean.clone();
        dirty.batch.rows = mask.packed_rows();
        dirty.batch.ref_log_probs = Some(packed(|t| t.1));
        dirty.log_probs = packed(|t| t.0);
        dirty.values = packed(|t| t.2);
        dirty.log_sum_sq_probs = packed(|t| t.3);
        for (_, objective) in objectives() {
            prop_assert_eq!(dirty.whole(&objective), clean.whole(&objective));
        }
    }

    #[test]
    fn only_the_last_value_of_a_row_is_read(pairs in pairs()) {
        let mut dirty = pairs.clone();
        for (token, value) in dirty.values.iter_mut().enumerate() {
            let row = pairs.batch.rows[token];
            if pairs.batch.rows.get(token + 1) == Some(&row) {
                *value = f64::NAN;
            }
        }
        for (_, objective) in objectives() {
            prop_assert_eq!(dirty.whole(&objective), pairs.whole(&objective));
        }
    }

    #[test]
    fn a_policy_that_is_its_reference_has_no_rewards(mut pairs in pairs()) {
        pairs.batch.ref_log_probs = Some(pairs.log_probs.clone());
        for (name, objective) in objectives().filter(|(name, _)| name.starts_with("dpo_")) {
            let (_, _, metrics) = pairs.whole(&objective);
            for zero in ["rewards_chosen", "rewards_rejected", "reward_margins", "reward_accuracies"] {
                prop_assert!(metric(&metrics, zero).abs() < TOLERANCE, "{} {}", name, zero);
            }
        }
        let log_2 = 0.7 * 2f64.ln();
        for name in ["aot", "aot_unpaired", "cdpo", "robust", "sigmoid", "sigmoid_norm"] {
            let name: PreferenceLossName = name.parse().unwrap();
            let loss = Dpo::new(name.into());
            let (value, _, _) = pairs.whole(&objective(Box::new(loss)));
            prop_assert!((value - log_2).abs() < TOLERANCE, "{}: {}", name, value);
        }
    }

    #[test]
    fn swapping_the_sides_swaps_the_rewards((rows, labels, margins) in rows()) {
        let swapped: Vec<Row> = (0..rows.len()).map(|b| rows[b ^ 1].clone()).collect();
        let straight = Pairs::new(&rows, labels.clone(), margins.clone());
        let swapped = Pairs::new(&swapped, labels, margins);
        for (name, objective) in objectives().filter(|(_, o)| o.cut_unit() != CutUnit::Row) {
            let (loss, _, metrics) = straight.whole(&objective);
            let (other, _, others) = swapped.whole(&objective);
            let opposite = metric(&metrics, "reward_margins") + metric(&others, "reward_margins");
            prop_assert!(opposite.abs() < TOLERANCE, "{}", name);
            let crossed = metric(&metrics, "rewards_chosen") - metric(&others, "rewards_rejected");
            prop_assert!(crossed.abs() < TOLERANCE, "{}", name);
            // −log σ(x) − (−log σ(−x)) = −x
            if matches!(name, "cpo_sigmoid" | "dpo_sigmoid") && !is_weighted(&objective) {
                let difference = -0.7 * metric(&metrics, "reward_margins");
                prop_assert!((loss - other - difference).abs() < TOLERANCE, "{}", name);
            }
        }
    }

    #[test]
    fn gradients_of_preference_losses_are_those_of_finite_differences(
        pairs in pairs(), at in any::<prop::sample::Index>()
    ) {
        const STEP: f64 = 1e-6;
        let n = pairs.log_probs.len();
        let at = at.index(2 * n);
        for (name, objective) in objectives().filter(|(_, o)| !is_weighted(o)) {
            let (value, grad, _) = pairs.whole(&objective);
            let moved = |step: f64| {
                let mut pairs = pairs.clone();
                let column = if at < n { &mut pairs.log_probs } else { &mut pairs.values };
                column[at % n] += step;
                pairs.whole(&objective).0
            };
            let slopes = [(moved(STEP) - value) / STEP, (value - moved(-STEP)) / STEP];
            // At a kink the two slopes differ, and the gradient is one of them.
            let near = slopes.iter().any(|slope| is_slope(grad[at], *slope, 1e-3));
            prop_assert!(near, "{}: {} differs from {:?}", name, grad[at], slopes);
        }
    }
}

/// Whether the policy determines the weights of pairs; they have no gradient, but change if a log-prob is moved.
fn is_weighted(objective: &Objective) -> bool {
    format!("{objective:?}").contains("wpo: true")
}
