//! What training imitates: the tokens of a finished conversation behind those of its prompt.
//!
//! A model is trained on what its chat template writes. The conversation is rendered with the answer and its text becomes
//! tokens as a whole; the *prompt* is what they share with the tokens that generation starts from, and the *target* is
//! what stands behind, up to the first token of the end of the turn at which generation stops. Blanks that the template
//! trims, text that only a finished turn has, and tokens that reach over the border are as the template and the tokenizer
//! make them, because nothing is put together from parts.
//!
//! | case | what becomes of it |
//! |---|---|
//! | the template writes something behind the end of the turn, such as a line end | not part of the target |
//! | the turn ends without a token that generation stops at | the tokenizer's first end-of-sequence id is added ([`Note::Unended`]) |
//! | the answer itself ends with such a token | the target ends with it; there is no second one |
//! | the prompt's tokens do not begin those of the finished conversation | the prompt is what the finished conversation has before the answer ([`Note::Apart`]) |
//! | the template leaves out a part of the answer, such as its thoughts | that is not trained ([`Note::Changed`]) |
//! | the template has `{% generation %}` marks | only what stands between them is trained; see [`Writer::last_turn`] |
//! | there is no template | prompt and answer are one text |
//!
//! In every case the tokens of prompt and target together are the first ones of the finished conversation, but for an end
//! that was added.
//!
//! ```
//! use serde_json::Map;
//! use verl_models::chat_template::{ChatTemplate, message};
//! use verl_models::targets::Writer;
//! # use verl_models::tokenizer::Tokenizer;
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/models/addition-init");
//!
//! let tokenizer = Tokenizer::load(folder.as_ref())?;
//! let template = ChatTemplate::load(folder.as_ref())?;
//! let writer = Writer::new(&tokenizer, Some(&template), Map::new());
//! let lesson = writer.answers(&[message("user", "12+34")], &[message("assistant", "46")])?;
//! assert_eq!(tokenizer.decode_with_special(&lesson.prompt), "<bos><|user|>12+34<|assistant|>");
//! assert_eq!(tokenizer.decode_with_special(&lesson.targets[0].tokens), "46<eos>");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod turns;
mod whole;

use serde_json::{Map, Value};

use crate::chat_template::{ChatTemplate, ChatTemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use turns::Turn;
use whole::{Whole, shared};

/// Why a conversation cannot be trained on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TargetError {
    /// The template refused the conversation.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The tokenizer refused the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Messages without a template that makes a text of them.
    #[error("the model has no chat template, which makes a text of messages")]
    NoTemplate,
    /// A prompt without a token, behind which nothing can be predicted.
    #[error("the prompt has no token")]
    NoPrompt,
    /// A model without an id that ends a sequence.
    #[error("the tokenizer has no end-of-sequence id, so that targets cannot end")]
    NoEnd,
    /// A template that passes over an answer.
    #[error("the chat template writes nothing of the assistant's message (message {message})")]
    Unwritten {
        /// Number of the message, from 1.
        message: usize,
    },
    /// A template whose marks pass over an answer.
    #[error(
        "the `{{% generation %}}` marks of the chat template hold nothing of what the assistant says, so that nothing would be trained"
    )]
    Unmarked,
    /// A conversation without an answer.
    #[error("the conversation has no message of the assistant behind a prompt")]
    NoAnswer,
}

/// Something of a conversation that is trained on, but perhaps not as it was meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The tokens of the prompt are not the first ones of the finished conversation.
    Apart {
        /// The text that generation starts from.
        prompt: String,
        /// The finished conversation, up to the end of the answer.
        finished: String,
    },
    /// Neither the template nor the answer ends the turn with a token that generation stops at.
    Unended,
    /// A token that generation stops at stands within an answer.
    EndsWithin,
    /// The template writes an answer in other words, or leaves out a part of it.
    Changed {
        /// The answer.
        answer: String,
        /// What is written of it.
        written: String,
    },
    /// The `{% generation %}` marks leave out the token that ends the turn.
    UnmarkedEnd,
    /// An earlier turn of the assistant is written in another way than when it was the last.
    Rewritten {
        /// The conversation up to that turn, as it is written alone.
        alone: String,
        /// The same part of the whole conversation.
        within: String,
    },
}

