//! Token ids with the piece of text that each covers.

use std::ops::Range;

use super::{Tokenizer, TokenizerError};

/// A token of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Its id.
    pub id: u32,
    /// Bytes of the text that it covers; may be empty, and several tokens may share a character.
    pub text: Range<usize>,
    /// Whether the tokenizer added it to the sequence, so that it covers no text.
    pub is_added: bool,
}

impl Tokenizer {
    /// The tokens of [`encode`](Self::encode) with the text that each covers.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn pieces(&self, text: &str, special: bool) -> Result<Vec<Piece>, TokenizerError> {
        let encoding = self.inner.encode(text, special);
        let encoding = encoding.map_err(|e| TokenizerError::Encode {
            reason: e.to_string(),
        })?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let tokens = tokens.zip(encoding.get_special_tokens_mask());
        let pieces = tokens.map(|((id, (start, end)), added)| Piece {
            id: *id,
            text: *start..*end,
            is_added: *added == 1,
        });
        Ok(pieces.collect())
    }
}
