//! Stage `preferences`: the source of a pipeline that learns from pairs; a prompt with a chosen and a rejected response.
//!
//! Rows are drawn as [`prompts`](crate::prompts) draws them. Stage [`pairs`](crate::pairs) makes the two responses rows of
//! their own.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_pipe::batch::{Batch, RaggedColumn, RowId};
use verl_pipe::data::DataError;
use verl_pipe::keys::{
    CHOSEN_RESPONSES, DATA_ROWS, MARGINS, PROMPT_TEXTS, PROMPTS, REJECTED_RESPONSES,
};
use verl_pipe::stage::{
    Access, BuildContext, Cardinality, ConfigError, RowRule, Stage, StageConfig, StageContext,
    StageError, StageSpec, StartContext,
};

use crate::prompts::source::Source;
use crate::prompts::{
    OnLong, PROMPT_LENGTH, PromptFormat, Template, margin, response_text, target_tokens,
};
use crate::settings::undeclared;

/// Settings of stage `preferences`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Preferences {
    /// Data set to draw from.
    pub data: String,
    /// Model whose tokenizer and chat template are used.
    pub model: String,
    /// Column with the prompt, a text: the only message of the user.
    pub prompt: String,
    /// Column with a whole conversation instead (a list of objects with `role` and `content`), where it is named.
    pub messages: Option<String>,
    /// Column with the better response: a text, or a list of one message of the assistant.
    pub chosen: String,
    /// Column with the worse response, likewise.
    pub rejected: String,
    /// Column with a number that says by how much the better response is better, where it is named.
    pub margin: Option<String>,
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
    /// Longest response (tokens), end-of-sequence included; a longer one loses its end. When absent, prompt and response
    /// must fit the model's context.
    pub max_response_tokens: Option<usize>,
    /// Whether rows come in a new order in each epoch; otherwise as the data set has them.
    pub shuffle: bool,
}

impl Default for Preferences {
    fn default() -> Self {
        let format = PromptFormat::default();
        Preferences {
            data: "train".to_owned(),
            model: "actor".to_owned(),
            prompt: "prompt".to_owned(),
            messages: format.messages,
            chosen: "chosen".to_owned(),
            rejected: "rejected".to_owned(),
            margin: None,
            system: format.system,
            template: format.template,
            template_variables: format.template_variables,
            max_prompt_tokens: format.max_prompt_tokens,
            on_long: format.on_long,
            max_response_tokens: None,
            shuffle: true,
        }
    }
}

impl Preferences {
    fn format(&self) -> PromptFormat {
        PromptFormat {
            question: self.prompt.clone(),
            messages: self.messages.clone(),
            answer: String::new(),
            system: self.system.clone(),
            template: self.template,
            template_variables: self.template_variables.clone(),
            max_prompt_tokens: self.max_prompt_tokens,
            on_long: self.on_long,
        }
    }
}

impl StageConfig for Preferences {
    const KIND: &'static str = "preferences";
    const SUMMARY: &'static str =
        "rows of a data set as prompts with a chosen and a rejected response";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let format = self.format();
        let mut faults = format.faults();
        faults.extend(undeclared("data", &self.data, &context.data, "data set"));
        faults.extend(undeclared("model", &self.model, &context.models, "model"));
        if self.max_response_tokens == Some(0) {
            faults.push(ConfigError::new(
                "max_response_tokens",
                "is 0, which leaves nothing of a response",
                "set it to the longest response, or leave it out",
            ));
        }
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Box::new(PreferenceStage {
            config: self.clone(),
            format,
            prompts: context.batch.prompts.max(1),
            opened: None,
        }))
    }
}

/// The running stage.
struct PreferenceStage {
    config: Preferences,
    format: PromptFormat,
    prompts: usize,
    opened: Option<Opened>,
}

/// What is opened when the run starts.
struct Opened {
    source: Source,
    /// Id that ends a response.
    stop: u32,
}

