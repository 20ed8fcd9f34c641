//! Reductions over the unmasked tokens.
//!
//! All take *packed* values: masked values have been dropped before ([`Ragged::select`]), so that NaN or infinity there
//! cannot reach a result.
//!
//! [`Ragged::select`]: crate::Ragged::select

use crate::error::{AlgoError, check_len};

/// Added to the variance in [`whiten`], so that equal values become 0 and not 0/0.
pub const WHITEN_EPSILON: f64 = 1e-8;

/// Σ x.
///
/// # Shapes
/// `values`: `[N]`, packed action tokens; result: one number.
/// # Differences
/// verl replaces masked numbers by 0 first, which is equivalent; OpenRLHF multiplies by the mask, so that a NaN there
/// remains.
/// # Source
/// verl `masked_sum`.
pub fn sum(values: &[f64]) -> f64 {
    values.iter().sum()
}

/// Σ x / N; 0 if there are no values.
///
/// # Shapes
/// `values`: `[N]`.
/// # Differences
/// verl adds 1e-8 to N; TRL's mean of no values is NaN.
/// # Source
/// verl `masked_mean`.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() {
        0.0
    } else {
        sum(values) / values.len() as f64
    }
}

/// Σ x of each row, 0 for a row without tokens; `rows` gives the row of each value.
///
/// # Shapes
/// `values`, `rows`: `[N]`; result: `[B]`, B = `num_rows`.
/// # Errors
/// Different lengths of `rows` and `values`, or a row at or above `num_rows`.
/// # Source
/// verl `masked_sum` over the last dim.
pub fn row_sums(values: &[f64], rows: &[usize], num_rows: usize) -> Result<Vec<f64>, AlgoError> {
    check_len("rows", "tokens", rows.len(), values.len())?;
    let mut sums = vec![0.0; num_rows];
    for (value, &row) in values.iter().zip(rows) {
        *sums.get_mut(row).ok_or(AlgoError::OutOfRange {
            position: row,
            tokens: num_rows,
        })? += value;
    }
    Ok(sums)
}

/// Mean of each row, 0 for a row without tokens.
///
/// # Shapes
/// As [`row_sums`].
/// # Errors
/// As [`row_sums`].
/// # Source
/// verl `masked_mean` over the last dim.
pub fn row_means(values: &[f64], rows: &[usize], num_rows: usize) -> Result<Vec<f64>, AlgoError> {
    let sums = row_sums(values, rows, num_rows)?;
    let counts = row_sums(&vec![1.0; values.len()], rows, num_rows)?;
    let each = sums.iter().zip(&counts);
    Ok(each
        .map(|(s, n)| if *n > 0.0 { s / n } else { 0.0 })
        .collect())
}

/// Sum of squared deviations from the mean, in two passes, so that a large common offset costs no digits.
fn squared_deviations(values: &[f64]) -> f64 {
    let mean = mean(values);
    values.iter().map(|v| (v - mean) * (v - mean)).sum()
}

/// Variance over N − 1 (Bessel).
///
/// # Shapes
/// `values`: `[N]`, packed action tokens; result: one number.
/// # Errors
/// [`AlgoError::TooFew`] for fewer than two values, where it is undefined.
/// # Differences
/// verl rejects zero values and one value, too.
/// # Source
/// verl `masked_var`.
pub fn variance(values: &[f64]) -> Result<f64, AlgoError> {
    if values.len() < 2 {
        return Err(AlgoError::TooFew {
            algorithm: "variance",
            unit: "values",
            needed: 2,
            got: values.len(),
        });
    }
    Ok(squared_deviations(values) / (values.len() - 1) as f64)
}

/// Variance over N; 0 if there are no values.
///
/// # Shapes
/// `values`: `[N]`, packed action tokens; result: one number.
/// # Source
/// verl `masked_var` with `unbiased` off.
pub fn variance_biased(values: &[f64]) -> f64 {
    if values.is_empty() {
        0.0
    } else {
        squared_deviations(values) / values.len() as f64
    }
}

/// (x − mean) / √(variance + 1e-8), Bessel variance.
///
/// # Shapes
/// `values`, result: `[N]`, packed action tokens.
/// # Errors
/// As [`variance`].
/// # Differences
/// verl whitens a padded array and leaves values at masked slots unchanged; here only action tokens are passed in. verl
/// also rejects fewer than two.
/// # Source
/// verl `masked_whiten`.
pub fn whiten(values: &[f64]) -> Result<Vec<f64>, AlgoError> {
    let scale = (variance(values)? + WHITEN_EPSILON).sqrt().recip();
    let mean = mean(values);
    Ok(values.iter().map(|v| (v - mean) * scale).collect())
}

/// [`whiten`] with the mean added back: only the scale changes.
///
/// # Shapes
/// As [`whiten`].
/// # Errors
/// As [`variance`].
/// # Differences
/// As [`whiten`].
/// # Source
/// verl `masked_whiten` with `shift_mean` off.
pub fn whiten_keep_mean(values: &[f64]) -> Result<Vec<f64>, AlgoError> {
    let mean = mean(values);
    Ok(whiten(values)?.into_iter().map(|v| v + mean).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_one_to_four() {
        let values = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(sum(&values), 10.0);
        assert_eq!(mean(&values), 2.5);
        assert_eq!(variance(&values).unwrap(), 5.0 / 3.0);
        assert_eq!(variance_biased(&values), 1.25);
        assert_eq!(
            row_sums(&values, &[0, 2, 2, 0], 3).unwrap(),
            [5.0, 0.0, 5.0]
        );
        assert_eq!(
            row_means(&values, &[0, 2, 2, 0], 3).unwrap(),
            [2.5, 0.0, 2.5]
        );
        let white = whiten(&values).unwrap();
        assert!(mean(&white).abs() < 1e-12);
        assert!((variance(&white).unwrap() - 1.0).abs() < 1e-6);
        let kept = whiten_keep_mean(&values).unwrap();
        assert!((mean(&kept) - 2.5).abs() < 1e-12);
    }

    #[test]
    fn of_too_few() {
        assert_eq!(mean(&[]), 0.0);
        assert_eq!(variance_biased(&[]), 0.0);
        assert!(variance(&[1.0]).is_err());
        assert!(whiten(&[]).is_err());
        assert!(row_sums(&[1.0], &[3], 3).is_err());
    }

    #[test]
    fn equal_values_whiten_to_zero() {
        assert_eq!(whiten(&[0.5, 0.5, 0.5]).unwrap(), [0.0, 0.0, 0.0]);
    }
}
