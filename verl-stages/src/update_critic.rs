//! Stage `update_critic`: trains a critic on the returns of the step's responses.
//!
//! Rows are split as in [`update`](crate::update): one optimiser step for each mini-batch, in which the gradients of
//! micro-batches add up, weighted by the counts of the mini-batch.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::losses::{MetricId, Objective, ValueLoss};
use verl_algos::{MicroBatch, MiniBatch};
use verl_models::model::ValueModel;
use verl_words::batch::{Batch, RaggedView};
use verl_words::keys::{MASK_KINDS, PROMPTS, RESPONSES, RETURNS, VALUES};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, MetricRole, Reduce, RowRule, Shown,
    Stage, StageConfig, StageContext, StageError, StageSink, StageSpec, find_model,
};

use crate::losses::{AggregationName, aggregation};
use crate::model::{VALUE_MODEL, ValueResource, sleep_engines};
use crate::settings::metrics;
use crate::training::{Cuts, OptimizerSteps, Rows, Shares, report_skipped};
use crate::values::values_of;

metrics! {
    LOSS: "critic/loss", "", "value loss of a mini-batch";
    CLIPPED: "critic/clipfrac", "share", "share of tokens where the clipped term of the loss is the larger one";
    GRAD_NORM: "critic/grad_norm", "", "global gradient norm before clipping", GradientNorm;
    LEARNING_RATE: "critic/learning_rate", "", "learning rate of the optimiser step", LearningRate;
    VALUES_MEAN: "critic/values_mean", "reward", "mean value over response tokens, before the update";
    RETURNS_MEAN: "critic/returns_mean", "reward", "mean return over response tokens";
    EXPLAINED_VARIANCE: "critic/explained_variance", "share", "1 − Var(returns − values) / Var(returns) over response tokens, before the update; above 0 the critic predicts better than a constant, 1 is perfect; not reported when all returns are equal", ExplainedVariance;
}

/// Optimiser steps of the step.
pub const OPTIMIZER_STEPS: Metric = Metric {
    name: "critic/optimizer_steps",
    unit: "optimiser steps",
    meaning: "optimiser steps taken; fewer than planned when mini-batches contain no token to train on",
    reduce: Reduce::Sum,
    role: Some(MetricRole::OptimizerSteps),
};

/// Settings of stage `update_critic`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateCritic {
    /// Value model to train: the one whose `values` are read.
    pub model: String,
    /// How far a value may move from the one at the start of the step; moving further gains nothing. 0: no limit.
    pub clip: f64,
    /// How token losses become one number.
    pub aggregation: AggregationName,
    /// Divisor of `seq-mean-token-sum-norm`: the longest response in tokens.
    pub loss_scale_factor: Option<f64>,
    /// Passes over the step's rows (passes); those of `batch` when absent.
    pub epochs: Option<usize>,
}

impl Default for UpdateCritic {
    fn default() -> Self {
        UpdateCritic {
            model: "critic".to_owned(),
            clip: 0.5,
            aggregation: AggregationName::TokenMean,
            loss_scale_factor: None,
            epochs: None,
        }
    }
}

impl StageConfig for UpdateCritic {
    const KIND: &'static str = "update_critic";
    const SUMMARY: &'static str = "trains a critic on the returns of the step's responses";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::new();
        if !(self.clip >= 0.0 && self.clip.is_finite()) {
            faults.push(ConfigError::new(
                "clip",
                format!("is {}", self.clip),
                "set it to a positive number, or to 0 for no limit",
            ));
        }
        if self.epochs == Some(0) {
            faults.push(ConfigError::new(
                "epochs",
                "is 0, so the critic would learn nothing",
                "set it to 1 or more, or remove it",
            ));
        }
        let aggregation = aggregation(self.aggregation, self.loss_scale_factor)
            .map_err(|error| faults.push(error));
        let (Ok(aggregation), true) = (aggregation, faults.is_empty()) else {
            return Err(faults);
        };
        let clip = (self.clip > 0.0).then_some(self.clip);
        let mut cuts = Cuts::new(&context.batch);
        cuts.epochs = self.epochs.unwrap_or(cuts.epochs);
        Ok(Box::new(UpdateCriticStage {
            model: self.model.clone(),
            objective: Objective::new(aggregation).with(1.0, ValueLoss { clip }),
            cuts,
            optimizer: OptimizerSteps::default(),
        }))
    }
}

