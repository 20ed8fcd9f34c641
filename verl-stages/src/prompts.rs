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

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_models::chat_template::ChatTemplate;
use verl_models::random;
use verl_models::tokenizer::Tokenizer;
use verl_pipe::batch::{Batch, RaggedColumn, RowId};
use verl_pipe::data::DataLoaderInterface;
use verl_pipe::keys::{ANSWERS, DATA_ROWS, PROMPT_TEXTS, PROMPTS, TARGETS};
use verl_pipe::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, Reduce, RowRule, Stage, StageConfig,
    StageContext, StageError, StageSpec, StartContext,
};

pub use format::{EncodedPrompt, OnLong, PromptFormat, Template, target_tokens};

use crate::model::TextTools;

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
    /// Longest prompt (tokens); the model's context when absent.
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
        for (setting, name, known, kind) in [
            ("data", &self.data, &context.data, "data set"),
            ("model", &self.model, &context.models, "model"),
        ] {
            if !known.contains(name) {
                faults.push(ConfigError::new(
                    setting,
                    format!("names `{name}`, but the pipeline declares no such {kind}"),
                    format!("declared are: {}", known.join(", ")),
                ));
            }
        }
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

/// What is opened when the run starts.
struct Source {
    data: Arc<dyn DataLoaderInterface>,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// Longest sequence of the model.
    context: usize,
    /// Id that ends a target; `None` where no targets are written.
    stop: Option<u32>,
    /// Rows that are drawn from.
    rows: Vec<usize>,
    /// The order that was drawn from last: of which seed and epoch, and the order itself. Only saves time.
    order: Option<((u64, u64), Vec<usize>)>,
}

/// How far wave `wave` lies ahead of the first in an epoch of `len` rows: 0, ½, ¼, ¾, ⅛, … of it.
fn ahead(wave: u64, len: u64) -> u64 {
    ((u128::from(wave.reverse_bits()) * u128::from(len)) >> 64) as u64
}

impl Source {
    /// Data-set row of a draw in a wave, and its epoch.
    fn draw(&mut self, draw: u64, wave: u64, seed: u64, shuffle: bool) -> (u64, usize) {
        let len = self.rows.len() as u64;
        let (epoch, position) = (draw / len, draw % len + ahead(wave, len));
        let position = (position % len) as usize;
        if !shuffle {
            return (epoch, self.rows[position]);
        }
        let order = match self.order.take() {
            Some((key, order)) if key == (seed, epoch) => order,
            _ => random::shuffle(seed, epoch, self.rows.len()),
        };
        let row = self.rows[order[position]];
        self.order = Some(((seed, epoch), order));
        (epoch, row)
    }

    /// Leaves out rows whose prompt is too long.
    fn drop_long(&mut self, format: &PromptFormat) -> Result<(), StageError> {
        let limit = format.limit(self.context);
        let mut rows = Vec::with_capacity(self.rows.len());
        for &row in &self.rows {
            let prompt = format.encode(
                self.data.as_ref(),
                row,
                &self.tokenizer,
                self.template.as_ref(),
            )?;
            if prompt.tokens.len() <= limit {
                rows.push(row);
            }
        }
        let dropped = self.rows.len() - rows.len();
        if rows.is_empty() {
            return Err(StageError::failed(format!(
                "every prompt of `{}` is longer than {limit} tokens, so that `on_long = \"drop\"` leaves none",
                self.data.origin()
            )));
        }
        if dropped > 0 {
            tracing::info!(
                dropped,
                kept = rows.len(),
                limit,
                "left out rows whose prompt is too long"
            );
        }
        self.rows = rows;
        Ok(())
    }
}

/// The id that ends a target: what the chat template writes after an answer if generation stops at it, else the
/// tokenizer's first end-of-sequence id.
fn stop_id(
    model: &str,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<u32, StageError> {
    let terminator = match template {
        Some(template) => template.terminator(tokenizer).map_err(StageError::failed)?,
        None => None,
    };
    if template.is_some() && terminator.is_none() {
        tracing::warn!(
            model,
            "the chat template does not end an answer with an end-of-sequence id; targets end with the tokenizer's"
        );
    }
    terminator
        .or(tokenizer.eos_id())
        .ok_or_else(|| StageError::Model {
            name: model.to_owned(),
            reason: "has no end-of-sequence id, so that targets cannot end".to_owned(),
        })
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
            .metrics(&[PROMPT_LENGTH])
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        let data = context.data(&self.config.data)?;
        let model = &self.config.model;
        let texts = TextTools::of(context.models, model)?;
        let missing = |what: &str, help: &str| StageError::Model {
            name: model.clone(),
            reason: format!("has no {what}{help}"),
        };
        let tokenizer = texts
            .tokenizer
            .ok_or_else(|| missing("tokenizer, which prompts need", ""))?;
        let template = match self.format.template {
            Template::None => None,
            Template::Chat => {
                let template = texts.template.as_deref().ok_or_else(|| {
                    missing(
                        "chat template",
                        "; `template = \"none\"` uses the question as it is",
                    )
                })?;
                Some(
                    template
                        .clone()
                        .with_variables(self.format.template_variables.clone()),
                )
            }
        };
        let stop = if self.config.with_targets {
            Some(stop_id(model, &tokenizer, template.as_ref())?)
        } else {
            None
        };
        let mut source = Source {
            rows: (0..data.len()).collect(),
            data,
            tokenizer,
            template,
            context: texts.max_tokens,
            stop,
            order: None,
        };
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
        let first = context.step.saturating_sub(1) * self.prompts as u64;
        let mut ids = Vec::with_capacity(self.prompts);
        let mut rows = Vec::with_capacity(self.prompts);
        let mut prompts = RaggedColumn::new();
        let mut texts = Vec::with_capacity(self.prompts);
        let mut answers = Vec::with_capacity(self.prompts);
        let mut targets = RaggedColumn::new();
        for draw in first..first + self.prompts as u64 {
            let (epoch, row) = source.draw(draw, context.wave, context.seed, self.config.shuffle);
            let data = source.data.as_ref();
            let template = source.template.as_ref();
            let prompt = self.format.encode(data, row, &source.tokenizer, template)?;
            let prompt = self.format.fit(prompt, source.context, data, row)?;
            context.record(&PROMPT_LENGTH, prompt.tokens.len() as f64);
            if let Some(stop) = source.stop {
                let tokens = target_tokens(&prompt.answer, stop, data, row, &source.tokenizer)?;
                targets.push(&tokens);
            }
            ids.push(RowId::prompt(epoch, row as u64)?.in_wave(context.wave)?);
            rows.push(row as u64);
            prompts.push(&prompt.tokens);
            texts.push(prompt.text);
            answers.push(prompt.answer);
        }
        let mut batch = Batch::with_rows(&ids);
        batch.put(&PROMPTS, prompts)?;
        batch.put(&PROMPT_TEXTS, texts)?;
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
