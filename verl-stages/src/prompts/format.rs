//! A row of a data set into prompt tokens. Pure: the same row gives the same tokens.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_models::chat_template::{ChatTemplate, message};
use verl_models::tokenizer::Tokenizer;
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::stage::ConfigError;

/// How messages become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Template {
    /// Through the model's chat template, up to where the assistant's answer begins.
    #[default]
    Chat,
    /// The text of the question as it is, with the special tokens that the tokenizer adds to a sequence.
    None,
}

/// What becomes of a prompt that is longer than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnLong {
    /// The run ends and tells the row.
    #[default]
    Error,
    /// Tokens are cut off at the beginning, so that what opens the answer stays.
    Truncate,
    /// The row is left out of every epoch; all rows are tokenised at the start to know which.
    Drop,
}

/// Which columns make a prompt, and how it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PromptFormat {
    /// Column with the question, a text: the only message of the user.
    pub question: String,
    /// Column with a whole conversation instead (a list of objects with `role` and `content`), where it is named.
    pub messages: Option<String>,
    /// Column with the reference answer, a text or number; empty: rows have none.
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
}

impl Default for PromptFormat {
    fn default() -> Self {
        PromptFormat {
            question: "question".to_owned(),
            messages: None,
            answer: "answer".to_owned(),
            system: None,
            template: Template::Chat,
            template_variables: Map::new(),
            max_prompt_tokens: None,
            on_long: OnLong::Error,
        }
    }
}

/// A prompt with what belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// The prompt as text; of a truncated one too the whole text.
    pub text: String,
    /// Its token ids, at least one.
    pub tokens: Vec<u32>,
    /// The reference answer as the data set has it; empty where the format names no column.
    pub answer: String,
}

impl PromptFormat {
    /// Settings that contradict each other.
    pub fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        if self.question.is_empty() && self.messages.is_none() {
            faults.push(ConfigError::new(
                "question",
                "is empty, and `messages` names no column",
                "name the column that holds the question",
            ));
        }
        if self.template == Template::None {
            for (setting, set) in [
                ("messages", self.messages.is_some()),
                ("system", self.system.is_some()),
                ("template_variables", !self.template_variables.is_empty()),
            ] {
                if set {
                    faults.push(ConfigError::new(
                        setting,
                        "has no effect with `template = \"none\"`",
                        "use `template = \"chat\"`, or write it into the question",
                    ));
                }
            }
        }
        if self.max_prompt_tokens == Some(0) {
            faults.push(ConfigError::new(
                "max_prompt_tokens",
                "is 0, but a prompt has at least one token",
                "set it to the longest prompt, or leave it out",
            ));
        }
        faults
    }

    /// Prompt and answer of a row; `template` is the model's, with the variables of this format already in.
    ///
    /// The result may be longer than `max_prompt_tokens`; see [`PromptFormat::fit`].
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, the template or the tokenizer refuses, the
    /// prompt has no token.
    pub fn encode(
        &self,
        data: &dyn DataLoaderInterface,
        index: usize,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<EncodedPrompt, DataError> {
        let row = Row::read(data, index)?;
        let (asked, answer) = self.read(&row)?;
        let (text, tokens) = self.write(&row, asked, tokenizer, template)?;
        Ok(EncodedPrompt {
            text,
            tokens,
            answer,
        })
    }

    /// What a row asks, and its answer.
    fn read(&self, row: &Row<'_>) -> Result<(Asked, String), DataError> {
        let asked = match &self.messages {
            Some(column) => Asked::Messages(row.messages(column)?),
            None => Asked::Text(row.text(&self.question)?),
        };
        let answer = if self.answer.is_empty() {
            String::new()
        } else {
            row.text(&self.answer)?
        };
        Ok((asked, answer))
    }

    /// Looks whether a row has what a prompt is made of; the template and the tokenizer are not asked.
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, the conversation ends with an answer.
    pub(crate) fn look(&self, row: &Row<'_>) -> Result<(), DataError> {
        let (asked, _) = self.read(row)?;
        self.look_at(row, asked)
    }

    /// The same of what is asked.
    pub(crate) fn look_at(&self, row: &Row<'_>, asked: Asked) -> Result<(), DataError> {
        match (self.template, asked) {
            (Template::Chat, asked) => self.conversation(row, asked).map(drop),
            (Template::None, Asked::Text(_)) => Ok(()),
            (Template::None, Asked::Messages(_)) => Err(messages_without_template(row)),
        }
    }

    /// Applies the limit to the prompt of row `index`: `max_prompt_tokens`, else what `context` leaves beside a token of
    /// an answer.
    ///
    /// # Errors
    /// [`DataError::Row`] when it is longer, unless it is to be truncated.
    pub fn fit(
        &self,
        mut prompt: EncodedPrompt,
        context: usize,
        data: &dyn DataLoaderInterface,
        index: usize,
    ) -> Result<EncodedPrompt, DataError> {
        let limit = self.limit(context);
        let tokens = prompt.tokens.len();
        if tokens > limit {
            if self.on_long != OnLong::Truncate {
                let room = if self.max_prompt_tokens == Some(limit) {
                    format!("`max_prompt_tokens` is {limit}; raise it")
                } else {
                    format!(
                        "the model's context is {context}, which an answer has to fit in too; shorten it"
                    )
                };
                return Err(DataError::Row {
                    path: data.origin(),
                    row: index + 1,
                    reason: format!(
                        "the prompt has {tokens} tokens, but {room}, or set `on_long` to \"truncate\" or \"drop\""
                    ),
                });
            }
            prompt.tokens.drain(..tokens - limit);
        }
        Ok(prompt)
    }

    /// Most tokens of a prompt for a model of this context, in which there must be room for a token of an answer.
    pub fn limit(&self, context: usize) -> usize {
        let room = context.saturating_sub(1).max(1);
        self.max_prompt_tokens.map_or(room, |most| most.min(room))
    }

    /// What is asked, as text and as tokens, at least one.
    ///
    /// # Errors
    /// [`DataError`] with the row: the conversation ends with an answer, the template or the tokenizer refuses.
    pub(crate) fn write(
        &self,
        row: &Row<'_>,
        asked: Asked,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> Result<(String, Vec<u32>), DataError> {
        let (text, tokens) = match (self.template, template, asked) {
            (Template::Chat, Some(template), asked) => {
                let messages = self.conversation(row, asked)?;
                let text = template
                    .render(&messages, true)
                    .map_err(|e| row.fault(e.to_string()))?;
                let tokens = tokenizer.encode(&text, false);
                (text, tokens)
            }
            (Template::Chat, None, _) => {
                return Err(row.fault(
                    "the model has no chat template; set `template = \"none\"` to use the question as it is"
                        .to_owned(),
                ));
            }
            (Template::None, _, Asked::Text(text)) => {
                let tokens = tokenizer.encode(&text, true);
                (text, tokens)
            }
            (Template::None, _, Asked::Messages(_)) => {
                return Err(messages_without_template(row));
            }
        };
        let tokens = tokens.map_err(|e| row.fault(e.to_string()))?;
        if tokens.is_empty() {
            return Err(row.fault("the prompt has no token".to_owned()));
        }
        Ok((text, tokens))
    }

    /// The messages before the answer.
    fn conversation(&self, row: &Row<'_>, asked: Asked) -> Result<Vec<Value>, DataError> {
        let mut messages = match asked {
            Asked::Text(text) => vec![message("user", &text)],
            Asked::Messages(messages) => messages,
        };
        if messages.last().and_then(role) == Some("assistant") {
            return Err(row.fault(
                "the conversation ends with the assistant's message, which the model is to write"
                    .to_owned(),
            ));
        }
        if let Some(system) = &self.system {
            if messages.first().and_then(role) == Some("system") {
                return Err(row.fault(
                    "the conversation has a system message, and `system` is set too".to_owned(),
                ));
            }
            messages.insert(0, message("system", system));
        }
        Ok(messages)
    }
}

fn messages_without_template(row: &Row<'_>) -> DataError {
    row.fault(
        "the prompt is a list of messages, which become text through a chat template alone; set `template = \"chat\"`"
            .to_owned(),
    )
}

/// What a prompt is made of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Asked {
    /// A text: the only message of the user.
    Text(String),
    /// A conversation of at least one message.
    Messages(Vec<Value>),
}

