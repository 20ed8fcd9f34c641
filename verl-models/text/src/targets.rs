//! Training targets: the tokens of a finished conversation that follow its prompt.
//!
//! A model is trained on the output of its chat template. The conversation is rendered with the answer, and the
//! complete text is tokenised at once. The *prompt* is the part that these tokens share with the tokens from which
//! generation starts, and the *target* is everything after it, up to the first token at the end of the turn at which
//! generation stops. Because nothing is assembled from parts, blanks that the template trims, text that only a finished
//! turn has, and tokens that span the border are exactly as the template and the tokenizer produce them.
//!
//! | case | result |
//! |---|---|
//! | the template writes something after the end of the turn, such as a line end | it is not part of the target |
//! | the turn ends without a token at which generation stops | the tokenizer's first end-of-sequence id is added ([`Note::Unended`]) |
//! | the answer itself ends with such a token | the target ends with it; no second one is added |
//! | the finished conversation does not start with the prompt's tokens | the prompt is what the finished conversation has before the answer ([`Note::PromptDiffers`]) |
//! | the template leaves out a part of the answer, such as its reasoning | that part is not trained ([`Note::Changed`]) |
//! | the template has `{% generation %}` marks | only the text between them is trained; see [`Writer::last_turn`] |
//! | there is no template | prompt and answer are a single text |
//!
//! In every case the finished conversation starts with the tokens of prompt and target, except for an added end.
//!
//! ```
//! use serde_json::Map;
//! use verl_text::chat_template::{ChatTemplate, message};
//! use verl_text::targets::Writer;
//! # use verl_text::tokenizer::Tokenizer;
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/addition-init");
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
    /// The template rejected the conversation.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The tokenizer cannot encode the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Messages without a template to render them.
    #[error("the model has no chat template to render messages with")]
    NoTemplate,
    /// A prompt without tokens, after which nothing can be predicted.
    #[error("the prompt has no tokens")]
    NoPrompt,
    /// A model without an end-of-sequence id.
    #[error("the tokenizer has no end-of-sequence id, so targets cannot end")]
    NoEnd,
    /// A template that skips an answer.
    #[error("the chat template does not write the assistant's message (message {message})")]
    Unwritten {
        /// Number of the message, from 1.
        message: usize,
    },
    /// A template whose marks skip an answer.
    #[error(
        "the `{{% generation %}}` marks of the chat template contain no text of the assistant, so nothing would be trained"
    )]
    Unmarked,
    /// A conversation without an answer.
    #[error("the conversation has no assistant message after a prompt")]
    NoAnswer,
}

/// A part of a conversation that is trained on, but perhaps not as intended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The finished conversation does not start with the tokens of the prompt.
    PromptDiffers {
        /// The text from which generation starts.
        prompt: String,
        /// The finished conversation, up to the end of the answer.
        finished: String,
    },
    /// Neither the template nor the answer ends the turn with a token at which generation stops.
    Unended,
    /// An answer contains a token at which generation stops.
    EndsWithin,
    /// The template changes an answer or leaves out a part of it.
    Changed {
        /// The answer.
        answer: String,
        /// What the template writes.
        written: String,
    },
    /// The `{% generation %}` marks leave out the token that ends the turn.
    UnmarkedEnd,
    /// An earlier turn of the assistant is written differently from when it was the last.
    Rewritten {
        /// The conversation up to that turn, rendered on its own.
        alone: String,
        /// The same part of the complete conversation.
        within: String,
    },
}

/// The tokens to predict after a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// Token ids after the prompt.
    pub tokens: Vec<u32>,
    /// Which of them are trained; the others are between turns of the assistant, or outside marks.
    pub trained: Vec<bool>,
}

