//! Group policy gradient.

use super::{AdvantageEstimator, AdvantageInputs, Advantages, GroupScores};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// GPG: A = α(s − μ_g)/f_norm with α = B / max(1, rows whose score is not 0).
///
/// Equal scores give exactly 0. A lone row has μ_g = 0 and gets α s / f_norm, which is α s with the usual f_norm = 1. α
/// depends on the entire batch, so the batch must not be divided.
///
/// # Shapes
/// Scores and groups `[B]`; result `[B, T~]`, one number per row on its action tokens.
/// # Errors
/// An `f_norm` that is not positive; scores or groups that are missing or not finite.
/// # Differences
/// verl also computes σ_g but does not use it; it divides lone rows by f_norm like all others, as here.
/// # Source
/// Chu et al. 2025, arXiv:2504.02546; verl `compute_gpg_outcome_advantage`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpg {
    /// Divisor; 1 in verl.
    pub f_norm: f64,
}

impl Default for Gpg {
    fn default() -> Gpg {
        Gpg { f_norm: 1.0 }
    }
}

impl AdvantageEstimator for Gpg {
    fn name(&self) -> &'static str {
        "gpg"
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::MiniBatch
    }

    fn check(&self) -> Result<(), AlgoError> {
        let valid = self.f_norm > 0.0 && self.f_norm.is_finite();
        check_setting("f_norm", self.f_norm, valid, "it must be positive")
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        self.check()?;
        let scores = GroupScores::new(inputs, self.name())?;
        let scored = scores.scores.iter().flatten();
        let not_zero = scored.clone().filter(|s| **s != 0.0).count();
        let scale = scored.count() as f64 / not_zero.max(1) as f64 / self.f_norm;
        let rows = scores.map_groups(|_, scores| {
            let mean = match scores {
                [_] => 0.0,
                _ => masked::mean(scores),
            };
            Ok(scores.iter().map(|s| scale * (s - mean)).collect())
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
        // 7 rows, 5 of them not 0.
        let expected = [0.7, -0.7, -0.7, 0.7, -0.14, 0.14, 0.98];
        check_groups(&Gpg::default(), &expected);
    }
}
