//! Reported statistics of a correction. Rows without action tokens are excluded from all of them.

use crate::masked;

macro_rules! stats {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: f64,)*
        }

        impl $name {
            /// Names and numbers, in the order of the fields.
            pub fn named(&self) -> Vec<(&'static str, f64)> {
                vec![$((stringify!($field), self.$field),)*]
            }
        }
    };
}

stats! {
    /// Importance weights before they are normalised.
    WeightStats {
        /// Mean of the bounded weights over tokens.
        mean,
        /// Largest weight: of token weights after bounding, of row weights before.
        max,
        /// Smallest weight, likewise.
        min,
        /// Deviation (over N) over tokens.
        std,
        /// 1 / mean((w / mean w)²) over tokens, in (0, 1]: the share of the batch that is effective under the weights.
        /// 0 if all weights are 0.
        eff_sample_size,
        /// Share of ratios above the upper bound.
        ratio_fraction_high,
        /// Share of ratios below the lower bound; for a truncation, below its inverse.
        ratio_fraction_low,
        /// Share of tokens whose ratio lies outside the band; 0 for a truncation.
        oob_ratio,
        /// The divisor of normalised weights; else 1.
        batch_norm_factor,
        /// Mean over rows of the row means of the bounded weights.
        seq_mean,
        /// Their deviation (n − 1).
        seq_std,
        /// The largest of them.
        seq_max,
        /// The smallest of them.
        seq_min,
        /// Their largest distance from 1.
        seq_max_deviation,
        /// Share of rows whose mean ratio lies above the upper bound.
        seq_fraction_high,
        /// Share of rows whose mean ratio lies below the lower bound.
        seq_fraction_low,
    }
}

stats! {
    /// A rejection rule's statistic, and the share of tokens and rows that the rule rejected.
    RejectionStats {
        /// Mean over tokens; a row's statistic counts for each of its tokens.
        mean,
        /// The largest: over tokens, or over rows.
        max,
        /// The smallest, likewise.
        min,
        /// Deviation (over N) over tokens, of the statistic clamped to its bounds.
        std,
        /// Share above the upper bound: of tokens, or of rows.
        fraction_high,
        /// Share below the lower bound, likewise; 0 if there is none.
        fraction_low,
        /// Mean over rows of the row's statistic, or of its tokens' mean.
        seq_mean,
        /// Their deviation (n − 1).
        seq_std,
        /// The largest of them.
        seq_max,
        /// The smallest of them.
        seq_min,
        /// Their largest distance from 0.
        seq_max_deviation,
        /// Share of rows above the upper bound.
        seq_fraction_high,
        /// Share of rows below the lower bound.
        seq_fraction_low,
        /// Share of tokens that the rule rejects.
        masked_fraction,
        /// Share of rows that lose a token to the rule.
        seq_masked_fraction,
    }
}

stats! {
    /// The mismatch between sampler and training engine, over the tokens that the sampler scored.
    Mismatch {
        /// Mean of ℓ_roll − ℓ_train: k1 of KL(π_roll‖π_train), nats.
        kl,
        /// Mean of e^q − q − 1, k3 of the same, nats. Not clamped.
        k3_kl,
        /// Mean of |π_train − π_roll| of the sampled tokens. Below 0.005 is healthy; above 0.01 needs investigation.
        probs_diff_mean,
        /// Mean of e^{2q} − 1, q within ±20: χ² of token distributions.
        chi2_token,
        /// Mean over rows of e^{2Σq} − 1, Σq within ±20.
        chi2_seq,
        /// Mean over rows of the training engine's perplexity.
        training_ppl,
        /// Mean over rows of its logarithm, nats per token.
        training_log_ppl,
        /// Mean over rows of the sampler's perplexity.
        rollout_ppl,
        /// Mean over rows of its logarithm, nats per token.
        rollout_log_ppl,
        /// Mean over rows of the training engine's log perplexity minus the sampler's.
        log_ppl_diff,
        /// Mean over rows of its absolute value.
        log_ppl_abs_diff,
        /// The largest.
        log_ppl_diff_max,
        /// The smallest.
        log_ppl_diff_min,
        /// Mean over rows of the two perplexities' ratio.
        ppl_ratio,
    }
}

/// Share of the values for which `holds`; 0 for no values.
pub(super) fn share(values: &[f64], holds: impl Fn(f64) -> bool) -> f64 {
    let count = values.iter().filter(|v| holds(**v)).count();
    count as f64 / values.len().max(1) as f64
}

/// Bessel's deviation; 0 for fewer than two values.
pub(super) fn deviation(values: &[f64]) -> f64 {
    masked::variance(values).map_or(0.0, f64::sqrt)
}

/// The largest value.
pub(super) fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// The smallest value.
pub(super) fn smallest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// The largest distance from `centre`.
pub(super) fn largest_distance(values: &[f64], centre: f64) -> f64 {
    let distances = values.iter().map(|v| (v - centre).abs());
    distances.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_three_numbers() {
        let values = [1.0, -3.0, 2.0];
        assert_eq!(share(&values, |v| v > 0.0), 2.0 / 3.0);
        assert_eq!(share(&[], |_| true), 0.0);
        assert_eq!((largest(&values), smallest(&values)), (2.0, -3.0));
        assert_eq!(largest_distance(&values, 1.0), 4.0);
        assert_eq!(deviation(&values), 7f64.sqrt());
        assert_eq!(deviation(&[1.0]), 0.0);
    }
}
