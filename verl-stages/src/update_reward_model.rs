//! Stage `update_reward_model`: trains a reward model to prefer the chosen response of a pair.
//!
//! A response's score is the number at its last token, as stage [`reward_model`](crate::reward::model) reads it. Row 2i
//! is the chosen response of a pair, row 2i + 1 the rejected one, as stage [`pairs`](crate::pairs) writes them.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::losses::{MetricId, Objective, RewardModelLoss, RowLoss};
use verl_algos::{Aggregation, Counts, MicroBatch, MiniBatch, Preferences};
use verl_models::model::ValueModel;
use verl_words::batch::Batch;
use verl_words::keys::{MARGINS, PROMPTS, RESPONSES};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, RowRule, Shown, Stage, StageConfig,
    StageContext, StageError, StageSink, StageSpec, find_model,
};

use crate::generate::TOKENS;
use crate::model::{VALUE_MODEL, ValueResource, sleep_engines};
use crate::settings::{metrics, refusal};
use crate::training::{Cuts, OptimizerSteps, Rows, Shares};

metrics! {
    LOSS: "reward_model/loss", "", "Bradley–Terry loss of a mini-batch, centring included", Loss;
    ACCURACY: "reward_model/accuracy", "share", "share of pairs whose chosen response scores higher, before each optimiser step";
    MARGIN: "reward_model/margin", "reward", "mean score of chosen minus rejected responses";
    CHOSEN: "reward_model/chosen_mean", "reward", "mean score of chosen responses";
    REJECTED: "reward_model/rejected_mean", "reward", "mean score of rejected responses";
    GRAD_NORM: "reward_model/grad_norm", "", "global gradient norm before clipping", GradientNorm;
    LEARNING_RATE: "reward_model/learning_rate", "", "learning rate of the optimiser step", LearningRate;
}

/// What the loss reports, and the metrics as which it is recorded.
const REPORTED: [(MetricId, Metric); 4] = [
    (MetricId::REWARD_ACCURACIES, ACCURACY),
    (MetricId::REWARD_MARGINS, MARGIN),
    (MetricId::REWARDS_CHOSEN, CHOSEN),
    (MetricId::REWARDS_REJECTED, REJECTED),
];

/// Rows of a pair.
const SIDES: usize = 2;

/// Settings of stage `update_reward_model`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateRewardModel {
    /// Value model to train.
    pub model: String,
    /// c of the term c (s_w + s_l)², which keeps scores near 0; 0: none, 0.01 is common.
    pub center_coefficient: f64,
}

impl Default for UpdateRewardModel {
    fn default() -> Self {
        UpdateRewardModel {
            model: "reward".to_owned(),
            center_coefficient: 0.0,
        }
    }
}

impl StageConfig for UpdateRewardModel {
    const KIND: &'static str = "update_reward_model";
    const SUMMARY: &'static str =
        "trains a reward model on pairs of a chosen and a rejected response";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let loss = RewardModelLoss {
            center_coefficient: self.center_coefficient,
        };
        let mut faults = Vec::new();
        if let Err(error) = loss.check() {
            faults.push(refusal("center_coefficient", &error));
        }
        let samples = context.batch.samples;
        if samples != SIDES {
            faults.push(ConfigError::new(
                "samples",
                format!("is {samples} in [batch], but a pair has {SIDES} responses"),
                format!("set `samples = {SIDES}` in [batch]"),
            ));
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(UpdateRewardModelStage {
            model: self.model.clone(),
            // The aggregation is for token losses, and there are none.
            objective: Objective::new(Aggregation::default()).with_rows(1.0, loss),
            cuts: Cuts::new(&context.batch),
            optimizer: OptimizerSteps::default(),
        }))
    }
}

/// The running stage.
struct UpdateRewardModelStage {
    model: String,
    objective: Objective,
    cuts: Cuts,
    optimizer: OptimizerSteps,
}

/// The mini-batch of `rows` rows, each with a score instead of tokens.
fn mini_batch(rows: usize, margins: Option<Vec<f64>>) -> MiniBatch {
    MiniBatch {
        counts: Counts::declared(rows, rows),
        preferences: Preferences {
            margins,
            ..Preferences::default()
        },
        ..MiniBatch::new((0..rows).collect())
    }
}