/// Who wrote a message.
pub(crate) fn role(message: &Value) -> Option<&str> {
    message.get("role").and_then(Value::as_str)
}

/// What supervised training imitates: the answer's tokens and the id that ends the response.
///
/// # Errors
/// [`DataError::Row`] when the tokenizer refuses the answer.
pub fn target_tokens(
    answer: &str,
    stop: u32,
    data: &dyn DataLoaderInterface,
    index: usize,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, DataError> {
    let mut tokens = tokenizer
        .encode(answer, false)
        .map_err(|e| DataError::Row {
            path: data.origin(),
            row: index + 1,
            reason: e.to_string(),
        })?;
    tokens.push(stop);
    Ok(tokens)
}

/// A row of a data set whose columns are read with messages that tell it.
pub(crate) struct Row<'a> {
    data: &'a dyn DataLoaderInterface,
    index: usize,
    values: Map<String, Value>,
}

impl<'a> Row<'a> {
    /// Reads row `index`.
    pub(crate) fn read(data: &'a dyn DataLoaderInterface, index: usize) -> Result<Self, DataError> {
        Ok(Row {
            data,
            index,
            values: data.row(index)?,
        })
    }
}

impl Row<'_> {
    /// The error that something is wrong with this row.
    pub(crate) fn fault(&self, reason: String) -> DataError {
        DataError::Row {
            path: self.data.origin(),
            row: self.index + 1,
            reason,
        }
    }

    /// The value of a column.
    pub(crate) fn value(&self, column: &str) -> Result<&Value, DataError> {
        self.values
            .get(column)
            .ok_or_else(|| DataError::MissingColumn {
                path: self.data.origin(),
                row: self.index + 1,
                column: column.to_owned(),
                known: self
                    .values
                    .keys()
                    .map(String::as_str)
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// The conversation in a column: a list of at least one object with a text `role`.
    pub(crate) fn messages(&self, column: &str) -> Result<Vec<Value>, DataError> {
        let value = self.value(column)?;
        let list = value
            .as_array()
            .filter(|list| list.iter().all(|message| role(message).is_some()));
        let list = list.ok_or_else(|| {
            self.fault(format!(
                "column `{column}` is not a list of objects with a text `role`"
            ))
        })?;
        if list.is_empty() {
            return Err(self.fault(format!("column `{column}` is an empty list")));
        }
        Ok(list.clone())
    }

    /// A text or number as text.
    pub(crate) fn text(&self, column: &str) -> Result<String, DataError> {
        match self.value(column)? {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(number.to_string()),
            other => Err(self.fault(format!(
                "column `{column}` holds {}, not a text",
                match other {
                    Value::Null => "null",
                    Value::Bool(_) => "a boolean",
                    Value::Array(_) => "a list",
                    _ => "an object",
                }
            ))),
        }
    }
}
