//! Statistics of the ratio of two log-probs: old against rollout, reference against old.

use std::collections::HashMap;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, UInt8Type};
use arrow_array::{Array, ArrayRef};
use verl_words::keys::{OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS, mask};

/// Log-prob keys, and their counterparts: the first in the list that the step has.
pub const COUNTERPARTS: [(&str, &[&str]); 2] = [
    (OLD_LOG_PROBS.name(), &[ROLLOUT_LOG_PROBS.name()]),
    (
        REF_LOG_PROBS.name(),
        &[OLD_LOG_PROBS.name(), ROLLOUT_LOG_PROBS.name()],
    ),
];

/// Ratio of a log-prob key to its counterpart, over the action tokens for which both are finite.
#[derive(Debug, Clone, PartialEq)]
pub struct RatioStats {
    /// The counterpart, by its writer's own name of the key.
    pub counterpart: String,
    /// Tokens compared.
    pub tokens: u64,
    /// Mean |key − counterpart| (nats).
    pub diff_mean: f64,
    /// Largest |key − counterpart| (nats).
    pub diff_max: f64,
    /// Mean of counterpart − key (nats): an estimate of KL(counterpart ‖ key) from samples of the counterpart.
    pub k1: f64,
    /// Standard error of `k1` (nats), with rows as sampling units, since the tokens of a row depend on each other;
    /// `None` for a single row.
    pub k1_error: Option<f64>,
    /// Rows with a compared token.
    pub rows: u64,
    /// Smallest ratio e^(key − counterpart).
    pub ratio_min: f64,
    /// Largest ratio.
    pub ratio_max: f64,
    /// Mean |e^key − e^counterpart|: mean difference in the probabilities of the sampled tokens.
    pub probability_diff: f64,
    /// Effective sample size of the ratios as importance weights, as a share of the tokens: (Σr)² / (N Σr²).
    pub ess: f64,
}

/// The largest distance in a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Farthest {
    pub id: u64,
    pub distance: f64,
}

/// Parts of a column: identities of rows, and the rows.
pub type Parts<'a> = Vec<(&'a [u64], &'a ArrayRef)>;

/// Compares `key` with `counterpart`, row by row; `masks` select action tokens in rows that have a mask. Returns the
/// statistics and the largest distance of each row.
pub fn compare_log_probs(
    name: &str,
    key: &Parts<'_>,
    counterpart: &Parts<'_>,
    masks: &Parts<'_>,
) -> Option<(RatioStats, Vec<Farthest>)> {
    let (others, kinds) = (by_row(counterpart), by_row(masks));
    let mut sums = Sums::default();
    let mut rows = Vec::new();
    for (ids, array) in key {
        for (row, id) in ids.iter().enumerate() {
            let (Some(own), Some(other)) = (floats(array, row), others.get(id)) else {
                continue;
            };
            let Some(other) = floats(other.0, other.1) else {
                continue;
            };
            let kinds = kinds.get(id).and_then(|(array, row)| bytes(array, *row));
            let distance = sums.row(own, other, kinds);
            rows.extend(distance.map(|distance| Farthest { id: *id, distance }));
        }
    }
    let n = sums.tokens as f64;
    (sums.tokens > 0).then(|| {
        let stats = RatioStats {
            counterpart: name.to_owned(),
            tokens: sums.tokens,
            diff_mean: sums.diff / n,
            diff_max: sums.diff_max,
            k1: -sums.signed / n,
            k1_error: sums.error(),
            rows: sums.rows,
            ratio_min: libm::exp(sums.min),
            ratio_max: libm::exp(sums.max),
            probability_diff: sums.probability / n,
            ess: sums.ratio * sums.ratio / (n * sums.ratio_squared),
        };
        (stats, rows)
    })
}

struct Sums {
    tokens: u64,
    diff: f64,
    diff_max: f64,
    signed: f64,
    min: f64,
    max: f64,
    probability: f64,
    ratio: f64,
    ratio_squared: f64,
    /// Number of rows.
    rows: u64,
    /// Σs², Σsn, Σn² over the rows, where s is a row's sum of key − counterpart over its n tokens.
    row_squares: [f64; 3],
}

impl Default for Sums {
    fn default() -> Self {
        Sums {
            tokens: 0,
            diff: 0.0,
            diff_max: 0.0,
            signed: 0.0,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            probability: 0.0,
            ratio: 0.0,
            ratio_squared: 0.0,
            rows: 0,
            row_squares: [0.0; 3],
        }
    }
}

