//! Inputs of preference losses in a mini-batch, besides its tokens.

use crate::error::{AlgoError, check_finite, check_len, check_setting};

/// Columns of a mini-batch of preferences; all are constants, and each is needed by only some losses.
///
/// In a mini-batch of pairs, row 2i is the chosen and row 2i + 1 the rejected side of pair i.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Preferences {
    /// The margin by which the chosen side should win, `[pairs]`; read by the reward model's loss.
    pub margins: Option<Vec<f64>>,
    /// Whether each row is a response to learn or to unlearn, `[B]`, including rows without action tokens; read by
    /// losses of unpaired rows.
    pub desirable: Option<Vec<bool>>,
    /// z₀ of KTO, at least 0, nats: see [`kl_baseline`](crate::losses::kl_baseline).
    pub kl_baseline: Option<f64>,
    /// δ of `bco_pair`, a running mean of rewards β·Δ that the caller maintains; 0 if it does not.
    pub reward_shift: f64,
    /// Action tokens of the chosen rows of all ranks; if not declared, those of this mini-batch.
    pub num_chosen_tokens: Option<usize>,
}

impl Preferences {
    /// Rejects columns that are too short for `num_rows` rows, and numbers that are not finite.
    ///
    /// # Errors
    /// The first invalid column.
    pub(crate) fn check(&self, num_rows: usize) -> Result<(), AlgoError> {
        if let Some(margins) = &self.margins {
            let num_pairs = num_rows.div_ceil(2).max(margins.len());
            check_len("margins", "pairs", margins.len(), num_pairs)?;
            check_finite("margins", margins)?;
        }
        if let Some(desirable) = &self.desirable {
            let num_rows = num_rows.max(desirable.len());
            check_len("desirable", "rows", desirable.len(), num_rows)?;
        }
        if let Some(baseline) = self.kl_baseline {
            let valid = baseline >= 0.0 && baseline.is_finite();
            check_setting("kl_baseline", baseline, valid, "it is max(0, a mean)")?;
        }
        check_finite("reward_shift", &[self.reward_shift])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(preferences: Preferences, refusal: Option<&str>) {
        match (preferences.check(3), refusal) {
            (Ok(()), None) => {}
            (Err(error), Some(word)) => assert!(error.to_string().contains(word), "{error}"),
            (got, expected) => panic!("{got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn columns_are_checked_against_the_rows() {
        let none = Preferences::default;
        check(none(), None);
        let margins = |margins: &[f64]| Preferences {
            margins: Some(margins.to_vec()),
            ..none()
        };
        check(margins(&[0.0, 1.0]), None);
        // A last pair without any token does not appear in the rows.
        check(margins(&[0.0, 1.0, 2.0]), None);
        check(margins(&[0.0]), Some("`margins` has 1 pairs, expected 2"));
        check(margins(&[0.0, f64::NAN]), Some("`margins` is NaN"));
        let desirable = |num_rows| Preferences {
            desirable: Some(vec![true; num_rows]),
            ..none()
        };
        check(desirable(4), None);
        check(desirable(2), Some("`desirable` has 2 rows, expected 3"));
        let baseline = |kl_baseline| Preferences {
            kl_baseline: Some(kl_baseline),
            ..none()
        };
        check(baseline(0.0), None);
        check(baseline(-0.1), Some("kl_baseline"));
        check(baseline(f64::INFINITY), Some("kl_baseline"));
    }
}
