//! A row of a data set into a prompt and its judged answers. Pure: the same row gives the same tokens.

use serde_json::Value;
use verl_models::chat_template::message;
use verl_pipe::data::DataError;

use super::{OnEqual, PreferenceFormat};
use crate::prompts::{
    Asked, EncodedPrompt, OnLong, PromptFormat, Row, Source, role, target_tokens,
};

/// A prompt with what was judged of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Judged {
    /// The prompt as text.
    pub text: String,
    /// Its token ids.
    pub prompt: Vec<u32>,
    /// Token ids of the chosen and the rejected answer, or of the only one; each at least one.
    pub answers: Vec<Vec<u32>>,
    /// Whether the only answer is good; true for pairs.
    pub is_desirable: bool,
    /// By how much the chosen answer is better; 0 where nobody says.
    pub margin: f32,
}

/// What is wrong with a pair whose answers are the same.
pub(super) const SAME: &str = "the chosen and the rejected answer are the same text, so that there is nothing to prefer; remove the row, or set `on_equal = \"warn\"`";

/// A row before anything became tokens.
pub(super) struct RawJudged {
    /// What is asked.
    pub asked: Asked,
    /// Texts of the answers.
    pub answers: Vec<String>,
    is_desirable: bool,
    margin: f32,
}

impl RawJudged {
    /// Reads a row.
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, an answer is empty, the answers are not of
    /// the row's prompt.
    pub fn read(config: &PreferenceFormat, row: &Row<'_>) -> Result<RawJudged, DataError> {
        let answers = config.answers().into_iter();
        let answers = answers
            .map(|(name, column)| read_answer(row, name, column))
            .collect::<Result<Vec<Answer>, DataError>>()?;
        Ok(RawJudged {
            asked: asked(row, &config.prompt, &answers)?,
            answers: answers.into_iter().map(|answer| answer.text).collect(),
            is_desirable: match &config.labels {
                Some(column) => label(row, column)?,
                None => true,
            },
            margin: match &config.margins {
                Some(column) => margin(row, column)?,
                None => 0.0,
            },
        })
    }
}

/// An answer with the conversation before it, where the column has one.
struct Answer {
    name: &'static str,
    before: Option<Vec<Value>>,
    text: String,
}

impl Judged {
    /// Reads row `index`; the result may be longer than the settings allow, see [`Judged::fit`].
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, an answer is empty, the answers are not of
    /// the row's prompt, the template or the tokenizer refuses.
    pub fn encode(
        config: &PreferenceFormat,
        format: &PromptFormat,
        source: &Source,
        index: usize,
    ) -> Result<Judged, DataError> {
        let (data, tokenizer) = (source.data.as_ref(), &source.tokenizer);
        let row = Row::read(data, index)?;
        let raw = RawJudged::read(config, &row)?;
        let (text, prompt) = format.write(&row, raw.asked, tokenizer, source.template.as_ref())?;
        let stop = source
            .stop
            .ok_or_else(|| row.fault("there is no id that ends an answer".to_owned()))?;
        let answers = raw.answers.iter();
        let answers = answers.map(|text| target_tokens(text, stop, data, index, tokenizer));
        Ok(Judged {
            text,
            prompt,
            answers: answers.collect::<Result<_, DataError>>()?,
            is_desirable: raw.is_desirable,
            margin: raw.margin,
        })
    }

    /// Whether nothing is longer than the settings and the model's context allow.
    pub fn fits(&self, config: &PreferenceFormat, format: &PromptFormat, context: usize) -> bool {
        let room = room(config, context, self.prompt.len());
        let fits = |answer: &Vec<u32>| answer.len() <= room;
        self.prompt.len() <= format.limit(context) && self.answers.iter().all(fits)
    }

