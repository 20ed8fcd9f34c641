//! Stage `update`: forward, loss, backward, optimiser steps, for any loss of [`losses`](crate::losses).
//!
//! The rows of a step are split into mini-batches of complete prompts, one optimiser step each, and those into
//! micro-batches whose gradients add up. The objective sees each entire mini-batch before any of its micro-batches, and
//! is weighted by its counts, so the micro-batch size does not change the result beyond rounding.
//!
//! Inputs of the objective that no stage writes are computed here (`update/inputs.rs`): log-probs and entropies of the
//! policy at the start of an optimiser step, by one forward pass without gradients, and random draws for subsets.

mod inputs;
mod judged;

use std::ops::Range;

use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::losses::{LossInput, MetricId, Objective, Partial};
use verl_algos::{AlgoError, Counts, MicroBatch, MiniBatch, Preferences};
use verl_declare::part::Part;
use verl_models::model::{PackedScores, PolicyModel};
use verl_words::batch::{Batch, RaggedView, RowId};
use verl_words::field::{Key, LogProbTag, Ragged, Support, Weights};
use verl_words::keys::{
    ADVANTAGES, FINISH_REASONS, MASK_KINDS, OLD_LOG_PROBS, PROMPTS, REF_LOG_PROBS,
    ROLLOUT_LOG_PROBS, ROLLOUT_MASKS, ROLLOUT_WEIGHTS, TARGET_KINDS,
};
use verl_words::resource::{Snapshot, StoredState, WeightsVersion};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, MetricRole, Reduce, RowRule, Shown,
    Stage, StageConfig, StageContext, StageError, StageSink, StageSpec, find_model,
};

use crate::advantages::{NO_OLD, NO_REFERENCE};
use crate::generate::TOKENS;
use crate::log_probs::{LogProbs, scoring_temperature, scoring_temperature_fault};
use crate::losses::{Grpo, KL_PENALTY, Loss, LossState, PolicyObjective};
use crate::model::{POLICY, PolicyResource, sleep_engines};
use crate::settings::metrics;
use crate::state::{recalled, restored, snapshot, stored};
use crate::training::{Cuts, OptimizerSteps, Rows, Shares, report_skipped};
use inputs::StepPosition;

metrics! {
    LOSS: "actor/loss", "", "loss of a mini-batch, all terms with their coefficients", Loss;
    GRAD_NORM: "actor/grad_norm", "", "global gradient norm before clipping", GradientNorm;
    LEARNING_RATE: "actor/learning_rate", "", "learning rate of the optimiser step", LearningRate;
    FIRST_PPO_KL: "actor/first_ppo_kl", "nats", "mean of old minus current log-probs on the first mini-batch of the step, where both come from the same weights: 0 except for rounding", SameWeightsDifference;
    KL_COEF: "actor/kl_coef", "", "coefficient of the KL in the loss, when it is adaptive";
    ENTROPY_COEF: "actor/entropy_coef", "", "coefficient of the entropy bonus after the optimiser step, when it is adaptive; 0 while the entropy is above its target";
    REWARD_SHIFT: "preference/reward_shift", "nats", "running mean of implicit rewards, δ of `bco_pair`";
}

/// Optimiser steps of the step.
pub const OPTIMIZER_STEPS: Metric = Metric {
    name: "actor/optimizer_steps",
    unit: "optimiser steps",
    meaning: "optimiser steps taken; fewer than planned when mini-batches contain no token to train on",
    reduce: Reduce::Sum,
    role: Some(MetricRole::OptimizerSteps),
};

/// Settings of stage `update`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Update {
    /// Model to train.
    pub model: String,
    /// What is minimised.
    pub loss: Part<Loss>,
    /// Temperature that divides logits; when absent, the temperature at which the trained tokens were sampled, or 1 for
    /// tokens of a data set.
    pub temperature: Option<f64>,
    /// Excludes the tokens of responses that reached the token limit from the loss and its counts (overlong filtering);
    /// their rewards still count in their groups. Only for losses on responses.
    pub mask_truncated: bool,
    /// Number of steps at the start of the run in which the model is not trained (steps), so that a critic can learn
    /// before its values train the policy.
    pub warmup_steps: u64,
}

