//! Stage `update`: forward, loss, backward, optimiser steps, for any loss of [`losses`](crate::losses).
//!
//! The step's rows are cut into mini-batches of whole prompts, one optimiser step each, and those into micro-batches
//! whose gradients add up. The objective sees each mini-batch whole before any of its micro-batches, and is weighted
//! by its counts, so no micro-batch size changes the result beyond rounding.

use std::ops::Range;

use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::losses::{LossInput, MetricSum};
use verl_algos::{AlgoError, Counts, CutUnit, MicroBatch, MiniBatch};
use verl_models::model::{PackedScores, PolicyModel, ScoreRow, StepReport};
use verl_pipe::batch::{Batch, RaggedView};
use verl_pipe::field::{Key, LogProbTag, Ragged, Support, Weights};
use verl_pipe::keys::{
    ADVANTAGES, FINISH_REASONS, MASK_KINDS, OLD_LOG_PROBS, PROMPTS, REF_LOG_PROBS,
    ROLLOUT_LOG_PROBS, finish, mask,
};
use verl_pipe::part::Part;
use verl_pipe::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, RowRule, Stage, StageConfig,
    StageContext, StageError, StageSink, StageSpec, find_model,
};

use crate::generate::TOKENS;
use crate::log_probs::scoring_temperature_fault;
use crate::losses::{Grpo, KL_PENALTY, Loss, PolicyObjective};
use crate::model::{POLICY, PolicyResource};
use crate::settings::metrics;

metrics! {
    LOSS: "actor/loss", "", "loss of a mini-batch, all terms with their coefficients";
    GRAD_NORM: "actor/grad_norm", "", "global gradient norm before clipping";
    LEARNING_RATE: "actor/learning_rate", "", "learning rate of the optimiser step";
}

/// Settings of stage `update`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Update {
    /// Model to train.
    pub model: String,
    /// What is minimised.
    pub loss: Part<Loss>,
    /// Divides logits; must be the sampling temperature, 1 for supervised training.
    pub temperature: f64,
    /// Leaves the tokens of responses that reached the token limit out of the loss and its counts (overlong filtering);
    /// their rewards count in their groups as before. Only for losses on responses.
    pub mask_truncated: bool,
}

impl Default for Update {
    fn default() -> Self {
        Update {
            model: "actor".to_owned(),
            loss: PolicyObjective::<Grpo>::default().into(),
            temperature: 1.0,
            mask_truncated: false,
        }
    }
}

impl StageConfig for Update {
    const KIND: &'static str = "update";
    const SUMMARY: &'static str = "trains a model: forward, loss, backward, optimiser steps";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::from_iter(scoring_temperature_fault(self.temperature));
        let loss = self.loss.build("loss", context);
        let loss = loss.map_err(|errors| faults.extend(errors));
        let (Ok(loss), true) = (loss, faults.is_empty()) else {
            return Err(faults);
        };
        let batch = &context.batch;
        Ok(Box::new(UpdateStage {
            config: self.clone(),
            loss,
            mini_rows: batch.mini_rows.max(1),
            micro_rows: batch.micro_rows.max(1),
            epochs: batch.epochs.max(1),
            samples: batch.samples.max(1),
            has_moved: false,
        }))
    }
}

/// The running stage.
struct UpdateStage {
    config: Update,
    loss: Loss,
    mini_rows: usize,
    micro_rows: usize,
    epochs: usize,
    samples: usize,
    /// The weights were seen to change, so that the optimiser works on those that the model uses.
    has_moved: bool,
}

/// The columns of a step that an update reads.
struct Columns<'a> {
    prompts: RaggedView<'a, u32>,
    tokens: RaggedView<'a, u32>,
    kinds: Option<RaggedView<'a, u8>>,
    /// Rows that no token is trained on; empty: none.
    left_out: Vec<bool>,
    old: Option<RaggedView<'a, f32>>,
    reference: Option<RaggedView<'a, f32>>,
    advantages: Option<RaggedView<'a, f32>>,
}

