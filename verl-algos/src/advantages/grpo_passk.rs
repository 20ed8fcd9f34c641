//! GRPO for pass@k.

use super::grpo::check_epsilon;
use super::{AdvantageEstimator, AdvantageInputs, Advantages, GroupScores, group_rows};
use crate::cut::CutUnit;
use crate::error::AlgoError;
use crate::masked;

/// Only the best row of a group gets an advantage: best − second best, over σ_g + ε if normalised; the others get 0.
///
/// A tie at the top gives 0, and so does a response that is the only scored one.
///
/// # Shapes
/// Scores and groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Errors
/// [`AlgoError::TooFew`] for a group of one.
/// # Differences
/// In verl the division by σ_g is switched by its configuration, and the argument of the same name is not read; here
/// `epsilon` is the switch.
/// # Source
/// verl `compute_grpo_passk_outcome_advantage`; Tang et al. 2025, arXiv:2503.19595.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GrpoPassK {
    /// Added to the deviation; `None` does not normalise.
    pub epsilon: Option<f64>,
}

impl Default for GrpoPassK {
    fn default() -> GrpoPassK {
        GrpoPassK {
            epsilon: Some(1e-6),
        }
    }
}

impl AdvantageEstimator for GrpoPassK {
    fn name(&self) -> &'static str {
        "grpo_passk"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Group
    }

    fn smallest_group(&self) -> usize {
        2
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_epsilon(self.epsilon)
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        self.check()?;
        let scores = GroupScores::new(inputs, self.name())?;
        let groups = group_rows(inputs.groups.unwrap_or_default());
        let needed = self.smallest_group();
        if let Some(group) = groups.iter().find(|rows| rows.len() < needed) {
            return Err(AlgoError::TooFew {
                algorithm: self.name(),
                unit: "responses to a prompt",
                needed,
                got: group.len(),
            });
        }
        let rows = scores.map_groups(|_, scores| self.of_group(scores))?;
        inputs.of_rows(&rows)
    }
}

impl GrpoPassK {
    fn of_group(&self, scores: &[f64]) -> Result<Vec<f64>, AlgoError> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let [best, second, ..] = order[..] else {
            return Ok(vec![0.0; scores.len()]);
        };
        let scale = match self.epsilon {
            Some(epsilon) => masked::variance(scores)?.sqrt() + epsilon,
            None => 1.0,
        };
        let mut advantages = vec![0.0; scores.len()];
        advantages[best] = (scores[best] - scores[second]) / scale;
        Ok(advantages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ragged::Ragged;

    #[test]
    fn by_hand() {
        let scores = [0.2, 0.9, 0.5];
        let plain = GrpoPassK { epsilon: None };
        assert_eq!(plain.of_group(&scores).unwrap(), [0.0, 0.4, 0.0]);
        let normalised = GrpoPassK::default().of_group(&scores).unwrap();
        assert!((normalised[1] - 1.138986).abs() < 1e-6);
        assert_eq!(plain.of_group(&[1.0, 1.0, 0.0]).unwrap(), [0.0; 3]);
    }

    #[test]
    fn a_lone_row_is_rejected_and_a_lone_score_gets_zero() {
        let actions = Ragged::<bool>::from_rows([[true], [true]]);
        let of = |groups: &[u64]| {
            let inputs = AdvantageInputs {
                groups: Some(groups),
                scores: Some(&[Some(1.0), None]),
                ..AdvantageInputs::new(&actions)
            };
            GrpoPassK::default().estimate(&inputs)
        };
        assert_eq!(of(&[3, 3]).unwrap().advantages.values(), [0.0, 0.0]);
        let error = of(&[3, 4]).unwrap_err();
        assert!(matches!(error, AlgoError::TooFew { got: 1, .. }), "{error}");
    }
}
