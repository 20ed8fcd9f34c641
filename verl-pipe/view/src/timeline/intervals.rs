//! Sets of times: sorted intervals that do not touch.

/// A time from its start to its end (seconds).
pub(super) type Interval = (f64, f64);

/// All times that are in any of `intervals`.
pub(super) fn union(mut intervals: Vec<Interval>) -> Vec<Interval> {
    intervals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut all: Vec<Interval> = Vec::new();
    for (from, to) in intervals {
        match all.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => all.push((from, to)),
        }
    }
    all
}

/// The times of a set within an interval.
pub(super) fn clip(set: &[Interval], (from, to): Interval) -> Vec<Interval> {
    let inside = set.iter().map(|(a, b)| (a.max(from), b.min(to)));
    inside.filter(|(a, b)| a < b).collect()
}

/// The times that are in both sets.
pub(super) fn both(a: &[Interval], b: &[Interval]) -> Vec<Interval> {
    a.iter().flat_map(|part| clip(b, *part)).collect()
}

/// The times of an interval that are not in the set.
pub(super) fn gaps(set: &[Interval], (from, to): Interval) -> Vec<Interval> {
    let mut gaps = Vec::new();
    let mut at = from;
    for (start, end) in clip(set, (from, to)) {
        if start > at {
            gaps.push((at, start));
        }
        at = at.max(end);
    }
    if to > at {
        gaps.push((at, to));
    }
    gaps
}

/// The length of a set (seconds).
pub(super) fn total(set: &[Interval]) -> f64 {
    // The sum of nothing is -0, which prints a minus sign.
    set.iter().map(|(from, to)| to - from).sum::<f64>() + 0.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sets() -> impl Strategy<Value = Vec<Interval>> {
        let interval = (0..90u32, 0..20u32);
        let some = proptest::collection::vec(interval, 0..8);
        some.prop_map(|all| {
            let all = all.into_iter();
            union(all.map(|(a, n)| (f64::from(a), f64::from(a + n))).collect())
        })
    }

    /// Whether the set contains the middle of a second.
    fn contains(set: &[Interval], second: u32) -> bool {
        let at = f64::from(second) + 0.5;
        set.iter().any(|(from, to)| (*from..*to).contains(&at))
    }

    proptest! {
        #[test]
        fn sets_contain_what_they_should(a in sets(), b in sets()) {
            let either = union([a.clone(), b.clone()].concat());
            let (common, rest) = (both(&a, &b), gaps(&a, (10.0, 100.0)));
            for second in 0..120 {
                let (in_a, in_b) = (contains(&a, second), contains(&b, second));
                prop_assert_eq!(contains(&either, second), in_a || in_b);
                prop_assert_eq!(contains(&common, second), in_a && in_b);
                prop_assert_eq!(contains(&rest, second), !in_a && (10..100).contains(&second));
            }
            prop_assert_eq!(total(&either) + total(&common), total(&a) + total(&b));
        }
    }
}
