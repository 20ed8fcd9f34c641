//! Stage `distill`: trains a student towards a teacher's token distribution on the student's responses.
//!
//! On-policy distillation is `prompts >> generate >> teacher_top >> distill`: the student samples responses, the teacher
//! lists its most probable tokens at each position, and the student's distribution is trained towards the teacher's. Rows
//! are split as in [`update`](crate::update).

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::CutUnit;
use verl_algos::losses::{
    DistillationBatch, DistillationLoss, DistillationMicroBatch, Divergence, MetricId,
};
use verl_models::model::{ListedTokens, PolicyModel};
use verl_words::batch::{Batch, RaggedView};
use verl_words::keys::{MASK_KINDS, PROMPTS, RESPONSES};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, MetricRole, Reduce, RowRule, Shown,
    Stage, StageConfig, StageContext, StageError, StageSink, StageSpec, find_model,
};

pub use verl_algos::losses::{DivergenceName, Tail};

use crate::log_probs::{scoring_temperature, scoring_temperature_fault};
use crate::losses::{AggregationName, aggregation};
use crate::model::{POLICY, PolicyResource, sleep_engines};
use crate::settings::{metrics, refusal};
use crate::teacher_top::{TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS, teacher_log_probs};
use crate::training::{Cuts, OptimizerSteps, Rows, Shares, report_skipped};

metrics! {
    LOSS: "distill/loss", "nats", "aggregated divergence of the student from the teacher", Loss;
    DIVERGENCE: "distill/divergence", "nats", "mean divergence of the student from the teacher over action tokens";
    TEACHER_MASS: "distill/teacher_mass", "probability", "mean probability that the teacher assigns to the listed tokens";
    STUDENT_MASS: "distill/student_mass", "probability", "mean probability that the student assigns to the listed tokens";
    GRAD_NORM: "distill/grad_norm", "", "global gradient norm before clipping", GradientNorm;
    LEARNING_RATE: "distill/learning_rate", "", "learning rate of the optimiser step", LearningRate;
}

/// Optimiser steps of the step.
pub const OPTIMIZER_STEPS: Metric = Metric {
    name: "distill/optimizer_steps",
    unit: "optimiser steps",
    meaning: "optimiser steps taken; fewer than planned when mini-batches contain no token to train on",
    reduce: Reduce::Sum,
    role: Some(MetricRole::OptimizerSteps),
};

/// Settings of stage `distill`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Distill {
    /// Student to train.
    pub model: String,
    /// Divergence minimised at each token.
    pub divergence: DivergenceName,
    /// Share of the teacher in the mixture of `jensen_shannon`, in (0, 1); ½ when absent.
    pub beta: Option<f64>,
    /// How tokens that the teacher does not list count.
    pub tail: Tail,
    /// How per-token losses are aggregated.
    pub aggregation: AggregationName,
    /// Divisor of `seq-mean-token-sum-norm`: the longest response in tokens.
    pub loss_scale_factor: Option<f64>,
    /// Divides logits, as in `teacher_top`; the temperature at which the responses were sampled when absent.
    pub temperature: Option<f64>,
}

impl Default for Distill {
    fn default() -> Self {
        Distill {
            model: "actor".to_owned(),
            divergence: DivergenceName::ForwardKl,
            beta: None,
            tail: Tail::Bucket,
            aggregation: AggregationName::TokenMean,
            loss_scale_factor: None,
            temperature: None,
        }
    }
}

impl Distill {
    fn loss(&self) -> Result<DistillationLoss, Vec<ConfigError>> {
        let mut faults = Vec::from_iter(scoring_temperature_fault(self.temperature));
        let divergence = Divergence::named(self.divergence, self.beta)
            .map_err(|error| faults.push(refusal("divergence", &error)));
        if let (Ok(Divergence::Forward | Divergence::Reverse), Some(beta)) =
            (&divergence, self.beta)
        {
            faults.push(ConfigError::new(
                "beta",
                format!("is {beta}, but `{}` has no mixture", self.divergence),
                "remove it, or set `divergence = \"jensen_shannon\"`",
            ));
        }
        let aggregation = aggregation(self.aggregation, self.loss_scale_factor)
            .map_err(|error| faults.push(error));
        match (divergence, aggregation) {
            (Ok(divergence), Ok(aggregation)) if faults.is_empty() => Ok(DistillationLoss {
                divergence,
                tail: self.tail,
                aggregation,
            }),
            _ => Err(faults),
        }
    }
}

impl StageConfig for Distill {
    const KIND: &'static str = "distill";
    const SUMMARY: &'static str = "trains a student towards a teacher's distribution over tokens";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(DistillStage {
            loss: self.loss()?,
            config: self.clone(),
            temperature: scoring_temperature(self.temperature, context),
            cuts: Cuts::new(&context.batch),
            optimizer: OptimizerSteps::default(),
        }))
    }
}

