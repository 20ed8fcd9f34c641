//! Tokens and rows that are too far from the sampler to be trained on.

use super::LOG_RATIO_BOUND;
use super::log_ratios::LogRatios;
use super::stats::{RejectionStats, deviation, largest, largest_distance, share, smallest};
use super::weights::parse_number;
use crate::error::{AlgoError, check_len, check_setting};
use crate::masked;
use crate::names::names;

/// An estimate of the divergence at a token, from q = clip(ℓ_train − ℓ_roll, ±20).
///
/// # Shapes
/// q: `[N]`; the result has the same shape.
/// # Differences
/// k1 is −q, so that it estimates KL(π_roll‖π_train); the estimators of [`crate::kl`] are of ℓ − ℓ_ref and have
/// their own bounds.
/// # Source
/// verl `compute_rollout_rejection_mask`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divergence {
    /// −q, of either sign.
    K1,
    /// q²/2.
    K2,
    /// e^q − 1 − q.
    K3,
}

impl Divergence {
    fn of(self, q: f64) -> f64 {
        let q = q.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND);
        match self {
            Divergence::K1 => -q,
            Divergence::K2 => q * q / 2.0,
            Divergence::K3 => libm::expm1(q) - q,
        }
    }
}

/// The unit that is compared with the bounds, and rejected beyond them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectionLevel {
    /// A token.
    Token,
    /// A row, by the sum over its tokens.
    SequenceSum,
    /// A row, by the mean over its tokens.
    SequenceMean,
    /// A row, by its worst token.
    SequenceMax,
}

names! {
    /// The name of a rejection rule: the unit that is compared with the bound, and the estimate of its divergence from
    /// q = ℓ_train − ℓ_roll: −q (k1, bounded as a ratio), q²/2 (k2) or e^q − 1 − q (k3).
    ///
    /// There is none for the largest k1: it is large only where π_roll > π_train.
    RejectionRuleName, "rejection rule" {
        /// The largest k2 of a response.
        SeqMaxK2 = "seq_max_k2",
        /// The largest k3 of a response.
        SeqMaxK3 = "seq_max_k3",
        /// The mean k1 of a response: the geometric mean of its π_roll/π_train.
        SeqMeanK1 = "seq_mean_k1",
        /// The mean k2 of a response.
        SeqMeanK2 = "seq_mean_k2",
        /// The mean k3 of a response.
        SeqMeanK3 = "seq_mean_k3",
        /// The sum of k1 over a response: the product of its π_roll/π_train.
        SeqSumK1 = "seq_sum_k1",
        /// The sum of k2 over a response.
        SeqSumK2 = "seq_sum_k2",
        /// The sum of k3 over a response.
        SeqSumK3 = "seq_sum_k3",
        /// k1 of a token: its π_roll/π_train.
        TokenK1 = "token_k1",
        /// k2 of a token.
        TokenK2 = "token_k2",
        /// k3 of a token.
        TokenK3 = "token_k3",
    }
}

impl RejectionRuleName {
    /// What is compared with the bound.
    fn parts(self) -> (RejectionLevel, Divergence) {
        use RejectionLevel::{SequenceMax, SequenceMean, SequenceSum, Token};
        match self {
            RejectionRuleName::SeqMaxK2 => (SequenceMax, Divergence::K2),
            RejectionRuleName::SeqMaxK3 => (SequenceMax, Divergence::K3),
            RejectionRuleName::SeqMeanK1 => (SequenceMean, Divergence::K1),
            RejectionRuleName::SeqMeanK2 => (SequenceMean, Divergence::K2),
            RejectionRuleName::SeqMeanK3 => (SequenceMean, Divergence::K3),
            RejectionRuleName::SeqSumK1 => (SequenceSum, Divergence::K1),
            RejectionRuleName::SeqSumK2 => (SequenceSum, Divergence::K2),
            RejectionRuleName::SeqSumK3 => (SequenceSum, Divergence::K3),
            RejectionRuleName::TokenK1 => (Token, Divergence::K1),
            RejectionRuleName::TokenK2 => (Token, Divergence::K2),
            RejectionRuleName::TokenK3 => (Token, Divergence::K3),
        }
    }
}

