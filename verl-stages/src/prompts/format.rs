//! Which columns of a row make a prompt and how, and how they are read.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_pipe::data::{DataError, DataLoaderInterface, column_names, find_column};
use verl_pipe::stage::ConfigError;

pub(crate) use verl_models::targets::role;

/// How messages become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Template {
    /// Through the model's chat template, up to where the assistant's answer begins. An answer that is trained is what the
    /// template writes of it behind the prompt, up to the token that ends the turn.
    #[default]
    Chat,
    /// The text of the question as it is, with the special tokens that the tokenizer adds to a sequence. An answer that is
    /// trained is one text with the question, so a blank between them has to be in one of the two; it ends with an
    /// end-of-sequence id, which is added where the answer's text does not end with one.
    None,
}

/// What becomes of rows that are too long; all rows are tokenised before the first step to know which are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnLong {
    /// They are left out of every epoch, and a warning tells how many.
    #[default]
    Drop,
    /// The run ends before its first step and tells them.
    Error,
    /// A prompt is cut off at the beginning, so that what opens the answer stays, and an answer at the end.
    Truncate,
}

/// Which turns of the assistant are trained in a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// The last one; all before it is the prompt.
    #[default]
    Last,
    /// Every one that something comes before. The prompt is what comes before the first; messages of others behind it are
    /// read and not trained.
    All,
}

/// Which columns make a prompt, and how it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PromptFormat {
    /// Column with the question, a text: the only message of the user.
    pub question: String,
    /// Column with a whole conversation instead (a list of objects with `role` and `content`), where it is named.
    pub messages: Option<String>,
    /// Column with the reference answer, a text or a number (as the file writes it); empty: rows have none.
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
}

/// What a prompt is made of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Asked {
    /// A text: the only message of the user.
    Text(String),
    /// A conversation of at least one message.
    Messages(Vec<Value>),
}

/// A row of a data set whose columns are read with messages that tell it.
pub(crate) struct Row<'a> {
    data: &'a dyn DataLoaderInterface,
    index: usize,
    /// All columns; `None` where the data set keeps them apart, so that each is read when it is asked for.
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
    /// The error that something is wrong with this row.
    pub(crate) fn fault(&self, reason: String) -> DataError {
        DataError::Row {
            path: self.data.origin(),
            row: self.index + 1,
            reason,
        }
    }

    /// The value of a column; its name may reach into nested ones ([`find_column`]).
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

    /// The value of a column that rows may lack; `None` too for null and where `column` is empty.
    pub(crate) fn optional(&self, column: &str) -> Result<Option<Value>, DataError> {
        if column.is_empty() {
            return Ok(None);
        }
        let value = self.find(column)?;
        Ok(value.filter(|value| !value.is_null()).map(Cow::into_owned))
    }

    /// The same of a value that may be written as JSON text; `None` for a blank text, and a text that is no JSON as it is.
    pub(crate) fn optional_json(&self, column: &str) -> Result<Option<Value>, DataError> {
        let value = self.optional(column)?;
        Ok(value.and_then(|value| match value {
            Value::String(text) if text.trim().is_empty() => None,
            Value::String(text) => Some(serde_json::from_str(&text).unwrap_or(Value::String(text))),
            value => Some(value),
        }))
    }

    /// The conversation in a column: a list of at least one object with a text `role`. What a message has as null but its
    /// content is left out, because files of columns give every message the keys of all.
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
