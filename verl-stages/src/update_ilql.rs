//! Stage `update_ilql`: implicit language Q-learning on logged or sampled responses with rewards.
//!
//! Q, V, CQL and AWAC are one loss, with one optimiser for trunk, policy and heads; Q̂ follows Q every few optimiser steps.
//! A response's reward lies on its last action. Rows are cut as in [`update`](crate::update); those without a reward are
//! left out.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::ilql::{IlqlBatch, IlqlLoss, IlqlMicroBatch, TargetSync};
use verl_algos::losses::MetricId;
use verl_algos::{Counts, CutUnit, MiniBatch, Ragged as AlgoRagged};
use verl_models::ilql::{IlqlModel, IlqlPolicy};
use verl_models::model::RoundError;
use verl_words::batch::Batch;
use verl_words::keys::{MASK_KINDS, PROMPTS, RESPONSES, REWARDS};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, RowRule, Shown, Stage, StageConfig,
    StageContext, StageError, StageSink, StageSpec, find_model,
};

use crate::model::{POLICY, PolicyResource, sleep_engines};
use crate::settings::{metrics, refusal};
use crate::training::{Cuts, OptimizerSteps, Rows, Shares, report_skipped};

metrics! {
    LOSS: "ilql/loss", "", "loss of a mini-batch, all terms with their coefficients", Loss;
    Q_LOSS: "ilql/q_loss", "", "squared error of Q against reward and the next state's value, summed over heads";
    V_LOSS: "ilql/v_loss", "", "expectile error of V against the slow copies of Q";
    CQL_LOSS: "ilql/cql_loss", "nats", "cross-entropy of softmax(Q) against the logged tokens, summed over heads";
    AWAC_LOSS: "ilql/awac_loss", "nats", "negative log-likelihood of the logged tokens, weighted by advantage";
    VALUE: "ilql/value", "reward", "mean value of the states in which tokens were chosen";
    TARGET_Q: "ilql/target_q", "reward", "mean of the smaller slow Q of the logged tokens";
    GRAD_NORM: "ilql/grad_norm", "", "global gradient norm before clipping", GradientNorm;
    LEARNING_RATE: "ilql/learning_rate", "", "learning rate of the optimiser step", LearningRate;
}

/// Settings of stage `update_ilql`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateIlql {
    /// Model to train, of kind `ilql_lm`.
    pub model: String,
    /// Discount γ, in [0, 1].
    pub gamma: f64,
    /// Expectile τ, in (0, 1); above ½ V leans towards the best tokens.
    pub tau: f64,
    /// Inverse temperature of AWAC's weights e^{β (q̂ − V)}, from 0; 0 clones all logged tokens alike.
    pub beta: f64,
    /// Coefficient of CQL, from 0.
    pub cql_scale: f64,
    /// Coefficient of AWAC, from 0.
    pub awac_scale: f64,
    /// Step α of Q̂ ← α Q + (1 − α) Q̂, in [0, 1].
    pub target_alpha: f64,
    /// Optimiser steps between two steps of Q̂ (steps).
    pub target_every: u64,
}

impl Default for UpdateIlql {
    fn default() -> Self {
        let (loss, sync) = (IlqlLoss::default(), TargetSync::default());
        UpdateIlql {
            model: "actor".to_owned(),
            gamma: loss.gamma,
            tau: loss.tau,
            beta: loss.beta,
            cql_scale: loss.cql_scale,
            awac_scale: loss.awac_scale,
            target_alpha: sync.alpha,
            target_every: sync.every,
        }
    }
}

impl UpdateIlql {
    fn loss(&self) -> IlqlLoss {
        IlqlLoss {
            gamma: self.gamma,
            tau: self.tau,
            beta: self.beta,
            cql_scale: self.cql_scale,
            awac_scale: self.awac_scale,
        }
    }

    fn sync(&self) -> TargetSync {
        TargetSync {
            alpha: self.target_alpha,
            every: self.target_every,
        }
    }
}

