//! Statistics that are robust to a few outliers, and numbers for messages.

/// Scales a median absolute deviation to the standard deviation of a normal distribution.
const NORMAL: f64 = 1.4826;

/// The median; for an even number of values the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.len().checked_sub(1)? / 2, sorted.len() / 2);
    Some(f64::midpoint(*sorted.get(low)?, *sorted.get(high)?))
}

/// The median absolute deviation from the median, scaled to a standard deviation.
pub(crate) fn deviation(values: &[f64]) -> Option<f64> {
    let center = median(values)?;
    let distances: Vec<f64> = values.iter().map(|value| (value - center).abs()).collect();
    Some(NORMAL * median(&distances)?)
}

/// A number with three significant digits: `17.4`, `0.0312`, `1.2e-5`. Only zero is printed as zero.
pub(crate) fn shown(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() || value == 0.0 || (value.fract() == 0.0 && size < 1e6) {
        return format!("{value}");
    }
    if !(1e-3..1e5).contains(&size) {
        return format!("{value:.1e}");
    }
    let digits = (2 - libm::log10(size).floor() as i32).max(0);
    let text = format!("{value:.*}", digits as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A share as `62 %`; at least `0.1 %` unless it is 0, and at most `99.9 %` unless it is 1.
pub(crate) fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    match percent {
        p if p <= 0.0 || p >= 100.0 => format!("{p:.0} %"),
        p if (1.0..99.0).contains(&p) => format!("{p:.0} %"),
        p => format!("{:.1} %", p.clamp(0.1, 99.9)),
    }
}

/// `17 times`, `1.4 times`.
pub(crate) fn times(factor: f64) -> String {
    match factor {
        f if f >= 10.0 => format!("{f:.0} times"),
        f => format!("{f:.1} times"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outlier_moves_neither_median_nor_deviation() {
        let calm = [1.0, 1.1, 0.9, 1.0, 1.05];
        let odd = [1.0, 1.1, 0.9, 1.0, 1e9];
        assert_eq!(median(&calm), Some(1.0));
        assert_eq!(median(&odd), Some(1.0));
        assert!(deviation(&odd).is_some_and(|d| d < 0.2));
        assert_eq!(median(&[1.0, 2.0]), Some(1.5));
        assert_eq!((median(&[]), deviation(&[])), (None, None));
    }

    #[test]
    fn numbers_are_short_and_small_ones_are_not_zero() {
        for (value, expected) in [
            (0.0, "0"),
            (0.000_04, "4.0e-5"),
            (0.000_5, "5.0e-4"),
            (17.4, "17.4"),
            (1.0, "1"),
            (0.031_24, "0.0312"),
            (123.456, "123"),
            (-0.05, "-0.05"),
            (2.5e7, "2.5e7"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(shown(value), expected);
        }
        let shares = [0.0, 0.0001, 0.5, 0.9999, 1.0].map(percent);
        assert_eq!(shares, ["0 %", "0.1 %", "50 %", "99.9 %", "100 %"]);
        assert_eq!([times(17.06), times(1.36)], ["17 times", "1.4 times"]);
    }
}