/// The running stage.
struct UpdateCriticStage {
    model: String,
    objective: Objective,
    cuts: Cuts,
    optimizer: OptimizerSteps,
}

/// The columns of a step that the update reads.
struct Columns<'a> {
    rows: Rows<'a>,
    values: RaggedView<'a, f32>,
    returns: RaggedView<'a, f32>,
}

impl<'a> Columns<'a> {
    fn new(input: &'a Batch) -> Result<Self, StageError> {
        Ok(Columns {
            rows: Rows::new(input, &RESPONSES)?,
            values: input.get(&VALUES)?,
            returns: input.get(&RETURNS)?,
        })
    }

    fn mini_batch(&self, rows: Range<usize>) -> MiniBatch {
        MiniBatch {
            old_values: Some(self.rows.packed(self.values, rows.clone())),
            returns: Some(self.rows.packed(self.returns, rows.clone())),
            ..self.rows.mini_batch(rows)
        }
    }
}

/// Mean and variance, dividing by n; `None` without numbers.
fn moments(numbers: impl Iterator<Item = f64> + Clone) -> Option<(f64, f64)> {
    let n = numbers.clone().count() as f64;
    let mean = numbers.clone().sum::<f64>() / n;
    let variance = numbers.map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (n > 0.0).then_some((mean, variance))
}

/// Records how well the values at the start of the step predict the returns.
fn report_fit(values: &[f64], returns: &[f64], sink: &mut dyn StageSink) {
    let errors = values.iter().zip(returns).map(|(v, r)| r - v);
    let (Some((values, _)), Some((returns, variance)), Some((_, unexplained))) = (
        moments(values.iter().copied()),
        moments(returns.iter().copied()),
        moments(errors),
    ) else {
        return;
    };
    sink.record(&VALUES_MEAN, values, 1.0);
    sink.record(&RETURNS_MEAN, returns, 1.0);
    if variance > 0.0 {
        sink.record(&EXPLAINED_VARIANCE, 1.0 - unexplained / variance, 1.0);
    }
}

impl UpdateCriticStage {
    /// Takes an optimiser step on `rows`; returns false, without a step, when none of their tokens is trained on.
    fn mini_step(
        &mut self,
        critic: &mut dyn ValueModel,
        columns: &Columns<'_>,
        rows: Range<usize>,
        sink: &mut dyn StageSink,
    ) -> Result<bool, StageError> {
        let mini = columns.mini_batch(rows.clone());
        if mini.num_tokens() == 0 {
            sink.record(&OPTIMIZER_STEPS, 0.0, 1.0);
            return Ok(false);
        }
        let prepared = self.objective.prepare(&mini).map_err(StageError::failed)?;
        let (ids, cuts) = (columns.rows.ids(), (self.cuts, self.objective.cut_unit()));
        let round_len = critic.round_len();
        let shares = Shares::of(&mini, ids, rows, cuts, round_len, |round, reports| {
            critic.accumulate_round(
                &columns.rows.round(round),
                &|micro, row, token| columns.rows.is_action(round[micro].rows.start + row, token),
                &|micro, packed| {
                    let tokens = round[micro].tokens.clone().collect();
                    let batch = MicroBatch::of_values(tokens, packed.values.clone());
                    reports.take(micro, prepared.loss(&batch), packed.values)
                },
            )
        })?;
        let report = self.optimizer.step(critic, &self.model)?;
        sink.record(&OPTIMIZER_STEPS, 1.0, 1.0);
        sink.record(&LOSS, shares.loss, 1.0);
        sink.record(&GRAD_NORM, report.grad_norm, 1.0);
        sink.record(&LEARNING_RATE, report.learning_rate, 1.0);
        shares.record(&[(MetricId::VF_CLIPFRAC, CLIPPED)], sink);
        Ok(true)
    }
}