impl PreferenceStage {
    /// The tokens of the response in `column`, end-of-sequence included, behind a prompt of `prompt` tokens.
    fn response(
        &self,
        Opened { source, stop }: &Opened,
        row: usize,
        column: &str,
        prompt: usize,
    ) -> Result<Vec<u32>, StageError> {
        let data = source.data.as_ref();
        let text = response_text(data, row, column)?;
        let mut tokens = target_tokens(&text, *stop, data, row, &source.tokenizer)?;
        tokens.truncate(self.config.max_response_tokens.unwrap_or(usize::MAX));
        let (all, limit) = (prompt + tokens.len(), source.context);
        if all > limit {
            return Err(DataError::Row {
                path: data.origin(),
                row: row + 1,
                reason: format!(
                    "prompt and `{column}` have {all} tokens, but the model's context is {limit}; set `max_prompt_tokens` and `max_response_tokens` so that they fit"
                ),
            }
            .into());
        }
        Ok(tokens)
    }
}

impl Stage for PreferenceStage {
    fn spec(&self) -> StageSpec {
        let mut spec = StageSpec::new()
            .writes(PROMPTS.field().shaped("[P, S~]"))
            .writes(PROMPT_TEXTS.field().shaped("[P]"))
            .writes(DATA_ROWS.field().shaped("[P]"))
            .writes(CHOSEN_RESPONSES.field().shaped("[P, C~]"))
            .writes(REJECTED_RESPONSES.field().shaped("[P, R~]"));
        if self.config.margin.is_some() {
            spec = spec.writes(MARGINS.field().shaped("[P]"));
        }
        spec.rows(RowRule::Source)
            .draws_waves()
            .cardinality(Cardinality::Batch)
            .uses(&self.config.model, Access::Read)
            .metrics(&[PROMPT_LENGTH])
    }

    fn start(&mut self, context: &mut StartContext<'_>) -> Result<(), StageError> {
        let (data, model) = (&self.config.data, &self.config.model);
        let source = Source::open(context, data, model, &self.format)?;
        let stop = source.stop_id(model)?;
        self.opened = Some(Opened { source, stop });
        Ok(())
    }

    fn run(&mut self, _input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let Some(mut opened) = self.opened.take() else {
            return Err(StageError::failed(
                "the stage was run before it was started",
            ));
        };
        let first = context.step.saturating_sub(1) * self.prompts as u64;
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        let (mut texts, mut margins) = (Vec::new(), Vec::new());
        let (mut prompts, mut chosen, mut rejected) = (
            RaggedColumn::new(),
            RaggedColumn::new(),
            RaggedColumn::new(),
        );
        for draw in first..first + self.prompts as u64 {
            let shuffle = self.config.shuffle;
            let (epoch, row) = opened
                .source
                .draw(draw, context.wave, context.seed, shuffle);
            let source = &opened.source;
            let data = source.data.as_ref();
            let template = source.template.as_ref();
            let prompt = self.format.encode(data, row, &source.tokenizer, template)?;
            let prompt = self.format.fit(prompt, source.context, data, row)?;
            context.record(&PROMPT_LENGTH, prompt.tokens.len() as f64);
            let length = prompt.tokens.len();
            chosen.push(&self.response(&opened, row, &self.config.chosen, length)?);
            rejected.push(&self.response(&opened, row, &self.config.rejected, length)?);
            if let Some(column) = &self.config.margin {
                margins.push(margin(data, row, column)?);
            }
            ids.push(RowId::prompt(epoch, row as u64)?.in_wave(context.wave)?);
            rows.push(row as u64);
            prompts.push(&prompt.tokens);
            texts.push(prompt.text);
        }
        self.opened = Some(opened);
        let mut batch = Batch::with_rows(&ids);
        batch.put(&PROMPTS, prompts)?;
        batch.put(&PROMPT_TEXTS, texts)?;
        batch.put(&DATA_ROWS, rows)?;
        batch.put(&CHOSEN_RESPONSES, chosen)?;
        batch.put(&REJECTED_RESPONSES, rejected)?;
        if self.config.margin.is_some() {
            batch.put(&MARGINS, margins)?;
        }
        context.emit(batch)
    }
}

#[cfg(test)]
mod tests;
