//! Losses added up over the parts of a mini-batch.

use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use super::row_loss::PreparedRowTerm;
use super::{RowLoss, TokenLoss};
use crate::aggregate::{Aggregation, token_weights};
use crate::batch::{MicroBatch, MiniBatch};
use crate::cut::CutUnit;
use crate::error::AlgoError;
use crate::tensor::{at_least_f32, constant_like, indices_like};

/// Σ coefficient · Agg(loss): what an optimiser step minimises.
///
/// The aggregation is that of its token losses; row losses are means over rows or pairs.
#[derive(Debug)]
pub struct Objective {
    aggregation: Aggregation,
    terms: Vec<(f64, Box<dyn TokenLoss>)>,
    row_terms: Vec<(f64, Box<dyn RowLoss>)>,
}

impl Objective {
    /// An objective without terms.
    pub fn new(aggregation: Aggregation) -> Objective {
        Objective {
            aggregation,
            terms: Vec::new(),
            row_terms: Vec::new(),
        }
    }

    /// Adds a term.
    #[must_use]
    pub fn with(self, coef: f64, loss: impl TokenLoss + 'static) -> Objective {
        self.with_boxed(coef, Box::new(loss))
    }

    /// Adds a term that was chosen at run time.
    #[must_use]
    pub fn with_boxed(mut self, coef: f64, loss: Box<dyn TokenLoss>) -> Objective {
        self.terms.push((coef, loss));
        self
    }

    /// Adds a term over rows or pairs.
    #[must_use]
    pub fn with_rows(self, coef: f64, loss: impl RowLoss + 'static) -> Objective {
        self.with_boxed_rows(coef, Box::new(loss))
    }

    /// Adds a term over rows or pairs that was chosen at run time.
    #[must_use]
    pub fn with_boxed_rows(mut self, coef: f64, loss: Box<dyn RowLoss>) -> Objective {
        self.row_terms.push((coef, loss));
        self
    }

    /// What micro-batches must hold whole: the largest that a term asks for.
    pub fn cut_unit(&self) -> CutUnit {
        let tokens = self.terms.iter().map(|(_, loss)| loss.cut_unit());
        let rows = self.row_terms.iter().map(|(_, loss)| loss.cut_unit());
        tokens.chain(rows).max().unwrap_or(CutUnit::Row)
    }

    /// Looks at the whole mini-batch, once, before any micro-batch.
    ///
    /// # Errors
    /// Settings out of range; columns of wrong lengths or not finite; a missing global count
    /// ([`token_weights`]).
    pub fn prepare<'a>(&'a self, batch: &'a MiniBatch) -> Result<PreparedObjective<'a>, AlgoError> {
        batch.check()?;
        let terms = self.terms.iter().map(|(coef, loss)| {
            loss.check()?;
            let aggregation = loss.aggregation(self.aggregation);
            Ok(PreparedTerm {
                coef: *coef,
                loss: loss.as_ref(),
                weights: token_weights(aggregation, &batch.rows, &batch.counts)?,
                marks: loss.prepare(batch)?,
            })
        });
        let row_terms = self.row_terms.iter();
        let row_terms =
            row_terms.map(|(coef, loss)| PreparedRowTerm::new(*coef, loss.as_ref(), batch));
        Ok(PreparedObjective {
            batch,
            row_lengths: batch.row_lengths(),
            terms: terms.collect::<Result<_, AlgoError>>()?,
            row_terms: row_terms.collect::<Result<_, AlgoError>>()?,
        })
    }
}

/// An objective that has seen its mini-batch.
#[derive(Debug)]
pub struct PreparedObjective<'a> {
    batch: &'a MiniBatch,
    row_lengths: Vec<usize>,
    terms: Vec<PreparedTerm<'a>>,
    row_terms: Vec<PreparedRowTerm<'a>>,
}

#[derive(Debug)]
struct PreparedTerm<'a> {
    coef: f64,
    loss: &'a dyn TokenLoss,
    weights: Vec<f64>,
    marks: Vec<f64>,
}