impl Sums {
    /// Adds a row; returns its largest distance.
    fn row(&mut self, own: &[f32], other: &[f32], kinds: Option<&[u8]>) -> Option<f64> {
        let mut farthest: Option<f64> = None;
        let (signed, tokens) = (self.signed, self.tokens);
        for (at, (own, other)) in own.iter().zip(other).enumerate() {
            let acted = kinds.is_none_or(|kinds| kinds.get(at) == Some(&mask::ACTION));
            if !acted || !own.is_finite() || !other.is_finite() {
                continue;
            }
            let (own, other) = (f64::from(*own), f64::from(*other));
            let d = own - other;
            self.tokens += 1;
            self.signed += d;
            self.diff += d.abs();
            self.diff_max = self.diff_max.max(d.abs());
            self.min = self.min.min(d);
            self.max = self.max.max(d);
            self.probability += (libm::exp(own) - libm::exp(other)).abs();
            let ratio = libm::exp(d);
            self.ratio += ratio;
            self.ratio_squared += ratio * ratio;
            farthest = Some(farthest.unwrap_or(0.0).max(d.abs()));
        }
        let (s, n) = (self.signed - signed, (self.tokens - tokens) as f64);
        self.rows += u64::from(n > 0.0);
        for (sum, of_row) in self.row_squares.iter_mut().zip([s * s, s * n, n * n]) {
            *sum += of_row;
        }
        farthest
    }

    /// Standard error of the mean over tokens, which is a ratio of two sums over rows (Cochran 1977, 6.4).
    fn error(&self) -> Option<f64> {
        let (rows, tokens) = (self.rows as f64, self.tokens as f64);
        let mean = self.signed / tokens;
        let [ss, sn, nn] = self.row_squares;
        let residuals = (ss - 2.0 * mean * sn + mean * mean * nn).max(0.0);
        (self.rows > 1).then(|| (rows / (rows - 1.0) * residuals).sqrt() / tokens)
    }
}

fn by_row<'a>(parts: &Parts<'a>) -> HashMap<u64, (&'a ArrayRef, usize)> {
    let rows = parts.iter().flat_map(|(ids, array)| {
        let rows = ids.iter().enumerate();
        rows.map(move |(row, id)| (*id, (*array, row)))
    });
    rows.collect()
}

/// Row `row` of a ragged f32 column.
pub(crate) fn floats(array: &ArrayRef, row: usize) -> Option<&[f32]> {
    let list = array.as_list_opt::<i32>()?;
    let values = list.values().as_primitive_opt::<Float32Type>()?.values();
    let offsets = list.value_offsets();
    let range = offsets[row] as usize..offsets[row + 1] as usize;
    list.is_valid(row).then(|| &values[range])
}

/// Row `row` of a ragged u8 column.
pub(crate) fn bytes(array: &ArrayRef, row: usize) -> Option<&[u8]> {
    let list = array.as_list_opt::<i32>()?;
    let values = list.values().as_primitive_opt::<UInt8Type>()?.values();
    let offsets = list.value_offsets();
    let range = offsets[row] as usize..offsets[row + 1] as usize;
    list.is_valid(row).then(|| &values[range])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::ListArray;

    use super::*;

    #[test]
    fn by_hand_over_action_tokens_in_any_order_of_rows() {
        let list = |rows: Vec<Vec<f32>>| -> ArrayRef {
            let rows = rows.into_iter().map(|r| Some(r.into_iter().map(Some)));
            Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows))
        };
        let old = list(vec![vec![-1.0, -9.0], vec![-0.5]]);
        let rollout = list(vec![vec![-0.25], vec![-2.0, f32::NAN]]);
        let kinds = vec![Some(vec![Some(1), Some(0)]), Some(vec![Some(1)])];
        let kinds: ArrayRef = Arc::new(ListArray::from_iter_primitive::<UInt8Type, _, _>(kinds));
        let (key, masks) = (vec![(&[1, 2][..], &old)], vec![(&[1, 2][..], &kinds)]);
        let other = vec![(&[2, 1][..], &rollout)];
        let (stats, rows) =
            compare_log_probs("rollout_log_probs", &key, &other, &masks).expect("tokens");
        // Row 1 differs by +1 at its one action, row 2 by −0.25.
        assert_eq!(
            (stats.tokens, stats.diff_mean, stats.diff_max),
            (2, 0.625, 1.0)
        );
        assert_eq!(stats.k1, -0.375);
        // Two rows of one token each: the deviation of +1 and −0.25 by the root of two.
        assert_eq!((stats.rows, stats.k1_error), (2, Some(0.625)));
        assert_eq!(
            (stats.ratio_min, stats.ratio_max),
            (libm::exp(-0.25), libm::exp(1.0))
        );
        let (a, b) = (1f64.exp(), (-0.25f64).exp());
        assert!((stats.ess - (a + b).powi(2) / (2.0 * (a * a + b * b))).abs() < 1e-12);
        let p = [
            (-1f64).exp() - (-2f64).exp(),
            (-0.5f64).exp() - (-0.25f64).exp(),
        ];
        assert!((stats.probability_diff - (p[0].abs() + p[1].abs()) / 2.0).abs() < 1e-12);
        assert_eq!(
            rows[0],
            Farthest {
                id: 1,
                distance: 1.0
            }
        );
        assert!(compare_log_probs("x", &key, &Vec::new(), &masks).is_none());
    }
}
