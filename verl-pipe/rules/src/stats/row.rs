//! A row of the table of statistics.

use crate::format::Side;
use crate::stats::ratio::RatioStats;

/// Shares for which the table has a quantile.
pub const QUANTILES: [f64; 7] = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99];

/// A row of the table of statistics.
#[derive(Debug, Clone, PartialEq)]
pub struct StatRow {
    /// Step of the run.
    pub step: u64,
    /// Name of the stage.
    pub stage: String,
    /// Side of the stage.
    pub side: Side,
    /// The stage's own name of the key.
    pub key: String,
    /// The pipeline's name of the key.
    pub name: String,
    /// Rows.
    pub rows: u64,
    /// Rows that are null.
    pub nulls: u64,
    /// Values: list items of a ragged key, else rows that are not null.
    pub count: u64,
    /// List items of a ragged key, else 0.
    pub tokens: u64,
    /// Values that are zero.
    pub zeros: u64,
    /// Values that are NaN or infinite.
    pub non_finite: u64,
    /// Smallest finite value; `None` for text and if there is none.
    pub min: Option<f64>,
    /// Largest finite value.
    pub max: Option<f64>,
    /// Mean of the finite values.
    pub mean: Option<f64>,
    /// Standard deviation of the finite values; divides by their number.
    pub std: Option<f64>,
    /// Quantiles at [`QUANTILES`], from the sketch.
    pub quantiles: [Option<f64>; 7],
    /// The sketch: buckets with their counts; see [`sketch`](crate::stats::sketch).
    pub sketch: Vec<(u16, u32)>,
    /// Content hash; see [`stats`](crate::stats).
    pub hash: u64,
    /// Shortest row: list items of a ragged key, characters of a text.
    pub length_min: Option<u64>,
    /// Mean length.
    pub length_mean: Option<f64>,
    /// Longest row.
    pub length_max: Option<u64>,
    /// Share of rows whose response reached the token limit, if the batch has finish reasons.
    pub truncated_share: Option<f64>,
    /// For log-probs: statistics of the ratio to their counterpart.
    pub ratio: Option<RatioStats>,
}
