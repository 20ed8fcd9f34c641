//! From token losses to a scalar: the named aggregations.
//!
//! Every aggregation is Σ_t w_t E_t with weights that are known before the loss is. They are computed once, from the
//! *entire* mini-batch, in plain numbers; a micro-batch then adds its own tokens with its share of the weights, so
//! that the parts of a mini-batch add up to the total for any division.

use crate::error::{AlgoError, check_setting};
use crate::names::names;

/// How token losses E become one number, Σ_t w_t E_t. D is the number of data-parallel ranks, N tokens, B sequences,
/// L_b a row's tokens.
///
/// # Shapes
/// E and w: `[N]`, packed action tokens.
/// # Differences
/// N and B are declared counts of the entire mini-batch, as in verl. Undeclared, they are those of this rank; verl uses
/// those of the micro-batch, so that its result depends on the division. verl adds 1e-8 to L_b. TRL's loss types are in
/// the table at [`POLICY_LOSSES`](crate::losses::POLICY_LOSSES).
/// # Source
/// verl `agg_loss`; `token-mean`: Yu et al. 2025 (DAPO), arXiv:2503.14476; `seq-mean-token-sum-norm`: Liu et al. 2025
/// (Dr. GRPO), arXiv:2503.20783.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Aggregation {
    /// D Σ E / N: each token has the same weight. The default, and DAPO's.
    #[default]
    TokenMean,
    /// D Σ E.
    TokenSum,
    /// D Σ_b Σ_t E / B.
    SeqMeanTokenSum,
    /// The same divided by a constant, as in Dr. GRPO: no row's weight depends on its length.
    SeqMeanTokenSumNorm {
        /// The constant, usually the longest response allowed, in tokens.
        loss_scale_factor: f64,
    },
    /// D Σ_b (Σ_t E / L_b) / B: each row has the same weight. The original GRPO, and GSPO.
    SeqMeanTokenMean,
}

names! {
    /// The name of an aggregation of token losses.
    #[derive(Default)]
    AggregationName, "aggregation" {
        /// Each token has the same weight (DAPO).
        #[default]
        TokenMean = "token-mean",
        /// The sum over all tokens.
        TokenSum = "token-sum",
        /// The mean over responses of the sum over their tokens.
        SeqMeanTokenSum = "seq-mean-token-sum",
        /// The same, divided by `loss_scale_factor` (Dr. GRPO).
        SeqMeanTokenSumNorm = "seq-mean-token-sum-norm",
        /// The mean over responses of the mean over their tokens (the first GRPO, GSPO).
        SeqMeanTokenMean = "seq-mean-token-mean",
    }
}

impl Aggregation {
    /// The aggregation with this name; `loss_scale_factor` is used only by `seq-mean-token-sum-norm`.
    ///
    /// # Errors
    /// `seq-mean-token-sum-norm` without its `loss_scale_factor`, or with one that is not positive.
    /// # Differences
    /// verl falls back to the width of the padded batch, so that the loss depends on which rows share a batch. Here
    /// the factor has to be declared.
    pub fn named(
        name: AggregationName,
        loss_scale_factor: Option<f64>,
    ) -> Result<Aggregation, AlgoError> {
        let aggregation = match name {
            AggregationName::TokenMean => Aggregation::TokenMean,
            AggregationName::TokenSum => Aggregation::TokenSum,
            AggregationName::SeqMeanTokenSum => Aggregation::SeqMeanTokenSum,
            AggregationName::SeqMeanTokenSumNorm => Aggregation::SeqMeanTokenSumNorm {
                loss_scale_factor: loss_scale_factor.ok_or(AlgoError::MissingSetting {
                    algorithm: name.as_str(),
                    setting: "loss_scale_factor",
                    reason: "declare the longest response in tokens; a batch's own width would make the loss depend on its rows",
                })?,
            },
            AggregationName::SeqMeanTokenMean => Aggregation::SeqMeanTokenMean,
        };
        aggregation.check()?;
        Ok(aggregation)
    }

    /// Its name.
    pub fn name(&self) -> AggregationName {
        match self {
            Aggregation::TokenMean => AggregationName::TokenMean,
            Aggregation::TokenSum => AggregationName::TokenSum,
            Aggregation::SeqMeanTokenSum => AggregationName::SeqMeanTokenSum,
            Aggregation::SeqMeanTokenSumNorm { .. } => AggregationName::SeqMeanTokenSumNorm,
            Aggregation::SeqMeanTokenMean => AggregationName::SeqMeanTokenMean,
        }
    }

    fn check(&self) -> Result<(), AlgoError> {
        match *self {
            Aggregation::SeqMeanTokenSumNorm { loss_scale_factor } => check_setting(
                "loss_scale_factor",
                loss_scale_factor,
                loss_scale_factor > 0.0 && loss_scale_factor.is_finite(),
                "it must be a positive number of tokens",
            ),
            _ => Ok(()),
        }
    }
}

/// Sizes of the entire mini-batch over all data-parallel ranks.
///
/// A count that is not declared is taken from this rank's mini-batch: its tokens, its *non-empty* rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Action tokens of all ranks, N.
    pub tokens: Option<usize>,
    /// Sequences of all ranks, B. May count rows without any action token.
    pub sequences: Option<usize>,
    /// Data-parallel ranks, D, over which gradients are *averaged* afterwards; hence the factor D here.
    pub dp_size: usize,
}

impl Counts {
    /// Nothing declared, one rank.
    pub const LOCAL: Counts = Counts {
        tokens: None,
        sequences: None,
        dp_size: 1,
    };