/// Refuses rows that are not pairs.
fn check_pairs(input: &Batch) -> Result<(), StageError> {
    let mut groups = input.groups().chunks(SIDES).enumerate();
    match groups.find(|(_, sides)| sides.len() != SIDES || sides[0] != sides[1]) {
        None => Ok(()),
        Some((pair, _)) => Err(StageError::failed(format!(
            "rows {} and {} are not a pair; rows 2i and 2i + 1 must be the chosen and the rejected response to one prompt, as stage `pairs` writes them",
            SIDES * pair,
            SIDES * pair + 1
        ))),
    }
}

impl UpdateRewardModelStage {
    /// Takes an optimiser step on `rows`.
    fn mini_step(
        &mut self,
        model: &mut dyn ValueModel,
        columns: &Rows<'_>,
        margins: Option<&[f64]>,
        rows: Range<usize>,
        sink: &mut dyn StageSink,
    ) -> Result<(), StageError> {
        let pairs = rows.start / SIDES..rows.end / SIDES;
        let margins = margins.map(|margins| margins[pairs].to_vec());
        let mini = mini_batch(rows.len(), margins);
        let prepared = self.objective.prepare(&mini).map_err(StageError::failed)?;
        let (ids, cuts) = (columns.ids(), (self.cuts, self.objective.cut_unit()));
        let round_len = model.round_len();
        let shares = Shares::of(&mini, ids, rows, cuts, round_len, |round, reports| {
            model.accumulate_scores_round(&columns.round(round), &|micro, scores| {
                let rows = round[micro].tokens.clone().collect();
                let batch = MicroBatch::of_values(rows, scores.clone());
                reports.take(micro, prepared.loss(&batch), scores)
            })
        })?;
        let report = self.optimizer.step(model, &self.model)?;
        sink.record(&LOSS, shares.loss, 1.0);
        sink.record(&GRAD_NORM, report.grad_norm, 1.0);
        sink.record(&LEARNING_RATE, report.learning_rate, 1.0);
        shares.record(&REPORTED, sink);
        Ok(())
    }
}

