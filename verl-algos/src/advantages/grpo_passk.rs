//! GRPO for pass@k.

use super::{AdvantageEstimator, AdvantageInputs, Advantages, GroupScores};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// Only the best row of a group gets something: best − second best, over σ_g + ε where normalised; the others 0.
///
/// A tie at the top gives 0.
///
/// # Errors
/// [`AlgoError::TooFew`] for a group of one.
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

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        if let Some(epsilon) = self.epsilon {
            let sound = epsilon >= 0.0 && epsilon.is_finite();
            check_setting(
                "epsilon",
                epsilon,
                sound,
                "it must be a finite number from 0",
            )?;
        }
        let scores = GroupScores::new(inputs, self.name())?;
        let rows = scores.map_groups(|_, scores| self.of_group(scores))?;
        inputs.of_rows(&rows)
    }
}

impl GrpoPassK {
    fn of_group(&self, scores: &[f64]) -> Result<Vec<f64>, AlgoError> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let [best, second, ..] = order[..] else {
            return Err(AlgoError::TooFew {
                algorithm: self.name(),
                unit: "responses to a prompt",
                needed: 2,
                got: scores.len(),
            });
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

    #[test]
    fn by_hand() {
        let scores = [0.2, 0.9, 0.5];
        let plain = GrpoPassK { epsilon: None };
        assert_eq!(plain.of_group(&scores).unwrap(), [0.0, 0.4, 0.0]);
        let normalised = GrpoPassK::default().of_group(&scores).unwrap();
        assert!((normalised[1] - 1.138986).abs() < 1e-6);
        assert_eq!(plain.of_group(&[1.0, 1.0, 0.0]).unwrap(), [0.0; 3]);
        assert!(plain.of_group(&[1.0]).is_err());
    }
}
