//! Metrics that a loss reports about its tokens, accumulated over micro-batches.

use burn::tensor::Tensor;

use super::MetricId;
use crate::aggregate::{Counts, row_lengths};
use crate::error::AlgoError;

/// How numbers of tokens are reduced to one number of the mini-batch, regardless of the aggregation of the loss.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Reduction {
    /// Mean over tokens.
    #[default]
    TokenMean,
    /// Mean over rows of each row's mean.
    RowMean {
        /// The value of a row without action tokens, if the declared number of sequences says that there are some.
        of_empty: f64,
    },
    /// The smallest of the means of the rows with action tokens.
    LeastRow,
    /// The largest of the means of the rows with action tokens.
    LargestRow,
}

/// How the shares of micro-batches are combined into the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// They are added: a term of the loss, which has to be finite.
    Sum,
    /// They are added; not a term of the loss.
    Reported,
    /// They are added, and the value is the sum divided by the sum of all counts.
    Mean {
        /// Number of summands of this share.
        count: usize,
    },
    /// The smallest is the value.
    Least,
    /// The largest is the value.
    Largest,
}

/// A micro-batch's share of the loss and of the metrics.
#[derive(Debug, Clone)]
pub struct Partial {
    /// `[1]`, differentiable.
    pub loss: Tensor<1>,
    /// The metrics, still on the device.
    pub metrics: Vec<Metric>,
}

/// A metric, still on the device.
#[derive(Debug, Clone)]
pub struct Metric {
    /// Its identity.
    pub id: MetricId,
    /// The share of the micro-batch, `[1]`, without gradient.
    pub number: Tensor<1>,
    /// How shares are combined into the value.
    pub share: Share,
}

/// A metric on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricSum {
    /// Its identity.
    pub id: MetricId,
    /// The combined shares so far.
    pub number: f64,
    /// How shares are combined into the value.
    pub share: Share,
}

impl Partial {
    /// Fetches all metrics from the device at once.
    ///
    /// # Errors
    /// A device error; [`AlgoError::NonFiniteLoss`] names the term whose share is not finite.
    pub fn read_metrics(&self) -> Result<Vec<MetricSum>, AlgoError> {
        if self.metrics.is_empty() {
            return Ok(Vec::new());
        }
        let numbers = self.metrics.iter().map(|m| m.number.clone()).collect();
        let numbers: Vec<f64> =
            Tensor::cat(numbers, 0)
                .try_into_vec_as()
                .map_err(|error| AlgoError::Read {
                    what: "metrics",
                    reason: error.to_string(),
                })?;
        let each = self.metrics.iter().zip(numbers);
        each.map(|(metric, number)| {
            if metric.share == Share::Sum && !number.is_finite() {
                return Err(AlgoError::NonFiniteLoss {
                    loss: metric.id.name(),
                    value: number,
                });
            }
            Ok(MetricSum {
                id: metric.id,
                number,
                share: metric.share,
            })
        })
        .collect()
    }
}

impl MetricSum {
    /// The value of `id` among `metrics`, if it was reported.
    pub fn find(metrics: &[MetricSum], id: MetricId) -> Option<f64> {
        let found = metrics.iter().find(|metric| metric.id == id);
        found.map(MetricSum::value)
    }

    /// The name under which it is reported.
    pub fn name(&self) -> &'static str {
        self.id.name()
    }

    /// The value. A mean over nothing is 0.
    pub fn value(&self) -> f64 {
        match self.share {
            Share::Mean { count } => self.number / count.max(1) as f64,
            Share::Sum | Share::Reported | Share::Least | Share::Largest => self.number,
        }
    }

    /// Adds the shares of another micro-batch into `totals`, by identity.
    pub fn add_to(totals: &mut Vec<MetricSum>, shares: Vec<MetricSum>) {
        for share in shares {
            match totals.iter_mut().find(|total| total.id == share.id) {
                Some(total) => total.add(&share),
                None => totals.push(share),
            }
        }
    }

    fn add(&mut self, other: &MetricSum) {
        match (&mut self.share, other.share) {
            (Share::Mean { count }, Share::Mean { count: more }) => {
                *count += more;
                self.number += other.number;
            }
            (Share::Least, _) => self.number = self.number.min(other.number),
            (Share::Largest, _) => self.number = self.number.max(other.number),
            _ => self.number += other.number,
        }
    }
}

/// Weights of a mean over the rows of a mini-batch.
#[derive(Debug)]
pub(crate) struct RowWeights {
    /// Of each token, `[N]`: 1/(L_b·B), where B counts only the rows of this rank if it is not declared.
    pub tokens: Vec<f64>,
    /// Weight of the rows without action tokens, spread over all tokens so that it is divided as they are.
    pub empty_per_token: f64,
}

impl RowWeights {
    pub(crate) fn new(rows: &[usize], counts: &Counts) -> RowWeights {
        let lengths = row_lengths(rows);
        let non_empty = lengths.iter().filter(|n| **n > 0).count() as f64;
        let declared = counts.sequences.map(|b| b as f64 / counts.dp_size as f64);
        let sequences = declared.unwrap_or(non_empty);
        let each = rows.iter().map(|&row| lengths[row] as f64);
        RowWeights {
            tokens: each.map(|length| 1.0 / (length * sequences)).collect(),
            empty_per_token: (sequences - non_empty).max(0.0) / sequences / rows.len() as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(numbers: [(f64, Share); 2], expected: f64) {
        let mut totals = Vec::new();
        for (number, share) in numbers {
            let share = MetricSum {
                id: MetricId::new("metric"),
                number,
                share,
            };
            MetricSum::add_to(&mut totals, vec![share]);
        }
        assert_eq!(totals.len(), 1);
        assert_eq!(totals[0].value(), expected);
    }

    #[test]
    fn shares_become_the_value() {
        check([(1.0, Share::Sum), (2.5, Share::Sum)], 3.5);
        check([(1.0, Share::Reported), (2.5, Share::Reported)], 3.5);
        let mean = |count| Share::Mean { count };
        check([(1.0, mean(1)), (5.0, mean(3))], 1.5);
        check([(0.0, mean(0)), (0.0, mean(0))], 0.0);
        check([(2.0, Share::Least), (1.0, Share::Least)], 1.0);
        check([(2.0, Share::Largest), (1.0, Share::Largest)], 2.0);
    }

    #[test]
    fn rows_weigh_the_same_and_declared_empty_ones_count() {
        let weights = RowWeights::new(&[0, 0, 2], &Counts::LOCAL);
        assert_eq!(weights.tokens, [0.25, 0.25, 0.5]);
        assert_eq!(weights.empty_per_token, 0.0);
        let weights = RowWeights::new(&[0, 0, 2], &Counts::declared(3, 4));
        assert_eq!(weights.tokens, [0.125, 0.125, 0.25]);
        assert!((3.0 * weights.empty_per_token - 0.5).abs() < 1e-12);
    }
}