impl Stage for UpdateCriticStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .reads(MASK_KINDS)
            .reads(values_of(&self.model))
            .reads(RETURNS)
            .remedy(RETURNS.name(), "set `estimator = \"gae\"` in `advantages`: it writes the returns that a critic learns")
            .rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .uses_as(VALUE_MODEL, &self.model, Access::Update)
            .optimizes(&self.model, self.cuts.epochs, 0)
            .works(self.cuts.work(&self.model, self.objective.cut_unit(), [PROMPTS.name(), RESPONSES.name()]))
            .metrics(&[LOSS, CLIPPED, GRAD_NORM, LEARNING_RATE, OPTIMIZER_STEPS])
            .metrics(&[VALUES_MEAN, RETURNS_MEAN, EXPLAINED_VARIANCE])
            .shows(Shown::of(&EXPLAINED_VARIANCE, "expl", Shown::DETAIL))
            .shows(Shown::of(&LOSS, "v loss", Shown::DETAIL + 1).narrow())
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let columns = Columns::new(&input)?;
        let all = 0..input.num_rows();
        let values = columns.rows.packed(columns.values, all.clone());
        let returns = columns.rows.packed(columns.returns, all);
        report_fit(&values, &returns, context.sink);
        sleep_engines(context.models);
        let critic = find_model::<ValueResource>(context.models, &self.model)?;
        let (mut skipped, mut steps) = (0, 0);
        for rows in self.cuts.mini_batches(input.num_rows()) {
            if context.cancel.is_cancelled() {
                return Err(StageError::Cancelled);
            }
            let moved = self.mini_step(critic.model.as_mut(), &columns, rows, context.sink)?;
            skipped += usize::from(!moved);
            steps += 1;
        }
        report_skipped(context, &columns.rows, skipped, steps);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use verl_models::model::ScoreRow;
    use verl_words::batch::RaggedColumn;
    use verl_words::stage::Models;

    use super::*;
    use crate::model::value::testing;
    use crate::sink::{RecordingSink, run_with};

    /// The stage with micro-batches of `micro_rows` of the four testing rows.
    fn stage(config: &UpdateCritic, micro_rows: usize) -> Box<dyn Stage> {
        let mut context = BuildContext::default();
        (context.batch.mini_rows, context.batch.micro_rows) = (4, micro_rows);
        (context.batch.samples, context.batch.epochs) = (2, 1);
        StageConfig::build(config, &context).unwrap()
    }

    /// The critic's values of the testing rows.
    fn values(models: &mut Models) -> Vec<Vec<f32>> {
        let batch = testing::batch();
        let (prompts, responses) = (batch.get(&PROMPTS).unwrap(), batch.get(&RESPONSES).unwrap());
        let rows = prompts.rows().zip(responses.rows());
        let rows: Vec<_> = rows
            .map(|(prompt, response)| ScoreRow { prompt, response })
            .collect();
        let critic = find_model::<ValueResource>(models, "critic").unwrap();
        critic.model.values(&rows).unwrap()
    }

    /// One step towards `returns`; the observation has values that must not be read.
    fn step(stage: &mut dyn Stage, returns: [&[f32]; 4], models: &mut Models) -> RecordingSink {
        let mut batch = testing::batch();
        let mut old = values(models);
        old[0][1] = 1e9;
        batch.put(&VALUES, RaggedColumn::from_rows(&old)).unwrap();
        batch
            .put(&RETURNS, RaggedColumn::from_rows(returns))
            .unwrap();
        run_with(stage, 1, batch, models).unwrap()
    }

    const RETURNS_OF_ROWS: [&[f32]; 4] = [&[1.0, -1e9, 1.0], &[1.0, 0.0], &[0.5; 4], &[0.5]];

    #[test]
    fn the_critic_learns_the_returns() {
        let mut models = testing::models("critic");
        let config = UpdateCritic {
            clip: 0.0,
            ..UpdateCritic::default()
        };
        let mut stage = stage(&config, 2);
        let mut results = Vec::new();
        for _ in 0..60 {
            results.push(step(stage.as_mut(), RETURNS_OF_ROWS, &mut models));
        }
        let (first, last) = (&results[0], &results[59]);
        let of = |kept: &RecordingSink, metric| kept.mean(metric).expect("recorded");
        assert!(of(last, &LOSS) < 0.1 * of(first, &LOSS));
        assert!(
            of(last, &EXPLAINED_VARIANCE) > 0.5,
            "{}",
            of(last, &EXPLAINED_VARIANCE)
        );
        // Nine of the ten tokens are actions: 1 + 1 + 1 + 0 + 4 · ½ + ½.
        assert!((of(last, &RETURNS_MEAN) - 5.5 / 9.0).abs() < 1e-6);
        assert!((of(last, &VALUES_MEAN) - 5.5 / 9.0).abs() < 0.2);
        assert!(of(first, &GRAD_NORM) > 0.0 && of(first, &LEARNING_RATE) == 3e-3);
    }

    #[test]
    fn values_that_moved_beyond_the_clip_are_reported() {
        let clipped = |clip| {
            let config = UpdateCritic {
                clip,
                epochs: Some(8),
                ..UpdateCritic::default()
            };
            let mut models = testing::models("critic");
            let kept = step(stage(&config, 4).as_mut(), RETURNS_OF_ROWS, &mut models);
            kept.mean(&CLIPPED)
        };
        assert!(clipped(1e-4).is_some_and(|share| share > 0.1));
        assert_eq!((clipped(1e3), clipped(0.0)), (Some(0.0), None));
    }

    #[test]
    fn micro_batches_change_nothing_but_rounding() {
        let after = |micro_rows| {
            let mut models = testing::models("critic");
            let mut stage = stage(&UpdateCritic::default(), micro_rows);
            let loss = step(stage.as_mut(), RETURNS_OF_ROWS, &mut models)
                .mean(&LOSS)
                .unwrap();
            (loss, values(&mut models).concat())
        };
        let ((one, ones), (four, fours)) = (after(1), after(4));
        assert!((one - four).abs() < 1e-6 * four.abs(), "{one} {four}");
        for (one, four) in ones.iter().zip(&fours) {
            assert!((one - four).abs() < 1e-3, "{one} {four}");
        }
    }

    #[test]
    fn fit_by_hand() {
        let fit = |values: &[f64], returns: &[f64]| {
            let mut kept = RecordingSink::default();
            report_fit(values, returns, &mut kept);
            [&VALUES_MEAN, &RETURNS_MEAN, &EXPLAINED_VARIANCE].map(|metric| kept.mean(metric))
        };
        // Errors 0.5 and -0.5: variance 0.25 of 1.
        assert_eq!(
            fit(&[0.5, 2.5], &[1.0, 2.0 + 0.0]),
            [Some(1.5), Some(1.5), Some(0.0)]
        );
        assert_eq!(
            fit(&[0.5, 2.5], &[0.0, 2.0]),
            [Some(1.5), Some(1.0), Some(1.0)]
        );
        assert_eq!(fit(&[0.0, 1.0], &[3.0, 3.0]), [Some(0.5), Some(3.0), None]);
        assert_eq!(fit(&[], &[]), [None, None, None]);
    }

    #[test]
    fn invalid_settings_are_reported_together() {
        let config = UpdateCritic {
            clip: -0.5,
            aggregation: AggregationName::SeqMeanTokenSumNorm,
            epochs: Some(0),
            ..UpdateCritic::default()
        };
        let faults = StageConfig::build(&config, &BuildContext::default());
        let settings: Vec<String> = faults
            .err()
            .unwrap()
            .into_iter()
            .map(|f| f.setting)
            .collect();
        assert_eq!(settings, ["clip", "epochs", "loss_scale_factor"]);
    }
}
