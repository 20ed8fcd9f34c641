//! Stage `values`: a critic's value of each response token, with the critic's weights at the start of the step.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::field::{Field, LogProbTag, Weights};
use verl_words::keys::{PROMPTS, RESPONSES, VALUES};
use verl_words::stage::{
    Access, BuildContext, ConfigError, ModelWork, Stage, StageConfig, StageContext, StageError,
    StageSpec, find_model,
};

use crate::model::{VALUE_MODEL, ValueResource};
use crate::refusals::refused_row;
use crate::training::score_rows;

/// Settings of stage `values`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Values {
    /// Value model to use.
    pub model: String,
}

impl Default for Values {
    fn default() -> Self {
        Values {
            model: "critic".to_owned(),
        }
    }
}

impl StageConfig for Values {
    const KIND: &'static str = "values";
    const SUMMARY: &'static str = "a critic's value of each response token";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(ValuesStage {
            model: self.model.clone(),
        }))
    }
}

/// Values of the critic `model` with its weights at the start of the step.
pub(crate) fn values_of(model: &str) -> Field {
    VALUES.tagged(LogProbTag {
        policy: Some(model.to_owned()),
        weights: Some(Weights::StepStart),
        ..LogProbTag::default()
    })
}

/// The running stage.
#[derive(Clone)]
struct ValuesStage {
    model: String,
}

impl Stage for ValuesStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .writes(values_of(&self.model))
            .uses_as(VALUE_MODEL, &self.model, Access::Read)
            .works(ModelWork::scoring(&self.model).of([PROMPTS.name(), RESPONSES.name()]))
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (prompts, responses) = (input.get(&PROMPTS)?, input.get(&RESPONSES)?);
        let rows = score_rows(&prompts, &responses);
        let critic = find_model::<ValueResource>(context.models, &self.model)?;
        let values = critic.model.values(&rows);
        let values = values.map_err(|error| refused_row(error, &input.ids()))?;
        let mut output = input.rows_only();
        output.put(&VALUES, RaggedColumn::from_rows(values.iter()))?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use verl_models::model::ScoreRow;
    use verl_words::stage::Models;

    use super::*;
    use crate::model::value::testing;
    use crate::reward::model::RewardModel;
    use crate::sink::run_with;

    /// What a stage of `config` writes for the test rows, and the models that it used.
    fn written(config: &impl StageConfig) -> (Batch, Models) {
        let mut models = testing::models("critic");
        let mut stage = config.build(&BuildContext::default()).unwrap();
        let kept = run_with(stage.as_mut(), 1, testing::batch(), &mut models).unwrap();
        (kept.batches[0].clone(), models)
    }

    #[test]
    fn values_and_scores_are_those_of_the_model() {
        let (values, mut models) = written(&Values::default());
        let reward = RewardModel {
            model: "critic".to_owned(),
        };
        let (rewards, _) = written(&reward);
        let critic = find_model::<ValueResource>(&mut models, "critic").unwrap();
        let batch = testing::batch();
        let (prompts, responses) = (batch.get(&PROMPTS).unwrap(), batch.get(&RESPONSES).unwrap());
        for row in 0..batch.num_rows() {
            let row_of = |response| ScoreRow {
                prompt: prompts.row(row),
                response,
            };
            let whole = row_of(responses.row(row));
            let expected = critic.model.values(&[whole]).unwrap().remove(0);
            assert_eq!(values.get(&VALUES).unwrap().row(row), expected);
            let score = critic.model.scores(&[whole]).unwrap()[0];
            let rewards = rewards.get(&verl_words::keys::REWARDS).unwrap();
            assert_eq!(rewards.row(row), Some(score));
            // The first value is the critic's score of the prompt without a response.
            assert_eq!(critic.model.scores(&[row_of(&[])]).unwrap()[0], expected[0]);
        }
    }

    #[test]
    fn a_missing_model_is_refused_by_name() {
        let mut stage = StageConfig::build(&Values::default(), &BuildContext::default()).unwrap();
        let refused = run_with(stage.as_mut(), 1, testing::batch(), &mut Models::new());
        let error = refused.err().unwrap().to_string();
        assert!(
            error.contains("`critic` is not on this device group"),
            "{error}"
        );
    }
}
