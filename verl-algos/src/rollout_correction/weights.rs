//! Importance weights against the sampler.

use super::LOG_RATIO_BOUND;
use super::log_ratios::LogRatios;
use super::stats::{WeightStats, deviation, largest, largest_distance, share, smallest};
use crate::error::{AlgoError, check_setting};
use crate::masked;
use crate::names::names;

/// Weights are not divided by a mean at or below this.
const SMALLEST_MEAN: f64 = 1e-8;

names! {
    /// The unit of a weight; q is ℓ_train − ℓ_roll of a token.
    WeightLevel, "level of rollout weights" {
        /// e^q of each token: low variance, biased.
        Token = "token",
        /// e^{Σq} of each row, on all its tokens: unbiased, high variance.
        Sequence = "sequence",
    }
}

/// The bound of a weight.
///
/// # Shapes
/// Weights `[N]`; the result has the same shape.
/// # Differences
/// OpenRLHF's `tis` clamps into a band; verl's `"lo_hi"`, followed here, sets weights outside it to 0.
/// # Source
/// verl `rollout_is_threshold`, whose band is called IcePop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeightBound {
    /// min(w, C): truncated importance sampling.
    Truncate(f64),
    /// w inside `[low, high]`, else 0: IcePop. The token stays in the denominators.
    Band {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
}

impl WeightBound {
    /// A bound from text: `2.0`, or a band `0.5_2.0`.
    ///
    /// # Errors
    /// Anything but one positive number, or two in order.
    pub fn parse(text: &str) -> Result<WeightBound, AlgoError> {
        let setting = "rollout_is_threshold";
        let bound = match text.split_once('_') {
            None => WeightBound::Truncate(parse_number(setting, text)?),
            Some((low, high)) => WeightBound::Band {
                low: parse_number(setting, low)?,
                high: parse_number(setting, high)?,
            },
        };
        bound.check()?;
        Ok(bound)
    }

    fn check(&self) -> Result<(), AlgoError> {
        let (low, high) = (self.low(), self.high());
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let rule = "it must be a positive number";
        check_setting("rollout_is_threshold", high, positive(high), rule)?;
        check_setting("rollout_is_threshold", low, positive(low), rule)?;
        if let WeightBound::Band { low, high } = *self {
            let rule = "the lower bound must not exceed the upper one";
            check_setting("rollout_is_threshold", low, low <= high, rule)?;
        }
        Ok(())
    }

    /// The lower bound, for a truncation the inverse of the upper one.
    fn low(&self) -> f64 {
        match *self {
            WeightBound::Truncate(high) => 1.0 / high,
            WeightBound::Band { low, .. } => low,
        }
    }

    fn high(&self) -> f64 {
        match *self {
            WeightBound::Truncate(high) | WeightBound::Band { high, .. } => high,
        }
    }

    fn apply(&self, weight: f64) -> f64 {
        match *self {
            WeightBound::Truncate(high) => weight.min(high),
            WeightBound::Band { low, high } if low <= weight && weight <= high => weight,
            WeightBound::Band { .. } => 0.0,
        }
    }
}

/// Parses a positive number.
pub(super) fn parse_number(setting: &'static str, text: &str) -> Result<f64, AlgoError> {
    text.trim().parse().map_err(|_| AlgoError::SettingText {
        setting,
        text: text.to_owned(),
        rule: "it must be a number, or two numbers as in 0.5_2.0",
    })
}

/// Weights w = e^{clip(q, ±20)} per token or e^{clip(Σq, ±20)} per row, bounded, and if normalised divided by their
/// mean.
///
/// The mean is over tokens, or over rows that have tokens; weights whose mean is 0 stay 0. Normalising depends on the
/// entire batch, so the batch must not be divided.
///
/// # Shapes
/// Log-ratios of the action tokens, packed `[N]`; weights `[N]`, without gradient.
/// # Differences
/// verl fails if a band leaves no weight, because the effective sample size is then 0/0; here it is 0. OpenRLHF's
/// `seq-mask-tis` keeps the token weights of the rows it keeps unbounded. TRL's form is
/// [`TrlSamplerRatio`](super::TrlSamplerRatio).
/// # Source
/// verl `compute_rollout_correction_weights`; truncation: Ionides 2008, "Truncated importance sampling".
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RolloutWeights {
    /// Whether weights are of tokens or of rows.
    pub level: WeightLevel,
    /// The bound.
    pub bound: WeightBound,
    /// Whether to divide by the mean weight.
    pub normalize: bool,
}

impl RolloutWeights {
    /// Rejects bounds that are out of order.
    ///
    /// # Errors
    /// A bound that is not positive, or a band with its bounds reversed.
    pub fn check(&self) -> Result<(), AlgoError> {
        self.bound.check()
    }