/// What is imitated behind a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// Token ids behind the prompt.
    pub tokens: Vec<u32>,
    /// Which of them are trained; the others stand between turns of the assistant, or outside marks.
    pub trained: Vec<bool>,
}

/// A prompt with what is imitated behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lesson {
    /// Text of the prompt.
    pub text: String,
    /// Its token ids, at least one.
    pub prompt: Vec<u32>,
    /// A target for each answer, in their order.
    pub targets: Vec<Target>,
    /// What should be told.
    pub notes: Vec<Note>,
}

/// Writes conversations as a model's chat template and tokenizer do.
#[derive(Debug, Clone)]
pub struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    variables: Map<String, Value>,
}

impl<'a> Writer<'a> {
    /// A writer; `variables` are those of one conversation, such as its `tools`.
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: Option<&'a ChatTemplate>,
        variables: Map<String, Value>,
    ) -> Self {
        Writer {
            tokenizer,
            template,
            variables,
        }
    }

    /// Text and tokens of the prompt that generation starts from: `messages`, and what opens the assistant's answer.
    ///
    /// # Errors
    /// The template or the tokenizer refuses; the prompt has no token.
    pub fn prompt(&self, messages: &[Value]) -> Result<(String, Vec<u32>), TargetError> {
        let template = self.template.ok_or(TargetError::NoTemplate)?;
        let text = template.render_with(messages, true, &self.variables)?;
        let tokens = self.tokenizer.encode(&text, false)?;
        if tokens.is_empty() {
            return Err(TargetError::NoPrompt);
        }
        Ok((text, tokens))
    }

    /// Tokens of a prompt that is a text as it is, with what the tokenizer adds to a sequence.
    ///
    /// # Errors
    /// The tokenizer refuses; the prompt has no token.
    pub fn plain_prompt(&self, text: &str) -> Result<Vec<u32>, TargetError> {
        let tokens = self.tokenizer.encode(text, true)?;
        if tokens.is_empty() {
            return Err(TargetError::NoPrompt);
        }
        Ok(tokens)
    }

    /// The conversation `before` with each of several answers (messages of the assistant) to it. All of a target is
    /// trained, whatever the template marks.
    ///
    /// # Errors
    /// The template or the tokenizer refuses, or the template writes nothing of an answer.
    pub fn answers(&self, before: &[Value], answers: &[Value]) -> Result<Lesson, TargetError> {
        let (text, asked) = self.prompt(before)?;
        let mut notes = Vec::new();
        let mut written = Vec::with_capacity(answers.len());
        for answer in answers {
            let mut messages = before.to_vec();
            messages.push(answer.clone());
            let whole = self.whole(&messages)?;
            let turn = self.turn(&messages, before.len(), &whole, &mut notes)?;
            written.push((whole, turn));
        }
        let joined = written.iter().map(|(whole, turn)| (whole, turn.start));
        let (text, prompt) = joined_prompt(text, asked, &joined.collect::<Vec<_>>())?;
        let mut targets = Vec::with_capacity(written.len());
        for (whole, turn) in &written {
            targets.push(self.target(whole, prompt.len(), *turn, &mut notes)?);
        }
        Ok(lesson(text, prompt, targets, notes))
    }

    /// A finished conversation whose last message is the assistant's, which is trained.
    ///
    /// Where the template marks text by `{% generation %}`, the tokens that hold marked text behind the prompt are trained
    /// and no others, as `transformers` tells them by `return_assistant_tokens_mask`.
    ///
    /// # Errors
    /// The template or the tokenizer refuses; it writes or marks nothing of the answer.
    pub fn last_turn(&self, messages: &[Value]) -> Result<Lesson, TargetError> {
        let at = messages.iter().rposition(is_answer);
        let at = at.filter(|at| *at + 1 == messages.len());
        self.conversation(messages, Vec::from_iter(at))
    }

    /// The same with every turn of the assistant that something comes before: the prompt is what comes before the first
    /// of them, and what stands between turns is not trained.
    ///
    /// # Errors
    /// As [`last_turn`](Self::last_turn).
    pub fn all_turns(&self, messages: &[Value]) -> Result<Lesson, TargetError> {
        let turns = (1..messages.len()).filter(|at| is_answer(&messages[*at]));
        self.conversation(messages, turns.collect())
    }

    fn conversation(&self, messages: &[Value], turns: Vec<usize>) -> Result<Lesson, TargetError> {
        let (Some(&first), Some(&last)) = (turns.first(), turns.last()) else {
            return Err(TargetError::NoAnswer);
        };
        let messages = &messages[..=last];
        let (text, asked) = self.prompt(&messages[..first])?;
        let whole = self.whole(messages)?;
        let mut notes = Vec::new();
        let mut written = Vec::with_capacity(turns.len());
        for &at in &turns {
            written.push(self.turn(messages, at, &whole, &mut notes)?);
            if at != last {
                notes.extend(self.rewritten(messages, at, &whole)?);
            }
        }
        let start = written.first().map_or(0, |turn| turn.start);
        let (text, prompt) = joined_prompt(text, asked, &[(&whole, start)])?;
        let target = match whole.marks.is_empty() {
            true => self.turns_target(&whole, prompt.len(), &written, &mut notes)?,
            false => self.marked_target(&whole, prompt.len(), &written, &mut notes)?,
        };
        Ok(lesson(text, prompt, vec![target], notes))
    }

    /// A text as it is with each of several answers: both are one text, with the special tokens that the tokenizer adds
    /// to a sequence. A blank between them has to be in one of the two.
    ///
    /// # Errors
    /// The tokenizer refuses; the prompt has no token.
    pub fn plain(&self, prompt: &str, answers: &[&str]) -> Result<Lesson, TargetError> {
        let asked = self.plain_prompt(prompt)?;
        let mut notes = Vec::new();
        let mut written = Vec::with_capacity(answers.len());
        for answer in answers {
            let text = format!("{prompt}{answer}");
            let pieces = self.tokenizer.pieces(&text, true)?;
            let whole = Whole::new(text, pieces, Vec::new());
            // An end that the tokenizer adds to every sequence is no part of the prompt of an answer without a text.
            let behind = whole.behind(&asked, prompt);
            let behind = behind.filter(|start| *start < whole.ids.len() || !whole.has_added_end());
            let start = behind.unwrap_or_else(|| {
                notes.push(Note::Apart {
                    prompt: prompt.to_owned(),
                    finished: whole.text.clone(),
                });
                whole.token_at(prompt.len())
            });
            let end = whole.ids.len();
            let is_ended = self.stops_at(&whole, start, end);
            let turn = Turn {
                start,
                end,
                is_ended,
            };
            written.push((whole, turn));
        }
        let joined = written.iter().map(|(whole, turn)| (whole, turn.start));
        let joined: Vec<_> = joined.collect();
        let (text, prompt) = joined_prompt(prompt.to_owned(), asked, &joined)?;
        let mut targets = Vec::with_capacity(written.len());
        for (whole, turn) in &written {
            targets.push(self.target(whole, prompt.len(), *turn, &mut notes)?);
        }
        // Where no template writes an end, there is nothing to tell of one that is added.
        notes.retain(|note| *note != Note::Unended);
        Ok(lesson(text, prompt, targets, notes))
    }

    /// A turn behind a prompt of `start` tokens.
    fn target(
        &self,
        whole: &Whole,
        start: usize,
        turn: Turn,
        notes: &mut Vec<Note>,
    ) -> Result<Target, TargetError> {
        let mut tokens = whole.ids[start..turn.end.max(start)].to_vec();
        if turn.is_ended {
            self.cut_second_ends(&mut tokens);
        } else {
            tokens.push(self.end()?);
            notes.push(Note::Unended);
        }
        self.note_ends_within(&tokens, notes);
        let trained = vec![true; tokens.len()];
        Ok(Target { tokens, trained })
    }

    /// Several turns behind a prompt of `start` tokens.
    fn turns_target(
        &self,
        whole: &Whole,
        start: usize,
        turns: &[Turn],
        notes: &mut Vec<Note>,
    ) -> Result<Target, TargetError> {
        let mut target = Target::default();
        for (index, turn) in turns.iter().enumerate() {
            let from = start + target.tokens.len();
            let until = turn.start.max(from);
            target.push(&whole.ids[from..until], false);
            let own = Turn {
                start: until,
                ..*turn
            };
            if index + 1 == turns.len() {
                let last = self.target(whole, until, own, notes)?;
                target.push(&last.tokens, true);
            } else {
                if !turn.is_ended {
                    notes.push(Note::Unended);
                }
                let own = &whole.ids[until..turn.end.max(until)];
                self.note_ends_within(own, notes);
                target.push(own, true);
            }
        }
        Ok(target)
    }

    /// What marks hold behind a prompt of `start` tokens.
    fn marked_target(
        &self,
        whole: &Whole,
        start: usize,
        turns: &[Turn],
        notes: &mut Vec<Note>,
    ) -> Result<Target, TargetError> {
        let mut trained = whole.marked()[start..].to_vec();
        let length = trained.iter().rposition(|marked| *marked);
        let length = length.ok_or(TargetError::Unmarked)? + 1;
        let mut tokens = whole.ids[start..start + length].to_vec();
        trained.truncate(length);
        match turns.last() {
            Some(turn) if turn.is_ended => {
                let end = turn.end.saturating_sub(start + 1);
                if trained.get(end) != Some(&true) {
                    notes.push(Note::UnmarkedEnd);
                }
            }
            _ => {
                tokens.push(self.end()?);
                trained.push(true);
                notes.push(Note::Unended);
            }
        }
        Ok(Target { tokens, trained })
    }

    /// The id that ends a sequence.
    fn end(&self) -> Result<u32, TargetError> {
        self.tokenizer.eos_id().ok_or(TargetError::NoEnd)
    }

    fn is_stop(&self, id: u32) -> bool {
        self.tokenizer.eos_ids().contains(&id)
    }

    /// Whether the tokens `start..end` end with one that generation stops at.
    fn stops_at(&self, whole: &Whole, start: usize, end: usize) -> bool {
        start < end && self.is_stop(whole.ids[end - 1])
    }

    /// Leaves one end where several follow each other.
    fn cut_second_ends(&self, tokens: &mut Vec<u32>) {
        while let [.., before, _] = tokens[..]
            && self.is_stop(before)
        {
            tokens.pop();
        }
    }

    fn note_ends_within(&self, tokens: &[u32], notes: &mut Vec<Note>) {
        let within = tokens.split_last().map_or(&[][..], |(_, within)| within);
        if within.iter().any(|id| self.is_stop(*id)) {
            notes.push(Note::EndsWithin);
        }
    }
}