impl Default for Update {
    fn default() -> Self {
        Update {
            model: "actor".to_owned(),
            loss: PolicyObjective::<Grpo>::default().into(),
            temperature: None,
            mask_truncated: false,
            warmup_steps: 0,
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
        if let Ok(loss) = &loss {
            faults.extend(inputs::unavailable_inputs(loss, self.loss.kind()));
        }
        let (Ok(loss), true) = (loss, faults.is_empty()) else {
            return Err(faults);
        };
        Ok(Box::new(UpdateStage {
            warning: self.never_trained(context.steps),
            temperature: scoring_temperature(self.temperature, context),
            config: self.clone(),
            loss,
            cuts: Cuts::new(&context.batch),
            steps: context.batch.optimizer_steps,
            optimizer: OptimizerSteps::default(),
        }))
    }
}

/// Help if no stage writes advantages.
const NO_ADVANTAGES: &str = "put an `advantages` stage before it";

/// Help if a step has several optimiser steps and no stage writes the old log-probs.
fn several_steps_help(steps: usize) -> String {
    format!(
        "only the first of the {steps} optimiser steps per step is on policy without it; {NO_OLD}, with `bypass = true` to use those of the rollout; or take only one: set `epochs = 1` in [batch] and remove `mini_batch`"
    )
}

impl Update {
    /// Warns if the run ends before the model is first trained.
    fn never_trained(&self, steps: u64) -> Option<ConfigError> {
        let warning = || {
            ConfigError::new(
                "warmup_steps",
                format!(
                    "is {}, but the run has {steps} steps, so `{}` is never trained",
                    self.warmup_steps, self.model
                ),
                "set it to less than `steps` in [run]",
            )
        };
        (steps > 0 && self.warmup_steps >= steps).then(warning)
    }
}

/// The running stage.
struct UpdateStage {
    config: Update,
    temperature: f64,
    loss: Loss,
    cuts: Cuts,
    /// Optimiser steps of a step with all its rows; 0 if the batch arithmetic is not known.
    steps: usize,
    optimizer: OptimizerSteps,
    warning: Option<ConfigError>,
}

/// The columns of a step that an update reads.
struct Columns<'a> {
    rows: Rows<'a>,
    ids: Vec<RowId>,
    old: Option<RaggedView<'a, f32>>,
    reference: Option<RaggedView<'a, f32>>,
    advantages: Option<RaggedView<'a, f32>>,
    rollout: Option<RaggedView<'a, f32>>,
    rollout_weights: Option<RaggedView<'a, f32>>,
    /// Whether each row is desirable; empty if the loss does not read it.
    desirable: Vec<bool>,
    /// z₀ of the current mini-batch, if the loss reads it.
    kl_baseline: Option<f64>,
}

impl<'a> Columns<'a> {
    fn new(input: &'a Batch, tokens: Key<Ragged<u32>>) -> Result<Self, StageError> {
        let optional =
            |key: &Key<Ragged<f32>>| input.has(key.name()).then(|| input.get(key)).transpose();
        Ok(Columns {
            rows: Rows::new(input, &tokens)?,
            old: optional(&OLD_LOG_PROBS)?,
            reference: optional(&REF_LOG_PROBS)?,
            advantages: optional(&ADVANTAGES)?,
            rollout: optional(&ROLLOUT_LOG_PROBS)?,
            rollout_weights: optional(&ROLLOUT_WEIGHTS)?,
            ids: input.ids(),
            desirable: Vec::new(),
            kl_baseline: None,
        })
    }

    /// Inputs of preference losses for `rows`.
    fn preferences(&self, rows: Range<usize>) -> Preferences {
        Preferences {
            desirable: self.desirable.get(rows).map(<[bool]>::to_vec),
            kl_baseline: self.kl_baseline,
            ..Preferences::default()
        }
    }

