//! A row of a data set into the tokens of a preference pair. Pure: the same row gives the same tokens.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_pipe::data::DataError;
use verl_pipe::stage::{ConfigError, StageError, StartContext};

use crate::prompts::source::Source;
use crate::prompts::{
    EncodedPrompt, OnLong, PromptFormat, Template, margin as margin_of, response_text,
    target_tokens,
};

/// Which columns make a preference pair, and how it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PairFormat {
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
}

impl Default for PairFormat {
    fn default() -> Self {
        let format = PromptFormat::default();
        PairFormat {
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
        }
    }
}

impl PairFormat {
    fn prompts(&self) -> PromptFormat {
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

    /// Settings that contradict each other.
    pub fn faults(&self) -> Vec<ConfigError> {
        let mut faults = self.prompts().faults();
        if self.max_response_tokens == Some(0) {
            faults.push(ConfigError::new(
                "max_response_tokens",
                "is 0, which leaves nothing of a response",
                "set it to the longest response, or leave it out",
            ));
        }
        faults
    }
}

/// A preference pair in tokens.
pub(crate) struct EncodedPair {
    pub prompt: EncodedPrompt,
    pub chosen: Vec<u32>,
    pub rejected: Vec<u32>,
    /// Where the format names a column.
    pub margin: Option<f32>,
}

/// Preference pairs of a data set, for one model.
pub(crate) struct PairSource {
    pub source: Source,
    format: PairFormat,
    prompts: PromptFormat,
    /// Id that ends a response.
    stop: u32,
}

impl PairSource {
    /// Opens the data set `data` for the model `model`.
    ///
    /// # Errors
    /// When one of them is not there, or the model lacks what the format needs.
    pub fn open(
        context: &mut StartContext<'_>,
        data: &str,
        model: &str,
        format: &PairFormat,
    ) -> Result<Self, StageError> {
        let prompts = format.prompts();
        let source = Source::open(context, data, model, &prompts)?;
        Ok(PairSource {
            stop: source.stop_id(model)?,
            source,
            format: format.clone(),
            prompts,
        })
    }

    /// The pair of a data-set row.
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, or the model's context is too short.
    pub fn pair(&self, row: usize) -> Result<EncodedPair, DataError> {
        let Source {
            data, tokenizer, ..
        } = &self.source;
        let (data, template) = (data.as_ref(), self.source.template.as_ref());
        let prompt = self.prompts.encode(data, row, tokenizer, template)?;
        let prompt = self.prompts.fit(prompt, self.source.context, data, row)?;
        let length = prompt.tokens.len();
        let margin = self.format.margin.as_deref();
        Ok(EncodedPair {
            chosen: self.response(row, &self.format.chosen, length)?,
            rejected: self.response(row, &self.format.rejected, length)?,
            margin: margin
                .map(|column| margin_of(data, row, column))
                .transpose()?,
            prompt,
        })
    }

    /// The tokens of the response in `column`, end-of-sequence included, behind a prompt of `prompt` tokens.
    fn response(&self, row: usize, column: &str, prompt: usize) -> Result<Vec<u32>, DataError> {
        let (data, limit) = (self.source.data.as_ref(), self.source.context);
        let text = response_text(data, row, column)?;
        let mut tokens = target_tokens(&text, self.stop, data, row, &self.source.tokenizer)?;
        tokens.truncate(self.format.max_response_tokens.unwrap_or(usize::MAX));
        let all = prompt + tokens.len();
        if all > limit {
            return Err(DataError::Row {
                path: data.origin(),
                row: row + 1,
                reason: format!(
                    "prompt and `{column}` have {all} tokens, but the model's context is {limit}; set `max_prompt_tokens` and `max_response_tokens` so that they fit"
                ),
            });
        }
        Ok(tokens)
    }
}
