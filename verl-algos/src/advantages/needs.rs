//! The inputs that an estimator declares.

/// A part of [`AdvantageInputs`](super::AdvantageInputs) besides the mask of actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EstimatorInput {
    /// One score per row, or the sum of its rewards.
    Scores,
    /// The prompt of each row, to compare the rows of one prompt.
    Groups,
    /// A reward per token.
    TokenLevelRewards,
    /// A critic's value of each token.
    Values,
    /// The score of a reference response to each row's prompt.
    RewardBaselines,
    /// Scores of several kinds, one of each kind per row.
    RewardComponents,
    /// Log-probs of the policy that sampled, one per token.
    OldLogProbs,
    /// Log-probs of the reference, one per token.
    RefLogProbs,
    /// Σ_v π(v)² of the policy that sampled, one per token.
    SumPiSquared,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::{AdvantageInputs, ESTIMATORS};
    use crate::ragged::Ragged;

    #[test]
    fn every_estimator_reads_the_inputs_that_it_declares() {
        let actions = Ragged::<bool>::from_rows(vec![vec![true, true]; 4]);
        let numbers = Ragged::<f64>::from_rows([[0.0, 1.0], [0.5, 0.0], [0.0, 0.0], [0.25, 2.0]]);
        let scores = [1.0, 0.5, 0.0, 2.25].map(Some);
        let components = [
            scores.to_vec(),
            vec![Some(0.5), Some(0.0), Some(1.0), Some(0.0)],
        ];
        let log_probs = Ragged::<f64>::from_rows(vec![[-1.0, -0.5]; 4]);
        let squares = Ragged::<f64>::from_rows(vec![[0.5, 0.75]; 4]);
        let all = AdvantageInputs {
            groups: Some(&[3, 3, 5, 5]),
            scores: Some(&scores),
            token_level_rewards: Some(&numbers),
            values: Some(&numbers),
            reward_baselines: Some(&[0.1, 0.1, 0.2, 0.2]),
            reward_components: Some(&components),
            old_log_probs: Some(&log_probs),
            ref_log_probs: Some(&log_probs),
            sum_pi_squared: Some(&squares),
            ..AdvantageInputs::new(&actions)
        };
        let given = |declared: &[EstimatorInput]| AdvantageInputs {
            groups: all
                .groups
                .filter(|_| declared.contains(&EstimatorInput::Groups)),
            scores: all
                .scores
                .filter(|_| declared.contains(&EstimatorInput::Scores)),
            token_level_rewards: all
                .token_level_rewards
                .filter(|_| declared.contains(&EstimatorInput::TokenLevelRewards)),
            values: all
                .values
                .filter(|_| declared.contains(&EstimatorInput::Values)),
            reward_baselines: all
                .reward_baselines
                .filter(|_| declared.contains(&EstimatorInput::RewardBaselines)),
            reward_components: all
                .reward_components
                .filter(|_| declared.contains(&EstimatorInput::RewardComponents)),
            old_log_probs: all
                .old_log_probs
                .filter(|_| declared.contains(&EstimatorInput::OldLogProbs)),
            ref_log_probs: all
                .ref_log_probs
                .filter(|_| declared.contains(&EstimatorInput::RefLogProbs)),
            sum_pi_squared: all
                .sum_pi_squared
                .filter(|_| declared.contains(&EstimatorInput::SumPiSquared)),
            ..all
        };
        for (name, make) in ESTIMATORS {
            let estimator = make();
            let declared = estimator.inputs();
            assert!(
                estimator.estimate(&given(declared)).is_ok(),
                "{name} reads more than it declares"
            );
            for left_out in declared {
                let fewer: Vec<_> = declared.iter().copied().filter(|i| i != left_out).collect();
                let without = estimator.estimate(&given(&fewer));
                assert!(without.is_err(), "{name} does not read {left_out:?}");
            }
            let lone = Ragged::<bool>::from_rows([[true, true]]);
            let first = Ragged::<f64>::from_rows([[0.0, 1.0]]);
            let lone_components = [vec![Some(1.0)], vec![Some(0.5)]];
            let single = AdvantageInputs {
                groups: Some(&[3]),
                scores: Some(&scores[..1]),
                token_level_rewards: Some(&first),
                values: Some(&first),
                reward_baselines: Some(&[0.1]),
                reward_components: Some(&lone_components),
                old_log_probs: Some(&first),
                ref_log_probs: Some(&first),
                sum_pi_squared: Some(&first),
                ..AdvantageInputs::new(&lone)
            };
            let refused = estimator.estimate(&single).is_err();
            assert_eq!(
                refused,
                estimator.smallest_group() > 1,
                "{name}, a lone row"
            );
        }
    }

    #[test]
    fn settings_out_of_range_are_rejected_before_any_input() {
        for (name, make) in ESTIMATORS {
            assert_eq!(make().check(), Ok(()), "{name}");
        }
        let half = crate::advantages::Gae {
            gamma: 1.5,
            ..Default::default()
        };
        let error = super::super::AdvantageEstimator::check(&half).unwrap_err();
        assert!(error.to_string().contains("`gamma` is 1.5"), "{error}");
    }
}
