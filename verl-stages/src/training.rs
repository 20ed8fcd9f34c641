//! Shared by stages that train: how the rows of a step are split, how the shares of micro-batches add up to an
//! optimiser step, and the check that it changes the weights.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;
use verl_algos::losses::{MetricId, MetricSum, Partial};
use verl_algos::{AlgoError, Counts, CutUnit, MiniBatch};
use verl_models::model::{RoundError, ScoreRow, StepReport, TrainedModel};
use verl_words::batch::{Batch, RaggedView, RowId};
use verl_words::field::{Key, Ragged};
use verl_words::keys::{
    FINISH_REASONS, MASK_KINDS, PROMPTS, ROLLOUT_MASKS, TARGET_KINDS, TARGETS, finish, mask,
};
use verl_words::stage::{
    BatchPlan, Metric, ModelWork, NO_SAMPLES, StageContext, StageError, StageSink, of_stage,
};

use crate::refusals::refused_row;

/// How the rows of a step are split: into mini-batches of complete prompts, one optimiser step each, and those into
/// micro-batches whose gradients add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cuts {
    mini_rows: usize,
    micro_rows: usize,
    samples: usize,
    /// Passes over the rows.
    pub epochs: usize,
}

impl Cuts {
    pub(crate) fn new(batch: &BatchPlan) -> Self {
        Cuts {
            mini_rows: batch.mini_rows.max(1),
            micro_rows: batch.micro_rows.max(1),
            samples: batch.samples.max(1),
            epochs: batch.epochs.max(1),
        }
    }

    /// Optimiser steps on `rows` rows.
    pub(crate) fn optimizer_steps(self, rows: usize) -> usize {
        self.epochs * rows.div_ceil(self.mini_rows)
    }

    /// Rows of each mini-batch, one pass after another.
    pub(crate) fn mini_batches(self, rows: usize) -> impl Iterator<Item = Range<usize>> {
        (0..self.epochs).flat_map(move |_| pieces(0..rows, self.mini_rows))
    }

    /// Rows of each micro-batch of a mini-batch, as many as the cut unit allows.
    fn micro_batches(
        self,
        mini: Range<usize>,
        unit: CutUnit,
    ) -> impl Iterator<Item = Range<usize>> {
        let most = mini.len().max(1);
        pieces(mini, self.rows_at_once(unit, most))
    }

    /// Rows of a micro-batch of a mini-batch of `mini` rows.
    fn rows_at_once(self, unit: CutUnit, mini: usize) -> usize {
        let whole = |unit: usize| (self.micro_rows / unit).max(1) * unit;
        match unit {
            CutUnit::Row => self.micro_rows,
            CutUnit::Pair => whole(2),
            CutUnit::Group => whole(self.samples),
            CutUnit::MiniBatch => mini,
        }
    }

    /// Training of `model` on rows of these keys, for the memory estimate.
    pub(crate) fn work<'k>(
        self,
        model: &str,
        unit: CutUnit,
        keys: impl IntoIterator<Item = &'k str>,
    ) -> ModelWork {
        ModelWork::training(model, self.rows_at_once(unit, self.mini_rows)).of(keys)
    }
}

/// `rows` in pieces of `size`; the last may be smaller.
fn pieces(rows: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(size)
        .map(move |start| start..end.min(start + size))
}

/// Prompts and responses of a step, and which of their tokens are trained on.
pub(crate) struct Rows<'a> {
    pub prompts: RaggedView<'a, u32>,
    pub tokens: RaggedView<'a, u32>,
    kinds: Option<RaggedView<'a, u8>>,
    /// Whether each row is excluded from training; empty if none is.
    left_out: Vec<bool>,
    ids: Vec<RowId>,
    /// Tokens that `correct_rollout` kept.
    kept: Option<RaggedView<'a, u8>>,
}