    /// The mini-batch of `rows`, numbered from its first.
    fn mini_batch(&self, rows: Range<usize>) -> MiniBatch {
        let packed = |column: Option<RaggedView<'_, f32>>| {
            column.map(|column| self.rows.packed(column, rows.clone()))
        };
        MiniBatch {
            old_log_probs: packed(self.old),
            advantages: packed(self.advantages),
            preferences: self.preferences(rows.clone()),
            ref_log_probs: packed(self.reference),
            rollout_log_probs: packed(self.rollout),
            rollout_weights: packed(self.rollout_weights),
            ..self.rows.mini_batch(rows.clone())
        }
    }

    /// The mini-batch of `rows` as pairs: both rows of a pair count, even without a token to train on.
    fn pairs(&self, rows: Range<usize>) -> MiniBatch {
        let mini = self.mini_batch(rows.clone());
        MiniBatch {
            counts: Counts::declared(mini.num_tokens(), rows.len()),
            ..mini
        }
    }
}

impl UpdateStage {
    fn tag(&self) -> LogProbTag {
        LogProbTag {
            policy: Some(self.config.model.clone()),
            temperature: Some(self.temperature),
            support: Some(Support::Full),
            weights: Some(Weights::StepStart),
        }
    }

    /// Takes an optimiser step on `rows`; returns false, without a step, when none of their tokens is trained on.
    fn mini_step(
        &mut self,
        policy: &mut dyn PolicyModel,
        columns: &Columns<'_>,
        rows: Range<usize>,
        at: StepPosition,
        sink: &mut dyn StageSink,
    ) -> Result<bool, StageError> {
        let mut mini = match self.loss.of_pairs {
            true => columns.pairs(rows.clone()),
            false => columns.mini_batch(rows.clone()),
        };
        if mini.num_tokens() == 0 {
            sink.record(&OPTIMIZER_STEPS, 0.0, 1.0);
            return Ok(false);
        }
        let squares = self.fill(&mut mini, &*policy, columns, rows.clone(), at)?;
        if let Some(mean) = self.loss.state.reward_shift {
            mini.preferences.reward_shift = mean.mean;
        }
        self.loss.state.steer(&mut self.loss.objective);
        let num_rows = rows.len();
        let whole = mini.old_log_probs.is_some() || !self.loss.reads(LossInput::OldLogProbs);
        let prepared = whole
            .then(|| self.loss.objective.prepare(&mini))
            .transpose()
            .map_err(StageError::failed)?;
        let entropies = self.loss.reads(LossInput::Entropies);
        let (ids, unit) = (columns.rows.ids(), self.loss.objective.cut_unit());
        let cuts = (self.cuts, unit);
        let round_len = policy.round_len();
        let (objective, temperature) = (&self.loss.objective, self.temperature);
        let shares = Shares::of(&mini, ids, rows, cuts, round_len, |round, reports| {
            policy.accumulate_round(
                &columns.rows.round(round),
                &|micro, row, token| columns.rows.is_action(round[micro].rows.start + row, token),
                temperature,
                entropies,
                &|micro, packed| {
                    let tokens = &round[micro].tokens;
                    let log_probs = packed.log_probs.clone();
                    let share = match &prepared {
                        Some(prepared) => {
                            let mut of_micro = micro_batch(tokens, packed);
                            of_micro.log_sum_sq_probs = squares.as_ref().map(|squares| {
                                let own = &squares[tokens.clone()];
                                Tensor::from_floats(own, &log_probs.device())
                            });
                            prepared.loss(&of_micro)
                        }
                        None => on_policy(objective, &mini, tokens, packed),
                    };
                    reports.take(micro, share, log_probs)
                },
            )
        })?;
        let report = self.optimizer.step(policy, &self.config.model)?;
        let noted = self.loss.state.note(&shares.metrics, num_rows);
        noted.map_err(StageError::failed)?;
        self.report_state(sink);
        sink.record(&OPTIMIZER_STEPS, 1.0, 1.0);
        sink.record(&LOSS, shares.loss, 1.0);
        sink.record(&GRAD_NORM, report.grad_norm, 1.0);
        sink.record(&LEARNING_RATE, report.learning_rate, 1.0);
        let update_kl = shares.value(MetricId::PPO_KL);
        if let Some(first_kl) = update_kl.filter(|_| at.is_first) {
            sink.record(&FIRST_PPO_KL, first_kl, 1.0);
        }
        for total in &shares.metrics {
            let mut metrics = self.loss.metrics.iter();
            match metrics.find(|(id, _)| *id == total.id) {
                Some((_, metric)) => sink.record(metric, total.value(), 1.0),
                None => sink.record_named(&format!("actor/{}", total.name()), total.value(), 1.0),
            }
        }
        Ok(true)
    }

