//! Losses with one number per row or pair of rows, as partial sums.

use burn::tensor::Tensor;

use super::LossInput;
use super::metric_id::MetricId;
use super::metrics::{Metric, Share};
use super::objective::PreparedTokens;
use super::prepared_rows::PreparedRows;
use super::units::Units;
use crate::batch::MiniBatch;
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};

/// A loss that is a function of complete rows: a number per *unit*, which is a row or a pair of rows.
///
/// In a mini-batch of pairs, row 2i is the chosen and row 2i + 1 the rejected side of pair i. A side may have no action
/// tokens; a pair without any is padding.
pub trait RowLoss: std::fmt::Debug + Send + Sync {
    /// Identity of its mean, which is reported.
    fn id(&self) -> MetricId;

    /// Its name in reports and errors.
    fn name(&self) -> &'static str {
        self.id().name()
    }

    /// The unit that micro-batches must not divide. With [`CutUnit::Row`] the units are rows, else pairs.
    fn cut_unit(&self) -> CutUnit {
        CutUnit::Pair
    }

    /// Its inputs besides the current log-probs of the policy.
    fn inputs(&self) -> &'static [LossInput];

    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    fn check(&self) -> Result<(), AlgoError> {
        Ok(())
    }

    /// The divisor of the sum over units.
    fn mean(&self) -> Mean {
        Mean::Units
    }

    /// Reads the entire mini-batch before any micro-batch: returns one number per token, which [`RowLoss::rows`]
    /// receives as [`PreparedTokens::marks`], such as the weight of each token. Empty for most losses.
    ///
    /// # Errors
    /// Missing inputs, rows for which the loss is not defined.
    fn prepare(&self, _batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        Ok(Vec::new())
    }

    /// Loss of each unit, differentiable, and its metrics.
    ///
    /// # Errors
    /// Missing inputs.
    fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError>;
}

/// The divisor of a row loss's sum, counted over the entire mini-batch and all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mean {
    /// The units: each row or pair has the same weight.
    Units,
    /// The action tokens of chosen rows, for a loss that is a sum over them.
    ChosenTokens,
}

/// Loss of each unit of a micro-batch.
#[derive(Debug, Clone)]
pub struct PerRow {
    /// `[U]`, differentiable.
    pub loss: Tensor<1>,
    /// Identities and numbers whose mean over all micro-batches is reported. There may be fewer numbers than units, if a
    /// metric is defined for only some.
    pub metrics: Vec<(MetricId, Tensor<1>)>,
}

/// A row loss prepared for its mini-batch.
#[derive(Debug)]
pub(super) struct PreparedRowTerm<'a> {
    coef: f64,
    loss: &'a dyn RowLoss,
    units: Units,
    weight: f64,
    marks: Vec<f64>,
}

impl<'a> PreparedRowTerm<'a> {
    pub fn new(
        coef: f64,
        loss: &'a dyn RowLoss,
        batch: &MiniBatch,
    ) -> Result<PreparedRowTerm<'a>, AlgoError> {
        loss.check()?;
        let units = Units::new(loss.name(), loss.cut_unit(), batch)?;
        Ok(PreparedRowTerm {
            coef,
            loss,
            weight: weight(loss, &units, batch)?,
            units,
            marks: loss.prepare(batch)?,
        })
    }

    pub fn coef(&self) -> f64 {
        self.coef
    }

    pub fn marks(&self) -> &[f64] {
        &self.marks
    }

    /// The micro-batch's share of the mean, without coefficient, and its metrics.
    pub fn share(&self, tokens: PreparedTokens<'_>) -> Result<(Tensor<1>, Vec<Metric>), AlgoError> {
        let rows = PreparedRows::new(tokens, &self.units)?;
        let per_row = self.loss.rows(&rows)?;
        let value = per_row.loss.sum() * self.weight;
        let mut metrics = vec![Metric {
            id: self.loss.id(),
            number: value.clone().detach(),
            share: Share::Sum,
        }];
        let reported = per_row.metrics.into_iter();
        metrics.extend(reported.map(|(id, values)| Metric {
            id,
            share: Share::Mean {
                count: values.dims()[0],
            },
            number: values.detach().sum(),
        }));
        Ok((value, metrics))
    }
}

