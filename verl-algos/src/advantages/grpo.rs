//! Group-relative advantages: a response compared with the other responses to its prompt.

use super::{AdvantageEstimator, AdvantageInputs, Advantages, GroupScores};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// Advantage of each row by GRPO: (s − μ_g) / (σ_g + ε), or s − μ_g without `epsilon` (Dr. GRPO).
///
/// μ_g and σ_g (Bessel, n − 1) are those of the row's group. Equal scores carry no signal and give exactly 0. A lone
/// row has no group to compare with and keeps its score: s / (1 + ε), or s. An unscored row (`None`) is excluded from
/// the statistics and gets 0.
///
/// # Shapes
/// `scores`, `groups`, result: `[B]`
/// # Errors
/// Lengths that differ; a score that is not finite; a negative `epsilon`.
/// # Differences
/// verl adds ε = 1e-6 to σ, as here by default; TRL 1e-4, OpenRLHF 1e-9. verl in f32 gives equal scores up to ±0.1
/// because of rounding in their mean.
/// # Source
/// Shao et al. 2024, arXiv:2402.03300, section 4.1; without σ: Liu et al. 2025, arXiv:2503.20783.
pub fn grpo_advantages(
    scores: &[Option<f64>],
    groups: &[u64],
    epsilon: Option<f64>,
) -> Result<Vec<f64>, AlgoError> {
    check_epsilon(epsilon)?;
    GroupScores::from_parts(scores.to_vec(), groups)?.map_groups(|_, scores| {
        let (mean, std) = match scores {
            [_] => (0.0, 1.0),
            _ => (masked::mean(scores), masked::variance(scores)?.sqrt()),
        };
        let scale = epsilon.map_or(1.0, |epsilon| std + epsilon);
        Ok(scores.iter().map(|s| (s - mean) / scale).collect())
    })
}

/// Rejects values that cannot be added to a deviation.
pub(super) fn check_epsilon(epsilon: Option<f64>) -> Result<(), AlgoError> {
    let Some(epsilon) = epsilon else {
        return Ok(());
    };
    let valid = epsilon >= 0.0 && epsilon.is_finite();
    let rule = "it must be a finite number of at least 0";
    check_setting("epsilon", epsilon, valid, rule)
}

/// GRPO and Dr. GRPO as an estimator: A = (s − μ_g)/(σ_g + ε), or s − μ_g without `epsilon`.
///
/// A lone row keeps its score; see [`grpo_advantages`].
///
/// # Shapes
/// Scores and groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Errors
/// The same as [`grpo_advantages`]; no scores or groups.
/// # Differences
/// The same as [`grpo_advantages`]. NeMo-RL uses mean and deviation of the other rows, and does not divide if the
/// deviation is 0; TRL rejects groups of one.
/// # Source
/// Shao et al. 2024, arXiv:2402.03300, section 4.1; without σ: Liu et al. 2025, arXiv:2503.20783.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Grpo {
    /// Added to the deviation; with `None` there is no division by the deviation (Dr. GRPO).
    pub epsilon: Option<f64>,
}

impl Grpo {
    /// Dr. GRPO: only subtracts the mean.
    pub fn without_std() -> Grpo {
        Grpo { epsilon: None }
    }
}

impl Default for Grpo {
    fn default() -> Grpo {
        Grpo {
            epsilon: Some(1e-6),
        }
    }
}

impl AdvantageEstimator for Grpo {
    fn name(&self) -> &'static str {
        match self.epsilon {
            Some(_) => "grpo",
            None => "dr_grpo",
        }
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Group
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_epsilon(self.epsilon)
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        let scores = inputs.outcome_scores(self.name())?;
        let groups = inputs.groups.ok_or(AlgoError::Missing {
            algorithm: self.name(),
            argument: "groups",
        })?;
        let rows = grpo_advantages(&scores, groups, self.epsilon)?;
        inputs.of_rows(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORES: [f64; 7] = [1.0, 0.2, 0.0, 0.7, 0.0, 0.4, 1.0];
    /// Groups 9 = [1, 0, 0, 1], 4 = [.2, .4], 7 = [.7], interleaved.
    const GROUPS: [u64; 7] = [9, 4, 9, 7, 9, 4, 9];

    #[track_caller]
    fn check(scores: &[Option<f64>], groups: &[u64], epsilon: Option<f64>, expected: &[f64]) {
        let got = grpo_advantages(scores, groups, epsilon).unwrap();
        for (a, e) in got.iter().zip(expected) {
            assert!((a - e).abs() < 1e-6, "{got:?}");
        }
    }

    #[test]
    fn by_hand() {
        let scores = SCORES.map(Some);
        let with = [
            0.866024, -0.707102, -0.866024, 0.699999, -0.866024, 0.707102, 0.866024,
        ];
        check(&scores, &GROUPS, Some(1e-6), &with);
        let without = [0.5, -0.1, -0.5, 0.7, -0.5, 0.1, 0.5];
        check(&scores, &GROUPS, None, &without);
        let trl = [
            0.865875, -0.706607, -0.865875, 0.699930, -0.865875, 0.706607, 0.865875,
        ];
        check(&scores, &GROUPS, Some(1e-4), &trl);
    }

    #[test]
    fn equal_scores_are_exactly_zero() {
        for score in [0.1, 0.7, 0.9, 1e6] {
            let got = grpo_advantages(&[Some(score); 7], &[3; 7], Some(1e-6)).unwrap();
            assert_eq!(got, [0.0; 7]);
        }
    }

    #[test]
    fn a_row_without_score_is_left_out() {
        let scores = [Some(1.0), None, Some(0.0), None];
        let std = 0.5f64.sqrt();
        let expected = [0.5 / std, 0.0, -0.5 / std, 0.0];
        check(&scores, &[1, 1, 1, 2], Some(0.0), &expected);
        check(&[Some(0.4), None], &[1, 1], None, &[0.4, 0.0]);
    }

    #[test]
    fn rejects_invalid_inputs() {
        assert!(grpo_advantages(&[Some(1.0)], &[], None).is_err());
        assert!(grpo_advantages(&[Some(f64::NAN), Some(0.0)], &[1, 1], None).is_err());
        assert!(grpo_advantages(&[Some(1.0)], &[1], Some(-1.0)).is_err());
    }
}
