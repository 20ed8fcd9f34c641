//! Stage `evaluate`: greedy answers to held-out rows, judged by a rule; before, during and after training.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::random::{DrawKey, Purpose};
use verl_models::rollout::engine::{
    FinishReason, RolloutError, RolloutOutput, RolloutRequest, SamplingSettings,
};
use verl_pipe::batch::{Batch, RowId};
use verl_pipe::data::DataLoaderInterface;
use verl_pipe::stage::{
    Access, BuildContext, ConfigError, ModelWork, Stage, StageConfig, StageContext, StageError,
    StageSpec, StartContext, find_model,
};

use crate::model::{POLICY, PolicyResource, TextTools, room_fault, template_config_fault};
use crate::prompts::{EncodedPrompt, PromptFormat, look_at_rows};
use crate::reward::rule::{Reward, Rule, Verdict};
use crate::settings::{metrics, undeclared};

metrics! {
    EXACT_MATCH: "eval/exact_match", "share", "share of held-out questions whose answer is right";
    WELL_FORMED: "eval/well_formed", "share", "share of held-out answers in the form that the rule asks for";
    LENGTH: "eval/response_length_mean", "tokens", "mean length of a held-out answer";
    TRUNCATED: "eval/truncated_share", "share", "share of held-out answers that reached the token limit";
}

/// Settings of stage `evaluate`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Evaluate {
    /// Data set to ask from, in its order.
    pub data: String,
    /// Model to ask.
    pub model: String,
    /// Steps between two evaluations; 0: only before the first step and after the last.
    pub every: u64,
    /// Questions asked (questions); all rows when absent.
    pub questions: Option<usize>,
    /// Most tokens of an answer, end-of-sequence included (tokens).
    pub max_new_tokens: usize,
    /// Divides logits; 0 is greedy.
    pub temperature: f64,
    /// How a row becomes a prompt.
    pub format: PromptFormat,
    /// How an answer is judged.
    pub reward: Reward,
    /// Answers kept as samples of each evaluation (samples).
    pub samples: usize,
}

/// A held-out question and its answer, as `samples.jsonl` shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EvaluationSample {
    /// `evaluation`.
    pub kind: String,
    /// When it was asked: `before` the first step, `during` the run, or `after` the last step.
    pub phase: String,
    /// Step of the run; 0 before the first.
    pub step: u64,
    /// Row of the data set.
    pub row: usize,
    /// The prompt as text.
    pub prompt: String,
    /// The answer of the model.
    pub response: String,
    /// The reference answer.
    pub answer: String,
    /// Whether the rule finds the answer right.
    pub correct: bool,
}

impl Default for Evaluate {
    fn default() -> Self {
        Evaluate {
            data: "eval".to_owned(),
            model: "actor".to_owned(),
            every: 0,
            questions: None,
            max_new_tokens: 128,
            temperature: 0.0,
            format: PromptFormat::default(),
            reward: Reward::default(),
            samples: 5,
        }
    }
}

impl StageConfig for Evaluate {
    const KIND: &'static str = "evaluate";
    const SUMMARY: &'static str = "greedy answers to held-out rows, judged by a rule";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = self.format.faults();
        faults.extend(undeclared("data", &self.data, &context.data, "data set"));
        faults.extend(undeclared("model", &self.model, &context.models, "model"));
        let (model, template) = (&self.model, self.format.template);
        faults.extend(template_config_fault(
            "format.template",
            template,
            model,
            context,
        ));
        faults.extend(room_fault(
            "max_new_tokens",
            self.max_new_tokens,
            model,
            context,
        ));
        for (setting, value) in [
            ("max_new_tokens", Some(self.max_new_tokens)),
            ("questions", self.questions),
        ] {
            if value == Some(0) {
                faults.push(ConfigError::new(
                    setting,
                    "is 0",
                    "set it to a number above 0",
                ));
            }
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            faults.push(ConfigError::new(
                "temperature",
                format!("is {}", self.temperature),
                "set it to 0 for greedy answers",
            ));
        }
        match Rule::new(&self.reward) {
            Ok(rule) if faults.is_empty() => Ok(Box::new(EvaluateStage {
                config: self.clone(),
                rule,
                source: None,
            })),
            Ok(_) => Err(faults),
            Err(errors) => {
                faults.extend(errors);
                Err(faults)
            }
        }
    }
}

/// Rows that are thought of as sampled at once where all rows of a data set are asked: no rollout takes more.
const MOST_ROWS: usize = 512;

/// The running stage.
struct EvaluateStage {
    config: Evaluate,
    rule: Rule,
    source: Option<Source>,
}

/// The questions, encoded when the run starts.
struct Source {
    data: Arc<dyn DataLoaderInterface>,
    prompts: Vec<EncodedPrompt>,
}

