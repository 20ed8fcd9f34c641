//! A finished conversation as text and tokens.

use std::ops::Range;

use crate::tokenizer::Piece;

/// A finished conversation.
#[derive(Debug)]
pub(super) struct Whole {
    /// Its text.
    pub text: String,
    /// Its token ids.
    pub ids: Vec<u32>,
    /// Text between `{% generation %}` marks, in bytes.
    pub marks: Vec<Range<usize>>,
    pieces: Vec<Piece>,
}

impl Whole {
    pub fn new(text: String, pieces: Vec<Piece>, marks: Vec<Range<usize>>) -> Self {
        Whole {
            ids: pieces.iter().map(|piece| piece.id).collect(),
            text,
            marks,
            pieces,
        }
    }

    /// Index of the first token after a prompt, if the conversation starts with the prompt's tokens and the last of
    /// them covers no text after the prompt except blanks. (An unknown token for a word may cover more.)
    pub fn after_prompt(&self, prompt: &[u32], text: &str) -> Option<usize> {
        if !self.ids.starts_with(prompt) {
            return None;
        }
        let last = prompt.len().checked_sub(1).map(|last| &self.pieces[last]);
        let end = last.map_or(0, |last| last.text.end);
        let over = self
            .text
            .starts_with(text)
            .then(|| self.text.get(text.len()..end));
        let over = over.flatten().unwrap_or("");
        over.trim().is_empty().then_some(prompt.len())
    }

    /// Whether the tokenizer added the last token.
    pub fn has_added_end(&self) -> bool {
        self.pieces.last().is_some_and(|piece| piece.is_added)
    }

    /// Index of the first token that covers no text before byte `at`.
    pub fn token_after(&self, at: usize) -> usize {
        let from = |piece: &Piece| !piece.is_added && piece.text.start >= at;
        self.pieces
            .iter()
            .position(from)
            .unwrap_or(self.pieces.len())
    }

    /// Index of the first token that covers text from byte `at` on, including a token that spans `at`.
    pub fn token_at(&self, at: usize) -> usize {
        let from =
            |piece: &Piece| !piece.is_added && (piece.text.start >= at || piece.text.end > at);
        let found = self.pieces.iter().position(from);
        found.unwrap_or_else(|| {
            let last = self.pieces.iter().rposition(|piece| !piece.is_added);
            last.map_or(self.pieces.len(), |last| last + 1)
        })
    }

    /// The end of a token's text, in bytes.
    pub fn text_end(&self, token: usize) -> usize {
        self.pieces[token].text.end
    }

    /// The text that the first `tokens` tokens cover.
    pub fn text_before(&self, tokens: usize) -> &str {
        let before = self.pieces.get(tokens).map(|piece| piece.text.start);
        self.upto(before.unwrap_or(self.text.len()))
    }

    /// The text that the tokens before `end` cover.
    pub fn text_of(&self, end: usize) -> &str {
        let last = end.checked_sub(1).and_then(|last| self.pieces.get(last));
        self.upto(last.map_or(0, |piece| piece.text.end))
    }

    /// The text that the tokens `start..end` cover.
    pub fn text_between(&self, start: usize, end: usize) -> &str {
        let until = self.text_of(end);
        until.get(self.text_before(start).len()..).unwrap_or("")
    }

    fn upto(&self, end: usize) -> &str {
        &self.text[..self.text.ceil_char_boundary(end)]
    }

    /// Which tokens contain marked text.
    pub fn marked(&self) -> Vec<bool> {
        let in_mark = |piece: &Piece| {
            let Range { start, end } = piece.text;
            let overlaps =
                |mark: &Range<usize>| start < mark.end && (end > mark.start || start >= mark.start);
            !piece.is_added && self.marks.iter().any(overlaps)
        };
        self.pieces.iter().map(in_mark).collect()
    }
}

/// The length of the common prefix of two lists.
pub(super) fn shared<T: PartialEq>(one: &[T], other: &[T]) -> usize {
    let pairs = one.iter().zip(other);
    pairs.take_while(|(one, other)| one == other).count()
}

/// The length in bytes of the common prefix of two texts, in complete characters.
pub(super) fn shared_start(one: &str, other: &str) -> usize {
    one.floor_char_boundary(shared(one.as_bytes(), other.as_bytes()))
}

/// The length in bytes of the common suffix of two texts, in complete characters of `one`.
pub(super) fn shared_end(one: &str, other: &str) -> usize {
    let pairs = one.bytes().rev().zip(other.bytes().rev());
    let bytes = pairs.take_while(|(one, other)| one == other).count();
    one.len() - one.ceil_char_boundary(one.len() - bytes)
}
