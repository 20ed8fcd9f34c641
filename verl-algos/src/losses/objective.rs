//! Losses, summed over the parts of a mini-batch.

use std::collections::BTreeSet;

use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use super::metrics::RowWeights;
use super::row_loss::PreparedRowTerm;
use super::{
    LossInput, Metric, MetricId, Partial, Reduction, RowLoss, Share, TokenFilter, TokenLoss,
};
use crate::aggregate::{Aggregation, token_weights};
use crate::batch::{MicroBatch, MiniBatch, require};
use crate::cut::CutUnit;
use crate::error::AlgoError;
use crate::tensor::{at_least_f32, constant_like, indices_like};

/// Σ coefficient · Agg(loss): the quantity that an optimiser step minimises.
///
/// The aggregation applies to its token losses; row losses are means over rows or pairs.
///
/// # Shapes
/// As the losses'; result: one number.
/// # Differences
/// verl adds −c_H Agg(H) and c_KL Agg(KL) to the aggregated policy loss, which is this sum with coefficients of those
/// signs.
/// # Source
/// verl `ppo_loss`.
#[derive(Debug)]
pub struct Objective {
    aggregation: Aggregation,
    terms: Vec<Term>,
    row_terms: Vec<(f64, Box<dyn RowLoss>)>,
}

#[derive(Debug)]
struct Term {
    coef: f64,
    loss: Box<dyn TokenLoss>,
    filters: Vec<Box<dyn TokenFilter>>,
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

    /// Adds a term chosen at run time.
    #[must_use]
    pub fn with_boxed(self, coef: f64, loss: Box<dyn TokenLoss>) -> Objective {
        self.with_boxed_filters(coef, loss, Vec::new())
    }

    /// Adds a term in which only the tokens count that all `filters` keep.
    #[must_use]
    pub fn with_filters(
        self,
        coef: f64,
        loss: impl TokenLoss + 'static,
        filters: Vec<Box<dyn TokenFilter>>,
    ) -> Objective {
        self.with_boxed_filters(coef, Box::new(loss), filters)
    }

    /// Adds a filtered term chosen at run time.
    #[must_use]
    pub fn with_boxed_filters(
        mut self,
        coef: f64,
        loss: Box<dyn TokenLoss>,
        filters: Vec<Box<dyn TokenFilter>>,
    ) -> Objective {
        self.terms.push(Term {
            coef,
            loss,
            filters,
        });
        self
    }

    /// Adds a term over rows or pairs.
    #[must_use]
    pub fn with_rows(self, coef: f64, loss: impl RowLoss + 'static) -> Objective {
        self.with_boxed_rows(coef, Box::new(loss))
    }

    /// Adds a term over rows or pairs chosen at run time.
    #[must_use]
    pub fn with_boxed_rows(mut self, coef: f64, loss: Box<dyn RowLoss>) -> Objective {
        self.row_terms.push((coef, loss));
        self
    }

    /// The coefficient of the token term `id`, if there is one.
    pub fn coef(&self, id: MetricId) -> Option<f64> {
        let mut terms = self.terms.iter();
        let term = terms.find(|term| term.loss.id() == id);
        term.map(|term| term.coef)
    }

    /// Changes the coefficient of the token term `id`; returns whether there is one.
    pub fn set_coef(&mut self, id: MetricId, coef: f64) -> bool {
        let mut terms = self.terms.iter_mut();
        let term = terms.find(|term| term.loss.id() == id);
        term.map(|term| term.coef = coef).is_some()
    }

    /// The inputs of its terms, each once.
    pub fn inputs(&self) -> Vec<LossInput> {
        let of_terms = self.terms.iter().flat_map(|term| {
            let filters = term.filters.iter().flat_map(|filter| filter.inputs());
            term.loss.inputs().iter().chain(filters)
        });
        let of_rows = self.row_terms.iter().flat_map(|(_, loss)| loss.inputs());
        let each = of_terms.chain(of_rows).copied();
        BTreeSet::from_iter(each).into_iter().collect()
    }

    /// The unit that micro-batches must not divide: the largest among its terms.
    pub fn cut_unit(&self) -> CutUnit {
        let tokens = self.terms.iter().map(|term| term.loss.cut_unit());
        let rows = self.row_terms.iter().map(|(_, loss)| loss.cut_unit());
        tokens.chain(rows).max().unwrap_or(CutUnit::Row)
    }