/// The running stage.
struct DistillStage {
    config: Distill,
    temperature: f64,
    loss: DistillationLoss,
    cuts: Cuts,
    optimizer: OptimizerSteps,
}

/// The columns of a step that the stage reads.
struct Columns<'a> {
    rows: Rows<'a>,
    ids: RaggedView<'a, u32>,
    log_probs: RaggedView<'a, f32>,
    /// Tokens listed for each response token, K.
    top_k: usize,
}

impl<'a> Columns<'a> {
    fn new(input: &'a Batch) -> Result<Self, StageError> {
        let rows = Rows::new(input, &RESPONSES)?;
        let (ids, log_probs) = (
            input.get(&TEACHER_TOP_IDS)?,
            input.get(&TEACHER_TOP_LOG_PROBS)?,
        );
        let lengths = || (0..ids.len()).map(|row| (rows.tokens.row_len(row), ids.row_len(row)));
        let top_k = lengths()
            .find(|(tokens, _)| *tokens > 0)
            .map_or(1, |(tokens, listed)| listed / tokens);
        for (row, (tokens, listed)) in lengths().enumerate() {
            if tokens * top_k != listed {
                return Err(StageError::Row {
                    row,
                    id: input.ids()[row],
                    reason: format!(
                        "`{}` has {listed} ids for {tokens} response tokens, but other rows have {top_k} per token",
                        TEACHER_TOP_IDS.name()
                    ),
                });
            }
        }
        Ok(Columns {
            rows,
            ids,
            log_probs,
            top_k,
        })
    }

    /// The actions of `rows` as a mini-batch, and what the teacher lists for them.
    fn batch(&self, rows: Range<usize>) -> (verl_algos::MiniBatch, DistillationBatch) {
        let mini = self.rows.mini_batch(rows.clone());
        let (mut ids, mut log_probs) = (Vec::new(), Vec::new());
        for row in rows {
            for token in (0..self.rows.tokens.row_len(row)).filter(|t| self.rows.is_action(row, *t))
            {
                let own = token * self.top_k..(token + 1) * self.top_k;
                ids.extend_from_slice(&self.ids.row(row)[own.clone()]);
                log_probs.extend(self.log_probs.row(row)[own].iter().map(|l| f64::from(*l)));
            }
        }
        let batch = DistillationBatch {
            counts: mini.counts,
            ..DistillationBatch::new(mini.rows.clone(), self.top_k, ids, log_probs)
        };
        (mini, batch)
    }

    fn listed(&self, rows: Range<usize>) -> ListedTokens<'a> {
        ListedTokens {
            top_k: self.top_k,
            rows: rows.map(|row| self.ids.row(row)).collect(),
        }
    }
}

impl DistillStage {
    /// Takes an optimiser step on `rows`; returns false, without a step, when none of their tokens is trained on.
    fn mini_step(
        &mut self,
        student: &mut dyn PolicyModel,
        columns: &Columns<'_>,
        rows: Range<usize>,
        sink: &mut dyn StageSink,
    ) -> Result<bool, StageError> {
        let (mini, batch) = columns.batch(rows.clone());
        if batch.num_tokens() == 0 {
            sink.record(&OPTIMIZER_STEPS, 0.0, 1.0);
            return Ok(false);
        }
        let prepared = self.loss.prepare(&batch).map_err(StageError::failed)?;
        let temperature = self.temperature;
        let (ids, cuts) = (columns.rows.ids(), (self.cuts, CutUnit::Row));
        let round_len = student.round_len();
        let shares = Shares::of(&mini, ids, rows, cuts, round_len, |round, reports| {
            let lists = round.iter().map(|micro| columns.listed(micro.rows.clone()));
            let lists: Vec<ListedTokens<'_>> = lists.collect();
            student.accumulate_listed_round(
                &columns.rows.round(round),
                &lists,
                &|micro, row, token| columns.rows.is_action(round[micro].rows.start + row, token),
                temperature,
                &|micro, packed| {
                    let output = packed.log_probs.clone().sum();
                    let batch = DistillationMicroBatch {
                        tokens: round[micro].tokens.clone().collect(),
                        log_probs: packed.log_probs,
                    };
                    reports.take(micro, prepared.loss(&batch), output)
                },
            )
        })?;
        let report = self.optimizer.step(student, &self.config.model)?;
        sink.record(&OPTIMIZER_STEPS, 1.0, 1.0);
        sink.record(&LOSS, shares.loss, 1.0);
        let reported = [
            (MetricId::DISTILLATION_DIVERGENCE, DIVERGENCE),
            (MetricId::TEACHER_MASS, TEACHER_MASS),
            (MetricId::STUDENT_MASS, STUDENT_MASS),
        ];
        shares.record(&reported, sink);
        sink.record(&GRAD_NORM, report.grad_norm, 1.0);
        sink.record(&LEARNING_RATE, report.learning_rate, 1.0);
        Ok(true)
    }
}

