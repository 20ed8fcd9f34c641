//! Finds the assistant's turns in a finished conversation.
//!
//! The text of a message is found by a second rendering in which a placeholder replaces its content: both texts are
//! equal before and after the text of the message.

use std::ops::Range;

use serde_json::{Map, Value};

use super::whole::{Whole, shared_end, shared_start};
use super::{Note, TargetError, Writer, role};

/// The placeholder content: a noncharacter, which ordinary text does not contain and no template trims.
const PLACEHOLDER: &str = "\u{FDD0}";

/// The tokens of a turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    /// The first token after the prompt.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// Whether generation stops at the last token.
    pub is_ended: bool,
}

impl Writer<'_> {
    /// The finished conversation of `messages`.
    pub(super) fn whole(&self, messages: &[Value]) -> Result<Whole, TargetError> {
        let template = self.template.ok_or(TargetError::NoTemplate)?;
        let (text, marks) = template.render_marked(messages, &self.variables)?;
        let pieces = self.tokenizer.pieces(&text, false)?;
        Ok(Whole::new(text, pieces, marks))
    }

    /// The turn of message `at`.
    pub(super) fn turn(
        &self,
        messages: &[Value],
        at: usize,
        whole: &Whole,
        notes: &mut Vec<Note>,
    ) -> Result<Turn, TargetError> {
        let (asked, tokens) = self.prompt(&messages[..at])?;
        let own = self.own_text(messages, at, whole);
        let after_prompt = whole.after_prompt(&tokens, &asked);
        let start = after_prompt.unwrap_or_else(|| {
            whole.token_at(self.text_start(&messages[..at], &asked, whole, own.as_ref()))
        });
        let turn = self.turn_from(start, messages, at, whole, own);
        if after_prompt.is_none() {
            notes.push(Note::PromptDiffers {
                prompt: asked,
                finished: whole.text_of(turn.end).to_owned(),
            });
        }
        let num_ends = usize::from(turn.is_ended);
        if turn.end - turn.start <= num_ends && has_content(&messages[at]) {
            return Err(TargetError::Unwritten { message: at + 1 });
        }
        notes.extend(changed(&messages[at], whole, turn));
        Ok(turn)
    }

    /// The turn of message `at` whose first token is `start`.
    fn turn_from(
        &self,
        start: usize,
        messages: &[Value],
        at: usize,
        whole: &Whole,
        own: Option<Range<usize>>,
    ) -> Turn {
        let is_last = at + 1 == messages.len();
        let next = match is_last {
            true => None,
            false => self.own_text(messages, at + 1, whole),
        };
        let until = next.map_or(whole.text.len(), |next| next.start);
        let written = own.map_or_else(|| content_end(&messages[at], whole, start), |own| own.end);
        let limit = match is_last {
            true => whole.ids.len(),
            false => whole.token_at(until),
        };
        let ends =
            |token: &usize| self.is_stop(whole.ids[*token]) && whole.text_end(*token) > written;
        if let Some(mut last) = (start..limit).find(ends) {
            while last > start && self.is_stop(whole.ids[last - 1]) {
                last -= 1;
            }
            return Turn {
                start,
                end: last + 1,
                is_ended: true,
            };
        }
        // Text that a template writes after its last turn belongs to that turn, except for blanks; between turns this
        // cannot be determined.
        let tail = match is_last {
            true => whole.text.get(written..).unwrap_or("").trim_end().len(),
            false => 0,
        };
        let end = whole.token_after(written + tail).max(start);
        Turn {
            start,
            end,
            is_ended: self.stops_at(whole, start, end),
        }
    }

    /// The start of the text of an answer that does not continue the prompt's tokens. Text that depends on the messages
    /// before it must not be trained.
    fn text_start(
        &self,
        before: &[Value],
        asked: &str,
        whole: &Whole,
        own: Option<&Range<usize>>,
    ) -> usize {
        let common = shared_start(asked, &whole.text);
        let closed = self.render(before);
        match closed.filter(|closed| whole.text.starts_with(closed) && common >= closed.len()) {
            Some(_) => common,
            // Messages before the answer are written differently once it is present.
            None => own.map_or(common, |own| common.max(own.start)),
        }
    }

    /// The text that depends on the content of message `at`; `None` if the template rejects every placeholder for it.
    fn own_text(&self, messages: &[Value], at: usize, whole: &Whole) -> Option<Range<usize>> {
        let mut other = messages.to_vec();
        let text = placeholders(&messages[at])
            .into_iter()
            .find_map(|placeholder| {
                other[at] = placeholder;
                self.render(&other)
            })?;
        let start = shared_start(&whole.text, &text);
        let end = whole.text.len() - shared_end(&whole.text, &text);
        Some(start..end.max(start))
    }

    /// The text of a finished conversation.
    fn render(&self, messages: &[Value]) -> Option<String> {
        let rendered = self.template?.render_with(messages, false, &self.variables);
        rendered.ok()
    }

    /// A note if the text of message `at`'s turn differs from when it was the last turn.
    pub(super) fn rewritten(
        &self,
        messages: &[Value],
        at: usize,
        whole: &Whole,
    ) -> Result<Option<Note>, TargetError> {
        let template = self.template.ok_or(TargetError::NoTemplate)?;
        let alone = template.render_with(&messages[..=at], false, &self.variables)?;
        let Some(own) = self.own_text(messages, at, whole) else {
            return Ok(None);
        };
        if shared_start(&alone, &whole.text) >= own.end {
            return Ok(None);
        }
        Ok(Some(Note::Rewritten {
            alone,
            within: whole.text[..whole.text.floor_char_boundary(own.end)].to_owned(),
        }))
    }
}

