//! Properties of every registered estimator, and of reward shaping.

use proptest::prelude::*;
use verl_algos::advantages::{AdvantageEstimator, Advantages, ESTIMATORS};
use verl_algos::rewards::group_filter::GroupFilter;
use verl_algos::rewards::scaling::RunningMoments;
use verl_algos::{CutUnit, masked};

use super::rows::{Row, Rows, TokenInputs, number, rows};
use super::{TOLERANCE, close};

fn estimators() -> impl Iterator<Item = Box<dyn AdvantageEstimator>> {
    ESTIMATORS.iter().map(|(name, make)| {
        let estimator = make();
        assert_eq!(estimator.name(), *name);
        estimator
    })
}

fn by_name(name: &str) -> Option<Box<dyn AdvantageEstimator>> {
    estimators().find(|e| e.name() == name)
}

/// The advantage of each row's first action token.
fn of_rows(rows: &Rows, advantages: &Advantages) -> Vec<f64> {
    let each = rows.0.iter().enumerate();
    each.map(|(b, row)| advantages.advantages.row(b)[row.first()])
        .collect()
}

proptest! {
    #[test]
    fn estimators_ignore_observations(rows in rows(), junk in prop::sample::select(vec![f64::NAN, f64::INFINITY, -1e10])) {
        let mut dirty = rows.clone();
        for token in dirty.0.iter_mut().flat_map(|row| &mut row.tokens) {
            if !token.action {
                *token = TokenInputs::observation(junk);
            }
        }
        for estimator in estimators() {
            let clean = rows.estimate(estimator.as_ref());
            prop_assert_eq!(&dirty.estimate(estimator.as_ref()), &clean);
            for (action, advantage) in rows.column(|t| t.action).values().iter().zip(clean.advantages.values()) {
                prop_assert!(*action || *advantage == 0.0);
            }
        }
    }

    #[test]
    fn observations_may_lie_anywhere(rows in rows()) {
        let actions = rows.actions_only();
        // The flat token baseline counts time in slots, observations included.
        for estimator in estimators().filter(|e| e.name() != "otb") {
            let with = rows.estimate(estimator.as_ref()).advantages;
            let with = with.select("advantages", &rows.column(|t| t.action)).unwrap();
            let without = actions.estimate(estimator.as_ref()).advantages;
            close(&with, without.values());
        }
    }

    #[test]
    fn estimators_ignore_the_order_of_rows((rows, order) in rows().prop_flat_map(|rows| {
        let order: Vec<usize> = (0..rows.0.len()).collect();
        (Just(rows), Just(order).prop_shuffle())
    })) {
        for estimator in estimators() {
            let straight = rows.estimate(estimator.as_ref());
            let shuffled = rows.reordered(&order).estimate(estimator.as_ref());
            for (at, &b) in order.iter().enumerate() {
                close(shuffled.advantages.row(at), straight.advantages.row(b));
            }
        }
    }

    #[test]
    fn group_estimators_ignore_padding_groups(rows in rows()) {
        // A separate group without action tokens changes nothing for estimators that need complete groups only.
        let mut padded = rows.clone();
        let empty = Row {
            tokens: vec![TokenInputs::observation(f64::NAN); 2],
            group: 999,
            baseline: 0.0,
            components: [Some(0.0), None],
        };
        padded.0.extend([empty.clone(), empty]);
        for estimator in estimators().filter(|e| e.cut_unit() <= CutUnit::Group) {
            let plain = rows.estimate(estimator.as_ref());
            let padded = padded.estimate(estimator.as_ref());
            for b in 0..rows.0.len() {
                prop_assert_eq!(padded.advantages.row(b), plain.advantages.row(b));
            }
        }
    }

    #[test]
    fn centred_estimators_sum_to_zero_in_each_group(rows in rows()) {
        for name in ["grpo", "dr_grpo", "rloo", "gpg", "grpo_trl", "rloo_trl"] {
            let Some(estimator) = by_name(name) else { continue };
            let advantages = of_rows(&rows, &rows.estimate(estimator.as_ref()));
            for group in rows.0.iter().map(|row| row.group) {
                let own = rows.0.iter().zip(&advantages).filter(|(row, _)| row.group == group);
                let sum: f64 = own.map(|(_, a)| a).sum();
                prop_assert!(sum.abs() < 1e-6, "{}: {}", name, sum);
            }
        }
    }

    #[test]
    fn leave_one_out_is_scaled_centring(rows in rows()) {
        let (Some(rloo), Some(centred)) = (by_name("rloo"), by_name("dr_grpo")) else { return Ok(()) };
        let rloo = of_rows(&rows, &rows.estimate(rloo.as_ref()));
        let centred = of_rows(&rows, &rows.estimate(centred.as_ref()));
        for (b, own) in rows.0.iter().enumerate() {
            let n = rows.0.iter().filter(|row| row.group == own.group).count() as f64;
            prop_assert!((rloo[b] - n / (n - 1.0) * centred[b]).abs() < TOLERANCE);
        }
    }

    #[test]
    fn equal_rewards_carry_no_signal(rows in rows(), reward in number()) {
        let mut equal = rows;
        for row in &mut equal.0 {
            let first = row.first();
            for (t, token) in row.tokens.iter_mut().enumerate() {
                token.reward = if t == first { reward } else { 0.0 };
            }
            row.components = [Some(reward), Some(1.0)];
        }
        let names = [
            "dr_grpo", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_trl", "opo", "reinforce_plus_plus_baseline", "rloo",
        ];
        for name in names {
            let Some(estimator) = by_name(name) else { continue };
            let advantages = equal.estimate(estimator.as_ref());
            prop_assert!(advantages.advantages.values().iter().all(|a| *a == 0.0), "{}", name);
        }
    }

    #[test]
    fn a_group_filter_never_splits_a_group(rows in rows()) {
        let scores: Vec<Option<f64>> = rows.0.iter().map(|row| row.components[0]).collect();
        let groups: Vec<u64> = rows.0.iter().map(|row| row.group).collect();
        for filter in [GroupFilter::Differing, GroupFilter::MeanInside { low: -0.5, high: 0.5 }] {
            let keep = filter.keep(&scores, &groups).unwrap();
            for (a, b) in (0..groups.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                prop_assert!(groups[a] != groups[b] || keep[a] == keep[b]);
            }
        }
    }

    #[test]
    fn running_moments_do_not_depend_on_the_cut(values in prop::collection::vec(-1e3f64..1e3, 2..40), at in any::<prop::sample::Index>()) {
        let (first, second) = values.split_at(at.index(values.len()));
        let mut moments = RunningMoments::default();
        moments.update(first).unwrap();
        moments.update(second).unwrap();
        let std = masked::variance(&values).unwrap().sqrt();
        close(&[moments.mean, moments.std().unwrap()], &[masked::mean(&values), std]);
    }
}