    fn state_metrics(&self) -> Vec<Metric> {
        let state = &self.loss.state;
        let kl = state.kl.as_ref().map(|_| KL_COEF);
        let entropy = state.entropy.as_ref().map(|_| ENTROPY_COEF);
        let shift = state.reward_shift.as_ref().map(|_| REWARD_SHIFT);
        kl.into_iter().chain(entropy).chain(shift).collect()
    }

    /// Records the adaptive coefficients and the running mean.
    fn report_state(&self, sink: &mut dyn StageSink) {
        let state = &self.loss.state;
        if let Some(kl) = &state.kl {
            sink.record(&KL_COEF, kl.coef(), 1.0);
        }
        if let Some(entropy) = &state.entropy {
            sink.record(&ENTROPY_COEF, entropy.coef(), 1.0);
        }
        if let Some(mean) = &state.reward_shift {
            sink.record(&REWARD_SHIFT, mean.mean, 1.0);
        }
    }
}

/// The share of a micro-batch whose old log-probs are its own, as in a step of one optimiser step.
fn on_policy(
    objective: &Objective,
    mini: &MiniBatch,
    positions: &Range<usize>,
    packed: PackedScores,
) -> Result<Partial, AlgoError> {
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
        rollout_log_probs: of(&mini.rollout_log_probs),
        rollout_weights: of(&mini.rollout_weights),
        ..MiniBatch::new(rows.map(|row| row - first).collect())
    };
    let prepared = objective.prepare(&own)?;
    prepared.loss(&micro_batch(&(0..own.num_tokens()), packed))
}

/// The model's output for the tokens at `positions` of a mini-batch.
fn micro_batch(positions: &Range<usize>, packed: PackedScores) -> MicroBatch {
    MicroBatch {
        entropies: packed.entropies,
        ..MicroBatch::new(positions.clone().collect(), packed.log_probs)
    }
}

