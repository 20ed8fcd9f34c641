//! Encodes a row of a data set as a prompt and its judged answers. Pure: the same row yields the same tokens.

use serde_json::Value;
use verl_models::chat_template::message;
use verl_models::targets::Lesson;
use verl_words::data::DataError;

use super::{OnEqual, PreferenceFormat};
use crate::prompts::{
    EncodedPrompt, OnLong, PromptFormat, PromptInput, Row, RowNote, Source, Template, TooLong,
    messages_without_template, refused, role, text_bytes,
};

/// A prompt with its judged answers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JudgedRow {
    /// The prompt as text.
    pub text: String,
    /// Its token ids.
    pub prompt: Vec<u32>,
    /// Token ids of the chosen and the rejected answer, or of the single one; none is empty.
    pub answers: Vec<Vec<u32>>,
    /// Whether the single answer is good; true for pairs.
    pub is_desirable: bool,
    /// By how much the chosen answer is better; 0 without a column of margins.
    pub margin: f32,
    /// What to report about the row.
    pub notes: Vec<RowNote>,
}

/// A row before tokenisation.
struct RawJudgedRow {
    /// The prompt.
    asked: PromptInput,
    /// The answers as assistant messages.
    answers: Vec<Value>,
    is_desirable: bool,
    margin: f32,
}

