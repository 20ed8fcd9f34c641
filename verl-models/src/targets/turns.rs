//! Where the assistant's turns lie in a finished conversation.
//!
//! What a message writes is found by another rendering, in which a stand-in takes the place of its content: both texts
//! are the same up to what the message writes and behind it.

use std::ops::Range;

use serde_json::{Map, Value};

use super::whole::{Whole, shared_end, shared_start};
use super::{Note, TargetError, Writer, role};

/// The content of a message that stands in for another: a noncharacter, which no text holds and no template trims.
const STAND_IN: &str = "\u{FDD0}";

/// Tokens of a turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    /// The first behind the prompt.
    pub start: usize,
    /// Behind the last.
    pub end: usize,
    /// Whether the last is one that generation stops at.
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
        let behind = whole.behind(&tokens, &asked);
        let start = behind.unwrap_or_else(|| {
            whole.token_at(self.text_start(&messages[..at], &asked, whole, own.as_ref()))
        });
        let turn = self.turn_from(start, messages, at, whole, own);
        if behind.is_none() {
            notes.push(Note::Apart {
                prompt: asked,
                finished: whole.text_of(turn.end).to_owned(),
            });
        }
        let num_ends = usize::from(turn.is_ended);
        if turn.end - turn.start <= num_ends && says_something(&messages[at]) {
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
        // What a template writes behind its last turn belongs to it, but for blanks; between turns nobody can tell.
        let tail = match is_last {
            true => whole.text.get(written..).unwrap_or("").trim_end().len(),
            false => 0,
        };
        let end = whole.token_behind(written + tail).max(start);
        Turn {
            start,
            end,
            is_ended: self.stops_at(whole, start, end),
        }
    }

    /// Where the text of an answer starts that does not go on behind the prompt's tokens: what follows from the messages
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
            // Messages before the answer are written in another way once it is there.
            None => own.map_or(common, |own| common.max(own.start)),
        }
    }

    /// The text that follows from what message `at` says; `None` where the template takes no stand-in for it.
    fn own_text(&self, messages: &[Value], at: usize, whole: &Whole) -> Option<Range<usize>> {
        let mut other = messages.to_vec();
        let text = stand_ins(&messages[at]).into_iter().find_map(|stand_in| {
            other[at] = stand_in;
            self.render(&other)
        })?;
        let start = shared_start(&whole.text, &text);
        let end = whole.text.len() - shared_end(&whole.text, &text);
        Some(start..end.max(start))
    }

    /// The text of a conversation that is over.
    fn render(&self, messages: &[Value]) -> Option<String> {
        let rendered = self.template?.render_with(messages, false, &self.variables);
        rendered.ok()
    }

    /// Tells where the turn of message `at` is another text than when it was the last.
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

/// Tells where a turn does not hold the content of its message, blanks aside.
fn changed(message: &Value, whole: &Whole, turn: Turn) -> Option<Note> {
    let answer = message.get("content").and_then(Value::as_str)?;
    let written = whole.text_between(turn.start, turn.end);
    let without_blanks = |text: &str| -> String { text.split_whitespace().collect() };
    let holds = without_blanks(written).contains(&without_blanks(answer));
    (!holds).then(|| Note::Changed {
        answer: answer.to_owned(),
        written: written.to_owned(),
    })
}

/// Messages that may stand in for another: without what only some messages have, and with it.
fn stand_ins(message: &Value) -> Vec<Value> {
    let role = message.get("role").cloned().unwrap_or_default();
    let mut bare = Map::new();
    bare.insert("role".to_owned(), role);
    bare.insert("content".to_owned(), STAND_IN.into());
    let mut full = message.as_object().cloned().unwrap_or_default();
    full.insert("content".to_owned(), STAND_IN.into());
    let bare = Value::Object(bare);
    match role_is_assistant(message) {
        true => vec![bare, Value::Object(full)],
        false => vec![Value::Object(full), bare],
    }
}

fn role_is_assistant(message: &Value) -> bool {
    role(message) == Some("assistant")
}

/// Where the content of a message ends that is written from token `start` on.
fn content_end(message: &Value, whole: &Whole, start: usize) -> usize {
    let content = message.get("content").and_then(Value::as_str);
    let content = content.unwrap_or("").trim();
    let from = whole.text_before(start).len();
    let at = whole.text[from..].find(content);
    from + at.map_or(0, |at| at + content.len())
}

/// Whether a message has a content that is not blank, or more than role and content.
fn says_something(message: &Value) -> bool {
    let said = |value: &Value| match value {
        Value::Null => false,
        Value::String(text) => !text.trim().is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => true,
    };
    ["content", "tool_calls", "reasoning_content", "thinking"]
        .iter()
        .filter_map(|key| message.get(*key))
        .any(said)
}
