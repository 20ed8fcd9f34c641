//! RLOO as in TRL: the KL to the reference is part of the reward.

use super::grpo_trl::{check_groups, standardized};
use super::{AdvantageEstimator, AdvantageInputs, Advantages, EstimatorInput, GroupScores};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// r = clip(s) − β Σ_t (ℓ_old − ℓ_ref); A = r − mean of the group's other r; with `normalize` (A − mean)/(std + ε) over
/// the batch.
///
/// An unscored row is excluded from the statistics and gets 0, and so does a row that is the only scored one of its
/// group.
///
/// # Shapes
/// Scores and groups `[B]`, `old_log_probs` and `ref_log_probs` `[B, T~]`; result `[B, T~]`, one number per row on its
/// action tokens.
/// # Errors
/// No log-probs although `beta` is not 0; [`AlgoError::TooFew`] for a group of one.
/// # Differences
/// [`Rloo`](super::Rloo) leaves the KL to the reward shaping, and keeps the score of a lone row.
/// # Source
/// TRL `RLOOTrainer`; Ahmadian et al. 2024, arXiv:2402.14740.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RlooTrl {
    /// β, the coefficient of the KL; 0 needs no log-probs.
    pub beta: f64,
    /// Bounds of the score before the KL is subtracted.
    pub reward_clip: Option<(f64, f64)>,
    /// Whether advantages get mean 0 and deviation 1 over the batch.
    pub normalize: bool,
    /// Added to that deviation.
    pub epsilon: f64,
}

impl Default for RlooTrl {
    fn default() -> RlooTrl {
        RlooTrl {
            beta: 0.05,
            reward_clip: None,
            normalize: false,
            epsilon: 1e-4,
        }
    }
}

impl AdvantageEstimator for RlooTrl {
    fn name(&self) -> &'static str {
        "rloo_trl"
    }

    fn cut_unit(&self) -> CutUnit {
        if self.normalize {
            CutUnit::MiniBatch
        } else {
            CutUnit::Group
        }
    }

    fn inputs(&self) -> &'static [EstimatorInput] {
        let all = &[
            EstimatorInput::Scores,
            EstimatorInput::Groups,
            EstimatorInput::OldLogProbs,
            EstimatorInput::RefLogProbs,
        ];
        if self.beta == 0.0 { &all[..2] } else { all }
    }

    fn smallest_group(&self) -> usize {
        2
    }

    fn check(&self) -> Result<(), AlgoError> {
        let rule = "it must be a finite number of at least 0";
        for (setting, value) in [("beta", self.beta), ("epsilon", self.epsilon)] {
            check_setting(setting, value, value >= 0.0 && value.is_finite(), rule)?;
        }
        let Some((low, high)) = self.reward_clip else {
            return Ok(());
        };
        let rule = "it must not exceed the upper bound";
        check_setting("reward_clip", low, low <= high, rule)
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        inputs.of_rows(&self.row_advantages(inputs)?)
    }
}

impl RlooTrl {
    /// Advantage of each row, `[B]`.
    ///
    /// # Errors
    /// The same as the estimator.
    pub fn row_advantages(&self, inputs: &AdvantageInputs<'_>) -> Result<Vec<f64>, AlgoError> {
        self.check()?;
        let groups = inputs.group_ids(self.name())?;
        check_groups(self.name(), groups)?;
        let rewards = self.rewards(inputs)?;
        let scores = GroupScores::from_parts(rewards.clone(), groups)?;
        let rows = scores.map_groups(|_, rewards| {
            let n = rewards.len() as f64;
            let mean = masked::mean(rewards);
            Ok(match rewards {
                [_] => vec![0.0],
                _ => rewards.iter().map(|r| n / (n - 1.0) * (r - mean)).collect(),
            })
        })?;
        if !self.normalize {
            return Ok(rows);
        }
        let scored = rewards.iter().zip(rows);
        let scored: Vec<Option<f64>> = scored.map(|(r, a)| r.map(|_| a)).collect();
        Ok(standardized(&scored, self.epsilon))
    }

