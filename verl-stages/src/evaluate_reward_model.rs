//! Stage `evaluate_reward_model`: measures how often a reward model prefers the better response of evaluation pairs;
//! before, during and after training.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::model::ScoreRow;
use verl_words::batch::{Batch, RowId};
use verl_words::stage::{
    Access, BuildContext, ConfigError, ModelWork, PreviewContext, RowPreviews, Stage, StageConfig,
    StageContext, StageError, StageSpec, StartContext, find_model,
};

use crate::model::{VALUE_MODEL, ValueResource};
use crate::preferences::{JudgedRow, PreferenceFormat};
use crate::prompts::declared_faults;
use crate::refusals::refused_row;
use crate::settings::metrics;

metrics! {
    ACCURACY: "eval/pair_accuracy", "share", "share of evaluation pairs whose chosen response scores higher";
    MARGIN: "eval/pair_margin", "reward", "mean score of chosen minus rejected responses of evaluation pairs";
    CHOSEN: "eval/chosen_mean", "reward", "mean score of chosen responses of evaluation pairs";
    REJECTED: "eval/rejected_mean", "reward", "mean score of rejected responses of evaluation pairs";
}

/// Settings of stage `evaluate_reward_model`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluateRewardModel {
    /// Data set of pairs, read in its order.
    pub data: String,
    /// Value model that scores.
    pub model: String,
    /// Steps between two evaluations; 0: only before the first step and after the last.
    pub every: u64,
    /// Pairs scored (pairs); all rows when absent.
    pub pairs: Option<usize>,
    /// How a row becomes a pair.
    pub format: PreferenceFormat,
}

impl Default for EvaluateRewardModel {
    fn default() -> Self {
        EvaluateRewardModel {
            data: "eval".to_owned(),
            model: "reward".to_owned(),
            every: 0,
            pairs: None,
            format: PreferenceFormat::default(),
        }
    }
}

impl StageConfig for EvaluateRewardModel {
    const KIND: &'static str = "evaluate_reward_model";
    const SUMMARY: &'static str =
        "measures how often a reward model prefers the better response of evaluation pairs";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = self.format.faults();
        faults.extend(declared_faults(&self.data, &self.model, context));
        if self.format.labels.is_some() {
            faults.push(ConfigError::new(
                "format.labels",
                "is set, but the stage compares the two answers of a pair",
                "remove it, and set the columns `chosen` and `rejected`",
            ));
        }
        if self.pairs == Some(0) {
            faults.push(ConfigError::new(
                "pairs",
                "is 0",
                "set it to a number above 0",
            ));
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(EvaluateRewardModelStage {
            config: self.clone(),
            pairs: Vec::new(),
            ids: Vec::new(),
        }))
    }
}

/// The running stage.
struct EvaluateRewardModelStage {
    config: EvaluateRewardModel,
    /// Encoded when the run starts.
    pairs: Vec<JudgedRow>,
    /// Rows of the data set, one for each answer of a pair.
    ids: Vec<RowId>,
}

impl Stage for EvaluateRewardModelStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .observer(self.config.every)
            .uses_as(VALUE_MODEL, &self.config.model, Access::Read)
            .works(ModelWork::scoring(&self.config.model))
            .metrics(&[ACCURACY, MARGIN, CHOSEN, REJECTED])
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        let EvaluateRewardModel {
            data,
            model,
            format,
            ..
        } = &self.config;
        let source = format.open(context, data, model)?;
        let rows = source.rows.iter();
        let rows = rows.take(self.config.pairs.unwrap_or(usize::MAX));
        for row in rows {
            let pair = format.read(&source, *row)?;
            let id = RowId::prompt(0, *row as u64)?;
            self.ids.extend(pair.answers.iter().map(|_| id));
            self.pairs.push(pair);
        }
        Ok(())
    }

    fn preview(
        &self,
        context: PreviewContext<'_>,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        let EvaluateRewardModel {
            data,
            model,
            format,
            ..
        } = &self.config;
        format.preview(context, data, model)
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let rows = self.pairs.iter().flat_map(|pair| {
            pair.answers.iter().map(|response| ScoreRow {
                prompt: &pair.prompt,
                response,
            })
        });
        let resource = find_model::<ValueResource>(context.models, &self.config.model)?;
        let scores = resource.model.scores(&rows.collect::<Vec<_>>());
        let scores = scores.map_err(|error| refused_row(error, &self.ids))?;
        for pair in scores.chunks_exact(2) {
            let (chosen, rejected) = (f64::from(pair[0]), f64::from(pair[1]));
            context.record(&ACCURACY, f64::from(chosen > rejected));
            context.record(&MARGIN, chosen - rejected);
            context.record(&CHOSEN, chosen);
            context.record(&REJECTED, rejected);
        }
        Ok(())
    }
}