/// A prompt with its targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lesson {
    /// Text of the prompt.
    pub text: String,
    /// Its token ids, at least one.
    pub prompt: Vec<u32>,
    /// A target for each answer, in order.
    pub targets: Vec<Target>,
    /// Notes to report.
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

    /// Text and tokens of the prompt from which generation starts: `messages`, and the text that opens the assistant's
    /// answer.
    ///
    /// # Errors
    /// The template or the tokenizer fails, or the prompt has no tokens.
    pub fn prompt(&self, messages: &[Value]) -> Result<(String, Vec<u32>), TargetError> {
        let template = self.template.ok_or(TargetError::NoTemplate)?;
        let text = template.render_with(messages, true, &self.variables)?;
        let tokens = self.tokenizer.encode(&text, false)?;
        if tokens.is_empty() {
            return Err(TargetError::NoPrompt);
        }
        Ok((text, tokens))
    }

    /// Tokens of a plain-text prompt, with the special tokens that the tokenizer adds to a sequence.
    ///
    /// # Errors
    /// The tokenizer fails, or the prompt has no tokens.
    pub fn plain_prompt(&self, text: &str) -> Result<Vec<u32>, TargetError> {
        let tokens = self.tokenizer.encode(text, true)?;
        if tokens.is_empty() {
            return Err(TargetError::NoPrompt);
        }
        Ok(tokens)
    }

    /// The conversation `before` with each of several answers (assistant messages) to it. The entire target is trained,
    /// whatever the template marks.
    ///
    /// # Errors
    /// The template or the tokenizer fails, or the template does not write an answer.
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

    /// A finished conversation; its last message, which must be the assistant's, is trained.
    ///
    /// If the template marks text with `{% generation %}`, only tokens after the prompt that contain marked text are
    /// trained, like `return_assistant_tokens_mask` of `transformers`.
    ///
    /// # Errors
    /// The template or the tokenizer fails, or the template does not write or mark the answer.
    pub fn last_turn(&self, messages: &[Value]) -> Result<Lesson, TargetError> {
        let at = messages.iter().rposition(is_answer);
        let at = at.filter(|at| *at + 1 == messages.len());
        self.conversation(messages, Vec::from_iter(at))
    }

    /// [`last_turn`](Self::last_turn), but trains every turn of the assistant except one that starts the conversation:
    /// the prompt is everything before the first trained turn, and text between turns is not trained.
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

    /// A plain-text prompt with each of several answers: prompt and answer are concatenated, with the special tokens
    /// that the tokenizer adds to a sequence. A blank between them must be part of one of the two.
    ///
    /// # Errors
    /// The tokenizer fails, or the prompt has no tokens.
    pub fn plain(&self, prompt: &str, answers: &[&str]) -> Result<Lesson, TargetError> {
        let asked = self.plain_prompt(prompt)?;
        let mut notes = Vec::new();
        let mut written = Vec::with_capacity(answers.len());
        for answer in answers {
            let text = format!("{prompt}{answer}");
            let pieces = self.tokenizer.pieces(&text, true)?;
            let whole = Whole::new(text, pieces, Vec::new());
            // For an empty answer, an end that the tokenizer adds to every sequence is not part of the prompt.
            let start = whole.after_prompt(&asked, prompt);
            let start = start.filter(|start| *start < whole.ids.len() || !whole.has_added_end());
            let start = start.unwrap_or_else(|| {
                notes.push(Note::PromptDiffers {
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
        // Without a template that writes an end, an added end needs no note.
        notes.retain(|note| *note != Note::Unended);
        Ok(lesson(text, prompt, targets, notes))
    }

    /// A turn after a prompt of `start` tokens.
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

    /// Several turns after a prompt of `start` tokens.
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

    /// The marked text after a prompt of `start` tokens.
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

    /// Whether the tokens `start..end` end with one at which generation stops.
    fn stops_at(&self, whole: &Whole, start: usize, end: usize) -> bool {
        start < end && self.is_stop(whole.ids[end - 1])
    }

    /// Keeps only the first of several consecutive ends.
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

/// The role of a message.
pub fn role(message: &Value) -> Option<&str> {
    message.get("role").and_then(Value::as_str)
}

fn is_answer(message: &Value) -> bool {
    role(message) == Some("assistant")
}

/// The prompt before all of `starts`: the requested prompt if all of them continue it, else their common prefix.
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
    let mut distinct: Vec<Note> = Vec::new();
    for note in notes {
        let same = |other: &Note| std::mem::discriminant(other) == std::mem::discriminant(&note);
        if !distinct.iter().any(same) {
            distinct.push(note);
        }
    }
    Lesson {
        text,
        prompt,
        targets,
        notes: distinct,
    }
}

#[cfg(test)]
mod tests;
