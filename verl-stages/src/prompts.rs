//! Stage `prompts`: the source of a pipeline; rows of a data set as prompt tokens.
//!
//! Rows are drawn from an endless sequence of epochs, each of which is a permutation of the data set that depends on
//! the run's seed and the epoch's number alone. Step k of P prompts uses draws (k − 1)·P to k·P of that sequence, so
//! resuming and replaying a run need no state, and a step may straddle two epochs.
//!
//! # What is trained
//!
//! With `with_targets` a row is an example to imitate. The chat template writes the whole conversation, question and answer,
//! and the text becomes tokens as a whole; the target is what stands behind the prompt's tokens, up to the token that ends
//! the turn, by which generation stops. What the template writes behind that token, such as a line end, is not trained. So
//! blanks that the template trims are not trained, and what only a finished turn has (an empty `<think>` block) is. Where
//! the template ends a turn without such a token, the tokenizer's is added, and a warning tells it; an answer that ends with
//! one already gets no second. Where the tokens of the prompt are not the first ones of the finished conversation (templates
//! whose prompt opens a `<think>` block, blanks that become one token over the border), the row's prompt is what the
//! finished text has before the answer, and a warning tells both texts once. With `template = "none"` question and answer
//! are one text in the same way. See [`verl_models::targets`].
//!
//! The answer is the text of the column `answer`, or the last message of a conversation that ends with the assistant's, with
//! the calls of tools that it makes. `train_on = "all"` trains every turn of the assistant: tokens between them are part of
//! the target, and `target_kinds` tells which are trained. A template that marks text by `{% generation %}` says itself what
//! is trained: of the tokens behind the prompt those that hold marked text, and no others.
//!
//! # Waves
//!
//! Where a filter asks for further waves, wave w of the step uses the same draws moved on by a part of the epoch: ½, ¼,
//! ¾, ⅛, … of it (van der Corput's sequence), wrapping around. So the first wave is what it is without a refill, a wave
//! does not depend on how many there may be, and no row comes twice in a step as long as the epoch has room: W waves
//! of P prompts with P ≤ ⌊rows / W⌋, W rounded up to a power of two.

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
use verl_pipe::batch::{Batch, RaggedColumn};
use verl_pipe::data::DataError;
use verl_pipe::keys::{ANSWERS, DATA_ROWS, PROMPT_TEXTS, PROMPTS, TARGET_KINDS, TARGETS, mask};
use verl_pipe::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, PreviewContext, Reduce, RowPreviews,
    RowRule, Stage, StageConfig, StageContext, StageError, StageSpec, StartContext,
};

use crate::model::{room_fault, template_config_fault};
pub use encode::{EncodedExample, EncodedPrompt};
pub(crate) use encode::{Long, messages_without_template, refused};
pub(crate) use format::{Asked, Row, role};
pub use format::{OnLong, PromptFormat, Template, TrainOn};
pub(crate) use notes::RowNote;
pub(crate) use preview::{Looks, Shown, preview, text_bytes};
pub(crate) use source::{Source, declared_faults};
pub(crate) use survey::Surveyed;

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
    /// Column with a whole conversation instead (a list of objects with `role` and `content`), where it is named. With
    /// `with_targets` it may end with the assistant's answer.
    pub messages: Option<String>,
    /// Column with the reference answer, a text or number; empty: rows have none, and `answers` is not written. Rows whose
    /// conversation ends with the answer may lack it.
    pub answer: String,
    /// System message before the conversation.
    pub system: Option<String>,
    /// How messages become text.
    pub template: Template,
    /// Further variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
    /// Column with the tools of a row's conversation, a list of objects or its JSON text, which the template gets as
    /// `tools`; empty: none is read. Rows without it, or with null there, have no tools but those of
    /// `template_variables`; where both are there, the row's go before.
    pub tools: String,
    /// Column with further variables of the template for the row alone, an object or its JSON text; they go before
    /// `template_variables`. Empty: none is read.
    pub row_variables: String,
    /// Longest prompt (tokens); one less than the model's context when absent.
    pub max_prompt_tokens: Option<usize>,
    /// What becomes of rows that are too long.
    pub on_long: OnLong,
    /// Whether to write what is imitated behind the prompt as `targets`, for supervised training: what the template writes
    /// of the answer, up to the token that ends the turn.
    pub with_targets: bool,
    /// Which turns of the assistant are trained, with `with_targets`; `all` is for conversations.
    pub train_on: TrainOn,
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
    /// The part that says how a row becomes a prompt; an evaluation that is to ask in the same way takes it too.
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
                "needs answers, but neither `answer` nor `messages` names a column",
                "name the column that holds the answer, or conversations that end with it",
            ));
        }
        if self.train_on == TrainOn::All && !(self.with_targets && self.messages.is_some()) {
            faults.push(ConfigError::new(
                "train_on",
                "is \"all\", which is for the turns of conversations that are trained on",
                "set `with_targets = true`, and name the column of conversations in `messages`",
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
        let looks = Looks::new(
            move |source, row| read.glance(row, source.template.as_ref(), has_answers),
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
    /// A row as it is, with what is imitated of it where that is wanted.
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

    /// A row with what is to be known of it.
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
    /// The rows of the step and wave at hand.
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