    /// Prepares all terms from the entire mini-batch, once, before any micro-batch.
    ///
    /// # Errors
    /// Settings out of range; columns of wrong lengths or not finite; a missing global count
    /// ([`token_weights`]).
    pub fn prepare<'a>(&'a self, batch: &'a MiniBatch) -> Result<PreparedObjective<'a>, AlgoError> {
        batch.check()?;
        let terms = self.terms.iter().map(|term| {
            term.loss.check()?;
            let aggregation = term.loss.aggregation(self.aggregation);
            let filters = term.filters.iter().map(|filter| {
                filter.check()?;
                Ok((filter.as_ref(), filter.prepare(batch)?))
            });
            Ok(PreparedTerm {
                coef: term.coef,
                loss: term.loss.as_ref(),
                weights: token_weights(aggregation, &batch.rows, &batch.counts)?,
                marks: term.loss.prepare(batch)?,
                filters: filters.collect::<Result<_, AlgoError>>()?,
            })
        });
        let row_terms = self.row_terms.iter();
        let row_terms =
            row_terms.map(|(coef, loss)| PreparedRowTerm::new(*coef, loss.as_ref(), batch));
        Ok(PreparedObjective {
            batch,
            row_lengths: batch.row_lengths(),
            row_weights: RowWeights::new(&batch.rows, &batch.counts),
            terms: terms.collect::<Result<_, AlgoError>>()?,
            row_terms: row_terms.collect::<Result<_, AlgoError>>()?,
        })
    }
}

/// An objective prepared for its mini-batch.
#[derive(Debug)]
pub struct PreparedObjective<'a> {
    batch: &'a MiniBatch,
    row_lengths: Vec<usize>,
    row_weights: RowWeights,
    terms: Vec<PreparedTerm<'a>>,
    row_terms: Vec<PreparedRowTerm<'a>>,
}

#[derive(Debug)]
struct PreparedTerm<'a> {
    coef: f64,
    loss: &'a dyn TokenLoss,
    weights: Vec<f64>,
    marks: Vec<f64>,
    /// Filters with the marks of each.
    filters: Vec<(&'a dyn TokenFilter, Vec<f64>)>,
}