impl Target {
    fn push(&mut self, tokens: &[u32], is_trained: bool) {
        self.tokens.extend(tokens);
        self.trained
            .extend(std::iter::repeat_n(is_trained, tokens.len()));
    }
}

/// Who wrote a message.
pub fn role(message: &Value) -> Option<&str> {
    message.get("role").and_then(Value::as_str)
}

fn is_answer(message: &Value) -> bool {
    role(message) == Some("assistant")
}

/// The prompt of what was written behind `starts`: the one that was asked, where all go on behind it.
fn joined_prompt(
    text: String,
    asked: Vec<u32>,
    starts: &[(&Whole, usize)],
) -> Result<(String, Vec<u32>), TargetError> {
    let Some(&(first, _)) = starts.first() else {
        return Ok((text, asked));
    };
    if starts
        .iter()
        .all(|(whole, start)| *start == asked.len() && whole.ids.starts_with(&asked))
    {
        return Ok((text, asked));
    }
    let common = starts
        .iter()
        .map(|(whole, start)| shared(&whole.ids, &first.ids).min(*start));
    let common = common.min().unwrap_or(0);
    if common == 0 {
        return Err(TargetError::NoPrompt);
    }
    Ok((
        first.text_before(common).to_owned(),
        first.ids[..common].to_vec(),
    ))
}

fn lesson(text: String, prompt: Vec<u32>, targets: Vec<Target>, notes: Vec<Note>) -> Lesson {
    let mut told: Vec<Note> = Vec::new();
    for note in notes {
        let same = |other: &Note| std::mem::discriminant(other) == std::mem::discriminant(&note);
        if !told.iter().any(same) {
            told.push(note);
        }
    }
    Lesson {
        text,
        prompt,
        targets,
        notes: told,
    }
}

#[cfg(test)]
mod tests;
