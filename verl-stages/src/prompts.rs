//! Stage `prompts`: the source of a pipeline; rows of a data set as prompt tokens.
//!
//! Rows are drawn from an endless sequence of epochs, each of which is a permutation of the data set that depends on
//! the run's seed and the epoch's number alone. Step k of P prompts uses draws (k − 1)·P to k·P of that sequence, so
//! resuming and replaying a run need no state, and a step may straddle two epochs.
//!
//! Where a filter asks for further waves, wave w of the step uses the same draws moved on by a part of the epoch: ½, ¼,
//! ¾, ⅛, … of it (van der Corput's sequence), wrapping around. So the first wave is what it is without a refill, a wave
//! does not depend on how many there may be, and no row comes twice in a step as long as the epoch has room: W waves
//! of P prompts with P ≤ ⌊rows / W⌋, W rounded up to a power of two.

mod format;
pub(crate) mod source;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_pipe::batch::{Batch, RaggedColumn};
use verl_pipe::data::DataError;
use verl_pipe::keys::{ANSWERS, DATA_ROWS, PROMPT_TEXTS, PROMPTS, TARGETS};
use verl_pipe::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, Reduce, RowRule, Stage, StageConfig,
    StageContext, StageError, StageSpec, StartContext,
};

use crate::model::{room_fault, template_config_fault};
pub(crate) use format::{Asked, Row, role};
pub use format::{EncodedPrompt, OnLong, PromptFormat, Template, target_tokens};
pub(crate) use source::{Source, declared_faults, look_at_rows};

/// Mean prompt length of the step.
pub const PROMPT_LENGTH: Metric = Metric {
    name: "prompt/length_mean",
    unit: "tokens",
    meaning: "mean number of tokens of a prompt",
    reduce: Reduce::Mean,
};

/// Settings of stage `prompts`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Prompts {
    /// Data set to draw from.
    pub data: String,
    /// Model whose tokenizer and chat template are used.
    pub model: String,
    /// Column with the question, a text: the only message of the user.
    pub question: String,
    /// Column with a whole conversation instead (a list of objects with `role` and `content`), where it is named.
    pub messages: Option<String>,
    /// Column with the reference answer, a text or number; empty: rows have none, and `answers` is not written.
    pub answer: String,
    /// System message before the conversation.
    pub system: Option<String>,
    /// How messages become text.
    pub template: Template,
    /// Further variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// Longest prompt (tokens); one less than the model's context when absent.
    pub max_prompt_tokens: Option<usize>,
    /// What becomes of a longer prompt.
    pub on_long: OnLong,
    /// Whether to write the answer's tokens as `targets`, for supervised training.
    pub with_targets: bool,
    /// Whether rows come in a new order in each epoch; otherwise as the data set has them.
    pub shuffle: bool,
}

impl Default for Prompts {
    fn default() -> Self {
        let format = PromptFormat::default();
        Prompts {
            data: "train".to_owned(),
            model: "actor".to_owned(),
            question: format.question,
            messages: format.messages,
            answer: format.answer,
            system: format.system,
            template: format.template,
            template_variables: format.template_variables,
            max_prompt_tokens: format.max_prompt_tokens,
            on_long: format.on_long,
            with_targets: false,
            shuffle: true,
        }
    }
}

impl Prompts {
    /// The part that says how a row becomes a prompt; an evaluation that is to ask in the same way takes it too.
    pub fn format(&self) -> PromptFormat {
        PromptFormat {
            question: self.question.clone(),
            messages: self.messages.clone(),
            answer: self.answer.clone(),
            system: self.system.clone(),
            template: self.template,
            template_variables: self.template_variables.clone(),
            max_prompt_tokens: self.max_prompt_tokens,
            on_long: self.on_long,
        }
    }
}