impl Stage for DistillStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .at_temperature_of(RESPONSES.name())
            .reads(MASK_KINDS)
            .reads(TEACHER_TOP_IDS)
            .reads(teacher_log_probs(None, self.temperature))
            .remedy(
                TEACHER_TOP_IDS.name(),
                "add a `teacher_top` stage, which scores the responses with a teacher",
            )
            .rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .uses_as(POLICY, &self.config.model, Access::Update)
            .works(self.cuts.work(
                &self.config.model,
                CutUnit::Row,
                [PROMPTS.name(), RESPONSES.name()],
            ))
            .metrics(&[LOSS, DIVERGENCE, TEACHER_MASS, STUDENT_MASS])
            .metrics(&[GRAD_NORM, LEARNING_RATE, OPTIMIZER_STEPS])
            .shows(Shown::of(&LOSS, "loss", Shown::LOSS))
            .shows(Shown::of(&DIVERGENCE, "div", Shown::DISTANCE))
            .shows(Shown::of(&GRAD_NORM, "grad", Shown::GRADIENT).narrow())
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let columns = Columns::new(&input)?;
        sleep_engines(context.models);
        let student = find_model::<PolicyResource>(context.models, &self.config.model)?;
        let (mut skipped, mut steps) = (0, 0);
        for rows in self.cuts.mini_batches(input.num_rows()) {
            if context.cancel.is_cancelled() {
                return Err(StageError::Cancelled);
            }
            let moved = self.mini_step(student.policy_mut(), &columns, rows, context.sink)?;
            skipped += usize::from(!moved);
            steps += 1;
        }
        report_skipped(context, &columns.rows, skipped, steps);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::{RaggedColumn, RowId};

    use super::*;

    fn refusals(config: &Distill) -> Vec<String> {
        let errors = config.loss().err().unwrap_or_default();
        errors.into_iter().map(|error| error.setting).collect()
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let plain = Distill::default();
        assert_eq!(refusals(&plain), [""; 0]);
        let all = Distill {
            divergence: DivergenceName::JensenShannon,
            beta: Some(1.0),
            aggregation: AggregationName::SeqMeanTokenSumNorm,
            temperature: Some(0.0),
            ..plain.clone()
        };
        let settings = ["temperature", "beta", "loss_scale_factor"];
        assert_eq!(refusals(&all), settings);
        let beta = |divergence, beta| Distill {
            divergence,
            beta: Some(beta),
            ..plain.clone()
        };
        assert_eq!(refusals(&beta(DivergenceName::ForwardKl, 0.5)), ["beta"]);
        assert_eq!(
            refusals(&beta(DivergenceName::JensenShannon, 1.0)),
            ["beta"]
        );
        assert_eq!(refusals(&beta(DivergenceName::JensenShannon, 0.1)), [""; 0]);
    }

    #[test]
    fn listed_tokens_follow_the_actions_and_have_one_length() {
        let ids: Vec<RowId> = (0..3).map(RowId).collect();
        let mut batch = Batch::with_rows(&ids);
        let tokens = [vec![1u32, 2], vec![], vec![3]];
        let kinds = [vec![0u8, 1], vec![], vec![1]];
        let put = |batch: &mut Batch, top: [Vec<u32>; 3]| {
            let log_probs = top.each_ref().map(|row| vec![-1.0f32; row.len()]);
            let top = RaggedColumn::from_rows(top);
            batch.put(&TEACHER_TOP_IDS, top).unwrap();
            let log_probs = RaggedColumn::from_rows(log_probs);
            batch.put(&TEACHER_TOP_LOG_PROBS, log_probs).unwrap();
        };
        let prompts = RaggedColumn::from_rows([[9u32]; 3]);
        batch.put(&PROMPTS, prompts).unwrap();
        let tokens = RaggedColumn::from_rows(tokens);
        batch.put(&RESPONSES, tokens).unwrap();
        let kinds = RaggedColumn::from_rows(kinds);
        batch.put(&MASK_KINDS, kinds).unwrap();
        let mut other = batch.clone();

        put(&mut batch, [vec![4, 5, 6, 7], vec![], vec![8, 4]]);
        let columns = Columns::new(&batch).unwrap();
        let (mini, of_teacher) = columns.batch(0..3);
        assert_eq!(
            (mini.rows.as_slice(), of_teacher.top_k),
            ([0, 2].as_slice(), 2)
        );
        assert_eq!(of_teacher.ids, [6, 7, 8, 4]);
        assert_eq!(columns.listed(1..3).rows, [[].as_slice(), &[8, 4]]);

        put(&mut other, [vec![4, 5, 6, 7], vec![], vec![8]]);
        let error = Columns::new(&other).err().expect("a refusal").to_string();
        assert!(
            error.contains("sample 0.0#2") && error.contains("1 ids for 1"),
            "{error}"
        );
    }
}
