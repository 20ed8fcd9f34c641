//! Stage `values`: what a critic expects of a response when each of its tokens is chosen, with the weights that the step
//! started with.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::model::ScoreRow;
use verl_pipe::batch::{Batch, RaggedColumn};
use verl_pipe::field::{Field, LogProbTag, Weights};
use verl_pipe::keys::{PROMPTS, RESPONSES, VALUES};
use verl_pipe::stage::{
    Access, BuildContext, ConfigError, Stage, StageConfig, StageContext, StageError, StageSpec,
    find_model,
};

use crate::model::{VALUE_MODEL, ValueResource};

/// Settings of stage `values`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Values {
    /// Value model that is asked.
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

/// Values of the critic `model` with the weights that the step started with.
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
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (prompts, responses) = (input.get(&PROMPTS)?, input.get(&RESPONSES)?);
        let rows: Vec<ScoreRow<'_>> = prompts
            .rows()
            .zip(responses.rows())
            .map(|(prompt, response)| ScoreRow { prompt, response })
            .collect();
        let critic = find_model::<ValueResource>(context.models, &self.model)?;
        let values = critic.model.values(&rows).map_err(StageError::failed)?;
        let mut output = input.rows_only();
        output.put(&VALUES, RaggedColumn::from_rows(values.iter()))?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}
