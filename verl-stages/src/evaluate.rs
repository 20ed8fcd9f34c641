//! Stage `evaluate`: greedy answers to held-out rows, judged by a rule; before, during and after training.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::random::{DrawKey, Purpose};
use verl_models::rollout::engine::{
    EngineChoice, Event, FinishReason, RolloutError, RolloutOutput, RolloutRequest,
    SamplingSettings,
};
use verl_models::targets::Target;
use verl_words::batch::{Batch, RowId};
use verl_words::data::{DataError, DataLoaderInterface};
use verl_words::stage::{
    Access, BuildContext, ConfigError, ModelWork, PreviewContext, RowPreviews, Stage, StageConfig,
    StageContext, StageError, StageSpec, StartContext, find_model,
};

use crate::engines;
use crate::generate::{STOPS, stop_fault, stop_list, warn_context_limit};
use crate::model::{POLICY, PolicyResource, room_fault, template_config_fault};
use crate::prompts::{
    EncodedExample, EncodedPrompt, PromptFormat, RowPreviewer, Shown, Source as Rows, preview,
};
use crate::refusals::refused_request;
use crate::reward::rule::{Reward, Rule, Verdict};
use crate::settings::{metrics, undeclared};

metrics! {
    EXACT_MATCH: "eval/exact_match", "share", "share of held-out questions whose answer is right";
    WELL_FORMED: "eval/well_formed", "share", "share of held-out answers in the form that the rule expects";
    LENGTH: "eval/response_length_mean", "tokens", "mean length of a held-out answer";
    TRUNCATED: "eval/truncated_share", "share", "share of held-out answers that reached the token limit or the end of the model's context";
    CONTEXT_LIMITED: "eval/context_limited_share", "share", "share of held-out answers that reached the end of the model's context before `max_new_tokens`";
}

/// Settings of stage `evaluate`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Evaluate {
    /// Data set with the questions, asked in its order.
    pub data: String,
    /// Model to ask.
    pub model: String,
    /// Steps between two evaluations; 0: only before the first step and after the last.
    pub every: u64,
    /// Questions asked (questions); all rows when absent.
    pub questions: Option<usize>,
    /// Longest answer, end-of-sequence included (tokens).
    pub max_new_tokens: usize,
    /// Divides logits; 0 is greedy.
    pub temperature: f64,
    /// Texts that end an answer; as in `generate`.
    pub stop: Vec<String>,
    /// Whether the text that is judged includes the stop text; as in `generate`.
    pub include_stop: bool,
    /// How a row becomes a prompt.
    pub format: PromptFormat,
    /// How an answer is judged.
    pub reward: Reward,
    /// Answers written as samples in each evaluation (samples).
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
            stop: Vec::new(),
            include_stop: false,
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
        faults.extend(stop_fault(&self.stop));
        match Rule::new(&self.reward) {
            Ok(rule) if faults.is_empty() => Ok(Box::new(EvaluateStage {
                config: self.clone(),
                rule,
                source: None,
                has_warned: false,
            })),
            Ok(_) => Err(faults),
            Err(errors) => {
                faults.extend(errors);
                Err(faults)
            }
        }
    }
}

/// Rows assumed to be sampled at once when all rows of a data set are asked: no rollout takes more.
const MOST_ROWS: usize = 512;

/// The running stage.
struct EvaluateStage {
    config: Evaluate,
    rule: Rule,
    source: Option<Source>,
    /// Whether the user was warned that the context limits answers.
    has_warned: bool,
}

/// The questions, encoded when the run starts.
struct Source {
    data: Arc<dyn DataLoaderInterface>,
    /// Each prompt with its row.
    prompts: Vec<(usize, EncodedPrompt)>,
}

/// Encodes a question, with its length problems and notes.
fn show(format: &PromptFormat, rows: &Rows, row: usize) -> Result<Shown, DataError> {
    let template = rows.template.as_ref();
    let prompt = format.encode(rows.data.as_ref(), row, &rows.tokenizer, template)?;
    let answer = (!format.answer.is_empty()).then(|| prompt.answer.clone());
    let example = EncodedExample {
        prompt,
        target: Target::default(),
        notes: Vec::new(),
    };
    Shown::example(format, rows, row, example, answer, None)
}

