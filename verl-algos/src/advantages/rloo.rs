//! Leave-one-out baseline.

use super::{AdvantageEstimator, AdvantageInputs, Advantages, GroupScores};
use crate::cut::CutUnit;
use crate::error::AlgoError;

/// RLOO: A = s − mean of the other scores of the group = n/(n−1)·(s − μ_g).
///
/// Equal scores give exactly 0. A lone row keeps its score. An unscored row is excluded from the statistics and gets 0.
///
/// # Shapes
/// Scores and groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Differences
/// One rule for lone rows: verl's vectorised form gives them 0, its loop the raw score, as here.
/// # Source
/// Ahmadian et al. 2024, arXiv:2402.14740, eq. 8; Kool et al. 2019.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rloo;

impl AdvantageEstimator for Rloo {
    fn name(&self) -> &'static str {
        "rloo"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Group
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        let scores = GroupScores::new(inputs, self.name())?;
        let rows = scores.map_groups(|_, scores| {
            let n = scores.len() as f64;
            let mean = crate::masked::mean(scores);
            Ok(match scores {
                [lone] => vec![*lone],
                _ => scores.iter().map(|s| n / (n - 1.0) * (s - mean)).collect(),
            })
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
        let two_thirds = 2.0 / 3.0;
        let expected = [
            two_thirds,
            -two_thirds,
            -two_thirds,
            two_thirds,
            -0.2,
            0.2,
            0.7,
        ];
        check_groups(&Rloo, &expected);
    }
}