    /// Declared sizes of a mini-batch on one rank.
    pub fn declared(tokens: usize, sequences: usize) -> Counts {
        Counts {
            tokens: Some(tokens),
            sequences: Some(sequences),
            dp_size: 1,
        }
    }
}

impl Default for Counts {
    fn default() -> Counts {
        Counts::LOCAL
    }
}

/// Weight w_t of each packed token, such that the aggregated loss is Σ_t w_t E_t.
///
/// `rows` contains the row of each action token of the entire mini-batch; a row without action tokens does not appear.
///
/// # Shapes
/// `rows`, result: `[N]`
/// # Errors
/// More than one rank without the count that the aggregation divides by; a declared count of 0 for a mini-batch with
/// tokens; no rank.
/// # Differences
/// The same as [`Aggregation`].
/// # Source
/// verl `agg_loss`; the rows of Dr. GRPO: Liu et al. 2025, arXiv:2503.20783.
pub fn token_weights(
    aggregation: Aggregation,
    rows: &[usize],
    counts: &Counts,
) -> Result<Vec<f64>, AlgoError> {
    aggregation.check()?;
    let dp_size = counts.dp_size as f64;
    check_setting("dp_size", dp_size, dp_size >= 1.0, "it must be at least 1")?;
    let lengths = row_lengths(rows);
    let non_empty = lengths.iter().filter(|n| **n > 0).count();
    let divisor = |declared: Option<usize>, own: usize, unit: &'static str| {
        if declared.is_none() && counts.dp_size > 1 {
            return Err(AlgoError::MissingCount {
                aggregation: aggregation.name().as_str(),
                unit,
                dp_size: counts.dp_size,
            });
        }
        let count = declared.unwrap_or(own) as f64;
        let valid = count > 0.0 || rows.is_empty();
        check_setting(unit, count, valid, "the mini-batch is not empty")?;
        Ok(count)
    };
    let sequences = || divisor(counts.sequences, non_empty, "sequences");
    let uniform = |weight: f64| vec![weight; rows.len()];
    Ok(match aggregation {
        Aggregation::TokenMean => uniform(dp_size / divisor(counts.tokens, rows.len(), "tokens")?),
        Aggregation::TokenSum => uniform(dp_size),
        Aggregation::SeqMeanTokenSum => uniform(dp_size / sequences()?),
        Aggregation::SeqMeanTokenSumNorm { loss_scale_factor } => {
            uniform(dp_size / sequences()? / loss_scale_factor)
        }
        Aggregation::SeqMeanTokenMean => {
            let weight = dp_size / sequences()?;
            let each = rows.iter().map(|&row| weight / lengths[row] as f64);
            each.collect()
        }
    })
}

/// Number of packed tokens of each row, up to the last row that has one.
///
/// # Shapes
/// `rows`: `[N]`; result: `[B]`.
pub fn row_lengths(rows: &[usize]) -> Vec<usize> {
    let mut lengths = vec![0; rows.iter().max().map_or(0, |last| last + 1)];
    for &row in rows {
        lengths[row] += 1;
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// E = [[1, 2, 3, 4], [10, 20], []] with an empty third row.
    const LOSSES: [f64; 6] = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0];
    const ROWS: [usize; 6] = [0, 0, 0, 0, 1, 1];

    #[track_caller]
    fn check(name: AggregationName, counts: Counts, expected: f64) {
        let aggregation = Aggregation::named(name, Some(4.0)).unwrap();
        assert_eq!(aggregation.name(), name);
        let weights = token_weights(aggregation, &ROWS, &counts).unwrap();
        let value: f64 = LOSSES.iter().zip(&weights).map(|(e, w)| e * w).sum();
        assert!((value - expected).abs() < 1e-9, "{name}: {value}");
    }

    #[test]
    fn by_hand() {
        check(AggregationName::TokenMean, Counts::LOCAL, 40.0 / 6.0);
        check(AggregationName::TokenSum, Counts::LOCAL, 40.0);
        check(AggregationName::SeqMeanTokenSum, Counts::LOCAL, 20.0);
        check(
            AggregationName::SeqMeanTokenSum,
            Counts::declared(6, 3),
            40.0 / 3.0,
        );
        check(AggregationName::SeqMeanTokenSumNorm, Counts::LOCAL, 5.0);
        check(AggregationName::SeqMeanTokenMean, Counts::LOCAL, 8.75);
    }

    #[test]
    fn two_ranks_need_the_count_they_divide_by() {
        let counts = Counts {
            tokens: Some(12),
            sequences: None,
            dp_size: 2,
        };
        check(AggregationName::TokenMean, counts, 2.0 * 40.0 / 12.0);
        let error = token_weights(Aggregation::SeqMeanTokenSum, &ROWS, &counts).unwrap_err();
        assert!(error.to_string().contains("sequences"), "{error}");
    }

    #[test]
    fn rejects_invalid_aggregations() {
        let norm = |factor| Aggregation::named(AggregationName::SeqMeanTokenSumNorm, factor);
        let error = norm(None).unwrap_err();
        assert!(error.to_string().contains("loss_scale_factor"), "{error}");
        assert!(norm(Some(0.0)).is_err());
        let none = Counts::declared(0, 0);
        assert!(token_weights(Aggregation::TokenMean, &ROWS, &none).is_err());
        assert_eq!(
            token_weights(Aggregation::TokenMean, &[], &none),
            Ok(vec![])
        );
    }
}