impl EvaluateStage {
    fn encode(&self, context: &mut StartContext<'_>) -> Result<Source, StageError> {
        let data = context.data(&self.config.data)?;
        let (model, format) = (&self.config.model, &self.config.format);
        let texts = TextTools::of(context.models, model)?;
        let tokenizer = texts.tokenizer(model, "evaluation needs")?;
        let template = texts.chat_template(model, format.template, &format.template_variables)?;
        let limit = texts.max_tokens;
        look_at_rows(data.as_ref(), |row| format.look(row))?;
        let count = self.config.questions.unwrap_or(data.len()).min(data.len());
        let mut prompts = Vec::with_capacity(count);
        for row in 0..count {
            let prompt = format.encode(data.as_ref(), row, &tokenizer, template.as_ref())?;
            prompts.push(format.fit(prompt, limit, data.as_ref(), row)?);
        }
        Ok(Source { data, prompts })
    }

    /// Its prompts are on no edge, so that of their length only what a setting says is known.
    fn work(&self) -> ModelWork {
        let Evaluate {
            model,
            questions,
            max_new_tokens,
            format,
            ..
        } = &self.config;
        let prompt = format.max_prompt_tokens.unwrap_or(0);
        let rows = questions.unwrap_or(MOST_ROWS);
        ModelWork::sampling(model, rows).tokens(prompt.saturating_add(*max_new_tokens))
    }

    fn sample(
        &self,
        step: u64,
        steps: u64,
        row: usize,
        prompt: &EncodedPrompt,
        text: &str,
        verdict: Verdict,
    ) -> serde_json::Value {
        let phase = match step {
            0 => "before",
            step if step == steps => "after",
            _ => "during",
        };
        let sample = EvaluationSample {
            kind: "evaluation".to_owned(),
            phase: phase.to_owned(),
            step,
            row,
            prompt: prompt.text.clone(),
            response: text.to_owned(),
            answer: prompt.answer.clone(),
            correct: verdict.correct,
        };
        // Texts and numbers always make an object.
        serde_json::to_value(sample).unwrap_or_default()
    }
}

impl Stage for EvaluateStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .observer(self.config.every)
            .uses_as(POLICY, &self.config.model, Access::Read)
            .works(self.work())
            .metrics(&[EXACT_MATCH, WELL_FORMED, LENGTH, TRUNCATED])
            .samples_of::<EvaluationSample>()
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        self.source = Some(self.encode(context)?);
        Ok(())
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(source) = &self.source else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let (seed, step, steps, cancel) =
            (context.seed, context.step, context.steps, context.cancel);
        let resource = find_model::<PolicyResource>(context.models, &self.config.model)?;
        let settings = SamplingSettings {
            temperature: self.config.temperature,
            eos_ids: resource.eos_ids(),
            ..SamplingSettings::default()
        };
        let mut requests = Vec::with_capacity(source.prompts.len());
        for (row, prompt) in source.prompts.iter().enumerate() {
            requests.push(RolloutRequest {
                prompt: prompt.tokens.clone(),
                key: DrawKey {
                    seed,
                    purpose: Purpose::Evaluation,
                    step: 0,
                    row: RowId::prompt(0, row as u64)?.0,
                    attempt: 0,
                },
                max_new_tokens: self.config.max_new_tokens,
            });
        }
        let mut outputs: Vec<Option<RolloutOutput>> = vec![None; requests.len()];
        resource
            .policy
            .generate(&requests, &settings, &mut |index, output| {
                if cancel.is_cancelled() {
                    return Err(RolloutError::Stopped(Box::new(StageError::Cancelled)));
                }
                outputs[index] = Some(output);
                Ok(())
            })
            .map_err(|error| match error {
                RolloutError::Stopped(_) => StageError::Cancelled,
                error => {
                    StageError::failed(format!("evaluation on `{}`: {error}", source.data.origin()))
                }
            })?;
        for (row, output) in outputs.into_iter().enumerate() {
            let Some(output) = output else { continue };
            let (prompt, text) = (&source.prompts[row], resource.decode(&output.tokens));
            let verdict = self.rule.judge(&text, &prompt.answer, output.tokens.len());
            let sink = &mut *context.sink;
            sink.record(&EXACT_MATCH, f64::from(verdict.correct), 1.0);
            sink.record(&WELL_FORMED, f64::from(verdict.well_formed), 1.0);
            sink.record(&LENGTH, output.tokens.len() as f64, 1.0);
            sink.record(
                &TRUNCATED,
                f64::from(output.finish == FinishReason::Length),
                1.0,
            );
            if row < self.config.samples {
                sink.sample(self.sample(step, steps, row, prompt, &text, verdict));
            }
        }
        Ok(())
    }
}