impl<'a> Columns<'a> {
    fn new(input: &'a Batch, tokens: Key<Ragged<u32>>) -> Result<Self, StageError> {
        let optional =
            |key: &Key<Ragged<f32>>| input.has(key.name()).then(|| input.get(key)).transpose();
        Ok(Columns {
            prompts: input.get(&PROMPTS)?,
            tokens: input.get(&tokens)?,
            kinds: input
                .has(MASK_KINDS.name())
                .then(|| input.get(&MASK_KINDS))
                .transpose()?,
            left_out: if input.has(FINISH_REASONS.name()) {
                let reasons = input.get(&FINISH_REASONS)?;
                let reasons = reasons.values().iter();
                reasons.map(|reason| *reason == finish::LENGTH).collect()
            } else {
                Vec::new()
            },
            old: optional(&OLD_LOG_PROBS)?,
            reference: optional(&REF_LOG_PROBS)?,
            advantages: optional(&ADVANTAGES)?,
        })
    }

    fn is_action(&self, row: usize, token: usize) -> bool {
        !self.left_out.get(row).is_some_and(|left_out| *left_out)
            && self
                .kinds
                .is_none_or(|kinds| kinds.row(row)[token] == mask::ACTION)
    }

    /// Actions of a column in `rows`, one after the other.
    fn packed(&self, column: Option<RaggedView<'_, f32>>, rows: Range<usize>) -> Option<Vec<f64>> {
        let column = column?;
        let mut values = Vec::new();
        for row in rows {
            let of_row = column.row(row).iter().enumerate();
            values.extend(
                of_row
                    .filter(|(token, _)| self.is_action(row, *token))
                    .map(|(_, v)| f64::from(*v)),
            );
        }
        Some(values)
    }

    /// The mini-batch of `rows`; rows are numbered from its first.
    fn mini_batch(&self, rows: Range<usize>) -> MiniBatch {
        let mut of_tokens = Vec::new();
        for row in rows.clone() {
            let actions = (0..self.tokens.row_len(row))
                .filter(|token| self.is_action(row, *token))
                .count();
            of_tokens.extend(std::iter::repeat_n(row - rows.start, actions));
        }
        let counts = Counts::declared(of_tokens.len(), rows.len());
        MiniBatch {
            counts,
            old_log_probs: self.packed(self.old, rows.clone()),
            advantages: self.packed(self.advantages, rows.clone()),
            ref_log_probs: self.packed(self.reference, rows),
            ..MiniBatch::new(of_tokens)
        }
    }

    fn score_rows(&self, rows: Range<usize>) -> Vec<ScoreRow<'a>> {
        rows.map(|row| ScoreRow {
            prompt: self.prompts.row(row),
            response: self.tokens.row(row),
        })
        .collect()
    }
}

impl UpdateStage {
    fn tag(&self) -> LogProbTag {
        LogProbTag {
            policy: Some(self.config.model.clone()),
            temperature: Some(self.config.temperature),
            support: Some(Support::Full),
            weights: Some(Weights::StepStart),
        }
    }

    /// Rows of one micro-batch, as many as the cut unit of the objective allows.
    fn micro_rows(&self, mini: usize) -> usize {
        let whole_groups = |rows: usize| (rows / self.samples).max(1) * self.samples;
        match self.loss.objective.cut_unit() {
            CutUnit::Row => self.micro_rows,
            CutUnit::Pair => (self.micro_rows / 2).max(1) * 2,
            CutUnit::Group => whole_groups(self.micro_rows),
            CutUnit::MiniBatch => mini,
        }
    }