impl<'a> Rows<'a> {
    /// The rows of `input`, whose responses have the key `tokens`. If there are finish reasons, responses that reached
    /// the token limit or the end of the context are excluded.
    ///
    /// # Errors
    /// If a key is missing.
    pub(crate) fn new(input: &'a Batch, tokens: &Key<Ragged<u32>>) -> Result<Self, StageError> {
        let kinds = match tokens.name() == TARGETS.name() {
            true => TARGET_KINDS,
            false => MASK_KINDS,
        };
        let has_kinds = input.has(kinds.name());
        Ok(Rows {
            ids: input.ids(),
            prompts: input.get(&PROMPTS)?,
            tokens: input.get(tokens)?,
            kinds: has_kinds.then(|| input.get(&kinds)).transpose()?,
            left_out: if input.has(FINISH_REASONS.name()) {
                let reasons = input.get(&FINISH_REASONS)?;
                let reasons = reasons.values().iter();
                reasons.map(|reason| finish::is_cut(*reason)).collect()
            } else {
                Vec::new()
            },
            kept: input
                .has(ROLLOUT_MASKS.name())
                .then(|| input.get(&ROLLOUT_MASKS))
                .transpose()?,
        })
    }

    /// Identities of the rows.
    pub(crate) fn ids(&self) -> &[RowId] {
        &self.ids
    }

    /// Why no token of the rows is trained on.
    fn why_idle(&self) -> String {
        let rows = self.ids.len();
        let truncated = self.left_out.iter().filter(|left_out| **left_out).count();
        if truncated == rows {
            return format!(
                "all {rows} responses were cut off and are masked (`mask_truncated`); raise `max_new_tokens`, or use shorter prompts if the context of the model is the limit"
            );
        }
        let missing = match self.kept {
            Some(_) => "token that the policy chose and `correct_rollout` kept",
            None => "token that the policy chose",
        };
        match truncated {
            0 => format!("none of {rows} rows has a {missing}"),
            n => format!(
                "{n} of {rows} rows reached the token limit and are masked (`mask_truncated`); the others have no {missing}"
            ),
        }
    }

    /// Whether a token is trained on.
    pub(crate) fn is_action(&self, row: usize, token: usize) -> bool {
        !self.left_out.get(row).is_some_and(|left_out| *left_out)
            && self
                .kinds
                .is_none_or(|kinds| kinds.row(row)[token] == mask::ACTION)
            && self.kept.is_none_or(|kept| kept.row(row)[token] == 1)
    }

    /// The tokens of a row that are trained on.
    pub(crate) fn actions(&self, row: usize) -> impl Iterator<Item = usize> {
        (0..self.tokens.row_len(row)).filter(move |token| self.is_action(row, *token))
    }

    /// Tokens of prompts and responses.
    pub(crate) fn num_tokens(&self) -> usize {
        let rows = 0..self.tokens.len();
        rows.map(|row| self.prompts.row_len(row) + self.tokens.row_len(row))
            .sum()
    }

    /// Values of a column at the actions of `rows`, concatenated.
    pub(crate) fn packed(&self, column: RaggedView<'_, f32>, rows: Range<usize>) -> Vec<f64> {
        let mut values = Vec::new();
        for row in rows {
            let of_row = column.row(row);
            values.extend(self.actions(row).map(|token| f64::from(of_row[token])));
        }
        values
    }

    /// The mini-batch of `rows`, which are numbered from its first, without any column.
    ///
    /// A row without an action does not count as a sequence: a row that `correct_rollout` rejected, or that is excluded
    /// as truncated, leaves the denominators together with its tokens.
    pub(crate) fn mini_batch(&self, rows: Range<usize>) -> MiniBatch {
        let mut of_tokens = Vec::new();
        let mut sequences = 0;
        for row in rows.clone() {
            let actions = self.actions(row).count();
            of_tokens.extend(std::iter::repeat_n(row - rows.start, actions));
            sequences += usize::from(actions > 0);
        }
        let counts = Counts::declared(of_tokens.len(), sequences);
        MiniBatch {
            counts,
            ..MiniBatch::new(of_tokens)
        }
    }