/// The only combination of level and divergence that is not a rule.
const LARGEST_K1: &str = "seq_max_k1";

/// Keeps tokens or rows with k2 or k3 ≤ high, or ln low ≤ k1 ≤ ln high.
///
/// k1 is −q, so its bounds are bounds of π_roll/π_train, *the inverse of the importance weight*: a band from 0.5 to 1.2
/// keeps π_train/π_roll from 1/1.2 to 2.
///
/// # Shapes
/// Log-ratios of the action tokens, packed `[N]`; one flag per token, `[N]`.
/// # Differences
/// verl counts rows without action tokens in its row statistics; here they are left out. OpenRLHF filters rows only by
/// the geometric mean of their ratio.
/// # Source
/// verl `compute_rollout_rejection_mask`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RejectionRule {
    /// The level of the rule.
    pub level: RejectionLevel,
    /// The estimate.
    pub divergence: Divergence,
    /// Lower bound of π_roll/π_train, for k1 only; `None` there for 1/high.
    pub low: Option<f64>,
    /// Upper bound: of π_roll/π_train for k1, of the estimate itself for k2 and k3.
    pub high: f64,
}

impl RejectionRule {
    /// A rule by its name, with a bound as text: `0.1`, or for k1 also a band `0.5_2.0`.
    ///
    /// # Errors
    /// A bound that is not a positive number; a band for k2 or k3, or one with its bounds reversed.
    pub fn named(name: RejectionRuleName, threshold: &str) -> Result<RejectionRule, AlgoError> {
        let (level, divergence) = name.parts();
        let setting = "rollout_rs_threshold";
        let (low, high) = match threshold.split_once('_') {
            None => (None, threshold),
            Some((low, high)) => (Some(parse_number(setting, low)?), high),
        };
        let rule = RejectionRule {
            level,
            divergence,
            low,
            high: parse_number(setting, high)?,
        };
        rule.check()?;
        Ok(rule)
    }

