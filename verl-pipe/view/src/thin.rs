//! Curves with fewer points that look the same: each part of a curve keeps its smallest and its largest value.

use std::ops::Range;

/// A point of a thinned curve, and the part of the curve that it represents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ThinnedPoint {
    /// Position in the curve.
    pub at: usize,
    /// Positions whose bands it represents.
    pub part: Range<usize>,
}

/// Thins a curve to `most` points (at least 4): the first, the last, and the first smallest and first largest value of
/// each part. A part without numbers keeps its first position, so that gaps remain.
pub(crate) fn thin(values: &[Option<f64>], most: usize) -> Vec<ThinnedPoint> {
    let n = values.len();
    if n <= most.max(4) {
        return (0..n)
            .map(|at| ThinnedPoint {
                at,
                part: at..at + 1,
            })
            .collect();
    }
    let parts = (most.max(4) - 2) / 2;
    let mut kept: Vec<ThinnedPoint> = Vec::with_capacity(most);
    for index in 0..parts {
        let part = index * n / parts..(index + 1) * n / parts;
        let mut chosen = extremes(values, &part);
        if index == 0 {
            chosen.push(0);
        }
        if index + 1 == parts {
            chosen.push(n - 1);
        }
        chosen.sort_unstable();
        chosen.dedup();
        kept.extend(chosen.into_iter().map(|at| ThinnedPoint {
            at,
            part: part.clone(),
        }));
    }
    kept
}

fn extremes(values: &[Option<f64>], part: &Range<usize>) -> Vec<usize> {
    let mut ends: Option<(usize, usize)> = None;
    let numbers = part.clone().filter_map(|at| Some((at, values[at]?)));
    for (at, value) in numbers {
        let (low, high) = ends.unwrap_or((at, at));
        let below = values[low].is_some_and(|least| value < least);
        let above = values[high].is_some_and(|most| value > most);
        ends = Some((if below { at } else { low }, if above { at } else { high }));
    }
    match ends {
        Some((low, high)) => vec![low, high],
        None => vec![part.start],
    }
}

/// The smallest number of a part.
pub(crate) fn least(values: &[Option<f64>], part: &Range<usize>) -> Option<f64> {
    values[part.clone()]
        .iter()
        .copied()
        .flatten()
        .reduce(f64::min)
}

/// The largest number of a part.
pub(crate) fn largest(values: &[Option<f64>], part: &Range<usize>) -> Option<f64> {
    values[part.clone()]
        .iter()
        .copied()
        .flatten()
        .reduce(f64::max)
}

/// The number with six significant digits, the precision of an f32; `None` if it is not finite.
pub(crate) fn rounded(value: Option<f64>) -> Option<f64> {
    let value = value.filter(|value| value.is_finite())?;
    format!("{value:.5e}").parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn short_curves_are_not_thinned() {
        let kept = thin(&[Some(1.0), None, Some(3.0)], 4);
        assert_eq!(kept.len(), 3);
        assert_eq!(kept[1], ThinnedPoint { at: 1, part: 1..2 });
        assert_eq!(thin(&[], 4), []);
    }

    #[test]
    fn a_spike_of_one_step_and_a_gap_remain() {
        let mut values: Vec<Option<f64>> = (0..10_000).map(|at| Some(f64::from(at % 7))).collect();
        values[4_321] = Some(1e6);
        values[77] = Some(-5.0);
        values[9_000..9_200].fill(None);
        let kept = thin(&values, 200);
        assert!(kept.len() <= 200, "{}", kept.len());
        let at: Vec<usize> = kept.iter().map(|kept| kept.at).collect();
        for needed in [0, 77, 4_321, 9_999] {
            assert!(at.contains(&needed), "{needed}");
        }
        assert!(at.iter().any(|at| values[*at].is_none()));
        let spiked = kept.iter().find(|kept| kept.at == 4_321);
        let part = spiked.map(|kept| kept.part.clone()).unwrap_or_default();
        assert_eq!(
            (least(&values, &part), largest(&values, &part)),
            (Some(0.0), Some(1e6))
        );
    }

    proptest! {
        #[test]
        fn extremes_and_order_are_kept(
            values in prop::collection::vec(prop::option::of(-1e3..1e3f64), 0..400),
            most in 4usize..80,
        ) {
            let kept = thin(&values, most);
            prop_assert!(kept.len() <= most.max(4));
            prop_assert!(kept.windows(2).all(|pair| pair[0].at < pair[1].at));
            prop_assert!(kept.iter().all(|kept| kept.part.contains(&kept.at)));
            let all = 0..values.len();
            let shown: Vec<Option<f64>> = kept.iter().map(|kept| values[kept.at]).collect();
            let range = 0..shown.len();
            prop_assert_eq!(least(&values, &all), least(&shown, &range));
            prop_assert_eq!(largest(&values, &all), largest(&shown, &range));
            // The parts cover the curve.
            let covered = kept.iter().map(|kept| kept.part.end).max().unwrap_or(0);
            prop_assert_eq!(covered, values.len());
        }
    }

    #[test]
    fn numbers_keep_six_digits() {
        for (value, expected) in [
            (0.123_456_789, Some(0.123_457)),
            (-1.0 / 3.0 * 1e-9, Some(-3.333_33e-10)),
            (1_234_567.0, Some(1_234_570.0)),
            (f64::NAN, None),
            (f64::INFINITY, None),
        ] {
            assert_eq!(rounded(Some(value)), expected);
        }
        assert_eq!(rounded(None), None);
    }
}
