//! Properties of every preset of the rollout correction, and of every rejection rule.

use proptest::prelude::*;
use verl_algos::CutUnit;
use verl_algos::rollout_correction::{
    Correction, LogProbPair, Preset, RejectionRule, RejectionRuleName, RolloutCorrection,
    RolloutWeights, WeightBound, WeightLevel,
};

use super::rows::{Rows, TokenInputs, rows};
use super::{TOLERANCE, close};

/// Every preset, and every rule with normalised weights of each level and bound.
pub(crate) fn corrections() -> Vec<RolloutCorrection> {
    let presets = Preset::ALL.iter().map(|preset| (*preset).into());
    let rule = |name: &RejectionRuleName| {
        let (level, bound) = match name.as_str().starts_with("token") {
            true => (
                WeightLevel::Token,
                WeightBound::Band {
                    low: 0.5,
                    high: 2.0,
                },
            ),
            false => (WeightLevel::Sequence, WeightBound::Truncate(1.5)),
        };
        RolloutCorrection {
            weights: Some(RolloutWeights {
                level,
                bound,
                normalize: true,
            }),
            rejection: vec![RejectionRule::named(*name, "1.3").unwrap()],
            ..RolloutCorrection::default()
        }
    };
    presets
        .chain(RejectionRuleName::ALL.iter().map(rule))
        .collect()
}

/// The policies of a batch: ℓ_old was sampled, ℓ_ref is trained.
pub(crate) fn correct(rows: &Rows, correction: &RolloutCorrection) -> Correction {
    let pair = LogProbPair {
        actions: &rows.column(|t| t.action),
        train_log_probs: &rows.column(|t| t.ref_log_prob),
        rollout_log_probs: &rows.column(|t| Some(t.old_log_prob)),
    };
    correction.correct(&pair).unwrap()
}

/// The reported numbers, in a fixed order.
fn reported(correction: &Correction) -> Vec<f64> {
    correction.metrics().into_iter().map(|(_, v)| v).collect()
}

proptest! {
    #[test]
    fn corrections_ignore_the_order_of_rows((rows, order) in rows().prop_flat_map(|rows| {
        let order: Vec<usize> = (0..rows.0.len()).collect();
        (Just(rows), Just(order).prop_shuffle())
    })) {
        for correction in corrections() {
            let straight = correct(&rows, &correction);
            let shuffled = correct(&rows.reordered(&order), &correction);
            for (at, &b) in order.iter().enumerate() {
                prop_assert_eq!(shuffled.actions.row(at), straight.actions.row(b));
                if let (Some(shuffled), Some(straight)) = (&shuffled.weights, &straight.weights) {
                    close(shuffled.row(at), straight.row(b));
                }
            }
            close(&reported(&shuffled), &reported(&straight));
        }
    }

    #[test]
    fn corrections_ignore_observations_and_empty_rows(rows in rows(), junk in prop::sample::select(vec![f64::NAN, f64::INFINITY, -1e10])) {
        let mut padded = rows.clone();
        for row in &mut padded.0 {
            for token in row.tokens.iter_mut().filter(|t| !t.action) {
                *token = TokenInputs::observation(junk);
            }
            row.tokens.push(TokenInputs::observation(junk));
        }
        let mut empty = padded.0[0].clone();
        empty.tokens = vec![TokenInputs::observation(junk)];
        padded.0.push(empty);
        for correction in corrections() {
            let (clean, padded) = (correct(&rows, &correction), correct(&padded, &correction));
            for b in 0..rows.0.len() {
                let n = rows.0[b].tokens.len();
                prop_assert_eq!(&padded.actions.row(b)[..n], clean.actions.row(b));
                if let (Some(padded), Some(clean)) = (&padded.weights, &clean.weights) {
                    prop_assert_eq!(&padded.row(b)[..n], clean.row(b));
                    prop_assert_eq!(padded.row(b)[n], 0.0);
                }
            }
            prop_assert_eq!(reported(&padded), reported(&clean));
        }
    }

    #[test]
    fn on_policy_nothing_is_corrected(rows in rows()) {
        let mut same = rows;
        for token in same.0.iter_mut().flat_map(|row| &mut row.tokens) {
            token.ref_log_prob = token.old_log_prob;
        }
        let actions = same.column(|t| t.action);
        for correction in corrections() {
            let got = correct(&same, &correction);
            prop_assert_eq!(&got.actions, &actions);
            if let Some(weights) = &got.weights {
                prop_assert_eq!(weights, &actions.map(|_, _, action| f64::from(action)));
            }
            let stats = got.weight_stats.map_or(1.0, |stats| stats.eff_sample_size);
            prop_assert_eq!(stats, 1.0);
            for value in [got.mismatch.kl, got.mismatch.k3_kl, got.mismatch.chi2_seq, got.masked_fraction] {
                prop_assert_eq!(value, 0.0);
            }
        }
    }

    #[test]
    fn weights_stay_within_their_bounds(rows in rows()) {
        for correction in corrections().iter().filter(|c| c.cut_unit() == CutUnit::Row) {
            let got = correct(&rows, correction);
            let (Some(weights), Some(settings)) = (&got.weights, correction.weights) else { continue };
            for weight in weights.values() {
                let inside = match settings.bound {
                    WeightBound::Truncate(high) => (0.0..=high).contains(weight),
                    WeightBound::Band { low, high } => *weight == 0.0 || (low..=high).contains(weight),
                };
                prop_assert!(inside);
            }
            let share = got.weight_stats.unwrap().eff_sample_size;
            prop_assert!((0.0..=1.0 + TOLERANCE).contains(&share));
        }
    }
}
