//! Stage `reward_model`: scores a response with a trained model, by the value at its last token.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::Batch;
use verl_words::keys::{PROMPTS, RESPONSES, REWARDS};
use verl_words::stage::{
    Access, BuildContext, ConfigError, ModelWork, Stage, StageConfig, StageContext, StageError,
    StageSpec, find_model,
};

use crate::model::{VALUE_MODEL, ValueResource};
use crate::refusals::refused_row;
use crate::training::score_rows;

/// Settings of stage `reward_model`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RewardModel {
    /// Value model that scores; it must have the tokenizer of the policy.
    pub model: String,
}

impl Default for RewardModel {
    fn default() -> Self {
        RewardModel {
            model: "reward".to_owned(),
        }
    }
}

impl StageConfig for RewardModel {
    const KIND: &'static str = "reward_model";
    const SUMMARY: &'static str = "scores each response with a reward model";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(RewardModelStage {
            model: self.model.clone(),
        }))
    }
}

/// The running stage.
#[derive(Clone)]
struct RewardModelStage {
    model: String,
}

impl Stage for RewardModelStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .writes(REWARDS)
            .uses_as(VALUE_MODEL, &self.model, Access::Read)
            .works(ModelWork::scoring(&self.model).of([PROMPTS.name(), RESPONSES.name()]))
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (prompts, responses) = (input.get(&PROMPTS)?, input.get(&RESPONSES)?);
        let rows = score_rows(&prompts, &responses);
        let resource = find_model::<ValueResource>(context.models, &self.model)?;
        let rewards = resource.model.scores(&rows);
        let rewards = rewards.map_err(|error| refused_row(error, &input.ids()))?;
        let mut output = input.rows_only();
        output.put(&REWARDS, rewards)?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}