impl PreparedObjective<'_> {
    /// The share of `micro` in the loss of the mini-batch; the shares of all micro-batches add up to it.
    ///
    /// # Errors
    /// Positions outside the mini-batch, cut rows, tensors of another length; missing inputs of a term.
    pub fn loss(&self, micro: &MicroBatch) -> Result<Partial, AlgoError> {
        micro.check(self.batch, &self.row_lengths)?;
        let log_probs = at_least_f32(micro.log_probs.clone());
        if micro.tokens.is_empty() {
            // The sum over no tokens is 0, and a caller can run a backward pass through it.
            return Ok(Partial {
                loss: log_probs.sum(),
                metrics: Vec::new(),
            });
        }
        let mut losses = Vec::with_capacity(self.terms.len() + self.row_terms.len());
        let mut metrics = Vec::new();
        for term in &self.terms {
            let view = |marks| PreparedTokens {
                batch: self.batch,
                micro,
                row_lengths: &self.row_lengths,
                marks,
                log_probs: log_probs.clone(),
            };
            let tokens = view(&term.marks);
            let per_token = term.loss.tokens(&tokens)?;
            let mut loss = per_token.loss;
            for (filter, marks) in &term.filters {
                let keeps = filter.keeps(&view(marks))?;
                loss = loss.mask_fill(keeps.bool_not(), 0.0);
            }
            let value = (loss * tokens.gather(&term.weights)).sum();
            metrics.push(Metric {
                id: term.loss.id(),
                number: value.clone().detach(),
                share: Share::Sum,
            });
            for (id, values) in per_token.metrics {
                let reduction = term.loss.reduction(id);
                metrics.push(self.report(id, reduction, values.detach(), &tokens));
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

    /// The share of a micro-batch in the metrics of its tokens.
    fn report(
        &self,
        id: MetricId,
        reduction: Reduction,
        values: Tensor<1>,
        tokens: &PreparedTokens<'_>,
    ) -> Metric {
        let count = tokens.micro.tokens.len();
        let (number, share) = match reduction {
            Reduction::TokenMean => (values.sum(), Share::Mean { count }),
            Reduction::RowMean { of_empty } => {
                let empty = of_empty * self.row_weights.empty_per_token * count as f64;
                let mean = (values * tokens.gather(&self.row_weights.tokens)).sum();
                (mean + empty, Share::Reported)
            }
            Reduction::LeastRow => (tokens.row_means(values).min(), Share::Least),
            Reduction::LargestRow => (tokens.row_means(values).max(), Share::Largest),
        };
        Metric { id, number, share }
    }
}

/// Input of a term: the tokens of a micro-batch, with their share of the mini-batch's columns.
#[derive(Debug)]
pub struct PreparedTokens<'a> {
    batch: &'a MiniBatch,
    micro: &'a MicroBatch,
    row_lengths: &'a [usize],
    marks: &'a [f64],
    log_probs: Tensor<1>,
}

impl PreparedTokens<'_> {
    /// Current log-probs of the policy, `[M]`, in f32 or wider; differentiable.
    pub fn log_probs(&self) -> Tensor<1> {
        self.log_probs.clone()
    }

    /// Current entropies of the policy, `[M]`; differentiable.
    ///
    /// # Errors
    /// If there are none.
    pub fn entropies(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        output(algorithm, "entropies", &self.micro.entropies)
    }

    /// Current log Σ_v π(v)² of the policy, `[M]`, without gradient.
    ///
    /// # Errors
    /// If there are none.
    pub fn log_sum_sq_probs(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        let column = &self.micro.log_sum_sq_probs;
        Ok(output(algorithm, "log_sum_sq_probs", column)?.detach())
    }

    /// Current outputs of a scalar head, `[M]`; differentiable.
    ///
    /// # Errors
    /// If there are none.
    pub fn values(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        output(algorithm, "values", &self.micro.values)
    }

    /// Log-probs at the start of the update, `[M]`.
    ///
    /// # Errors
    /// If there are none.
    pub fn old_log_probs(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "old_log_probs", &self.batch.old_log_probs)
    }

    /// Advantages, `[M]`.
    ///
    /// # Errors
    /// If there are none.
    pub fn advantages(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "advantages", &self.batch.advantages)
    }

    /// Log-probs of the reference policy, `[M]`.
    ///
    /// # Errors
    /// If there are none.
    pub fn ref_log_probs(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "ref_log_probs", &self.batch.ref_log_probs)
    }

    /// Values at the start of the update, `[M]`.
    ///
    /// # Errors
    /// If there are none.
    pub fn old_values(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "old_values", &self.batch.old_values)
    }

    /// Returns, `[M]`.
    ///
    /// # Errors
    /// If there are none.
    pub fn returns(&self, algorithm: &'static str) -> Result<Tensor<1>, AlgoError> {
        self.column(algorithm, "returns", &self.batch.returns)
    }

    /// Log-probs reported by the sampler, `[M]`, if any.
    pub fn rollout_log_probs(&self) -> Option<Tensor<1>> {
        self.batch
            .rollout_log_probs
            .as_deref()
            .map(|column| self.gather(column))
    }

    /// Importance weights against the sampler, `[M]`, if any.
    pub fn rollout_weights(&self) -> Option<Tensor<1>> {
        self.batch
            .rollout_weights
            .as_deref()
            .map(|column| self.gather(column))
    }

    /// `loss` times the importance weights against the sampler, if any.
    pub fn times_rollout_weights(&self, loss: Tensor<1>) -> Tensor<1> {
        match self.rollout_weights() {
            Some(weights) => loss * weights,
            None => loss,
        }
    }

    /// The numbers that [`TokenLoss::prepare`] returned for each token, `[M]`.
    ///
    /// # Errors
    /// If it returned none.
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
        let lengths = rows.map(|row| self.row_lengths[row] as f64).collect();
        let lengths = constant_like(lengths, &values);
        self.row_sums(values) / lengths
    }

    /// Sum of `values` over each token's row, `[M]` to `[M]`; differentiable.
    pub fn row_sums(&self, values: Tensor<1>) -> Tensor<1> {
        let rows = self.micro.tokens.iter().map(|&t| self.batch.rows[t]);
        let mut places = vec![usize::MAX; self.row_lengths.len()];
        let mut num_rows = 0;
        let index: Vec<usize> = rows
            .map(|row| {
                if places[row] == usize::MAX {
                    places[row] = num_rows;
                    num_rows += 1;
                }
                places[row]
            })
            .collect();
        let index: Tensor<1, Int> = indices_like(&index, &values);
        // [M] -> [rows] -> [M]
        constant_like(vec![0.0; num_rows], &values)
            .select_assign(0, index.clone(), values, IndexingUpdateOp::Add)
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
        Ok(self.gather(require(algorithm, argument, column)?))
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