    /// Clipped scores minus the KL.
    fn rewards(&self, inputs: &AdvantageInputs<'_>) -> Result<Vec<Option<f64>>, AlgoError> {
        let mut scores = inputs.outcome_scores(self.name())?;
        if let Some((low, high)) = self.reward_clip {
            let clip = |score: &mut f64| *score = score.clamp(low, high);
            scores.iter_mut().flatten().for_each(clip);
        }
        if self.beta == 0.0 {
            return Ok(scores);
        }
        let old = inputs.packed(self.name(), "old_log_probs", inputs.old_log_probs)?;
        let reference = inputs.packed(self.name(), "ref_log_probs", inputs.ref_log_probs)?;
        let kl: Vec<f64> = old.iter().zip(&reference).map(|(l, r)| l - r).collect();
        let rows = inputs.actions.packed_rows();
        let kl = masked::row_sums(&kl, &rows, inputs.num_rows())?;
        let penalised = scores.iter().zip(kl);
        Ok(penalised
            .map(|(score, kl)| score.map(|s| s - self.beta * kl))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::test::check;
    use crate::ragged::Ragged;

    fn estimate(
        rloo: RlooTrl,
        scores: &[Option<f64>],
        groups: &[u64],
    ) -> Result<Vec<f64>, AlgoError> {
        let rows = vec![[true, false]; scores.len()];
        let actions = Ragged::<bool>::from_rows(rows);
        let old = actions.map(|b, _, action| if action { -(b as f64) } else { f64::NAN });
        let reference = actions.map(|_, _, action| if action { -3.0 } else { f64::NAN });
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.scores = Some(scores);
        inputs.groups = Some(groups);
        inputs.old_log_probs = Some(&old);
        inputs.ref_log_probs = Some(&reference);
        rloo.row_advantages(&inputs)
    }

    #[test]
    fn by_hand() {
        // KL 3, 2, 1: rewards 1 − .3, 2 − .2, 0.5 − .1 after the clip.
        let mut rloo = RlooTrl {
            beta: 0.1,
            reward_clip: Some((0.5, 2.0)),
            ..RlooTrl::default()
        };
        let scores = [Some(1.0), Some(9.0), Some(-7.0)];
        let got = estimate(rloo, &scores, &[1; 3]).unwrap();
        check(&got, &[-0.4, 1.25, -0.85]);
        rloo.normalize = true;
        rloo.epsilon = 0.0;
        let std = ((0.16 + 1.5625 + 0.7225) / 2.0f64).sqrt();
        let got = estimate(rloo, &scores, &[1; 3]).unwrap();
        check(&got, &[-0.4 / std, 1.25 / std, -0.85 / std]);
    }

    #[test]
    fn rows_without_a_score_are_left_out() {
        let rloo = RlooTrl {
            beta: 0.0,
            ..RlooTrl::default()
        };
        let scores = [Some(1.0), None, Some(0.0), Some(0.7), None];
        let got = estimate(rloo, &scores, &[1, 1, 1, 2, 2]).unwrap();
        assert_eq!(got, [1.0, 0.0, -1.0, 0.0, 0.0]);
    }

    #[test]
    fn rejects_invalid_inputs() {
        let plain = RlooTrl::default();
        assert!(estimate(plain, &[Some(1.0)], &[1]).is_err());
        let rloo = RlooTrl {
            reward_clip: Some((1.0, -1.0)),
            ..plain
        };
        assert!(estimate(rloo, &[Some(1.0); 2], &[1, 1]).is_err());
        let actions = Ragged::<bool>::from_rows([[true], [true]]);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.scores = Some(&[Some(1.0), Some(0.0)]);
        inputs.groups = Some(&[1, 1]);
        let error = plain.row_advantages(&inputs).unwrap_err();
        assert_eq!(error.to_string(), "`rloo_trl` needs `old_log_probs`");
        assert_eq!(
            RlooTrl { beta: 0.0, ..plain }.row_advantages(&inputs),
            Ok(vec![1.0, -1.0])
        );
    }
}