impl PreparedObjective<'_> {
    /// The share of `micro` in the loss of the mini-batch; the shares of all micro-batches add up to it.
    ///
    /// # Errors
    /// Positions outside the mini-batch, cut rows, tensors of another length; inputs that a term needs.
    pub fn loss(&self, micro: &MicroBatch) -> Result<Partial, AlgoError> {
        micro.check(self.batch, &self.row_lengths)?;
        let log_probs = at_least_f32(micro.log_probs.clone());
        if micro.tokens.is_empty() {
            // The sum over no token is 0, and a caller can go backward through it.
            return Ok(Partial {
                loss: log_probs.sum(),
                metrics: Vec::new(),
            });
        }
        let mut losses = Vec::with_capacity(self.terms.len() + self.row_terms.len());
        let mut metrics = Vec::new();
        for term in &self.terms {
            let tokens = PreparedTokens {
                batch: self.batch,
                micro,
                row_lengths: &self.row_lengths,
                marks: &term.marks,
                log_probs: log_probs.clone(),
            };
            let per_token = term.loss.tokens(&tokens)?;
            let value = (per_token.loss * tokens.gather(&term.weights)).sum();
            metrics.push(Metric {
                name: term.loss.name(),
                sum: value.clone().detach(),
                count: None,
            });
            for (name, values) in per_token.metrics {
                metrics.push(Metric {
                    name,
                    sum: values.detach().sum(),
                    count: Some(micro.tokens.len()),
                });
            }
            losses.push(value * term.coef);
        }
        for term in &self.row_terms {
            let (value, reported) = term.share(PreparedTokens {
                batch: self.batch,
                micro,
                row_lengths: &self.row_lengths,
                marks: term.marks(),
                log_probs: log_probs.clone(),
            })?;
            metrics.extend(reported);
            losses.push(value * term.coef());
        }
        let loss = losses.into_iter().reduce(|a, b| a + b);
        Ok(Partial {
            loss: loss.ok_or(AlgoError::Missing {
                algorithm: "objective",
                argument: "a loss",
            })?,
            metrics,
        })
    }
}

/// What a term reads: the tokens of a micro-batch, with their share of the mini-batch's columns.
#[derive(Debug)]
pub struct PreparedTokens<'a> {
    batch: &'a MiniBatch,
    micro: &'a MicroBatch,
    row_lengths: &'a [usize],
    marks: &'a [f64],
    log_probs: Tensor<1>,
}

impl PreparedTokens<'_> {
    /// Log-probs of the policy now, `[M]`, in f32 or wider; differentiable.
    pub fn log_probs(&self) -> Tensor<1> {
        self.log_probs.clone()
    }

    /// Entropies of the policy now, `[M]`; differentiable.
    ///
    /// # Errors
    /// When there are none.
    pub fn entropies(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        output(algorithm, "entropies", &self.micro.entropies)
    }

    /// log Σ_v π(v)² of the policy now, `[M]`, without gradient.
    ///
    /// # Errors
    /// When there are none.
    pub fn log_sum_sq_probs(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        let column = &self.micro.log_sum_sq_probs;
        Ok(output(algorithm, "log_sum_sq_probs", column)?.detach())
    }

    /// Numbers of a scalar head now, `[M]`; differentiable.
    ///
    /// # Errors
    /// When there are none.
    pub fn values(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        output(algorithm, "values", &self.micro.values)
    }

    /// Log-probs at the start of the update, `[M]`.
    ///
    /// # Errors
    /// When there are none.
    pub fn old_log_probs(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "old_log_probs", &self.batch.old_log_probs)
    }

    /// Advantages, `[M]`.
    ///
    /// # Errors
    /// When there are none.
    pub fn advantages(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "advantages", &self.batch.advantages)
    }

    /// Log-probs of the reference policy, `[M]`.
    ///
    /// # Errors
    /// When there are none.
    pub fn ref_log_probs(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "ref_log_probs", &self.batch.ref_log_probs)
    }

    /// `loss` times the importance weights against the sampler, where there are any.
    pub fn times_rollout_weights(&self, loss: Tensor<1>) -> Tensor<1> {
        match &self.batch.rollout_weights {
            Some(weights) => loss * self.gather(weights),
            None => loss,
        }
    }

    /// What [`TokenLoss::prepare`] said about each token, `[M]`.
    ///
    /// # Errors
    /// When it said nothing.
    pub fn marks(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        if self.marks.len() == self.batch.num_tokens() {
            return Ok(self.gather(self.marks));
        }
        Err(AlgoError::Missing {
            algorithm,
            argument: "marks",
        })
    }

    /// Mean of `values` over each token's row, `[M]` to `[M]`; differentiable.
    pub fn row_means(&self, values: Tensor<1>) -> Tensor<1> {
        let rows = self.micro.tokens.iter().map(|&t| self.batch.rows[t]);
        let mut places = vec![usize::MAX; self.row_lengths.len()];
        let mut lengths = Vec::new();
        let index: Vec<usize> = rows
            .map(|row| {
                if places[row] == usize::MAX {
                    places[row] = lengths.len();
                    lengths.push(self.row_lengths[row] as f64);
                }
                places[row]
            })
            .collect();
        let index: Tensor<1, Int> = indices_like(&index, &values);
        let lengths = constant_like(lengths, &values);
        // [M] -> [rows] -> [M]
        lengths
            .zeros_like()
            .select_assign(0, index.clone(), values, IndexingUpdateOp::Add)
            .div(lengths)
            .select(0, index)
    }

    /// The mini-batch.
    pub(super) fn batch(&self) -> &MiniBatch {
        self.batch
    }

    /// Positions of the tokens in the mini-batch, `[M]`.
    pub(super) fn positions(&self) -> &[usize] {
        &self.micro.tokens
    }

    /// The micro-batch's share of a column of the mini-batch: `[N]` to `[M]`.
    pub(crate) fn gather(&self, column: &[f64]) -> Tensor<1> {
        let values = self.micro.tokens.iter().map(|&t| column[t]);
        constant_like(values.collect(), &self.log_probs)
    }

    fn column(
        &self,
        algorithm: &'static str,
        argument: &'static str,
        column: &Option<Vec<f64>>,
    ) -> Result<Tensor<1>, AlgoError> {
        match column {
            Some(values) => Ok(self.gather(values)),
            None => Err(AlgoError::Missing {
                algorithm,
                argument,
            }),
        }
    }
}