    /// Rules from two comma-separated lists, such as `token_k1,seq_mean_k3` and `0.5_2.0,0.2`; a single bound applies
    /// to all.
    ///
    /// # Errors
    /// Those of [`RejectionRule::named`]; an unknown name; different numbers of bounds and rules.
    pub fn parse_list(names: &str, thresholds: &str) -> Result<Vec<RejectionRule>, AlgoError> {
        let parts = |text: &'_ str| -> Vec<String> {
            let parts = text.split(',').map(str::trim);
            let there = parts.filter(|part| !part.is_empty());
            there.map(str::to_owned).collect()
        };
        let names = parts(names);
        let mut thresholds = parts(thresholds);
        if let [one] = &thresholds[..] {
            thresholds = vec![one.clone(); names.len()];
        }
        check_len(
            "rollout_rs_threshold",
            "bounds",
            thresholds.len(),
            names.len(),
        )?;
        let each = names.iter().zip(&thresholds);
        each.map(|(name, threshold)| RejectionRule::named(name.parse()?, threshold))
            .collect()
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        let own = |name: &&RejectionRuleName| name.parts() == (self.level, self.divergence);
        let found = RejectionRuleName::ALL.iter().find(own);
        found.map_or(LARGEST_K1, |name| name.as_str())
    }

    /// Rejects bounds that are out of order.
    ///
    /// # Errors
    /// A bound that is not positive; a lower bound for k2 or k3; a band with its bounds reversed; the largest k1.
    pub fn check(&self) -> Result<(), AlgoError> {
        self.name().parse::<RejectionRuleName>()?;
        let setting = "rollout_rs_threshold";
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let rule = "it must be a positive number";
        check_setting(setting, self.high, positive(self.high), rule)?;
        match (self.divergence, self.low) {
            (Divergence::K1, _) => {
                let low = self.low.unwrap_or(1.0 / self.high);
                check_setting(setting, low, positive(low), rule)?;
                let rule = "the lower bound must not exceed the upper one";
                check_setting(setting, low, low <= self.high, rule)
            }
            (_, None) => Ok(()),
            (_, Some(low)) => {
                let rule = "k2 and k3 have only an upper bound";
                check_setting(setting, low, false, rule)
            }
        }
    }

    /// Bounds of the statistic itself.
    fn limits(&self) -> (f64, f64) {
        match self.divergence {
            Divergence::K1 => {
                let low = self.low.unwrap_or(1.0 / self.high);
                (libm::log(low), libm::log(self.high))
            }
            // Neither is ever negative.
            Divergence::K2 | Divergence::K3 => (0.0, self.high),
        }
    }

    /// Which action tokens are kept, `[N]`.
    pub(super) fn apply(&self, ratios: &LogRatios) -> (Vec<bool>, RejectionStats) {
        let of_tokens: Vec<f64> = ratios
            .values
            .iter()
            .map(|q| self.divergence.of(*q))
            .collect();
        let of_rows = match self.level {
            RejectionLevel::Token | RejectionLevel::SequenceMean => ratios.row_means(&of_tokens),
            RejectionLevel::SequenceSum => ratios.row_sums(&of_tokens),
            RejectionLevel::SequenceMax => row_maxima(ratios, &of_tokens),
        };
        let statistic = match self.level {
            RejectionLevel::Token => of_tokens,
            _ => ratios.on_tokens(&of_rows),
        };
        let (low, high) = self.limits();
        let keep: Vec<bool> = statistic.iter().map(|s| low <= *s && *s <= high).collect();
        let stats = self.stats(ratios, &statistic, &of_rows, &keep);
        (keep, stats)
    }

    fn stats(
        &self,
        ratios: &LogRatios,
        statistic: &[f64],
        of_rows: &[f64],
        keep: &[bool],
    ) -> RejectionStats {
        let (low, high) = self.limits();
        let of_rows = ratios.of_non_empty(of_rows);
        let own = match self.level {
            RejectionLevel::Token => statistic,
            _ => &of_rows,
        };
        let within: Vec<f64> = statistic.iter().map(|s| s.clamp(low, high)).collect();
        let (masked_fraction, seq_masked_fraction) = masked_fractions(ratios, keep);
        RejectionStats {
            mean: masked::mean(statistic),
            max: largest(own),
            min: smallest(own),
            std: masked::variance_biased(&within).sqrt(),
            fraction_high: share(own, |s| s > high),
            fraction_low: share(own, |s| s < low),
            seq_mean: masked::mean(&of_rows),
            seq_std: deviation(&of_rows),
            seq_max: largest(&of_rows),
            seq_min: smallest(&of_rows),
            seq_max_deviation: largest_distance(&of_rows, 0.0),
            seq_fraction_high: share(&of_rows, |s| s > high),
            seq_fraction_low: share(&of_rows, |s| s < low),
            masked_fraction,
            seq_masked_fraction,
        }
    }
}

/// Share of tokens that are rejected, and of rows that lose one.
pub(super) fn masked_fractions(ratios: &LogRatios, keep: &[bool]) -> (f64, f64) {
    let gone: Vec<f64> = keep.iter().map(|kept| f64::from(!kept)).collect();
    let of_rows = ratios.of_non_empty(&ratios.row_sums(&gone));
    (masked::mean(&gone), share(&of_rows, |lost| lost > 0.0))
}