impl EvaluateStage {
    fn encode(&self, context: &mut StartContext<'_>) -> Result<Source, StageError> {
        let Evaluate {
            data,
            model,
            format,
            ..
        } = &self.config;
        let mut rows = Rows::open(context, data, model, format, false)?;
        let count = self.config.questions.unwrap_or(usize::MAX);
        rows.rows.truncate(count);
        rows.survey(format.on_long, |rows, row| {
            Ok(show(format, rows, row)?.surveyed())
        })?;
        let mut prompts = Vec::with_capacity(rows.rows.len());
        for &row in &rows.rows {
            let (data, template) = (rows.data.as_ref(), rows.template.as_ref());
            let prompt = format.encode(data, row, &rows.tokenizer, template)?;
            prompts.push((row, format.fit(prompt, rows.context, data, row)?));
        }
        let data = rows.data;
        Ok(Source { data, prompts })
    }

    /// Its prompts are not on an edge, so only `max_prompt_tokens` bounds their length.
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
        // A struct of texts and numbers always serialises.
        serde_json::to_value(sample).unwrap_or_default()
    }
}

impl Stage for EvaluateStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .observer(self.config.every)
            .agrees(STOPS, "stop", stop_list(&self.config.stop))
            .uses_as(POLICY, &self.config.model, Access::Read)
            .works(self.work())
            .metrics(&[EXACT_MATCH, WELL_FORMED, LENGTH, TRUNCATED, CONTEXT_LIMITED])
            .samples_of::<EvaluationSample>()
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        self.source = Some(self.encode(context)?);
        Ok(())
    }

    fn preview(
        &self,
        context: PreviewContext<'_>,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        let Evaluate {
            data,
            model,
            format,
            questions,
            ..
        } = &self.config;
        let (read, own) = (format.clone(), format.clone());
        let looks = RowPreviewer::new(
            move |rows, row| read.measure(row, rows.template.as_ref(), false),
            move |rows, row| show(&own, rows, row),
        );
        let looks = looks.first(questions.unwrap_or(usize::MAX));
        preview(context, data, model, format, false, looks)
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
            stop_texts: self.config.stop.clone(),
            text_decoder: resource.text_decoder(),
            cancel: Some(engines::cancel(cancel)),
            ..SamplingSettings::default()
        };
        let mut requests = Vec::with_capacity(source.prompts.len());
        for (row, prompt) in &source.prompts {
            requests.push(RolloutRequest {
                prompt: prompt.tokens.clone(),
                key: DrawKey {
                    seed,
                    purpose: Purpose::Evaluation,
                    step: 0,
                    row: RowId::prompt(0, *row as u64)?.0,
                    attempt: 0,
                },
                max_new_tokens: self.config.max_new_tokens,
            });
        }
        let mut outputs: Vec<Option<RolloutOutput>> = vec![None; requests.len()];
        let engine = EngineChoice::default();
        resource
            .generate(&engine, &requests, &settings, &mut |event| {
                if let Event::Done {
                    request, output, ..
                } = event
                {
                    outputs[request] = Some(output);
                }
                Ok(())
            })
            .map_err(|error| match error {
                RolloutError::Cancelled => StageError::Cancelled,
                error => {
                    let ids: Vec<RowId> =
                        requests.iter().map(|asked| RowId(asked.key.row)).collect();
                    let error = refused_request(error, &ids, 1);
                    StageError::failed(format!("evaluation on `{}`: {error}", source.data.origin()))
                }
            })?;
        let mut context_limited = 0usize;
        for (index, output) in outputs.into_iter().enumerate() {
            let Some(output) = output else { continue };
            let (row, prompt) = &source.prompts[index];
            let text =
                resource.response_text(&output.tokens, &self.config.stop, self.config.include_stop);
            let verdict = self.rule.judge(&text, &prompt.answer, output.tokens.len());
            let sink = &mut *context.sink;
            sink.record(&EXACT_MATCH, f64::from(verdict.correct), 1.0);
            sink.record(&WELL_FORMED, f64::from(verdict.well_formed), 1.0);
            sink.record(&LENGTH, output.tokens.len() as f64, 1.0);
            let is_limited = output.finish == FinishReason::Context;
            context_limited += usize::from(is_limited);
            sink.record(&TRUNCATED, f64::from(output.finish.is_cut()), 1.0);
            sink.record(&CONTEXT_LIMITED, f64::from(is_limited), 1.0);
            if index < self.config.samples {
                sink.sample(self.sample(step, steps, *row, prompt, &text, verdict));
            }
        }
        if context_limited > 0 && !self.has_warned {
            warn_context_limit(
                context_limited,
                requests.len(),
                &self.config.model,
                resource,
            );
            self.has_warned = true;
        }
        Ok(())
    }
}