/// D over the divisor of the mean.
fn weight(loss: &dyn RowLoss, units: &Units, batch: &MiniBatch) -> Result<f64, AlgoError> {
    let counts = &batch.counts;
    let dp_size = counts.dp_size as f64;
    check_setting("dp_size", dp_size, dp_size >= 1.0, "it must be at least 1")?;
    let (unit, declared, own) = match loss.mean() {
        Mean::Units => {
            let declared = counts.sequences.map(|rows| rows / units.size());
            ("sequences", declared, units.num_counted())
        }
        Mean::ChosenTokens => {
            let declared = batch.preferences.num_chosen_tokens;
            ("num_chosen_tokens", declared, units.num_chosen_tokens())
        }
    };
    if declared.is_none() && counts.dp_size > 1 {
        return Err(AlgoError::MissingCount {
            aggregation: loss.name(),
            unit,
            dp_size: counts.dp_size,
        });
    }
    let count = declared.unwrap_or(own);
    let valid = count > 0 || own == 0;
    check_setting(unit, count as f64, valid, "the mini-batch is not empty")?;
    // A sum over nothing is 0 for any divisor.
    Ok(dp_size / count.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::{Aggregation, Counts};
    use crate::batch::MicroBatch;
    use crate::losses::{Objective, SftLoss};
    use crate::tensor::test::{constant, gradient, read};

    /// Chosen sum minus ten times the rejected mean, and the values of last tokens if there are any.
    #[derive(Debug)]
    struct Given(Mean);

    impl RowLoss for Given {
        fn id(&self) -> MetricId {
            MetricId::new("given")
        }

        fn inputs(&self) -> &'static [LossInput] {
            &[]
        }

        fn mean(&self) -> Mean {
            self.0
        }

        fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError> {
            let log_probs = rows.tokens().log_probs();
            let sums = rows.sides(log_probs.clone());
            let means = rows.side_means(log_probs.clone());
            let lasts = rows.side_lasts(log_probs);
            Ok(PerRow {
                loss: sums.chosen - means.rejected * 10.0,
                metrics: vec![
                    (MetricId::new("last"), lasts.chosen),
                    (MetricId::new("pair"), rows.column(&[3.0, 5.0])),
                ],
            })
        }
    }

    /// Rows of 2, 2, 0 and 1 tokens.
    fn batch() -> MiniBatch {
        let mut batch = MiniBatch::new(vec![0, 0, 1, 1, 3]);
        batch.counts = Counts::declared(5, 4);
        batch
    }

    const LOG_PROBS: [f64; 5] = [-1.0, -2.0, -3.0, -5.0, -7.0];

    fn objective(mean: Mean) -> Objective {
        Objective::new(Aggregation::default()).with_rows(2.0, Given(mean))
    }

    #[test]
    fn sums_means_and_lasts_by_hand() {
        let (batch, objective) = (batch(), objective(Mean::Units));
        let prepared = objective.prepare(&batch).unwrap();
        let (value, grad) = gradient(&LOG_PROBS, |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        // Pairs -3 + 40 and 0 + 70, their mean times the coefficient.
        assert_eq!(value, 107.0);
        assert_eq!(grad, [1.0, 1.0, -5.0, -5.0, -10.0]);
        let whole = batch.whole(constant(&LOG_PROBS), None);
        let metrics = prepared.loss(&whole).unwrap().read_metrics().unwrap();
        let values: Vec<f64> = metrics.iter().map(|m| m.value()).collect();
        assert_eq!(values, [53.5, -1.0, 4.0]);
    }

    #[test]
    fn micro_batches_add_up_in_any_order_of_tokens() {
        let (batch, objective) = (batch(), objective(Mean::Units));
        let prepared = objective.prepare(&batch).unwrap();
        let share = |tokens: &[usize]| {
            let log_probs: Vec<f64> = tokens.iter().map(|&t| LOG_PROBS[t]).collect();
            let micro = MicroBatch::new(tokens.to_vec(), constant(&log_probs));
            read(prepared.loss(&micro).unwrap().loss)[0]
        };
        assert_eq!(share(&[4]) + share(&[2, 0, 3, 1]), 107.0);
        assert_eq!(share(&[]), 0.0);
    }

    #[test]
    fn means_over_chosen_tokens_and_over_ranks() {
        let value = |batch: &MiniBatch| {
            let objective = objective(Mean::ChosenTokens);
            let prepared = objective.prepare(batch)?;
            let whole = batch.whole(constant(&LOG_PROBS), None);
            Ok::<f64, AlgoError>(read(prepared.loss(&whole)?.loss)[0])
        };
        let mut batch = batch();
        assert_eq!(value(&batch), Ok(107.0));
        batch.counts.dp_size = 2;
        let error = value(&batch).unwrap_err();
        assert!(error.to_string().contains("num_chosen_tokens"), "{error}");
        batch.preferences.num_chosen_tokens = Some(8);
        assert_eq!(value(&batch), Ok(53.5));
        batch.preferences.num_chosen_tokens = Some(0);
        assert!(value(&batch).is_err());
    }

    #[test]
    fn terms_over_tokens_and_over_rows_add_up() {
        let batch = batch();
        let both = objective(Mean::Units).with(0.5, SftLoss);
        assert_eq!(both.cut_unit(), CutUnit::Pair);
        let prepared = both.prepare(&batch).unwrap();
        let partial = prepared.loss(&batch.whole(constant(&LOG_PROBS), None));
        // Half the mean of 1, 2, 3, 5 and 7.
        assert!((read(partial.unwrap().loss)[0] - 108.8).abs() < 1e-12);
    }

    #[test]
    fn columns_of_another_length_are_reported_by_name() {
        let (batch, objective) = (batch(), objective(Mean::Units));
        let mut whole = batch.whole(constant(&LOG_PROBS), None);
        whole.values = Some(constant(&[0.0; 4]));
        let error = objective.prepare(&batch).unwrap().loss(&whole).unwrap_err();
        assert_eq!(error.to_string(), "`values` has 4 tokens, expected 5");
    }

    #[test]
    fn a_non_finite_share_is_reported_by_name() {
        let (batch, objective) = (batch(), objective(Mean::Units));
        let prepared = objective.prepare(&batch).unwrap();
        let mut log_probs = LOG_PROBS;
        log_probs[0] = f64::NAN;
        let partial = prepared.loss(&batch.whole(constant(&log_probs), None));
        let error = partial.unwrap().read_metrics().unwrap_err();
        assert!(error.to_string().contains("`given` is NaN"), "{error}");
    }
}
