//! Dynamic sampling: groups without a training signal are dropped, and others sampled in their place.

use crate::advantages::group_rows;
use crate::error::{AlgoError, check_given, check_len, check_setting};

/// Which groups of responses are kept.
///
/// # Shapes
/// Scores and groups `[B]`; result: one flag per row, `[B]`.
/// # Differences
/// The same as [`GroupFilter::keep`].
/// # Source
/// The same as [`GroupFilter::keep`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GroupFilter {
    /// Groups whose scores are not all equal. A group with one score is kept: there is nothing to compare it with.
    Differing,
    /// Groups whose mean score lies strictly between the bounds.
    MeanInside {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
}

impl GroupFilter {
    /// For each row whether its group is kept; the rows of a group are kept or dropped together.
    ///
    /// Responses without a score are ignored, and a group without any score is dropped.
    ///
    /// # Shapes
    /// `scores`, `groups`, result: `[B]`
    /// # Errors
    /// Lengths that differ; a score that is not finite; bounds that are not in order.
    /// # Differences
    /// Equality is exact and decided per group. A deviation may differ from 0 by rounding, and statistics that leave a
    /// row out can split a group, as NeMo-RL's do.
    /// # Source
    /// Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2; verl `filter_groups`; the bounds are OpenRLHF's.
    pub fn keep(&self, scores: &[Option<f64>], groups: &[u64]) -> Result<Vec<bool>, AlgoError> {
        check_len("groups", "rows", groups.len(), scores.len())?;
        check_given("scores", scores)?;
        if let GroupFilter::MeanInside { low, high } = *self {
            let rule = "it must be below the upper bound";
            check_setting("low", low, low < high, rule)?;
        }
        let mut keep = vec![false; scores.len()];
        for rows in group_rows(groups) {
            let scored: Vec<f64> = rows.iter().filter_map(|&row| scores[row]).collect();
            let kept = self.keeps_group(&scored);
            rows.iter().for_each(|&row| keep[row] = kept);
        }
        Ok(keep)
    }

    fn keeps_group(&self, scores: &[f64]) -> bool {
        match (*self, scores) {
            (_, []) => false,
            (GroupFilter::Differing, [_]) => true,
            (GroupFilter::Differing, [first, rest @ ..]) => rest.iter().any(|s| s != first),
            (GroupFilter::MeanInside { low, high }, _) => {
                let mean = crate::masked::mean(scores);
                low < mean && mean < high
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(filter: GroupFilter, scores: &[Option<f64>], groups: &[u64], expected: &[bool]) {
        assert_eq!(filter.keep(scores, groups).unwrap(), expected);
    }

    #[test]
    fn groups_of_equal_scores_are_dropped() {
        let scores = [Some(0.1), Some(1.0), Some(0.1), Some(0.0), Some(0.1), None];
        let groups = [4, 9, 4, 9, 4, 9];
        let expected = [false, true, false, true, false, true];
        check(GroupFilter::Differing, &scores, &groups, &expected);
    }

    #[test]
    fn lone_scores_are_kept_and_groups_without_any_are_dropped() {
        let scores = [Some(0.0), Some(0.0), None, None];
        let expected = [true, true, true, false];
        check(GroupFilter::Differing, &scores, &[1, 2, 2, 3], &expected);
    }

    #[test]
    fn bounds_of_the_mean_are_strict() {
        let filter = GroupFilter::MeanInside {
            low: 0.0,
            high: 1.0,
        };
        let scores = [0.0, 0.0, 1.0, 1.0, 1.0, 0.0].map(Some);
        let expected = [false, false, false, false, true, true];
        check(filter, &scores, &[1, 1, 2, 2, 3, 3], &expected);
    }

    #[test]
    fn rejects_invalid_inputs() {
        let filter = GroupFilter::Differing;
        assert!(filter.keep(&[Some(1.0)], &[]).is_err());
        assert!(filter.keep(&[Some(f64::NAN)], &[1]).is_err());
        let filter = GroupFilter::MeanInside {
            low: 1.0,
            high: 1.0,
        };
        assert!(filter.keep(&[Some(1.0)], &[1]).is_err());
    }
}