    /// One optimiser step on `rows`.
    fn mini_step(
        &mut self,
        policy: &mut dyn PolicyModel,
        columns: &Columns<'_>,
        rows: Range<usize>,
        sink: &mut dyn StageSink,
    ) -> Result<(), StageError> {
        let mini = columns.mini_batch(rows.clone());
        if mini.num_tokens() == 0 {
            return Ok(());
        }
        let whole = columns.old.is_some() || !self.loss.reads(LossInput::OldLogProbs);
        let prepared = whole
            .then(|| self.loss.objective.prepare(&mini))
            .transpose()
            .map_err(StageError::failed)?;
        let entropies = self.loss.reads(LossInput::Entropies);
        let mut totals: Vec<MetricSum> = Vec::new();
        let mut total_loss = 0.0;
        let mut first_token = 0;
        for start in rows.clone().step_by(self.micro_rows(rows.len())) {
            let part = start..rows.end.min(start + self.micro_rows(rows.len()));
            let own = mini
                .rows
                .iter()
                .filter(|row| part.contains(&(**row + rows.start)))
                .count();
            let positions = first_token..first_token + own;
            first_token += own;
            if own == 0 {
                continue;
            }
            let mut refused = None;
            let value = policy
                .accumulate(
                    &columns.score_rows(part.clone()),
                    &|row, token| columns.is_action(part.start + row, token),
                    self.config.temperature,
                    entropies,
                    &mut |packed| {
                        let log_probs = packed.log_probs.clone();
                        let partial = match &prepared {
                            Some(prepared) => {
                                share(&positions, packed, |micro| prepared.loss(micro))
                            }
                            None => self.on_policy(&mini, &positions, packed),
                        };
                        match partial {
                            Ok((loss, metrics)) => {
                                MetricSum::add_to(&mut totals, metrics);
                                loss
                            }
                            Err(error) => {
                                refused = Some(error);
                                log_probs.sum() * 0.0
                            }
                        }
                    },
                )
                .map_err(StageError::failed)?;
            if let Some(error) = refused {
                return Err(StageError::failed(error));
            }
            total_loss += value;
        }
        let report = self.optimizer_step(policy)?;
        sink.record(&LOSS, total_loss, 1.0);
        sink.record(&GRAD_NORM, report.grad_norm, 1.0);
        sink.record(&LEARNING_RATE, report.learning_rate, 1.0);
        for total in &totals {
            let mut metrics = self.loss.metrics.iter();
            match metrics.find(|(name, _)| *name == total.name) {
                Some((_, metric)) => sink.record(metric, total.value(), 1.0),
                None => sink.record_named(&format!("actor/{}", total.name), total.value(), 1.0),
            }
        }
        Ok(())
    }

