//! Two log-probs of each action token, and their differences.

use crate::error::{AlgoError, check_finite, check_given};
use crate::ragged::Ragged;

/// The log-probs that are compared, and which tokens count.
#[derive(Debug, Clone, Copy)]
pub struct LogProbPair<'a> {
    /// Which response tokens are actions, `[B, T~]`.
    pub actions: &'a Ragged<bool>,
    /// Log-probs of the training engine, `[B, T~]`, nats: ℓ_old in decoupled mode, ℓ in bypass mode.
    pub train_log_probs: &'a Ragged<f64>,
    /// Log-probs of the sampler, `[B, T~]`, nats; `None` for a token that it did not score, whose ratio is then 1.
    pub rollout_log_probs: &'a Ragged<Option<f64>>,
}

/// Log-probs of a sampler that scored every token.
pub fn all_scored(log_probs: &Ragged<f64>) -> Ragged<Option<f64>> {
    log_probs.map(|_, _, log_prob| Some(log_prob))
}

/// Log-ratios of the action tokens, packed.
pub(super) struct LogRatios {
    /// Row of each action token, `[N]`.
    pub rows: Vec<usize>,
    /// Action tokens of each row, `[B]`.
    pub lengths: Vec<usize>,
    /// q = ℓ_train − ℓ_roll, 0 if the sampler did not score the token, `[N]`.
    pub values: Vec<f64>,
    /// ℓ_train, `[N]`.
    pub train: Vec<f64>,
    /// ℓ_roll, `[N]`.
    pub rollout: Vec<Option<f64>>,
}

impl LogRatios {
    /// # Errors
    /// Rows whose lengths differ from those of the mask; a log-prob of an action token that is not finite; no action
    /// token that the sampler scored.
    pub fn new(pair: &LogProbPair<'_>) -> Result<LogRatios, AlgoError> {
        let train = pair
            .train_log_probs
            .select("train_log_probs", pair.actions)?;
        let rollout = pair
            .rollout_log_probs
            .select("rollout_log_probs", pair.actions)?;
        check_finite("train_log_probs", &train)?;
        check_given("rollout_log_probs", &rollout)?;
        if rollout.iter().all(Option::is_none) {
            return Err(AlgoError::TooFew {
                algorithm: "rollout_correction",
                unit: "action tokens that the sampler scored",
                needed: 1,
                got: 0,
            });
        }
        let each = train.iter().zip(&rollout);
        let values = each.map(|(t, r)| r.map_or(0.0, |r| t - r)).collect();
        Ok(LogRatios {
            rows: pair.actions.packed_rows(),
            lengths: pair.actions.counts(),
            values,
            train,
            rollout,
        })
    }

    /// Sum of each row, `[N]` to `[B]`.
    pub fn row_sums(&self, values: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.lengths.len()];
        let each = self.rows.iter().zip(values);
        each.for_each(|(&row, value)| sums[row] += value);
        sums
    }

    /// Mean of each row, 0 for a row without tokens, `[N]` to `[B]`.
    pub fn row_means(&self, values: &[f64]) -> Vec<f64> {
        let sums = self.row_sums(values).into_iter().zip(&self.lengths);
        sums.map(|(sum, &length)| sum / length.max(1) as f64)
            .collect()
    }

    /// Repeats one number per row on its tokens, `[B]` to `[N]`.
    pub fn on_tokens(&self, of_rows: &[f64]) -> Vec<f64> {
        self.rows.iter().map(|&row| of_rows[row]).collect()
    }

    /// The numbers of rows that have tokens.
    pub fn of_non_empty(&self, of_rows: &[f64]) -> Vec<f64> {
        let each = of_rows.iter().zip(&self.lengths);
        each.filter(|(_, n)| **n > 0).map(|(v, _)| *v).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_tokens_without_a_ratio() {
        let actions = Ragged::<bool>::from_rows([[true, false]]);
        let check = |train: f64, rollout: Option<f64>, expected: &str| {
            let train = Ragged::<f64>::from_rows([[train, f64::NAN]]);
            let rollout = Ragged::<Option<f64>>::from_rows([[rollout, Some(f64::NAN)]]);
            let pair = LogProbPair {
                actions: &actions,
                train_log_probs: &train,
                rollout_log_probs: &rollout,
            };
            let error = LogRatios::new(&pair).err().map(|error| error.to_string());
            assert_eq!(error.unwrap_or_default(), expected);
        };
        check(-1.0, Some(-2.0), "");
        let text = "`rollout_log_probs` is NaN at position 0";
        check(-1.0, Some(f64::NAN), text);
        let text = "`train_log_probs` is -inf at position 0";
        check(f64::NEG_INFINITY, Some(-1.0), text);
        let text = "`rollout_correction` needs at least 1 action tokens that the sampler scored, \
                    got 0";
        check(-1.0, None, text);
    }
}
