//! Length-weighted group baseline.

use super::{AdvantageEstimator, AdvantageInputs, Advantages, GroupScores};
use crate::cut::CutUnit;
use crate::error::AlgoError;

/// OPO: A = s − Σ L s / Σ L over the group, L the row's number of action tokens.
///
/// Equal scores give exactly 0. A lone row keeps its score.
///
/// # Shapes
/// Scores and groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Differences
/// A group of rows without action tokens is 0/0 in verl; here its baseline is 0.
/// # Source
/// Hao et al. 2025, arXiv:2505.23585.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opo;

impl AdvantageEstimator for Opo {
    fn name(&self) -> &'static str {
        "opo"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Group
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        let scores = GroupScores::new(inputs, self.name())?;
        let lengths = inputs.actions.counts();
        let rows = scores.map_groups(|rows, scores| {
            if let [lone] = scores {
                return Ok(vec![*lone]);
            }
            let length = |row: &usize| lengths[*row] as f64;
            let total: f64 = rows.iter().map(length).sum();
            let weighted: f64 = rows.iter().zip(scores).map(|(b, s)| length(b) * s).sum();
            let baseline = if total > 0.0 { weighted / total } else { 0.0 };
            Ok(scores.iter().map(|s| s - baseline).collect())
        })?;
        inputs.of_rows(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::test::check_groups;

    #[test]
    fn by_hand() {
        check_groups(&Opo, &[0.25, -0.75, -0.75, 0.25, -0.05, 0.15, 0.7]);
    }
}