/// The largest number of each row.
fn row_maxima(ratios: &LogRatios, values: &[f64]) -> Vec<f64> {
    let mut maxima = vec![f64::NEG_INFINITY; ratios.lengths.len()];
    for (&row, &value) in ratios.rows.iter().zip(values) {
        maxima[row] = maxima[row].max(value);
    }
    maxima
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ragged::Ragged;
    use crate::rollout_correction::{LogProbPair, all_scored};

    /// Which of the tokens with ratios π_train/π_roll 3, 0.4, 1 | 1.1, 1.2 a rule keeps.
    #[track_caller]
    fn check(name: &str, threshold: &str, expected: [bool; 5]) {
        let ratios = [vec![3.0f64, 0.4, 1.0], vec![1.1, 1.2], vec![]];
        let train = Ragged::<f64>::from_rows(ratios).map(|_, _, r| r.ln() - 2.0);
        let pair = LogProbPair {
            actions: &train.map(|_, _, _| true),
            train_log_probs: &train,
            rollout_log_probs: &all_scored(&train.map(|_, _, _| -2.0)),
        };
        let rule = RejectionRule::named(name.parse().unwrap(), threshold).unwrap();
        assert_eq!(rule.name(), name);
        let (keep, stats) = rule.apply(&LogRatios::new(&pair).unwrap());
        assert_eq!(keep, expected, "{name}");
        let gone = keep.iter().filter(|kept| !**kept).count() as f64;
        assert_eq!(stats.masked_fraction, gone / 5.0);
    }

    #[test]
    fn by_hand() {
        // k1 bounds π_roll/π_train: 1/3, 2.5, 1 | 0.91, 0.83.
        check("token_k1", "0.9_3", [false, true, true, true, false]);
        check("token_k1", "2.6", [false, true, true, true, true]);
        // k2 = 0.60, 0.42, 0 | 0.0045, 0.0166; k3 = 0.90, 0.32, 0 | 0.0047, 0.0177.
        check("token_k2", "0.5", [false, true, true, true, true]);
        check("token_k3", "0.3", [false, false, true, true, true]);
        // Products of π_roll/π_train 1/1.2 and 1/1.32, geometric means 0.94 and 0.87.
        check("seq_sum_k1", "0.8_1.25", [true, true, true, false, false]);
        check("seq_mean_k1", "0.9_1.1", [true, true, true, false, false]);
        check("seq_sum_k2", "1.03", [true; 5]);
        check("seq_sum_k2", "1.02", [false, false, false, true, true]);
        check("seq_mean_k2", "0.342", [true; 5]);
        check("seq_mean_k2", "0.34", [false, false, false, true, true]);
        check("seq_sum_k3", "1.21", [false, false, false, true, true]);
        check("seq_mean_k3", "0.41", [true; 5]);
        check("seq_max_k2", "0.61", [true; 5]);
        check("seq_max_k2", "0.60", [false, false, false, true, true]);
        check("seq_max_k3", "0.91", [true; 5]);
    }

    #[test]
    fn lists() {
        let rules = RejectionRule::parse_list("token_k1, seq_mean_k3", "0.5_2.0,0.2").unwrap();
        let bounds: Vec<_> = rules.iter().map(|r| (r.name(), r.low, r.high)).collect();
        let expected = [("token_k1", Some(0.5), 2.0), ("seq_mean_k3", None, 0.2)];
        assert_eq!(bounds, expected);
        let rules = RejectionRule::parse_list("token_k2,token_k3", "0.2").unwrap();
        assert_eq!(rules[1].high, 0.2);
        assert!(RejectionRule::parse_list("token_k2,token_k3,seq_sum_k2", "1,2").is_err());
        assert!(RejectionRule::parse_list("token_k2", "").is_err());
    }

    #[test]
    fn rejects_invalid_inputs() {
        for (name, threshold) in [
            ("token_k4", "1"),
            ("seq_max_k1", "1"),
            ("token_k2", "0.1_1"),
            ("token_k3", "0"),
            ("token_k1", "2_0.5"),
            ("token_k1", "0.5"),
            ("token_k1", "0_2"),
            ("token_k1", "x"),
            ("token_k2", "nan"),
        ] {
            let refused = RejectionRule::parse_list(name, threshold).is_err();
            assert!(refused, "{name} {threshold}");
        }
        let largest = RejectionRule {
            level: RejectionLevel::SequenceMax,
            divergence: Divergence::K1,
            low: None,
            high: 2.0,
        };
        let error = largest.check().unwrap_err().to_string();
        assert!(error.contains("`seq_max_k1`"), "{error}");
    }
}