impl StageConfig for UpdateIlql {
    const KIND: &'static str = "update_ilql";
    const SUMMARY: &'static str = "trains policy and value heads on responses with rewards (ILQL)";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let loss = self.loss().check().map_err(|error| refusal("loss", &error));
        let sync = self.sync().check().map_err(|error| {
            let mut refused = refusal("target", &error);
            refused.setting = format!("target_{}", refused.setting);
            refused
        });
        let faults: Vec<ConfigError> = [loss, sync].into_iter().filter_map(Result::err).collect();
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(UpdateIlqlStage {
            config: self.clone(),
            cuts: Cuts::new(&context.batch),
            optimizer: OptimizerSteps::default(),
        }))
    }
}

/// The running stage.
struct UpdateIlqlStage {
    config: UpdateIlql,
    cuts: Cuts,
    optimizer: OptimizerSteps,
}

/// The columns of a step that the update reads.
struct Columns<'a> {
    rows: Rows<'a>,
    rewards: Vec<Option<f32>>,
}

impl<'a> Columns<'a> {
    fn new(input: &'a Batch) -> Result<Self, StageError> {
        Ok(Columns {
            rows: Rows::new(input, &RESPONSES)?,
            rewards: input.get(&REWARDS)?.rows().collect(),
        })
    }

    fn is_action(&self, row: usize, token: usize) -> bool {
        self.rewards[row].is_some() && self.rows.is_action(row, token)
    }

    /// Finished trajectories of `rows`, whose last action carries the reward.
    fn batch(&self, rows: Range<usize>) -> Result<IlqlBatch, StageError> {
        let actions = rows.clone().map(|row| {
            let tokens = self.rows.tokens.row(row).iter().enumerate();
            let actions = tokens.filter(|(token, _)| self.is_action(row, *token));
            actions.map(|(_, id)| *id).collect::<Vec<_>>()
        });
        let actions = AlgoRagged::from_rows(actions);
        let returns: Vec<f64> = rows
            .clone()
            .map(|row| self.rewards[row].map_or(0.0, f64::from))
            .collect();
        let counts = Counts::declared(actions.num_values(), rows.len());
        let batch = IlqlBatch::from_returns(actions, &returns).map_err(StageError::failed)?;
        Ok(IlqlBatch { counts, ..batch })
    }
}

impl UpdateIlqlStage {
    /// One optimiser step on `rows`; false where none of their tokens is trained on, so that there is none.
    fn mini_step(
        &mut self,
        model: &mut dyn IlqlModel,
        columns: &Columns<'_>,
        rows: Range<usize>,
        sink: &mut dyn StageSink,
    ) -> Result<bool, StageError> {
        let batch = columns.batch(rows.clone())?;
        if batch.actions.num_values() == 0 {
            return Ok(false);
        }
        let loss = self.config.loss();
        let prepared = loss.prepare(&batch).map_err(StageError::failed)?;
        let mini = MiniBatch::new(batch.rows());
        let first = rows.start;
        let (ids, cuts) = (columns.rows.ids(), (self.cuts, CutUnit::Row));
        let shares = Shares::of(&mini, ids, rows, cuts, 1, |round, reports| {
            let each = round.iter().enumerate().map(|(index, micro)| {
                let start = micro.rows.start;
                let loss = model.accumulate_ilql(
                    &columns.rows.score_rows(micro.rows.clone()),
                    &|row, token| columns.is_action(start + row, token),
                    &mut |packed| {
                        let output = packed.values.clone();
                        let batch = IlqlMicroBatch {
                            rows: packed.rows.iter().map(|row| start - first + row).collect(),
                            qs: packed.qs,
                            target_qs: packed.target_qs,
                            values: packed.values,
                            logits: packed.logits,
                        };
                        reports.take(index, prepared.loss(&batch), output)
                    },
                );
                loss.map_err(|error| RoundError {
                    micro: index,
                    error,
                })
            });
            each.collect()
        })?;
        let report = self.optimizer.step(model, &self.config.model)?;
        let sync = self.config.sync();
        let due = sync.is_due(model.optimizer_steps());
        if due.map_err(StageError::failed)? {
            model.sync_targets(sync.alpha).map_err(StageError::failed)?;
        }
        sink.record(&LOSS, shares.loss, 1.0);
        let reported = [
            (MetricId::Q_LOSS, Q_LOSS),
            (MetricId::V_LOSS, V_LOSS),
            (MetricId::CQL_LOSS, CQL_LOSS),
            (MetricId::AWAC_LOSS, AWAC_LOSS),
            (MetricId::VALUE, VALUE),
            (MetricId::TARGET_Q, TARGET_Q),
        ];
        shares.record(&reported, sink);
        sink.record(&GRAD_NORM, report.grad_norm, 1.0);
        sink.record(&LEARNING_RATE, report.learning_rate, 1.0);
        Ok(true)
    }
}

