//! The columns of a row that make a prompt, and how they are read.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_words::data::{DataError, DataLoaderInterface, column_names, find_column};
use verl_words::stage::ConfigError;

pub(crate) use verl_models::targets::role;

/// How messages become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Template {
    /// With the model's chat template, up to the start of the assistant's answer. A trained answer is what the template
    /// writes after the prompt, up to the token that ends the turn.
    #[default]
    Chat,
    /// The unchanged text of the question, with the special tokens that the tokenizer adds to a sequence. A trained answer is
    /// one text with the question, so a space between them must be in one of the two; it ends with an end-of-sequence id,
    /// which is added if the answer's text does not end with one.
    None,
}

/// What to do with rows that are too long; all rows are tokenised before the first step to find them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnLong {
    /// They are dropped from every epoch, and a warning says how many.
    #[default]
    Drop,
    /// The run stops before its first step and reports them.
    Error,
    /// A prompt is truncated at its start, so that the opening of the answer stays, and an answer at its end.
    Truncate,
}

/// Which assistant turns of a conversation are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// The last one; everything before it is the prompt.
    #[default]
    Last,
    /// All of them, except one that starts the conversation. The prompt is everything before the first trained turn; later
    /// messages of other roles are read but not trained.
    All,
}

/// The columns that make a prompt, and how it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PromptFormat {
    /// Column with the question, a text, used as a single user message.
    pub question: String,
    /// Column with a complete conversation (a list of objects with `role` and `content`), used instead of `question`.
    pub messages: Option<String>,
    /// Column with the reference answer, a text or a number (as the file writes it); empty: rows have none.
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
            tools: "tools".to_owned(),
            row_variables: "chat_template_kwargs".to_owned(),
            max_prompt_tokens: None,
            on_long: OnLong::default(),
        }
    }
}

impl PromptFormat {
    /// Settings that contradict each other.
    pub fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        if self.question.is_empty() && self.messages.is_none() {
            faults.push(ConfigError::new(
                "question",
                "is empty, and `messages` is not set",
                "set it to the column of the question",
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
                        "set `template = \"chat\"`, or write it into the question",
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
}

/// What a prompt is made of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PromptInput {
    /// A text, used as a single user message.
    Text(String),
    /// A conversation of at least one message.
    Messages(Vec<Value>),
}

/// A row of a data set; errors about its columns name the row.
pub(crate) struct Row<'a> {
    data: &'a dyn DataLoaderInterface,
    index: usize,
    /// All columns; `None` for a columnar data set, whose columns are read on demand.
    values: Option<Map<String, Value>>,
}

impl<'a> Row<'a> {
    /// Reads row `index`.
    pub(crate) fn read(data: &'a dyn DataLoaderInterface, index: usize) -> Result<Self, DataError> {
        let values = match data.is_columnar() {
            true => None,
            false => Some(data.row(index)?),
        };
        Ok(Row {
            data,
            index,
            values,
        })
    }
}

impl Row<'_> {
    /// An error about this row.
    pub(crate) fn fault(&self, reason: String) -> DataError {
        DataError::Row {
            path: self.data.origin(),
            row: self.index + 1,
            reason,
        }
    }

    /// The value of a column; its name may be a path into nested columns ([`find_column`]).
    pub(crate) fn value(&self, column: &str) -> Result<Cow<'_, Value>, DataError> {
        match self.find(column)? {
            Some(value) => Ok(value),
            None => {
                let names = match &self.values {
                    Some(values) => column_names(values),
                    None => self.data.names(self.index)?,
                };
                let origin = self.data.origin();
                Err(DataError::missing_column(
                    origin, self.index, column, &names,
                ))
            }
        }
    }

    fn find(&self, column: &str) -> Result<Option<Cow<'_, Value>>, DataError> {
        Ok(match &self.values {
            Some(values) => find_column(values, column).map(Cow::Borrowed),
            None => self.data.value(self.index, column)?.map(Cow::Owned),
        })
    }

    /// The value of a column that rows may lack; also `None` for null, and if `column` is empty.
    pub(crate) fn optional(&self, column: &str) -> Result<Option<Value>, DataError> {
        if column.is_empty() {
            return Ok(None);
        }
        let value = self.find(column)?;
        Ok(value.filter(|value| !value.is_null()).map(Cow::into_owned))
    }

    /// Like [`optional`](Self::optional), for a value that may be JSON text: `None` for a blank text; a text that is not JSON
    /// is returned unchanged.
    pub(crate) fn optional_json(&self, column: &str) -> Result<Option<Value>, DataError> {
        let value = self.optional(column)?;
        Ok(value.and_then(|value| match value {
            Value::String(text) if text.trim().is_empty() => None,
            Value::String(text) => Some(serde_json::from_str(&text).unwrap_or(Value::String(text))),
            value => Some(value),
        }))
    }

    /// The conversation in a column: a list of at least one object with a text `role`. Null fields other than `content` are
    /// removed, because columnar files give every message the keys of all messages.
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
        let mut messages = list.clone();
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            message.retain(|key, value| key == "content" || !value.is_null());
        }
        Ok(messages)
    }

    /// A text, or a number as the data set writes it.
    pub(crate) fn text(&self, column: &str) -> Result<String, DataError> {
        match self.value(column)?.as_ref() {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => {
                let written = match self.values {
                    Some(_) => self.data.written(self.index)?,
                    None => Map::new(),
                };
                let text = find_column(&written, column).and_then(Value::as_str);
                let text = text.map(str::to_owned);
                Ok(text.unwrap_or_else(|| number.to_string()))
            }
            other => Err(self.fault(format!(
                "column `{column}` contains {}, not a text",
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