impl RawJudgedRow {
    /// Reads a row.
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, an answer is empty, the answers do not
    /// belong to the row's prompt.
    fn read(config: &PreferenceFormat, row: &Row<'_>) -> Result<RawJudgedRow, DataError> {
        let answers = config.answers().into_iter();
        let answers = answers
            .map(|(name, column)| read_answer(row, name, column))
            .collect::<Result<Vec<Answer>, DataError>>()?;
        Ok(RawJudgedRow {
            asked: read_prompt(row, &config.prompt, &answers)?,
            answers: answers.into_iter().map(|answer| answer.said).collect(),
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

/// An answer with the conversation before it, if the column has one.
struct Answer {
    name: &'static str,
    before: Option<Vec<Value>>,
    /// The assistant's message.
    said: Value,
}

impl JudgedRow {
    /// Reads the columns of a row without rendering it; returns the number of bytes of its texts.
    ///
    /// # Errors
    /// Those of [`JudgedRow::encode`], except errors of the template and the tokenizer.
    pub fn measure(config: &PreferenceFormat, row: &Row<'_>) -> Result<usize, DataError> {
        let RawJudgedRow { asked, answers, .. } = RawJudgedRow::read(config, row)?;
        let asked = match asked {
            PromptInput::Text(text) => text.len(),
            PromptInput::Messages(messages) => messages.iter().map(text_bytes).sum(),
        };
        // The longer of the answers must fit.
        let answers = answers.iter().map(text_bytes);
        Ok(asked + answers.max().unwrap_or(0))
    }

    /// Reads row `index`; the result may be longer than the settings allow, see [`JudgedRow::fit`].
    ///
    /// # Errors
    /// [`DataError`] with the row: a column is missing or of another type, an answer is empty, the answers do not
    /// belong to the row's prompt, the template or the tokenizer fails.
    pub fn encode(
        config: &PreferenceFormat,
        format: &PromptFormat,
        source: &Source,
        index: usize,
    ) -> Result<JudgedRow, DataError> {
        let row = Row::read(source.data.as_ref(), index)?;
        let raw = RawJudgedRow::read(config, &row)?;
        let writer = format.writer(&row, &source.tokenizer, source.template.as_ref())?;
        let lesson = match (config.template, raw.asked) {
            (Template::None, PromptInput::Text(prompt)) => {
                let answers = raw.answers.iter().map(|said| plain_text(&row, said));
                writer.plain(&prompt, &answers.collect::<Result<Vec<&str>, DataError>>()?)
            }
            (Template::None, PromptInput::Messages(_)) => {
                return Err(messages_without_template(&row));
            }
            (Template::Chat, asked) => {
                writer.answers(&format.conversation(&row, asked)?, &raw.answers)
            }
        };
        let Lesson {
            text,
            prompt,
            targets,
            notes,
        } = lesson.map_err(|error| refused(&row, &error))?;
        Ok(JudgedRow {
            text,
            prompt,
            answers: targets.into_iter().map(|target| target.tokens).collect(),
            is_desirable: raw.is_desirable,
            margin: raw.margin,
            notes: notes.into_iter().map(RowNote::Written).collect(),
        })
    }

    /// What exceeds the limits of the settings and the model's context.
    pub fn long(
        &self,
        config: &PreferenceFormat,
        format: &PromptFormat,
        context: usize,
    ) -> Option<TooLong> {
        let prompt = self.prompt.len();
        if let Some(long) = format.long_prompt(prompt, context) {
            return Some(long);
        }
        let room = room(config, context, prompt);
        let names = config.answers().into_iter().map(|(name, _)| name);
        let mut answers = names.zip(&self.answers);
        let (name, answer) = answers.find(|(_, answer)| answer.len() > room)?;
        let tokens = answer.len();
        Some(TooLong {
            tokens,
            reason: format!(
                "the {name} answer has {tokens} tokens, but only {room} fit after a prompt of {prompt} (`max_response_tokens`, the model's context of {context})"
            ),
            help: "raise the limit or shorten the row",
        })
    }

    /// Applies the limits to row `index`, and checks that its answers differ.
    ///
    /// # Errors
    /// [`DataError::Row`] when something is too long and may not be truncated, or when both answers are the same, unless
    /// `on_equal` is `warn`.
    pub fn fit(
        mut self,
        config: &PreferenceFormat,
        format: &PromptFormat,
        source: &Source,
        index: usize,
    ) -> Result<JudgedRow, DataError> {
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
        if let Some(long) = self.long(config, format, source.context)
            && (config.on_long != OnLong::Truncate || room == 0)
        {
            return Err(fault(long.refusal()));
        }
        for answer in &mut self.answers {
            answer.truncate(room);
        }
        if let [chosen, rejected] = &self.answers[..]
            && chosen == rejected
        {
            if config.on_equal == OnEqual::Error {
                return Err(fault(
                    "the chosen and the rejected answer have the same tokens, so neither is preferred; remove the row, or set `on_equal = \"warn\"`".to_owned(),
                ));
            }
            self.notes.push(RowNote::SameAnswers);
        }
        Ok(self)
    }
}

/// Maximum number of tokens of an answer to a prompt of `prompt` tokens.
fn room(config: &PreferenceFormat, context: usize, prompt: usize) -> usize {
    let left = context.saturating_sub(prompt);
    config
        .max_response_tokens
        .map_or(left, |most| most.min(left))
}

fn read_answer(row: &Row<'_>, name: &'static str, column: &str) -> Result<Answer, DataError> {
    if !row.value(column)?.is_array() {
        let said = message("assistant", &row.text(column)?);
        return Answer::new(row, name, column, None, said);
    }
    let mut messages = row.messages(column)?;
    let last = messages.pop_if(|last| role(last) == Some("assistant"));
    let said = last.ok_or_else(|| {
        row.fault(format!(
            "column `{column}` does not end with the assistant's message, which is the answer"
        ))
    })?;
    let before = (!messages.is_empty()).then_some(messages);
    Answer::new(row, name, column, before, said)
}

impl Answer {
    /// Checks that an answer has content.
    fn new(
        row: &Row<'_>,
        name: &'static str,
        column: &str,
        before: Option<Vec<Value>>,
        said: Value,
    ) -> Result<Answer, DataError> {
        let calls = said.get("tool_calls").and_then(Value::as_array);
        if calls.is_none_or(Vec::is_empty) {
            match said.get("content") {
                Some(Value::String(text)) if text.trim().is_empty() => {
                    return Err(row.fault(format!(
                        "the {name} answer (column `{column}`) is empty, so there is nothing to compare"
                    )));
                }
                Some(Value::String(_) | Value::Array(_)) => {}
                _ => {
                    return Err(row.fault(format!(
                        "the last message of column `{column}` has no text `content`"
                    )));
                }
            }
        }
        Ok(Answer { name, before, said })
    }

    /// Whether it continues after `prompt` with more than one turn.
    fn has_turns_after(&self, prompt: &[Value]) -> bool {
        let own = self.before.as_deref().unwrap_or_default();
        own.len() > prompt.len() && own.starts_with(prompt)
            || own.first().and_then(role) == Some("assistant")
    }
}

/// The text of an answer that is written without a template.
fn plain_text<'a>(row: &Row<'_>, said: &'a Value) -> Result<&'a str, DataError> {
    let text = said.get("content").and_then(Value::as_str);
    text.ok_or_else(|| messages_without_template(row))
}

/// Why answers of several turns are refused.
const ONE_TURN: &str = "a pair compares single assistant turns; move earlier turns into the prompt";

/// The prompt of a row: from its own column, which the answers may repeat, or the one that all answers share.
fn read_prompt(row: &Row<'_>, column: &str, answers: &[Answer]) -> Result<PromptInput, DataError> {
    if column.is_empty() {
        let mut shared: Option<(&str, &Vec<Value>)> = None;
        for answer in answers {
            let before = answer.before.as_ref().ok_or_else(|| {
                row.fault(format!(
                    "the {} answer has no conversation before it, and `prompt` is empty",
                    answer.name
                ))
            })?;
            match shared {
                Some((other, first)) if first != before => {
                    return Err(row.fault(format!(
                        "the {other} and the {} answer have different prompts; {ONE_TURN}",
                        answer.name
                    )));
                }
                _ => shared = Some((answer.name, before)),
            }
        }
        let shared = shared.map(|(_, messages)| PromptInput::Messages(messages.clone()));
        return shared.ok_or_else(|| row.fault("there is no answer".to_owned()));
    }
    let asked = if row.value(column)?.is_array() {
        PromptInput::Messages(row.messages(column)?)
    } else {
        PromptInput::Text(row.text(column)?)
    };
    let messages = match &asked {
        PromptInput::Text(text) => &vec![message("user", text)],
        PromptInput::Messages(messages) => messages,
    };
    let is_other = |answer: &&Answer| answer.before.as_ref().is_some_and(|own| own != messages);
    match answers.iter().find(is_other) {
        Some(answer) if answer.has_turns_after(messages) => Err(row.fault(format!(
            "the {} answer has several messages after the prompt, but {ONE_TURN}",
            answer.name
        ))),
        Some(answer) => Err(row.fault(format!(
            "the {} answer has a different prompt from the one in column `{column}`; a pair has one prompt",
            answer.name
        ))),
        None => Ok(asked),
    }
}

fn label(row: &Row<'_>, column: &str) -> Result<bool, DataError> {
    match row.value(column)?.as_ref() {
        Value::Bool(label) => Ok(*label),
        Value::Number(number) if number.as_f64() == Some(1.0) => Ok(true),
        Value::Number(number) if number.as_f64() == Some(0.0) => Ok(false),
        other => Err(row.fault(format!(
            "column `{column}` contains {other}, but a label is true or false, 1 or 0"
        ))),
    }
}

fn margin(row: &Row<'_>, column: &str) -> Result<f32, DataError> {
    let value = row.value(column)?;
    let margin = value.as_f64().map(|margin| margin as f32);
    margin.filter(|margin| margin.is_finite()).ok_or_else(|| {
        row.fault(format!(
            "column `{column}` contains {value}, but a margin is a number"
        ))
    })
}
