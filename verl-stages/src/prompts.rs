//! Stage `prompts`: the source of a pipeline. It turns rows of a data set into prompt tokens.
//!
//! Rows are drawn from an endless sequence of epochs, each a permutation of the data set that depends only on the run's
//! seed and the epoch's number. Step k of P prompts uses draws (k − 1)·P to k·P of that sequence, so resuming and
//! replaying a run need no state, and a step may span two epochs.
//!
//! # What is trained
//!
//! With `with_targets` a row is an example to imitate. The chat template writes the complete conversation, question and
//! answer, and its text is tokenised in one piece. The target is what follows the prompt's tokens, up to the token that ends
//! the turn and stops generation. What the template writes after that token, such as a newline, is not trained. So
//! whitespace that the template trims is not trained, and what only a finished turn has (an empty `<think>` block) is. If
//! the template ends a turn without such a token, the tokenizer's is added, with a warning; an answer that already ends with
//! one gets no second. If the tokens of the prompt are not a prefix of the finished conversation (templates whose prompt
//! opens a `<think>` block, whitespace that merges into one token across the boundary), the row's prompt is what the
//! finished text has before the answer, and a warning shows both texts once. With `template = "none"`, question and answer
//! are one text, handled in the same way. See [`verl_models::targets`].
//!
//! The answer is the text of the column `answer`, or the last message of a conversation that ends with the assistant's,
//! including its tool calls. `train_on = "all"` trains every assistant turn: the tokens between them are part of the
//! target, and `target_kinds` says which are trained. If a template marks text with `{% generation %}`, the marks decide
//! what is trained: of the tokens after the prompt, exactly those that contain marked text.
//!
//! # Waves
//!
//! If a filter requests more waves, wave w of the step uses the same draws, offset by a part of the epoch: ½, ¼, ¾, ⅛, …
//! of it (van der Corput's sequence), wrapping around. So the first wave is the same with or without a refill, a wave does
//! not depend on the number of waves, and no row repeats within a step as long as the epoch has room: W waves of P prompts
//! with P ≤ ⌊rows / W⌋, W rounded up to a power of two.

mod encode;
mod format;
mod notes;
mod preview;
pub(crate) mod source;
mod survey;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_models::targets::Target;
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::data::DataError;
use verl_words::keys::{ANSWERS, DATA_ROWS, PROMPT_TEXTS, PROMPTS, TARGET_KINDS, TARGETS, mask};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, PreviewContext, Reduce, RowPreviews,
    RowRule, Stage, StageConfig, StageContext, StageError, StageSpec, StartContext,
};

use crate::model::{room_fault, template_config_fault};
pub use encode::{EncodedExample, EncodedPrompt};
pub(crate) use encode::{TooLong, messages_without_template, refused};
pub use format::{OnLong, PromptFormat, Template, TrainOn};
pub(crate) use format::{PromptInput, Row, role};
pub(crate) use notes::RowNote;
pub(crate) use preview::{RowPreviewer, Shown, preview, text_bytes};
pub(crate) use source::{Source, declared_faults};
pub(crate) use survey::SurveyedRow;

/// Mean prompt length of the step.
pub const PROMPT_LENGTH: Metric = Metric {
    name: "prompt/length_mean",
    unit: "tokens",
    meaning: "mean number of tokens of a prompt",
    reduce: Reduce::Mean,
    role: None,
};

/// Settings of stage `prompts`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Prompts {
    /// Data set to draw from.
    pub data: String,
    /// Model whose tokenizer and chat template are used.
    pub model: String,
    /// Column with the question, a text, used as a single user message.
    pub question: String,
    /// Column with a complete conversation (a list of objects with `role` and `content`), used instead of `question`. With
    /// `with_targets` it may end with the assistant's answer.
    pub messages: Option<String>,
    /// Column with the reference answer, a text or number; empty: rows have none, and `answers` is not written. Rows whose
    /// conversation ends with the answer may lack it.
    pub answer: String,
    /// System message before the conversation.
    pub system: Option<String>,
    /// How messages become text.
    pub template: Template,
    /// Additional variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// Column with the tools of a row's conversation, a list of objects or its JSON text, passed to the template as `tools`.
    /// They take precedence over those of `template_variables`, which apply to rows where the column is missing or null.
    /// Empty: no column is read.
    pub tools: String,
    /// Column with template variables of the row, an object or its JSON text; they take precedence over
    /// `template_variables`. Empty: no column is read.
    pub row_variables: String,
    /// Longest prompt (tokens); one less than the model's context when absent.
    pub max_prompt_tokens: Option<usize>,
    /// What to do with rows that are too long.
    pub on_long: OnLong,
    /// Whether to write `targets`, for supervised training: what the template writes after the prompt, up to the token that
    /// ends the turn.
    pub with_targets: bool,
    /// Which assistant turns are trained, with `with_targets`; `all` requires conversations.
    pub train_on: TrainOn,
    /// Whether rows are shuffled anew in each epoch; otherwise they keep the order of the data set.
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
            tools: format.tools,
            row_variables: format.row_variables,
            max_prompt_tokens: format.max_prompt_tokens,
            on_long: format.on_long,
            with_targets: false,
            train_on: TrainOn::default(),
            shuffle: true,
        }
    }
}