impl Stage for UpdateStage {
    fn spec(&self) -> StageSpec {
        let policy = self.tag();
        let reference = LogProbTag {
            policy: self.loss.reference.clone(),
            weights: Some(Weights::Frozen),
            ..policy.clone()
        };
        let mut spec = StageSpec::new()
            .reads(PROMPTS)
            .reads(self.loss.tokens)
            .scored_by(LogProbs::KIND)
            .at_temperature_of(self.loss.tokens.name());
        spec = match self.loss.on_responses() {
            true => spec.reads(MASK_KINDS),
            false => spec.reads_optional(TARGET_KINDS),
        };
        if self.loss.reads(LossInput::Advantages) {
            spec = spec.reads(ADVANTAGES);
            spec = spec.remedy(ADVANTAGES.name(), NO_ADVANTAGES);
        }
        if self.config.mask_truncated {
            spec = spec.reads(FINISH_REASONS);
        }
        if self.loss.reads(LossInput::RefLogProbs) {
            spec = spec.reads(REF_LOG_PROBS.tagged(reference));
            spec = spec.remedy(REF_LOG_PROBS.name(), NO_REFERENCE);
        }
        if self.loss.reads(LossInput::OldLogProbs) {
            let old = OLD_LOG_PROBS.tagged(policy.clone());
            // After the first of several optimiser steps the policy is no longer the one that sampled.
            spec = if self.steps > 1 {
                spec.reads(old)
                    .remedy(OLD_LOG_PROBS.name(), several_steps_help(self.steps))
            } else {
                spec.reads_optional(old)
            };
        }
        if self.loss.on_responses() {
            // The engine's log-probs are also read for their tag: responses that were sampled at another temperature
            // are not those of the policy that is trained.
            spec = spec
                .reads_optional(ROLLOUT_LOG_PROBS.tagged(policy))
                .reads_optional(ROLLOUT_WEIGHTS)
                .reads_optional(ROLLOUT_MASKS);
        }
        spec = judged::spec(spec, &self.loss);
        if self.loss.penalises_kl {
            spec = spec.once(KL_PENALTY);
        }
        let metrics: Vec<Metric> = self
            .loss
            .metrics
            .iter()
            .map(|(_, metric)| *metric)
            .collect();
        // The loss of a policy gradient says nothing about how good the policy is.
        let rank = match self.loss.reads(LossInput::Advantages) {
            true => Shown::DETAIL,
            false => Shown::LOSS,
        };
        let spec = self.loss.shown().into_iter().fold(spec, StageSpec::shows);
        self.warning
            .iter()
            .cloned()
            .fold(spec, StageSpec::warning)
            .shows(Shown::of(&LOSS, "loss", rank))
            .shows(Shown::of(&GRAD_NORM, "grad", Shown::GRADIENT).narrow())
            .shows(Shown::of(&LEARNING_RATE, "lr", Shown::DETAIL + 2))
            .rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .uses_as(POLICY, &self.config.model, Access::Update)
            .optimizes(
                &self.config.model,
                self.cuts.epochs,
                self.config.warmup_steps,
            )
            .works(self.cuts.work(
                &self.config.model,
                self.loss.objective.cut_unit(),
                [PROMPTS.name(), self.loss.tokens.name()],
            ))
            .metrics(&[LOSS, GRAD_NORM, LEARNING_RATE, OPTIMIZER_STEPS])
            .metrics(&[FIRST_PPO_KL, TOKENS])
            .metrics(&self.state_metrics())
            .metrics(&metrics)
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        if context.step <= self.config.warmup_steps {
            return Ok(());
        }
        let mut columns = Columns::new(&input, self.loss.tokens)?;
        columns.desirable = judged::desirable(&input, &self.loss)?;
        let reads_old = self.loss.reads(LossInput::OldLogProbs);
        let steps = self.cuts.optimizer_steps(input.num_rows());
        if reads_old && columns.old.is_none() && steps > 1 {
            return Err(StageError::failed(format!(
                "{steps} optimiser steps per step need `{}`: {}",
                OLD_LOG_PROBS.name(),
                several_steps_help(steps)
            )));
        }
        // Sampled tokens are counted by the stage that samples.
        if !self.loss.on_responses() {
            let tokens = self.cuts.epochs * columns.rows.num_tokens();
            context.record(&TOKENS, tokens as f64);
        }
        sleep_engines(context.models);
        let mini_batches = self.cuts.mini_batches(input.num_rows());
        let mut skipped = 0;
        for (index, rows) in mini_batches.enumerate() {
            if context.cancel.is_cancelled() {
                return Err(StageError::Cancelled);
            }
            if let Some(reference) = &self.loss.reference {
                let scored = columns.rows.score_rows(rows.clone());
                let baseline = judged::Baseline {
                    policy: &self.config.model,
                    reference,
                    temperature: self.temperature,
                };
                let baseline = baseline.of(context.models, &columns.ids[rows.clone()], &scored)?;
                columns.kl_baseline = Some(baseline);
            }
            let resource = find_model::<PolicyResource>(context.models, &self.config.model)?;
            let at = StepPosition {
                seed: context.seed,
                step: context.step,
                pass: index * self.cuts.epochs / steps,
                is_first: index == 0,
            };
            let moved = self.mini_step(resource.policy_mut(), &columns, rows, at, context.sink)?;
            skipped += usize::from(!moved);
        }
        report_skipped(context, &columns.rows, skipped, steps);
        let ended = self.loss.state.end_step(input.num_rows());
        ended.map_err(StageError::failed)
    }

    fn snapshot(&mut self) -> Result<Option<Snapshot>, StageError> {
        let state = &self.loss.state;
        Ok(state.is_some().then(|| snapshot(state)))
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), StageError> {
        self.loss.state = restored(snapshot)?;
        Ok(())
    }

    fn store(&mut self, snapshot: &Snapshot) -> Result<Option<StoredState>, StageError> {
        stored::<LossState>(snapshot)
    }

    fn recall(
        &mut self,
        version: &WeightsVersion,
        stored: &StoredState,
    ) -> Result<Snapshot, StageError> {
        recalled::<LossState>(version, stored)
    }
}

#[cfg(test)]
mod tests;
