//! Stage `baseline`: answers each prompt once, greedily, for estimators that use this answer as a baseline (ReMax).
//!
//! It works on the rows of prompts, before each becomes `batch.samples` rows. A `reward` stage scores what it writes,
//! and `advantages` uses that score for all samples of the prompt:
//!
//! ```toml
//! [[stages]]
//! kind = "baseline"
//! max_new_tokens = 12
//!
//! [[stages]]
//! kind = "reward"
//! name = "baseline_reward"
//! rename = { responses = "baseline_responses", response_texts = "baseline_response_texts", rewards = "reward_baselines" }
//!
//! [[stages]]
//! kind = "advantages"
//! estimator = "remax"
//! ```

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::random::{DrawKey, Purpose};
use verl_models::rollout::engine::{EngineChoice, Event, RolloutRequest, SamplingSettings};
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::keys::{BASELINE_RESPONSE_TEXTS, BASELINE_RESPONSES, PROMPTS};
use verl_words::stage::{
    Access, BuildContext, ConfigError, ModelWork, Stage, StageConfig, StageContext, StageError,
    StageSpec, find_model,
};

use crate::engines;
use crate::generate::{LONGEST, STOPS, stop_fault, stop_list};
use crate::model::{POLICY, PolicyResource, room_fault};
use crate::refusals::refused_request;
use crate::settings::metrics;

metrics! {
    LENGTH: "baseline/length_mean", "tokens", "mean number of tokens of a greedy response, end-of-sequence included";
}

/// Settings of stage `baseline`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Baseline {
    /// Model that answers.
    pub model: String,
    /// Longest response, end-of-sequence included; as in `generate` (tokens).
    pub max_new_tokens: usize,
    /// End-of-sequence is forbidden until a response has this many tokens; as in `generate` (tokens).
    pub min_new_tokens: usize,
    /// Texts that end a response; as in `generate`.
    pub stop: Vec<String>,
    /// Whether the text that rewards see includes the stop text; as in `generate`.
    pub include_stop: bool,
}

impl Default for Baseline {
    fn default() -> Self {
        Baseline {
            model: "actor".to_owned(),
            max_new_tokens: 128,
            min_new_tokens: 0,
            stop: Vec::new(),
            include_stop: false,
        }
    }
}

impl StageConfig for Baseline {
    const KIND: &'static str = "baseline";
    const SUMMARY: &'static str = "answers each prompt once, greedily, as a baseline";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::new();
        if self.max_new_tokens == 0 {
            faults.push(ConfigError::new(
                "max_new_tokens",
                "is 0, so no response could have a token",
                "set it to the `max_new_tokens` of `generate`",
            ));
        }
        if self.min_new_tokens > self.max_new_tokens {
            faults.push(ConfigError::new(
                "min_new_tokens",
                format!(
                    "is {}, above max_new_tokens = {}",
                    self.min_new_tokens, self.max_new_tokens
                ),
                "set it to the `min_new_tokens` of `generate`",
            ));
        }
        faults.extend(stop_fault(&self.stop));
        let longest = self.max_new_tokens;
        faults.extend(room_fault("max_new_tokens", longest, &self.model, context));
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(BaselineStage {
            config: self.clone(),
            prompts: context.batch.prompts.max(1),
        }))
    }
}

/// The running stage.
struct BaselineStage {
    config: Baseline,
    prompts: usize,
}

impl Stage for BaselineStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(PROMPTS)
            .writes(BASELINE_RESPONSES)
            .writes(BASELINE_RESPONSE_TEXTS)
            .agrees(LONGEST, "max_new_tokens", self.config.max_new_tokens)
            .agrees(STOPS, "stop", stop_list(&self.config.stop))
            .slice_rows(self.prompts)
            .uses_as(POLICY, &self.config.model, Access::Read)
            .works(
                ModelWork::sampling(&self.config.model, self.prompts)
                    .of([PROMPTS.name(), BASELINE_RESPONSES.name()]),
            )
            .bounds(
                BASELINE_RESPONSES.name(),
                "max_new_tokens",
                Some(self.config.max_new_tokens),
            )
            .metrics(&[LENGTH])
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (seed, step, cancel) = (context.seed, context.step, context.cancel);
        let resource = find_model::<PolicyResource>(context.models, &self.config.model)?;
        let settings = SamplingSettings {
            temperature: 0.0,
            min_new_tokens: self.config.min_new_tokens,
            stop_texts: self.config.stop.clone(),
            eos_ids: resource.eos_ids(),
            text_decoder: resource.text_decoder(),
            cancel: Some(engines::cancel(cancel)),
            ..SamplingSettings::default()
        };
        let rows = input.get(&PROMPTS)?;
        let requests: Vec<RolloutRequest> = rows
            .rows()
            .zip(input.ids())
            .map(|(prompt, id)| RolloutRequest {
                prompt: prompt.to_vec(),
                key: DrawKey {
                    seed,
                    purpose: Purpose::Baseline,
                    step,
                    row: id.0,
                    attempt: id.wave() as u32,
                },
                max_new_tokens: self.config.max_new_tokens,
            })
            .collect();
        let mut responses = vec![Vec::new(); requests.len()];
        let engine = EngineChoice::default();
        resource
            .generate(&engine, &requests, &settings, &mut |event| {
                if let Event::Done {
                    request, output, ..
                } = event
                {
                    responses[request] = output.tokens;
                }
                Ok(())
            })
            .map_err(|error| refused_request(error, &input.ids(), 1))?;
        for response in &responses {
            context.sink.record(&LENGTH, response.len() as f64, 1.0);
        }
        let (stop, include_stop) = (&self.config.stop, self.config.include_stop);
        let text = |ids: &Vec<u32>| resource.response_text(ids, stop, include_stop);
        let texts: Vec<String> = responses.iter().map(text).collect();
        let mut output = input.rows_only();
        output.put(&BASELINE_RESPONSES, RaggedColumn::from_rows(&responses))?;
        output.put(&BASELINE_RESPONSE_TEXTS, texts)?;
        context.sink.emit(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_reported_together() {
        let config = Baseline {
            max_new_tokens: 0,
            min_new_tokens: 3,
            stop: vec!["end".to_owned(), String::new()],
            ..Baseline::default()
        };
        let faults = config.build(&BuildContext::default()).err().expect("three");
        let settings: Vec<&str> = faults.iter().map(|fault| fault.setting.as_str()).collect();
        assert_eq!(settings, ["max_new_tokens", "min_new_tokens", "stop"]);
    }
}
