//! Distances between two lists of numbers.

/// ‖got − want‖ / ‖want‖; the plain norm of `got` where `want` is zero; NaN where lengths differ or a value is not
/// finite.
pub(super) fn relative(got: &[f64], want: &[f64]) -> f64 {
    let difference = norm(&differences(got, want));
    let size = norm(want);
    if size > 0.0 {
        difference / size
    } else {
        difference
    }
}

/// The largest |got − want|.
pub(super) fn largest(got: &[f64], want: &[f64]) -> f64 {
    differences(got, want)
        .into_iter()
        .map(f64::abs)
        // `f64::max` drops NaN.
        .fold(0.0, |a, b| if b.is_nan() || b > a { b } else { a })
}

/// The mean |got − want|; 0 for empty lists.
pub(super) fn mean(got: &[f64], want: &[f64]) -> f64 {
    let differences = differences(got, want);
    let count = differences.len().max(1) as f64;
    differences.into_iter().map(f64::abs).sum::<f64>() / count
}

pub(super) fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn differences(got: &[f64], want: &[f64]) -> Vec<f64> {
    if got.len() != want.len() {
        return vec![f64::NAN];
    }
    let pairs = got.iter().zip(want);
    // Infinity minus itself is NaN; minus anything else it stays infinite.
    pairs.map(|(got, want)| got - want).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_match_hand_computed_values() {
        let (got, want) = ([3.0, 4.5], [3.0, 4.0]);
        assert_eq!(relative(&got, &want), 0.1);
        assert_eq!(largest(&got, &want), 0.5);
        assert_eq!(mean(&got, &want), 0.25);
        assert_eq!(relative(&[2.0], &[0.0]), 2.0);
        assert_eq!(mean(&[], &[]), 0.0);
    }

    #[test]
    fn missing_or_non_finite_values_give_no_finite_distance() {
        for measure in [relative, largest, mean] {
            assert!(measure(&[1.0], &[1.0, 2.0]).is_nan());
            assert!(measure(&[f64::NAN, 1.0], &[1.0, 1.0]).is_nan());
            assert!(!measure(&[f64::INFINITY], &[1.0]).is_finite());
        }
    }
}