    /// The optimiser's step. The first that can move weights is checked to have done so: an optimiser that works on a
    /// copy trains nothing and looks as if it did. Later ones are not, since a hash reads every weight twice.
    fn optimizer_step(&mut self, policy: &mut dyn PolicyModel) -> Result<StepReport, StageError> {
        if self.has_moved {
            return policy.optimizer_step().map_err(StageError::failed);
        }
        let before = policy.weights_hash();
        let report = policy.optimizer_step().map_err(StageError::failed)?;
        if report.grad_norm > 0.0 && report.learning_rate > 0.0 {
            // An empty hash is that of a model which computes none.
            if !before.is_empty() && policy.weights_hash() == before {
                return Err(StageError::Model {
                    name: self.config.model.clone(),
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

    /// The share of a micro-batch whose old log-probs are its own, which holds where a step is one optimiser step.
    fn on_policy(
        &self,
        mini: &MiniBatch,
        positions: &Range<usize>,
        packed: PackedScores,
    ) -> Result<(Tensor<1>, Vec<MetricSum>), AlgoError> {
        let now: Vec<f64> = packed
            .log_probs
            .clone()
            .detach()
            .try_into_vec_as()
            .map_err(|error| AlgoError::Read {
                what: "log_probs",
                reason: error.to_string(),
            })?;
        let of = |column: &Option<Vec<f64>>| {
            column
                .as_ref()
                .map(|values| values[positions.clone()].to_vec())
        };
        let first = mini.rows.get(positions.start).copied().unwrap_or(0);
        let rows = mini.rows[positions.clone()].iter();
        let own = MiniBatch {
            counts: mini.counts,
            old_log_probs: Some(now),
            advantages: of(&mini.advantages),
            ref_log_probs: of(&mini.ref_log_probs),
            rollout_weights: of(&mini.rollout_weights),
            ..MiniBatch::new(rows.map(|row| row - first).collect())
        };
        let prepared = self.loss.objective.prepare(&own)?;
        share(&(0..own.num_tokens()), packed, |micro| prepared.loss(micro))
    }
}

/// A micro-batch's share of the loss and of what is reported.
fn share(
    positions: &Range<usize>,
    packed: PackedScores,
    loss: impl FnOnce(&MicroBatch) -> Result<verl_algos::losses::Partial, AlgoError>,
) -> Result<(Tensor<1>, Vec<MetricSum>), AlgoError> {
    let micro = MicroBatch {
        entropies: packed.entropies,
        ..MicroBatch::new(positions.clone().collect(), packed.log_probs)
    };
    let partial = loss(&micro)?;
    let metrics = partial.read_metrics()?;
    Ok((partial.loss, metrics))
}

impl Stage for UpdateStage {
    fn spec(&self) -> StageSpec {
        let policy = self.tag();
        let reference = LogProbTag {
            policy: None,
            weights: Some(Weights::Frozen),
            ..policy.clone()
        };
        let mut spec = StageSpec::new().reads(PROMPTS).reads(self.loss.tokens);
        if self.loss.on_responses() {
            spec = spec.reads(MASK_KINDS);
        }
        if self.loss.reads(LossInput::Advantages) {
            spec = spec.reads(ADVANTAGES);
        }
        if self.config.mask_truncated {
            spec = spec.reads(FINISH_REASONS);
        }
        if self.loss.reads(LossInput::RefLogProbs) {
            spec = spec.reads(REF_LOG_PROBS.tagged(reference));
        }
        if self.loss.reads(LossInput::OldLogProbs) {
            spec = spec.reads_optional(OLD_LOG_PROBS.tagged(policy.clone()));
        }
        if self.loss.on_responses() {
            // The engine's own log-probs are read for their tag alone: responses that were sampled at another
            // temperature are not those of the policy that is trained.
            spec = spec.reads_optional(ROLLOUT_LOG_PROBS.tagged(policy));
        }
        if self.loss.penalises_kl {
            spec = spec.once(KL_PENALTY);
        }
        let metrics: Vec<Metric> = self
            .loss
            .metrics
            .iter()
            .map(|(_, metric)| *metric)
            .collect();
        spec.rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .uses_as(POLICY, &self.config.model, Access::Update)
            .metrics(&[LOSS, GRAD_NORM, LEARNING_RATE, TOKENS])
            .metrics(&metrics)
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let columns = Columns::new(&input, self.loss.tokens)?;
        let reads_old = self.loss.reads(LossInput::OldLogProbs);
        let steps = self.epochs * input.num_rows().div_ceil(self.mini_rows);
        if reads_old && columns.old.is_none() && steps > 1 {
            return Err(StageError::failed(format!(
                "{steps} optimiser steps a step need `{}`; without it only one is on policy. Add a `log_probs` stage, or set batch.epochs = 1 and leave batch.mini_batch out",
                OLD_LOG_PROBS.name()
            )));
        }
        // Tokens that were sampled are counted where that was done.
        if !self.loss.on_responses() {
            let rows = 0..input.num_rows();
            let tokens = rows.map(|row| columns.prompts.row_len(row) + columns.tokens.row_len(row));
            context.record(&TOKENS, (self.epochs * tokens.sum::<usize>()) as f64);
        }
        let cancel = context.cancel;
        let resource = find_model::<PolicyResource>(context.models, &self.config.model)?;
        for _ in 0..self.epochs {
            for start in (0..input.num_rows()).step_by(self.mini_rows) {
                if cancel.is_cancelled() {
                    return Err(StageError::Cancelled);
                }
                let rows = start..input.num_rows().min(start + self.mini_rows);
                self.mini_step(resource.policy.as_mut(), &columns, rows, context.sink)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
