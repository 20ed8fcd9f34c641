//! ReMax: the score of the greedy response as baseline.

use super::{AdvantageEstimator, AdvantageInputs, Advantages, EstimatorInput, backward_scan};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_finite, check_len};

/// ReMax: G_t = Σ_{u ≥ t} r_u over action tokens; A = G − b, b the score of a greedy response to the row's prompt.
///
/// # Shapes
/// Rewards, advantages and returns: `[B, T~]`; `reward_baselines`: `[B]`.
/// # Errors
/// No `reward_baselines`, or not one per row.
/// # Differences
/// verl multiplies masked slots by 0, so that a NaN there spreads; here they are left out. Here there is one baseline
/// per row, whereas verl's is per prompt and has to be repeated for its responses.
/// # Source
/// Li et al. 2023, arXiv:2310.10505.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReMax;

impl AdvantageEstimator for ReMax {
    fn name(&self) -> &'static str {
        "remax"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Row
    }

    fn inputs(&self) -> &'static [EstimatorInput] {
        &[
            EstimatorInput::TokenLevelRewards,
            EstimatorInput::RewardBaselines,
        ]
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        let rewards = inputs.rewards(self.name())?;
        let baselines = inputs.reward_baselines.ok_or(AlgoError::Missing {
            algorithm: self.name(),
            argument: "reward_baselines",
        })?;
        check_len(
            "reward_baselines",
            "rows",
            baselines.len(),
            inputs.num_rows(),
        )?;
        check_finite("reward_baselines", baselines)?;
        let rows = inputs.actions.packed_rows();
        let returns = backward_scan(&rows, 0.0, |t, next| rewards[t] + next);
        let each = returns.iter().zip(&rows);
        let advantages: Vec<f64> = each.map(|(g, &row)| g - baselines[row]).collect();
        Ok(Advantages {
            advantages: inputs.actions.scatter(&advantages)?,
            returns: Some(inputs.actions.scatter(&returns)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ragged::Ragged;

    #[test]
    fn by_hand() {
        let actions = Ragged::<bool>::from_rows([vec![true, false, true], vec![true]]);
        let rewards = Ragged::<f64>::from_rows([vec![0.5, 9.0, 1.0], vec![0.0]]);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.token_level_rewards = Some(&rewards);
        assert!(ReMax.estimate(&inputs).is_err());
        inputs.reward_baselines = Some(&[1.0, 0.25]);
        let result = ReMax.estimate(&inputs).unwrap();
        assert_eq!(result.advantages.values(), [0.5, 0.0, 0.0, -0.25]);
        assert_eq!(result.returns.unwrap().values(), [1.5, 0.0, 1.0, 0.0]);
    }
}
