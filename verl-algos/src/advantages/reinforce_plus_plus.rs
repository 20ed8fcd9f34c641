//! REINFORCE++: whitened returns, with or without a group baseline.

use super::{
    AdvantageEstimator, AdvantageInputs, Advantages, EstimatorInput, GroupScores, backward_scan,
};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// REINFORCE++: returns G_t = r_t + γ G_{t+1} over action tokens; advantages are G whitened over the batch.
///
/// Observations are skipped: γ counts actions, not time slots.
///
/// # Shapes
/// Rewards, advantages and returns: `[B, T~]`, 0 at observations.
/// # Errors
/// Fewer than two action tokens in the batch, where whitening is undefined.
/// # Differences
/// The same as verl since August 2026; before, an observation set the running return to 0. slime and miles count time
/// slots, so that γ acts at observations too: rewards of −1 at the first and last of four slots, two observations
/// between them, γ = 0.9, give a first return of −1.9 here and of −1.729 there. As here, verl drops rewards at
/// observations in this estimator.
/// # Source
/// Hu et al. 2025, arXiv:2501.03262; verl `compute_reinforce_plus_plus_outcome_advantage`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReinforcePlusPlus {
    /// Discount, in [0, 1].
    pub gamma: f64,
}

impl Default for ReinforcePlusPlus {
    fn default() -> ReinforcePlusPlus {
        ReinforcePlusPlus { gamma: 1.0 }
    }
}

impl AdvantageEstimator for ReinforcePlusPlus {
    fn name(&self) -> &'static str {
        "reinforce_plus_plus"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::MiniBatch
    }

    fn inputs(&self) -> &'static [EstimatorInput] {
        &[EstimatorInput::TokenLevelRewards]
    }

    fn check(&self) -> Result<(), AlgoError> {
        let valid = (0.0..=1.0).contains(&self.gamma);
        check_setting("gamma", self.gamma, valid, "it must lie in [0, 1]")
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        self.check()?;
        let rewards = inputs.rewards(self.name())?;
        let returns = backward_scan(&inputs.actions.packed_rows(), 0.0, |t, next| {
            rewards[t] + self.gamma * next
        });
        Ok(Advantages {
            advantages: inputs.actions.scatter(&masked::whiten(&returns)?)?,
            returns: Some(inputs.actions.scatter(&returns)?),
        })
    }
}

/// REINFORCE++ with baseline: s − μ_g on each action token, whitened over all action tokens of the batch.
///
/// Long responses weigh more in the whitening. A lone row keeps its score. An unscored row is excluded from the
/// statistics and gets 0.
///
/// # Shapes
/// Scores and groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Errors
/// Fewer than two action tokens in the batch.
/// # Differences
/// verl has no rows without a score, and also adds rewards at masked slots; here an outcome score is the sum over
/// action tokens.
/// # Source
/// Hu et al. 2025, arXiv:2501.03262; verl `compute_reinforce_plus_plus_baseline_outcome_advantage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReinforcePlusPlusBaseline;

impl AdvantageEstimator for ReinforcePlusPlusBaseline {
    fn name(&self) -> &'static str {
        "reinforce_plus_plus_baseline"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::MiniBatch
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        let scores = GroupScores::new(inputs, self.name())?;
        let rows = scores.map_groups(|_, scores| {
            let mean = match scores {
                [_] => 0.0,
                _ => masked::mean(scores),
            };
            Ok(scores.iter().map(|s| s - mean).collect())
        })?;
        // A row without a score is not whitened either; otherwise it would get minus the mean.
        let scored = |row: usize| scores.scores[row].is_some();
        let actions = inputs.actions.map(|row, _, action| action && scored(row));
        let tokens = actions.packed_rows();
        let centred: Vec<f64> = tokens.iter().map(|&row| rows[row]).collect();
        Ok(Advantages {
            advantages: actions.scatter(&masked::whiten(&centred)?)?,
            returns: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::test::check;
    use crate::ragged::Ragged;

    #[test]
    fn by_hand() {
        let actions = Ragged::<bool>::from_rows([[true, false, true]]);
        let rewards = Ragged::<f64>::from_rows([[0.0, f64::NAN, 1.0]]);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.token_level_rewards = Some(&rewards);
        let result = ReinforcePlusPlus { gamma: 0.5 }.estimate(&inputs).unwrap();
        assert_eq!(result.returns.unwrap().values(), [0.5, 0.0, 1.0]);
        let half = 0.5f64.sqrt();
        check(result.advantages.values(), &[-half, 0.0, half]);
    }

    #[test]
    fn one_token_cannot_be_whitened() {
        let actions = Ragged::<bool>::from_rows([[true]]);
        let rewards = Ragged::<f64>::from_rows([[1.0]]);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.token_level_rewards = Some(&rewards);
        assert!(ReinforcePlusPlus::default().estimate(&inputs).is_err());
    }

    #[test]
    fn with_baseline_by_hand() {
        // Scores [1, 0, 0, 1 | .2, .4] with lengths [4, 2, 2, 8 | 3, 1].
        let lengths = [4, 2, 2, 8, 3, 1];
        let actions = Ragged::<bool>::from_rows(lengths.map(|n| vec![true; n]));
        let scores = [1.0, 0.0, 0.0, 1.0, 0.2, 0.4].map(Some);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.scores = Some(&scores);
        inputs.groups = Some(&[1, 1, 1, 1, 2, 2]);
        let result = ReinforcePlusPlusBaseline.estimate(&inputs).unwrap();
        let first: Vec<f64> = result.advantages.rows().map(|row| row[0]).collect();
        let expected = [
            0.741823, -1.651154, -1.651154, 0.741823, -0.693963, -0.215368,
        ];
        check(&first, &expected);
        // A seventh row without a score changes nothing and gets 0.
        let actions = Ragged::<bool>::from_rows([4, 2, 2, 8, 3, 1, 5].map(|n| vec![true; n]));
        let scores = [&scores[..], &[None]].concat();
        let inputs = AdvantageInputs {
            scores: Some(&scores),
            groups: Some(&[1, 1, 1, 1, 2, 2, 2]),
            ..AdvantageInputs::new(&actions)
        };
        let result = ReinforcePlusPlusBaseline.estimate(&inputs).unwrap();
        let first: Vec<f64> = result.advantages.rows().map(|row| row[0]).collect();
        check(&first[..6], &expected);
        assert_eq!(first[6], 0.0);
    }
}