/// An output of the model in f32 or wider.
fn output(
    algorithm: &'static str,
    argument: &'static str,
    column: &Option<Tensor<1>>,
) -> Result<Tensor<1>, AlgoError> {
    let column = column.clone().ok_or(AlgoError::Missing {
        algorithm,
        argument,
    })?;
    Ok(at_least_f32(column))
}

/// A micro-batch's share of the loss and of what is reported.
#[derive(Debug, Clone)]
pub struct Partial {
    /// `[1]`, differentiable.
    pub loss: Tensor<1>,
    /// What is reported, still on the device.
    pub metrics: Vec<Metric>,
}

/// A reported number, still on the device.
#[derive(Debug, Clone)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Sum over the micro-batch, `[1]`, without gradient.
    pub sum: Tensor<1>,
    /// Number of summands where a mean is reported; `None` where the shares add up to the value.
    pub count: Option<usize>,
}

/// A reported number on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricSum {
    /// Its name.
    pub name: &'static str,
    /// The sum.
    pub sum: f64,
    /// Number of summands where a mean is reported.
    pub count: Option<usize>,
}

impl Partial {
    /// The metrics, fetched from the device at once.
    ///
    /// # Errors
    /// When the device fails; [`AlgoError::NonFiniteLoss`] names the term whose share is not finite.
    pub fn read_metrics(&self) -> Result<Vec<MetricSum>, AlgoError> {
        if self.metrics.is_empty() {
            return Ok(Vec::new());
        }
        let sums = self.metrics.iter().map(|m| m.sum.clone()).collect();
        let sums: Vec<f64> =
            Tensor::cat(sums, 0)
                .try_into_vec_as()
                .map_err(|error| AlgoError::Read {
                    what: "metrics",
                    reason: error.to_string(),
                })?;
        let each = self.metrics.iter().zip(sums);
        each.map(|(metric, sum)| {
            if metric.count.is_none() && !sum.is_finite() {
                return Err(AlgoError::NonFiniteLoss {
                    loss: metric.name,
                    value: sum,
                });
            }
            Ok(MetricSum {
                name: metric.name,
                sum,
                count: metric.count,
            })
        })
        .collect()
    }
}

impl MetricSum {
    /// The value: the mean, or the sum where shares add up. A mean over nothing is 0.
    pub fn value(&self) -> f64 {
        match self.count {
            Some(count) => self.sum / count.max(1) as f64,
            None => self.sum,
        }
    }

    /// Adds the shares of another micro-batch into `totals`, by name.
    pub fn add_to(totals: &mut Vec<MetricSum>, shares: Vec<MetricSum>) {
        for share in shares {
            match totals.iter_mut().find(|total| total.name == share.name) {
                Some(total) => {
                    total.sum += share.sum;
                    total.count = total.count.zip(share.count).map(|(a, b)| a + b);
                }
                None => totals.push(share),
            }
        }
    }
}
