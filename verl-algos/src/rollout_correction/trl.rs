//! Importance weights against the sampler as in TRL.

use super::log_ratios::{LogProbPair, LogRatios};
use super::weights::WeightLevel;
use crate::error::{AlgoError, check_setting};
use crate::names::names;
use crate::ragged::Ragged;

/// e^q per token or e^{Σq} per row, clamped into `[clip_min, clip_max]`, or with `mask` 0 outside.
///
/// The ratio of a token that the sampler did not score is 1.
///
/// # Shapes
/// Log-probs and ratios: `[B, T~]`.
/// # Differences
/// [`RolloutWeights`](super::RolloutWeights) clamps log-ratios at ±20; here only the ratio has bounds. TRL treats a
/// sampler log-prob of NaN as not scored; here it is rejected unless marked as not scored.
/// # Source
/// `vllm_importance_sampling_mode` of TRL's `GRPOTrainer`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrlSamplerRatio {
    /// Whether ratios are of tokens or of rows.
    pub level: WeightLevel,
    /// Whether a ratio outside the bounds becomes 0; else it is clamped to the bound.
    pub mask: bool,
    /// Lower bound.
    pub clip_min: Option<f64>,
    /// Upper bound.
    pub clip_max: f64,
}

impl Default for TrlSamplerRatio {
    /// Rows whose ratio is above 3 get 0.
    fn default() -> TrlSamplerRatio {
        TrlSamplerRatio {
            level: WeightLevel::Sequence,
            mask: true,
            clip_min: None,
            clip_max: 3.0,
        }
    }
}

names! {
    /// TRL's name for how ratios are treated: whether tokens or responses have one, and what happens outside the bounds.
    #[derive(Default)]
    SamplerRatioMode, "sampler ratio" {
        /// One ratio for all tokens of a response, 0 outside the bounds.
        #[default]
        SequenceMask = "sequence_mask",
        /// One ratio for all tokens of a response, clamped into the bounds.
        SequenceTruncate = "sequence_truncate",
        /// A ratio for each token, 0 outside the bounds.
        TokenMask = "token_mask",
        /// A ratio for each token, clamped into the bounds.
        TokenTruncate = "token_truncate",
    }
}

impl TrlSamplerRatio {
    /// Ratios with TRL's name of their treatment.
    ///
    /// # Errors
    /// Bounds that are negative or not in order.
    pub fn named(
        mode: SamplerRatioMode,
        clip_min: Option<f64>,
        clip_max: f64,
    ) -> Result<TrlSamplerRatio, AlgoError> {
        let (level, mask) = match mode {
            SamplerRatioMode::SequenceMask => (WeightLevel::Sequence, true),
            SamplerRatioMode::SequenceTruncate => (WeightLevel::Sequence, false),
            SamplerRatioMode::TokenMask => (WeightLevel::Token, true),
            SamplerRatioMode::TokenTruncate => (WeightLevel::Token, false),
        };
        let ratio = TrlSamplerRatio {
            level,
            mask,
            clip_min,
            clip_max,
        };
        ratio.check()?;
        Ok(ratio)
    }

    fn check(&self) -> Result<(), AlgoError> {
        let low = self.clip_min.unwrap_or(0.0);
        let rule = "it must be a number of at least 0";
        check_setting("clip_min", low, low >= 0.0, rule)?;
        let rule = "it must be above the lower bound";
        check_setting("clip_max", self.clip_max, self.clip_max > low, rule)
    }

    /// The ratio of each token; a row's ratio on all its action tokens. 1 at observations.
    ///
    /// # Shapes
    /// `[B, T~]`
    /// # Errors
    /// Those of [`RolloutCorrection::correct`](super::RolloutCorrection::correct); bounds out of order.
    pub fn ratios(&self, pair: &LogProbPair<'_>) -> Result<Ragged<f64>, AlgoError> {
        self.check()?;
        let ratios = LogRatios::new(pair)?;
        let log_ratios = match self.level {
            WeightLevel::Token => ratios.values,
            WeightLevel::Sequence => ratios.on_tokens(&ratios.row_sums(&ratios.values)),
        };
        let low = self.clip_min.unwrap_or(0.0);
        let mut bounded = log_ratios.iter().map(|q| {
            let ratio = libm::exp(*q);
            let inside = low <= ratio && ratio <= self.clip_max;
            match self.mask {
                true if inside => ratio,
                true => 0.0,
                false => ratio.clamp(low, self.clip_max),
            }
        });
        Ok(pair.actions.map(|_, _, action| {
            let own = if action { bounded.next() } else { None };
            own.unwrap_or(1.0)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ratios ½, an observation, 4, not scored | 1.
    #[track_caller]
    fn check(mode: SamplerRatioMode, clip_min: Option<f64>, expected: [f64; 5]) {
        let actions = Ragged::<bool>::from_rows([vec![true, false, true, true], vec![true]]);
        let train = Ragged::<f64>::from_rows([vec![-1.0, f64::NAN, -1.0, -9.0], vec![-2.0]]);
        let rollout = Ragged::<Option<f64>>::from_rows([
            vec![
                Some(-1.0 + 2f64.ln()),
                Some(f64::NAN),
                Some(-1.0 - 4f64.ln()),
                None,
            ],
            vec![Some(-2.0)],
        ]);
        let pair = LogProbPair {
            actions: &actions,
            train_log_probs: &train,
            rollout_log_probs: &rollout,
        };
        let ratio = TrlSamplerRatio::named(mode, clip_min, 3.0).unwrap();
        let got = ratio.ratios(&pair).unwrap();
        for (g, e) in got.values().iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{mode}: {got:?}");
        }
    }

    #[test]
    fn by_hand() {
        check(
            SamplerRatioMode::TokenTruncate,
            None,
            [0.5, 1.0, 3.0, 1.0, 1.0],
        );
        check(
            SamplerRatioMode::TokenTruncate,
            Some(0.75),
            [0.75, 1.0, 3.0, 1.0, 1.0],
        );
        check(
            SamplerRatioMode::TokenMask,
            Some(0.75),
            [0.0, 1.0, 0.0, 1.0, 1.0],
        );
        check(
            SamplerRatioMode::SequenceTruncate,
            None,
            [2.0, 1.0, 2.0, 2.0, 1.0],
        );
        check(
            SamplerRatioMode::SequenceMask,
            Some(1.5),
            [2.0, 1.0, 2.0, 2.0, 0.0],
        );
    }

    #[test]
    fn rejects_invalid_inputs() {
        let mask = |low, high| TrlSamplerRatio::named(SamplerRatioMode::TokenMask, low, high);
        assert!(mask(Some(3.0), 3.0).is_err());
        assert!(mask(Some(-1.0), 3.0).is_err());
        assert!(mask(None, f64::NAN).is_err());
    }
}