impl Stage for UpdateRewardModelStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .reads_optional(MARGINS)
            .rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .uses_as(VALUE_MODEL, &self.model, Access::Update)
            .works(self.cuts.work(
                &self.model,
                self.objective.cut_unit(),
                [PROMPTS.name(), RESPONSES.name()],
            ))
            .metrics(&[LOSS, GRAD_NORM, LEARNING_RATE, TOKENS])
            .metrics(&REPORTED.map(|(_, metric)| metric))
            .shows(Shown::of(&LOSS, "loss", Shown::LOSS))
            .shows(Shown::of(&ACCURACY, "acc", Shown::OUTCOME).narrow())
            .shows(Shown::of(&MARGIN, "margin", Shown::OUTCOME + 1))
            .shows(Shown::of(&GRAD_NORM, "grad", Shown::GRADIENT).narrow())
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        check_pairs(&input)?;
        let columns = Rows::new(&input, &RESPONSES)?;
        let margins = input
            .has(MARGINS.name())
            .then(|| input.get(&MARGINS))
            .transpose()?
            .map(|margins| {
                margins
                    .values()
                    .iter()
                    .step_by(SIDES)
                    .copied()
                    .map(f64::from)
                    .collect::<Vec<_>>()
            });
        let tokens = self.cuts.epochs * columns.num_tokens();
        context.record(&TOKENS, tokens as f64);
        sleep_engines(context.models);
        let resource = find_model::<ValueResource>(context.models, &self.model)?;
        for rows in self.cuts.mini_batches(input.num_rows()) {
            if context.cancel.is_cancelled() {
                return Err(StageError::Cancelled);
            }
            let (model, margins) = (resource.model.as_mut(), margins.as_deref());
            self.mini_step(model, &columns, margins, rows, context.sink)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RowId;
    use verl_words::stage::Models;

    use super::*;
    use crate::model::value::testing;
    use crate::sink::{RecordingSink, run_with};

    fn stage(config: &UpdateRewardModel, micro_rows: usize) -> Box<dyn Stage> {
        let mut context = BuildContext::default();
        (context.batch.mini_rows, context.batch.micro_rows) = (4, micro_rows);
        (context.batch.samples, context.batch.epochs) = (2, 1);
        StageConfig::build(config, &context).unwrap()
    }

    /// One step on the testing rows, two pairs.
    fn step(
        stage: &mut dyn Stage,
        margins: Option<Vec<f32>>,
        models: &mut Models,
    ) -> RecordingSink {
        let mut batch = testing::batch();
        if let Some(margins) = margins {
            batch.put(&MARGINS, margins).unwrap();
        }
        run_with(stage, 1, batch, models).unwrap()
    }

    #[track_caller]
    fn check_near(found: Option<f64>, expected: f64) {
        let found = found.expect("recorded");
        assert!(
            (found - expected).abs() < 1e-5,
            "{found}, expected {expected}"
        );
    }

    #[test]
    fn the_chosen_response_learns_to_score_higher() {
        let mut models = testing::models("reward");
        let mut stage = stage(&UpdateRewardModel::default(), 2);
        let mut last = RecordingSink::default();
        for _ in 0..30 {
            last = step(stage.as_mut(), None, &mut models);
        }
        check_near(last.mean(&ACCURACY), 1.0);
        let margin = last.mean(&MARGIN).unwrap();
        assert!(margin > 1.0, "{margin}");
        check_near(
            Some(last.mean(&CHOSEN).unwrap() - last.mean(&REJECTED).unwrap()),
            margin,
        );
        assert!(last.mean(&LOSS).unwrap() < 0.4);
        assert_eq!(last.sum(&TOKENS), 18.0);
    }

    #[test]
    fn margins_and_centring_are_part_of_the_loss_of_their_pair() {
        let scores = {
            let mut models = testing::models("reward");
            let batch = testing::batch();
            let rows = Rows::new(&batch, &RESPONSES).unwrap().score_rows(0..4);
            let resource = find_model::<ValueResource>(&mut models, "reward").unwrap();
            resource.model.scores(&rows).unwrap()
        };
        let score = |row: usize| f64::from(scores[row]);
        let softplus = |x: f64| x.exp().ln_1p();
        let pair = |chosen: usize, margin: f64, center: f64| {
            let (w, l) = (score(chosen), score(chosen + 1));
            softplus(l - w + margin) + center * (w + l) * (w + l)
        };
        for (margins, center) in [
            (None, 0.0),
            (Some([0.5f32, -2.0]), 0.0),
            (Some([1.0, 3.0]), 0.1),
        ] {
            let config = UpdateRewardModel {
                center_coefficient: center,
                ..UpdateRewardModel::default()
            };
            let [a, b] = margins.unwrap_or_default();
            let of_rows = margins.map(|_| vec![a, a, b, b]);
            let (a, b) = (f64::from(a), f64::from(b));
            let expected = (pair(0, a, center) + pair(2, b, center)) / 2.0;
            for micro_rows in [1, 4] {
                let mut models = testing::models("reward");
                let mut stage = stage(&config, micro_rows);
                let kept = step(stage.as_mut(), of_rows.clone(), &mut models);
                check_near(kept.mean(&LOSS), expected);
            }
        }
    }

    #[test]
    fn rows_that_are_not_pairs_are_refused() {
        let check = |rows: &[u64]| {
            let ids: Vec<RowId> = rows
                .iter()
                .map(|row| RowId::prompt(0, *row).unwrap())
                .collect();
            check_pairs(&Batch::with_rows(&ids)).map_err(|error| error.to_string())
        };
        assert!(check(&[]).is_ok() && check_pairs(&testing::batch()).is_ok());
        let message = check(&[1, 1, 2, 3]).unwrap_err();
        assert!(message.contains("rows 2 and 3 are not a pair"), "{message}");
        assert!(check(&[1]).is_err());
    }

    #[test]
    fn invalid_settings_are_reported_together() {
        let config = UpdateRewardModel {
            center_coefficient: f64::NAN,
            ..UpdateRewardModel::default()
        };
        let mut context = BuildContext::default();
        context.batch.samples = 8;
        let faults = StageConfig::build(&config, &context).err().unwrap();
        let settings: Vec<&str> = faults.iter().map(|f| f.setting.as_str()).collect();
        assert_eq!(settings, ["center_coefficient", "samples"]);
        assert!(
            faults[1]
                .to_string()
                .contains("is 8 in [batch], but a pair has 2")
        );
    }
}
