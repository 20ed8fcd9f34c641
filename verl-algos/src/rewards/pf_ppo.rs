//! PF-PPO: rows resampled with replacement, with weights that depend on their scores.

use crate::error::{AlgoError, check_finite, check_given, check_setting};

/// Added to each weight, so that a batch whose weights are all 0 can be sampled.
const EPSILON: f64 = 1e-8;
/// Weight of the best rows, and of the others, by [`PfPpo::MaxRandom`].
const MAX_RANDOM: (f64, f64) = (0.4, 0.1);

/// How a row's weight w depends on its score s: w = |s|^p, or one of two levels, for rows that are and are not among
/// the best (or worst).
///
/// # Shapes
/// Scores and weights `[B]`.
/// # Differences
/// verl draws the rows itself, from a stateful generator; here [`draw`] takes the uniform numbers.
/// # Source
/// Shen and Zhang 2024, arXiv:2409.06957; verl `compute_pf_ppo_reweight_data`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PfPpo {
    /// |s|^p; verl: p = 2.
    Pow(f64),
    /// 1 for the best and the worst score of the batch, 0 for the others.
    MaxMin,
    /// 0.4 for the best score of the batch, 0.1 for the others.
    MaxRandom,
}

impl PfPpo {
    /// Weight of each row, 1e-8 added; 0 for a row without a score, which is never drawn.
    ///
    /// # Shapes
    /// `scores`, result: `[B]`
    /// # Errors
    /// A score that is not finite; a power that is negative or not finite.
    pub fn weights(&self, scores: &[Option<f64>]) -> Result<Vec<f64>, AlgoError> {
        check_given("scores", scores)?;
        if let PfPpo::Pow(power) = *self {
            let valid = power >= 0.0 && power.is_finite();
            let rule = "it must be a finite number of at least 0";
            check_setting("weight_pow", power, valid, rule)?;
        }
        let scored = || scores.iter().flatten().copied();
        let (best, worst) = (
            scored().fold(f64::NEG_INFINITY, f64::max),
            scored().fold(f64::INFINITY, f64::min),
        );
        let weight = |score: f64| match *self {
            PfPpo::Pow(power) => libm::pow(score.abs(), power),
            PfPpo::MaxMin => f64::from(score == best || score == worst),
            PfPpo::MaxRandom if score == best => MAX_RANDOM.0,
            PfPpo::MaxRandom => MAX_RANDOM.1,
        };
        let each = scores.iter();
        Ok(each
            .map(|score| score.map_or(0.0, |s| weight(s) + EPSILON))
            .collect())
    }
}

/// Rows drawn with replacement: each of `uniforms` selects the row in whose share of Σ weights it falls.
///
/// # Shapes
/// `weights`: `[B]`; `uniforms`, numbers in [0, 1), and the result: `[draws]`
/// # Errors
/// Weights that are negative, not finite, or all 0; a number outside [0, 1).
pub fn draw(weights: &[f64], uniforms: &[f64]) -> Result<Vec<usize>, AlgoError> {
    check_finite("weights", weights)?;
    let lowest = weights.iter().copied().fold(0.0, f64::min);
    check_setting("weights", lowest, lowest >= 0.0, "none may be negative")?;
    let total: f64 = weights.iter().sum();
    check_setting("weights", total, total > 0.0, "their sum must be positive")?;
    let drawn = uniforms.iter().map(|&u| {
        let rule = "it must lie in [0, 1)";
        check_setting("uniforms", u, (0.0..1.0).contains(&u), rule)?;
        let mut rest = u * total;
        let mut last = 0;
        for (row, &weight) in weights.iter().enumerate() {
            if weight > 0.0 {
                // Rounding may leave a remainder after the last row that has a weight.
                last = row;
                if rest < weight {
                    break;
                }
                rest -= weight;
            }
        }
        Ok(last)
    });
    drawn.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(method: PfPpo, expected: [f64; 5]) {
        let scores = [Some(-3.0), Some(2.0), Some(1.0), Some(2.0), None];
        let got = method.weights(&scores).unwrap();
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-7, "{got:?}");
        }
        assert_eq!(got[4], 0.0);
    }

    #[test]
    fn by_hand() {
        check(PfPpo::Pow(2.0), [9.0, 4.0, 1.0, 4.0, 0.0]);
        check(PfPpo::MaxMin, [1.0, 1.0, 0.0, 1.0, 0.0]);
        check(PfPpo::MaxRandom, [0.1, 0.4, 0.1, 0.4, 0.0]);
    }

    #[test]
    fn draws_fall_into_shares() {
        let weights = [1.0, 0.0, 3.0, 0.0];
        let got = draw(&weights, &[0.0, 0.2499, 0.25, 0.999_999]).unwrap();
        assert_eq!(got, [0, 0, 2, 2]);
        // All scores 0: every scored row is equally likely.
        let weights = PfPpo::Pow(2.0).weights(&[Some(0.0), Some(0.0)]).unwrap();
        assert_eq!(draw(&weights, &[0.49, 0.51]).unwrap(), [0, 1]);
    }

    #[test]
    fn rejects_invalid_inputs() {
        assert!(PfPpo::Pow(-1.0).weights(&[Some(1.0)]).is_err());
        assert!(PfPpo::MaxMin.weights(&[Some(f64::NAN)]).is_err());
        assert!(draw(&[1.0], &[1.0]).is_err());
        assert!(draw(&[0.0], &[0.5]).is_err());
        assert!(draw(&[2.0, -1.0], &[0.5]).is_err());
        assert!(draw(&[], &[0.5]).is_err());
    }
}