impl Prompts {
    /// The settings that define how a row becomes a prompt; an evaluation with the same prompts uses them too.
    pub fn format(&self) -> PromptFormat {
        PromptFormat {
            question: self.question.clone(),
            messages: self.messages.clone(),
            answer: self.answer.clone(),
            system: self.system.clone(),
            template: self.template,
            template_variables: self.template_variables.clone(),
            tools: self.tools.clone(),
            row_variables: self.row_variables.clone(),
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
        if self.with_targets && self.answer.is_empty() && self.messages.is_none() {
            faults.push(ConfigError::new(
                "with_targets",
                "requires answers, but neither `answer` nor `messages` is set",
                "set `answer` to the column with the answer, or `messages` to conversations that end with it",
            ));
        }
        if self.train_on == TrainOn::All && !(self.with_targets && self.messages.is_some()) {
            faults.push(ConfigError::new(
                "train_on",
                "is \"all\", which requires conversations with targets",
                "set `with_targets = true`, and set `messages` to the column of conversations",
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
            spec = spec
                .writes(TARGETS.field().shaped("[P, T~]"))
                .writes(TARGET_KINDS.field().shaped("[P, T~]"));
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
        let Prompts {
            data,
            model,
            with_targets,
            ..
        } = &self.config;
        let mut source = Source::open(context, data, model, &self.format, *with_targets)?;
        let (config, format) = (&self.config, &self.format);
        source.survey(format.on_long, |source, row| {
            Ok(config.show(format, source, row)?.surveyed())
        })?;
        self.source = Some(source);
        Ok(())
    }

    fn preview(
        &self,
        context: PreviewContext<'_>,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        let (config, read, format) = (
            self.config.clone(),
            self.format.clone(),
            self.format.clone(),
        );
        let has_answers = self.config.with_targets;
        let looks = RowPreviewer::new(
            move |source, row| read.measure(row, source.template.as_ref(), has_answers),
            move |source, row| config.show(&format, source, row),
        );
        let Prompts { data, model, .. } = &self.config;
        preview(context, data, model, &self.format, has_answers, looks)
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(mut source) = self.source.take() else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let written = self.write(&mut source, context);
        self.source = Some(source);
        context.emit(written?)
    }
}

impl Prompts {
    /// Encodes a row without applying limits, with its target if targets are written.
    fn encode(
        &self,
        format: &PromptFormat,
        source: &Source,
        row: usize,
    ) -> Result<EncodedExample, DataError> {
        let (data, template) = (source.data.as_ref(), source.template.as_ref());
        let tokenizer = source.tokenizer.as_ref();
        if self.with_targets {
            return format.encode_example(data, row, tokenizer, template, self.train_on);
        }
        Ok(EncodedExample {
            prompt: format.encode(data, row, tokenizer, template)?,
            target: Target::default(),
            notes: Vec::new(),
        })
    }

    /// Encodes a row, with what is too long in it and its notes.
    fn show(&self, format: &PromptFormat, source: &Source, row: usize) -> Result<Shown, DataError> {
        let example = self.encode(format, source, row)?;
        let answer = (!self.answer.is_empty()).then(|| example.prompt.answer.clone());
        Shown::example(
            format,
            source,
            row,
            example,
            answer,
            self.with_targets.then_some("target"),
        )
    }
}

impl PromptStage {
    /// The rows of the current step and wave.
    fn write(
        &self,
        source: &mut Source,
        context: &mut StageContext<'_>,
    ) -> Result<Batch, StageError> {
        let ids = source.drawn(context, self.prompts, self.config.shuffle)?;
        let mut prompts = RaggedColumn::new();
        let mut texts = Vec::with_capacity(self.prompts);
        let mut answers = Vec::with_capacity(self.prompts);
        let (mut targets, mut kinds) = (RaggedColumn::new(), RaggedColumn::new());
        for id in &ids {
            let row = id.row() as usize;
            let example = self.config.encode(&self.format, source, row)?;
            let data = source.data.as_ref();
            let EncodedExample { prompt, target, .. } =
                self.format
                    .fit_example(example, source.context, data, row)?;
            context.record(&PROMPT_LENGTH, prompt.tokens.len() as f64);
            targets.push(&target.tokens);
            let of_target = target.trained.iter().map(|trained| match trained {
                true => mask::ACTION,
                false => mask::OBSERVATION,
            });
            kinds.push(&of_target.collect::<Vec<u8>>());
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
            batch.put(&TARGET_KINDS, kinds)?;
        }
        Ok(batch)
    }
}

#[cfg(test)]
mod conversation_tests;
#[cfg(test)]
mod tests;
