//! Standardisation of a data set's returns.

use crate::error::{AlgoError, check_finite};
use crate::masked;

/// (x − mean) / (std + ε) over the entire data set, Bessel deviation, ε the spacing of f64 at 1.
///
/// A single return has no deviation: it becomes 0 and is not divided. Equal returns become exactly 0.
///
/// # Shapes
/// `returns`, result: one per row of the data set
/// # Errors
/// A return that is not finite.
/// # Differences
/// trlX divides the rounding error of equal returns by ε; here equality is checked.
/// # Source
/// trlX `make_experience` of its ILQL trainer.
pub fn standardize_returns(returns: &[f64]) -> Result<Vec<f64>, AlgoError> {
    check_finite("returns", returns)?;
    if returns.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(vec![0.0; returns.len()]);
    }
    let mean = masked::mean(returns);
    let scale = masked::variance(returns)?.sqrt() + f64::EPSILON;
    Ok(returns.iter().map(|x| (x - mean) / scale).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let got = standardize_returns(&[1.0, 2.0, 3.0]).unwrap();
        let expected = [-1.0, 0.0, 1.0];
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{got:?}");
        }
    }

    #[test]
    fn returns_without_a_deviation_become_zero() {
        assert_eq!(standardize_returns(&[]).unwrap(), [0.0; 0]);
        assert_eq!(standardize_returns(&[3.5]).unwrap(), [0.0]);
        assert_eq!(standardize_returns(&[0.1; 3]).unwrap(), [0.0; 3]);
    }

    #[test]
    fn rejects_non_finite_numbers() {
        let error = standardize_returns(&[1.0, f64::NAN]).unwrap_err();
        assert_eq!(error.to_string(), "`returns` is NaN at position 1");
    }
}
