//! What an estimator reads, as it says itself.

/// A part of [`AdvantageInputs`](super::AdvantageInputs) beside the mask of actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EstimatorInput {
    /// One score a row, or the sum of its rewards.
    Scores,
    /// The prompt of each row, to compare the rows of one prompt.
    Groups,
    /// A reward a token.
    TokenLevelRewards,
    /// A critic's value of each token.
    Values,
    /// The score of a reference response to each row's prompt.
    RewardBaselines,
    /// Scores of several kinds, one of each kind a row.
    RewardComponents,
    /// Log-probs of the policy that sampled, a token.
    OldLogProbs,
    /// Log-probs of the reference, a token.
    RefLogProbs,
    /// Σ_v π(v)² of the policy that sampled, a token.
    SumPiSquared,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::{AdvantageInputs, ESTIMATORS};
    use crate::ragged::Ragged;

    #[test]
    fn every_estimator_reads_what_it_says() {
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
        let given = |says: &[EstimatorInput]| AdvantageInputs {
            groups: all
                .groups
                .filter(|_| says.contains(&EstimatorInput::Groups)),
            scores: all
                .scores
                .filter(|_| says.contains(&EstimatorInput::Scores)),
            token_level_rewards: all
                .token_level_rewards
                .filter(|_| says.contains(&EstimatorInput::TokenLevelRewards)),
            values: all
                .values
                .filter(|_| says.contains(&EstimatorInput::Values)),
            reward_baselines: all
                .reward_baselines
                .filter(|_| says.contains(&EstimatorInput::RewardBaselines)),
            reward_components: all
                .reward_components
                .filter(|_| says.contains(&EstimatorInput::RewardComponents)),
            old_log_probs: all
                .old_log_probs
                .filter(|_| says.contains(&EstimatorInput::OldLogProbs)),
            ref_log_probs: all
                .ref_log_probs
                .filter(|_| says.contains(&EstimatorInput::RefLogProbs)),
            sum_pi_squared: all
                .sum_pi_squared
                .filter(|_| says.contains(&EstimatorInput::SumPiSquared)),
            ..all
        };
        for (name, make) in ESTIMATORS {
            let estimator = make();
            let says = estimator.inputs();
            assert!(
                estimator.estimate(&given(says)).is_ok(),
                "{name} reads more"
            );
            for left_out in says {
                let fewer: Vec<_> = says.iter().copied().filter(|i| i != left_out).collect();
                let without = estimator.estimate(&given(&fewer));
                assert!(without.is_err(), "{name} does not read {left_out:?}");
            }
            let lone = Ragged::<bool>::from_rows([[true, true]]);
            let first = Ragged::<f64>::from_rows([[0.0, 1.0]]);
            let lone_components = [vec![Some(1.0)], vec![Some(0.5)]];
            let alone = AdvantageInputs {
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
            let refused = estimator.estimate(&alone).is_err();
            assert_eq!(
                refused,
                estimator.smallest_group() > 1,
                "{name}, a lone row"
            );
        }
    }

    #[test]
    fn settings_out_of_range_are_refused_before_any_input() {
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