impl Stage for UpdateIlqlStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .reads(MASK_KINDS)
            .reads(REWARDS)
            .rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .uses_as(POLICY, &self.config.model, Access::Update)
            .works(self.cuts.work(
                &self.config.model,
                CutUnit::Row,
                [PROMPTS.name(), RESPONSES.name()],
            ))
            .metrics(&[LOSS, Q_LOSS, V_LOSS, CQL_LOSS, AWAC_LOSS])
            .metrics(&[VALUE, TARGET_Q, GRAD_NORM, LEARNING_RATE])
            .shows(Shown::of(&LOSS, "loss", Shown::LOSS))
            .shows(Shown::of(&VALUE, "value", Shown::OUTCOME))
            .shows(Shown::of(&Q_LOSS, "q loss", Shown::DISTANCE))
            .shows(Shown::of(&GRAD_NORM, "grad", Shown::GRADIENT).narrow())
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let columns = Columns::new(&input)?;
        sleep_engines(context.models);
        let name = &self.config.model;
        let resource = find_model::<PolicyResource>(context.models, name)?;
        let Some(model) = IlqlPolicy::of(resource.policy_mut()) else {
            return Err(StageError::Model {
                name: name.clone(),
                reason: "has no value heads; declare it with `kind = \"ilql_lm\"`".to_owned(),
            });
        };
        let (mut skipped, mut steps) = (0, 0);
        for rows in self.cuts.mini_batches(input.num_rows()) {
            if context.cancel.is_cancelled() {
                return Err(StageError::Cancelled);
            }
            let moved = self.mini_step(model, &columns, rows, context.sink)?;
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

    #[test]
    fn settings_out_of_range_are_reported_by_name() {
        let refused = |config: UpdateIlql| {
            let errors = StageConfig::build(&config, &BuildContext::default());
            let errors = errors.err().unwrap_or_default();
            errors
                .into_iter()
                .map(|error| error.setting)
                .collect::<Vec<_>>()
        };
        let plain = UpdateIlql::default;
        assert_eq!(refused(plain()), [""; 0]);
        let both = UpdateIlql {
            tau: 1.0,
            target_alpha: 2.0,
            ..plain()
        };
        assert_eq!(refused(both), ["tau", "target_alpha"]);
        let every = UpdateIlql {
            target_every: 0,
            ..plain()
        };
        assert_eq!(refused(every), ["target_every"]);
    }

    #[test]
    fn rewards_lie_on_last_actions_and_rows_without_one_are_left_out() {
        let ids: Vec<RowId> = (0..3).map(RowId).collect();
        let mut batch = Batch::with_rows(&ids);
        let prompts = RaggedColumn::from_rows([[9u32]; 3]);
        batch.put(&PROMPTS, prompts).unwrap();
        let tokens = RaggedColumn::from_rows([vec![1u32, 2, 3], vec![4], vec![5, 6]]);
        batch.put(&RESPONSES, tokens).unwrap();
        let kinds = RaggedColumn::from_rows([vec![1u8, 1, 0], vec![1], vec![1, 1]]);
        batch.put(&MASK_KINDS, kinds).unwrap();
        let rewards = vec![Some(2.0f32), None, Some(-1.0)];
        batch.put(&REWARDS, rewards).unwrap();
        let columns = Columns::new(&batch).unwrap();
        let trajectories = columns.batch(0..3).unwrap();
        assert_eq!(trajectories.actions.values(), [1, 2, 5, 6]);
        assert_eq!(trajectories.rewards.values(), [0.0, 2.0, 0.0, -1.0]);
        assert_eq!(trajectories.rows(), [0, 0, 2, 2]);
        assert_eq!(columns.batch(1..2).unwrap().actions.num_values(), 0);
    }
}
