//! What stages that train have in common: how a step's rows are cut, how the shares of micro-batches add up to an
//! optimiser step, and the check that it moves weights.

use std::ops::Range;

use burn::tensor::Tensor;
use verl_algos::losses::{MetricSum, Partial};
use verl_algos::{AlgoError, Counts, CutUnit, MiniBatch};
use verl_models::model::{ModelError, ScoreRow, StepReport, TrainedModel};
use verl_pipe::batch::{Batch, RaggedView, RowId};
use verl_pipe::field::{Key, Ragged};
use verl_pipe::keys::{
    FINISH_REASONS, MASK_KINDS, PROMPTS, ROLLOUT_MASKS, TARGET_KINDS, TARGETS, finish, mask,
};
use verl_pipe::run::records::{NO_SAMPLES, STAGE};
use verl_pipe::schedule::batching::BatchPlan;
use verl_pipe::stage::{ModelWork, StageContext, StageError};

use crate::refusals::refused_row;

/// How the rows of a step are cut: into mini-batches of whole prompts, one optimiser step each, and those into
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

    /// Rows of each mini-batch, pass after pass.
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

    /// Training of `model` on rows of these keys, for the estimate of memory.
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
    /// Rows that no token is trained on; empty: none.
    left_out: Vec<bool>,
    ids: Vec<RowId>,
    /// Tokens that a correction of the rollout kept.
    kept: Option<RaggedView<'a, u8>>,
}

impl<'a> Rows<'a> {
    /// The rows of `input`, whose responses have the key `tokens`. Where reasons for the end of responses are there, those
    /// that reached the token limit or the end of the context are left out.
    ///
    /// # Errors
    /// When a key is not there.
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
                "all {rows} responses were cut off and are masked (`mask_truncated`); raise `max_new_tokens`, or where the context of the model is the limit, use shorter prompts"
            );
        }
        let masked = match truncated {
            0 => String::new(),
            n => format!("{n} of them reached the token limit and are masked (`mask_truncated`); "),
        };
        let others = match self.kept {
            Some(_) => {
                "the others have no token that the policy chose and the correction of the rollout kept"
            }
            None => "the others have no token that the policy chose",
        };
        format!("of {rows} rows {masked}{others}")
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

    /// Actions of a column in `rows`, one after the other.
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
    /// A row without an action is no sequence: one that a correction of the rollout rejected, or that was left out
    /// because it was truncated, leaves the denominators with its tokens.
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

    /// What the model reads of `rows`.
    pub(crate) fn score_rows(&self, rows: Range<usize>) -> Vec<ScoreRow<'a>> {
        rows.map(|row| ScoreRow {
            prompt: self.prompts.row(row),
            response: self.tokens.row(row),
        })
        .collect()
    }
}

/// Tells that `skipped` of `steps` optimiser steps were left out, since no token of theirs is trained on.
pub(crate) fn tell_skipped(
    context: &mut StageContext<'_>,
    rows: &Rows<'_>,
    skipped: usize,
    steps: usize,
) {
    if skipped == 0 {
        return;
    }
    // Named after the stage, as the engine does where no row comes to it.
    let name = NO_SAMPLES.name.replace(STAGE, context.stage);
    context.sink.record_named(&name, skipped as f64, 1.0);
    if skipped == steps {
        tracing::warn!(
            "step {}, stage `{}`: nothing was left to learn from, so no weight was moved: {}",
            context.step,
            context.stage,
            rows.why_idle()
        );
    }
}

/// What a model reads of all rows of two columns.
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
    pub metrics: Vec<MetricSum>,
    refused: Option<AlgoError>,
}

impl Shares {
    /// Has `accumulate` take the micro-batches of the mini-batch of `rows` one after the other; those without a token are
    /// passed over. `ids` are those of all rows of the step, for refusals.
    ///
    /// # Errors
    /// What the model or the maths refuses.
    pub(crate) fn of(
        mini: &MiniBatch,
        ids: &[RowId],
        rows: Range<usize>,
        (cuts, unit): (Cuts, CutUnit),
        mut accumulate: impl FnMut(&Micro, &mut Shares) -> Result<f64, ModelError>,
    ) -> Result<Shares, StageError> {
        let mut shares = Shares::default();
        let mut first_token = 0;
        for part in cuts.micro_batches(rows.clone(), unit) {
            let own = mini.rows[first_token..].iter();
            let own = own.take_while(|row| part.contains(&(**row + rows.start)));
            let tokens = first_token..first_token + own.count();
            first_token = tokens.end;
            if tokens.is_empty() {
                continue;
            }
            let ids = ids.get(part.clone()).unwrap_or_default();
            let value = accumulate(&Micro { rows: part, tokens }, &mut shares);
            if let Some(error) = shares.refused.take() {
                return Err(StageError::failed(error));
            }
            shares.loss += value.map_err(|error| refused_row(error, ids))?;
        }
        Ok(shares)
    }

    /// Takes a share and gives the loss to go backward through. Inside a model's pass nothing can be refused, so a
    /// refusal of the maths is kept until the pass is over; `output` is what the model gave.
    pub(crate) fn take(
        &mut self,
        share: Result<Partial, AlgoError>,
        output: Tensor<1>,
    ) -> Tensor<1> {
        let read = share.and_then(|share| Ok((share.read_metrics()?, share.loss)));
        match read {
            Ok((metrics, loss)) => {
                MetricSum::add_to(&mut self.metrics, metrics);
                loss
            }
            Err(error) => {
                self.refused = Some(error);
                output.sum() * 0.0
            }
        }
    }
}

/// The optimiser's steps of a model. The first that can move weights is checked to have done so: an optimiser that works
/// on a copy trains nothing and looks as if it did. Later ones are not, since a hash reads every weight twice.
#[derive(Debug, Default)]
pub(crate) struct OptimizerSteps {
    /// The weights were seen to change, so that the optimiser works on those that the model uses.
    has_moved: bool,
}

impl OptimizerSteps {
    /// Takes a step of the model `name`.
    ///
    /// # Errors
    /// What the optimiser refuses; weights that stay as they were although they should not.
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
            // An empty hash is that of a model which computes none.
            if !before.is_empty() && model.weights_hash() == before {
                return Err(StageError::Model {
                    name: name.to_owned(),
                    reason: format!(
                        "has the same weights after an optimiser step with gradient norm {:e} and learning rate {:e}; the learning rate is too small for the weights' type, or the optimiser does not hold the weights that the model uses",
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