    /// The model's input for each micro-batch of a round.
    pub(crate) fn round(&self, round: &[Micro]) -> Vec<Vec<ScoreRow<'a>>> {
        let each = round.iter();
        each.map(|micro| self.score_rows(micro.rows.clone()))
            .collect()
    }

    /// The model's input for `rows`.
    pub(crate) fn score_rows(&self, rows: Range<usize>) -> Vec<ScoreRow<'a>> {
        rows.map(|row| ScoreRow {
            prompt: self.prompts.row(row),
            response: self.tokens.row(row),
        })
        .collect()
    }
}

/// Reports that `skipped` of `steps` optimiser steps were skipped, because none of their tokens is trained on.
pub(crate) fn report_skipped(
    context: &mut StageContext<'_>,
    rows: &Rows<'_>,
    skipped: usize,
    steps: usize,
) {
    if skipped == 0 {
        return;
    }
    // Named after the stage, as the engine does when no row reaches it.
    let name = of_stage(&NO_SAMPLES, context.stage);
    context.sink.record_named(&name, skipped as f64, 1.0);
    if skipped == steps {
        tracing::warn!(
            "step {}, stage `{}`: nothing was left to train on, so no weights were updated: {}",
            context.step,
            context.stage,
            rows.why_idle()
        );
    }
}

/// The model's input for all rows of two columns.
pub(crate) fn score_rows<'a>(
    prompts: &RaggedView<'a, u32>,
    responses: &RaggedView<'a, u32>,
) -> Vec<ScoreRow<'a>> {
    let rows = 0..prompts.len().min(responses.len());
    rows.map(|row| ScoreRow {
        prompt: prompts.row(row),
        response: responses.row(row),
    })
    .collect()
}

/// A micro-batch.
pub(crate) struct Micro {
    /// Its rows in the step.
    pub rows: Range<usize>,
    /// Positions of its tokens in the mini-batch.
    pub tokens: Range<usize>,
}

/// The shares of micro-batches in the loss of their mini-batch, added up.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    pub loss: f64,
    /// What the loss reported.
    pub metrics: Vec<MetricSum>,
}

/// What a loss reported for a micro-batch.
type Report = Result<Vec<MetricSum>, AlgoError>;

/// What the loss reported for each micro-batch of a round, whose losses may be computed at the same time.
#[derive(Debug)]
pub(crate) struct Reports(Vec<Mutex<Option<Report>>>);

impl Reports {
    fn new(micros: usize) -> Self {
        Reports((0..micros).map(|_| Mutex::default()).collect())
    }

    /// Keeps what the loss reported for a micro-batch of the round, and returns the loss to backpropagate. A model's pass
    /// cannot return errors of the maths, so such an error is kept until the pass is over; `output` is the model's output.
    pub(crate) fn take(
        &self,
        micro: usize,
        share: Result<Partial, AlgoError>,
        output: Tensor<1>,
    ) -> Tensor<1> {
        let read = share.and_then(|share| Ok((share.read_metrics()?, share.loss)));
        let (report, loss) = match read {
            Ok((metrics, loss)) => (Ok(metrics), loss),
            Err(error) => (Err(error), output.sum() * 0.0),
        };
        *self.0[micro].lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
        loss
    }