    /// Weights of the action tokens, `[N]`.
    pub(super) fn weigh(&self, ratios: &LogRatios) -> (Vec<f64>, WeightStats) {
        let row_log_ratios = ratios.row_sums(&ratios.values);
        let log_ratios = match self.level {
            WeightLevel::Token => ratios.values.clone(),
            WeightLevel::Sequence => ratios.on_tokens(&row_log_ratios),
        };
        let exp = |q: &f64| libm::exp(q.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND));
        let raw: Vec<f64> = log_ratios.iter().map(exp).collect();
        let bounded: Vec<f64> = raw.iter().map(|w| self.bound.apply(*w)).collect();
        let mut stats = self.stats(ratios, &raw, &bounded);
        if self.level == WeightLevel::Sequence {
            let (low, high) = (libm::log(self.bound.low()), libm::log(self.bound.high()));
            let of_rows = ratios.of_non_empty(&row_log_ratios);
            stats.max = libm::exp(largest(&of_rows).min(LOG_RATIO_BOUND));
            stats.min = libm::exp(smallest(&of_rows));
            stats.ratio_fraction_high = share(&of_rows, |q| q > high);
            stats.ratio_fraction_low = share(&of_rows, |q| q < low);
        }
        let mean = match self.level {
            WeightLevel::Token => stats.mean,
            WeightLevel::Sequence => stats.seq_mean,
        };
        if self.normalize && mean > SMALLEST_MEAN {
            stats.batch_norm_factor = mean;
        }
        let factor = stats.batch_norm_factor;
        let weights = bounded.iter().map(|w| w / factor).collect();
        (weights, stats)
    }

    fn stats(&self, ratios: &LogRatios, raw: &[f64], bounded: &[f64]) -> WeightStats {
        let (low, high) = (self.bound.low(), self.bound.high());
        let mean = masked::mean(bounded);
        let squares: Vec<f64> = bounded.iter().map(|w| w * w).collect();
        let mean_square = masked::mean(&squares);
        let of_rows = ratios.of_non_empty(&ratios.row_means(bounded));
        let raw_of_rows = ratios.of_non_empty(&ratios.row_means(raw));
        let is_band = matches!(self.bound, WeightBound::Band { .. });
        WeightStats {
            mean,
            max: largest(bounded),
            min: smallest(bounded),
            std: masked::variance_biased(bounded).sqrt(),
            eff_sample_size: if mean_square > 0.0 {
                mean * mean / mean_square
            } else {
                0.0
            },
            ratio_fraction_high: share(raw, |w| w > high),
            ratio_fraction_low: share(raw, |w| w < low),
            oob_ratio: share(raw, |w| is_band && (w < low || w > high)),
            batch_norm_factor: 1.0,
            seq_mean: masked::mean(&of_rows),
            seq_std: deviation(&of_rows),
            seq_max: largest(&of_rows),
            seq_min: smallest(&of_rows),
            seq_max_deviation: largest_distance(&of_rows, 1.0),
            seq_fraction_high: share(&raw_of_rows, |w| w > high),
            seq_fraction_low: share(&raw_of_rows, |w| w < low),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ragged::Ragged;
    use crate::rollout_correction::{LogProbPair, all_scored};

    /// Weights of ratios 3, 0.4, 1 | 1.1, 1.2.
    fn weigh(level: WeightLevel, bound: &str, normalize: bool) -> (Vec<f64>, WeightStats) {
        let ratios = [vec![3.0f64, 0.4, 1.0], vec![1.1, 1.2], vec![]];
        let train = Ragged::<f64>::from_rows(ratios).map(|_, _, r| r.ln() - 2.0);
        let weights = RolloutWeights {
            level,
            bound: WeightBound::parse(bound).unwrap(),
            normalize,
        };
        let pair = LogProbPair {
            actions: &train.map(|_, _, _| true),
            train_log_probs: &train,
            rollout_log_probs: &all_scored(&train.map(|_, _, _| -2.0)),
        };
        weights.weigh(&LogRatios::new(&pair).unwrap())
    }

    #[track_caller]
    fn check(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-6, "{got:?}");
        }
    }

    #[test]
    fn of_tokens() {
        let (weights, stats) = weigh(WeightLevel::Token, "2", false);
        check(&weights, &[2.0, 0.4, 1.0, 1.1, 1.2]);
        check(&[stats.mean, stats.eff_sample_size], &[1.14, 0.832010]);
        check(&[stats.seq_min, stats.seq_max], &[3.4 / 3.0, 1.15]);
        let (weights, _) = weigh(WeightLevel::Token, "2", true);
        let expected = [1.754386, 0.350877, 0.877193, 0.964912, 1.052632];
        check(&weights, &expected);
        let (weights, stats) = weigh(WeightLevel::Token, "0.5_2", false);
        check(&weights, &[0.0, 0.0, 1.0, 1.1, 1.2]);
        assert_eq!(stats.oob_ratio, 0.4);
    }

    #[test]
    fn of_rows() {
        let (weights, _) = weigh(WeightLevel::Sequence, "2", false);
        check(&weights, &[1.2, 1.2, 1.2, 1.32, 1.32]);
        let (weights, stats) = weigh(WeightLevel::Sequence, "1.25", true);
        check(&[stats.batch_norm_factor, stats.max], &[1.225, 1.32]);
        let (low, high) = (1.2 / 1.225, 1.25 / 1.225);
        check(&weights, &[low, low, low, high, high]);
        assert_eq!(stats.ratio_fraction_high, 0.5);
    }

    #[test]
    fn a_band_may_drop_all() {
        let (weights, stats) = weigh(WeightLevel::Token, "8_9", true);
        assert_eq!(weights, [0.0; 5]);
        assert_eq!((stats.eff_sample_size, stats.batch_norm_factor), (0.0, 1.0));
    }

    #[test]
    fn bounds_from_text() {
        assert_eq!(WeightBound::parse("3"), Ok(WeightBound::Truncate(3.0)));
        for text in ["", "0", "-1", "true", "2_0.5", "0_1", "1_x", "nan", "inf"] {
            assert!(WeightBound::parse(text).is_err(), "{text}");
        }
        let error = WeightBound::parse("true").unwrap_err().to_string();
        let expected = "`rollout_is_threshold` is `true`, but it must be a number, or two numbers \
                        as in 0.5_2.0";
        assert_eq!(error, expected);
    }
}