/// A note if a turn does not contain the content of its message, ignoring blanks.
fn changed(message: &Value, whole: &Whole, turn: Turn) -> Option<Note> {
    let answer = message.get("content").and_then(Value::as_str)?;
    let written = whole.text_between(turn.start, turn.end);
    let without_blanks = |text: &str| -> String { text.split_whitespace().collect() };
    let is_contained = without_blanks(written).contains(&without_blanks(answer));
    (!is_contained).then(|| Note::Changed {
        answer: answer.to_owned(),
        written: written.to_owned(),
    })
}

/// Placeholder messages for another message: without its optional fields, and with them.
fn placeholders(message: &Value) -> Vec<Value> {
    let role = message.get("role").cloned().unwrap_or_default();
    let mut bare = Map::new();
    bare.insert("role".to_owned(), role);
    bare.insert("content".to_owned(), PLACEHOLDER.into());
    let mut full = message.as_object().cloned().unwrap_or_default();
    full.insert("content".to_owned(), PLACEHOLDER.into());
    let bare = Value::Object(bare);
    match role_is_assistant(message) {
        true => vec![bare, Value::Object(full)],
        false => vec![Value::Object(full), bare],
    }
}

fn role_is_assistant(message: &Value) -> bool {
    role(message) == Some("assistant")
}

/// The end of the content of a message that is written from token `start` on.
fn content_end(message: &Value, whole: &Whole, start: usize) -> usize {
    let content = message.get("content").and_then(Value::as_str);
    let content = content.unwrap_or("").trim();
    let from = whole.text_before(start).len();
    let at = whole.text[from..].find(content);
    from + at.map_or(0, |at| at + content.len())
}

/// Whether a message has content that is not blank, or more than role and content.
fn has_content(message: &Value) -> bool {
    let is_present = |value: &Value| match value {
        Value::Null => false,
        Value::String(text) => !text.trim().is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => true,
    };
    ["content", "tool_calls", "reasoning_content", "thinking"]
        .iter()
        .filter_map(|key| message.get(*key))
        .any(is_present)
}