impl StageConfig for Prompts {
    const KIND: &'static str = "prompts";
    const SUMMARY: &'static str = "rows of a data set as prompt tokens";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let format = self.format();
        let mut faults = format.faults();
        faults.extend(declared_faults(&self.data, &self.model, context));
        let template = self.template;
        faults.extend(template_config_fault(
            "template",
            template,
            &self.model,
            context,
        ));
        let longest = self.max_prompt_tokens;
        faults
            .extend(longest.and_then(|longest| {
                room_fault("max_prompt_tokens", longest, &self.model, context)
            }));
        if self.with_targets && self.answer.is_empty() {
            faults.push(ConfigError::new(
                "with_targets",
                "needs answers, but `answer` names no column",
                "name the column that holds the answer",
            ));
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(PromptStage {
            config: self.clone(),
            format,
            prompts: context.batch.prompts.max(1),
            source: None,
        }))
    }
}

/// The stage.
struct PromptStage {
    config: Prompts,
    format: PromptFormat,
    prompts: usize,
    source: Option<Source>,
}

impl Stage for PromptStage {
    fn spec(&self) -> StageSpec {
        let mut spec = StageSpec::new()
            .writes(PROMPTS.field().shaped("[P, S~]"))
            .writes(PROMPT_TEXTS.field().shaped("[P]"))
            .writes(DATA_ROWS.field().shaped("[P]"));
        if !self.config.answer.is_empty() {
            spec = spec.writes(ANSWERS.field().shaped("[P]"));
        }
        if self.config.with_targets {
            spec = spec.writes(TARGETS.field().shaped("[P, T~]"));
        }
        spec.rows(RowRule::Source)
            .draws_waves()
            .cardinality(Cardinality::Batch)
            .uses(&self.config.model, Access::Read)
            .bounds(
                PROMPTS.name(),
                "max_prompt_tokens",
                self.config.max_prompt_tokens,
            )
            .metrics(&[PROMPT_LENGTH])
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        let config = &self.config;
        let ends_answers = config.with_targets;
        let mut source = Source::open(
            context,
            &config.data,
            &config.model,
            &self.format,
            ends_answers,
        )?;
        look_at_rows(source.data.as_ref(), |row| self.format.look(row))?;
        if self.format.on_long == OnLong::Drop {
            source.drop_long(&self.format)?;
        }
        self.source = Some(source);
        Ok(())
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(source) = &mut self.source else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let ids = source.drawn(context, self.prompts, self.config.shuffle)?;
        let mut prompts = RaggedColumn::new();
        let mut texts = Vec::with_capacity(self.prompts);
        let mut answers = Vec::with_capacity(self.prompts);
        let mut targets = RaggedColumn::new();
        for id in &ids {
            let row = id.row() as usize;
            let data = source.data.as_ref();
            let template = source.template.as_ref();
            let prompt = self.format.encode(data, row, &source.tokenizer, template)?;
            let prompt = self.format.fit(prompt, source.context, data, row)?;
            context.record(&PROMPT_LENGTH, prompt.tokens.len() as f64);
            if let Some(stop) = source.stop {
                let tokens = target_tokens(&prompt.answer, stop, data, row, &source.tokenizer)?;
                let room = source.context.saturating_sub(prompt.tokens.len());
                let fault = |reason| DataError::Row {
                    path: data.origin(),
                    row: row + 1,
                    reason,
                };
                if tokens.len() > room && self.format.on_long != OnLong::Truncate {
                    return Err(fault(format!(
                        "the answer has {} tokens, but behind a prompt of {} the model's context of {} has room for {room}; shorten it, or set `on_long` to \"truncate\" or \"drop\"",
                        tokens.len(),
                        prompt.tokens.len(),
                        source.context
                    ))
                    .into());
                }
                targets.push(&tokens[..tokens.len().min(room)]);
            }
            prompts.push(&prompt.tokens);
            texts.push(prompt.text);
            answers.push(prompt.answer);
        }
        let mut batch = Batch::with_rows(&ids);
        batch.put(&PROMPTS, prompts)?;
        batch.put(&PROMPT_TEXTS, texts)?;
        let rows: Vec<u64> = ids.iter().map(|id| id.row()).collect();
        batch.put(&DATA_ROWS, rows)?;
        if !self.config.answer.is_empty() {
            batch.put(&ANSWERS, answers)?;
        }
        if self.config.with_targets {
            batch.put(&TARGETS, targets)?;
        }
        context.emit(batch)
    }
}

#[cfg(test)]
mod tests;