    /// The report of each micro-batch, if its loss was computed.
    fn into_reports(self) -> impl Iterator<Item = Option<Report>> {
        let each = self.0.into_iter();
        each.map(|report| report.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Shares {
    /// Calls `accumulate` for the micro-batches of the mini-batch of `rows` in order, in rounds of up to `round_len`; those
    /// without a token are skipped. It returns the losses of the round. Losses and metrics are added in the order of
    /// micro-batches. `ids` are those of all rows of the step, for error messages.
    ///
    /// # Errors
    /// Errors of the model or the maths: the first one in the order of micro-batches.
    pub(crate) fn of(
        mini: &MiniBatch,
        ids: &[RowId],
        rows: Range<usize>,
        (cuts, unit): (Cuts, CutUnit),
        round_len: usize,
        mut accumulate: impl FnMut(&[Micro], &Reports) -> Result<Vec<f64>, RoundError>,
    ) -> Result<Shares, StageError> {
        let mut shares = Shares::default();
        let mut first_token = 0;
        let micros = cuts.micro_batches(rows.clone(), unit).map(|part| {
            let own = mini.rows[first_token..].iter();
            let own = own.take_while(|row| part.contains(&(**row + rows.start)));
            let tokens = first_token..first_token + own.count();
            first_token = tokens.end;
            Micro { rows: part, tokens }
        });
        let micros: Vec<Micro> = micros.filter(|micro| !micro.tokens.is_empty()).collect();
        for round in micros.chunks(round_len.max(1)) {
            let reports = Reports::new(round.len());
            let (losses, mut failed) = match accumulate(round, &reports) {
                Ok(losses) => (losses, None),
                Err(error) => (Vec::new(), Some(error)),
            };
            for (index, report) in reports.into_reports().enumerate() {
                if let Some(metrics) = report.transpose().map_err(StageError::failed)? {
                    MetricSum::add_to(&mut shares.metrics, metrics);
                }
                if let Some(RoundError { error, .. }) =
                    failed.take_if(|failed| failed.micro == index)
                {
                    let ids = ids.get(round[index].rows.clone()).unwrap_or_default();
                    return Err(refused_row(error, ids));
                }
            }
            if let Some(error) = failed {
                return Err(StageError::failed(error.error));
            }
            for loss in losses {
                shares.loss += loss;
            }
        }
        Ok(shares)
    }

    /// The value of `id` in the mini-batch, if the loss reported it.
    pub(crate) fn value(&self, id: MetricId) -> Option<f64> {
        MetricSum::find(&self.metrics, id)
    }

    /// Records each of `metrics` that the loss reported.
    pub(crate) fn record(&self, metrics: &[(MetricId, Metric)], sink: &mut dyn StageSink) {
        for (id, metric) in metrics {
            if let Some(value) = self.value(*id) {
                sink.record(metric, value, 1.0);
            }
        }
    }
}

/// The optimiser steps of a model. The first step that can change weights is checked: an optimiser that works on a copy
/// trains nothing and shows no other sign of it. Later steps are not checked, since a check hashes every weight twice.
#[derive(Debug, Default)]
pub(crate) struct OptimizerSteps {
    /// Whether the weights have changed, which shows that the optimiser works on those that the model uses.
    has_moved: bool,
}

impl OptimizerSteps {
    /// Takes an optimiser step of the model `name`.
    ///
    /// # Errors
    /// Errors of the optimiser; weights that did not change although they should have.
    pub(crate) fn step(
        &mut self,
        model: &mut dyn TrainedModel,
        name: &str,
    ) -> Result<StepReport, StageError> {
        if self.has_moved {
            return model.optimizer_step().map_err(StageError::failed);
        }
        let before = model.weights_hash();
        let report = model.optimizer_step().map_err(StageError::failed)?;
        if report.grad_norm > 0.0 && report.learning_rate > 0.0 {
            // A model that computes no hash returns an empty one.
            if !before.is_empty() && model.weights_hash() == before {
                return Err(StageError::Model {
                    name: name.to_owned(),
                    reason: format!(
                        "has the same weights after an optimiser step with gradient norm {:e} and learning rate {:e}; the learning rate is too small for the weights' type, or the optimiser does not update the weights that the model uses",
                        report.grad_norm, report.learning_rate
                    ),
                });
            }
            self.has_moved = true;
        }
        Ok(report)
    }
}

#[cfg(test)]
mod tests;