    /// Applies the limits to row `index`, and looks whether its answers differ.
    ///
    /// # Errors
    /// [`DataError::Row`] when something is too long, unless it is to be truncated; when both answers are the same,
    /// unless that is to be a warning.
    pub fn fit(
        mut self,
        config: &PreferenceFormat,
        format: &PromptFormat,
        source: &Source,
        index: usize,
    ) -> Result<Judged, DataError> {
        let data = source.data.as_ref();
        let fault = |reason: String| DataError::Row {
            path: data.origin(),
            row: index + 1,
            reason,
        };
        let prompt = EncodedPrompt {
            text: self.text,
            tokens: self.prompt,
            answer: String::new(),
        };
        let EncodedPrompt { text, tokens, .. } = format.fit(prompt, source.context, data, index)?;
        (self.text, self.prompt) = (text, tokens);
        let room = room(config, source.context, self.prompt.len());
        for ((name, _), answer) in config.answers().iter().zip(&mut self.answers) {
            if answer.len() <= room {
                continue;
            }
            if config.on_long != OnLong::Truncate || room == 0 {
                return Err(fault(format!(
                    "the {name} answer has {} tokens, but there is room for {room} behind a prompt of {} (`max_response_tokens`, the model's context of {}); raise or shorten them, or set `on_long` to \"truncate\" or \"drop\"",
                    answer.len(),
                    self.prompt.len(),
                    source.context
                )));
            }
            answer.truncate(room);
        }
        if let [chosen, rejected] = &self.answers[..]
            && chosen == rejected
        {
            let reason = "the chosen and the rejected answer are the same tokens";
            if config.on_equal == OnEqual::Error {
                return Err(fault(format!(
                    "{reason}, so that there is nothing to prefer; remove the row, or set `on_equal = \"warn\"`"
                )));
            }
            tracing::warn!(data = data.origin(), row = index + 1, "{reason}");
        }
        Ok(self)
    }
}

/// Most tokens of an answer to a prompt of `prompt` tokens.
fn room(config: &PreferenceFormat, context: usize, prompt: usize) -> usize {
    let left = context.saturating_sub(prompt);
    config
        .max_response_tokens
        .map_or(left, |most| most.min(left))
}

fn read_answer(row: &Row<'_>, name: &'static str, column: &str) -> Result<Answer, DataError> {
    let (before, text) = if row.value(column)?.is_array() {
        let mut messages = row.messages(column)?;
        let last = messages
            .pop()
            .filter(|last| role(last) == Some("assistant"));
        let last = last.ok_or_else(|| {
            row.fault(format!(
                "column `{column}` does not end with the assistant's message, which is the answer"
            ))
        })?;
        let text = last.get("content").and_then(Value::as_str);
        let text = text.ok_or_else(|| {
            row.fault(format!(
                "the last message of column `{column}` has no text `content`"
            ))
        })?;
        ((!messages.is_empty()).then_some(messages), text.to_owned())
    } else {
        (None, row.text(column)?)
    };
    if text.trim().is_empty() {
        return Err(row.fault(format!(
            "the {name} answer (column `{column}`) is empty, so that there is nothing to compare"
        )));
    }
    Ok(Answer { name, before, text })
}

/// The prompt of a row: that of its own column, which the answers may repeat, or else the one that they agree in.
fn asked(row: &Row<'_>, column: &str, answers: &[Answer]) -> Result<Asked, DataError> {
    if column.is_empty() {
        let mut shared: Option<(&str, &Vec<Value>)> = None;
        for answer in answers {
            let before = answer.before.as_ref().ok_or_else(|| {
                row.fault(format!(
                    "the {} answer has no conversation before it, and `prompt` names no column",
                    answer.name
                ))
            })?;
            match shared {
                Some((other, first)) if first != before => {
                    return Err(row.fault(format!(
                        "the {other} and the {} answer are of different prompts; a pair has one",
                        answer.name
                    )));
                }
                _ => shared = Some((answer.name, before)),
            }
        }
        let shared = shared.map(|(_, messages)| Asked::Messages(messages.clone()));
        return shared.ok_or_else(|| row.fault("there is no answer".to_owned()));
    }
    let asked = if row.value(column)?.is_array() {
        Asked::Messages(row.messages(column)?)
    } else {
        Asked::Text(row.text(column)?)
    };
    let messages = match &asked {
        Asked::Text(text) => &vec![message("user", text)],
        Asked::Messages(messages) => messages,
    };
    let is_other = |answer: &&Answer| answer.before.as_ref().is_some_and(|own| own != messages);
    match answers.iter().find(is_other) {
        Some(answer) => Err(row.fault(format!(
            "the {} answer is of another prompt than the one in column `{column}`; a pair has one prompt",
            answer.name
        ))),
        None => Ok(asked),
    }
}

fn label(row: &Row<'_>, column: &str) -> Result<bool, DataError> {
    match row.value(column)? {
        Value::Bool(label) => Ok(*label),
        Value::Number(number) if number.as_f64() == Some(1.0) => Ok(true),
        Value::Number(number) if number.as_f64() == Some(0.0) => Ok(false),
        other => Err(row.fault(format!(
            "column `{column}` holds {other}, but a label is true or false, 1 or 0"
        ))),
    }
}

fn margin(row: &Row<'_>, column: &str) -> Result<f32, DataError> {
    let value = row.value(column)?;
    let margin = value.as_f64().map(|margin| margin as f32);
    margin.filter(|margin| margin.is_finite()).ok_or_else(|| {
        row.fault(format!(
            "column `{column}` holds {value}, but a margin is a number"
        ))
    })
}
