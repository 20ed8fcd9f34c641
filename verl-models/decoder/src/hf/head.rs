//! Whether the output head is the embedding, according to config.json and to the weights.

use std::path::Path;

use serde_json::Value;

use super::LoadError;
use super::config::{Origin, read_object};
use super::weights::{Checkpoint, StoredTensor};
use crate::decoder::DecoderConfig;

/// The embedding's name in a file.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The head's name in a file.
pub(super) const HEAD: &str = "lm_head.weight";

/// Whether the config.json of a folder declares the head to be the embedding; `false` without a config.json.
pub(super) fn is_tied_by_config(dir: &Path) -> Result<bool, LoadError> {
    let path = dir.join("config.json");
    if !path.exists() {
        return Ok(false);
    }
    Ok(read_object(&path)?.get("tie_word_embeddings") == Some(&Value::Bool(true)))
}

impl Origin {
    /// The decoder that the folder contains: [`Origin::decoder_config`], but with a separate head if the weights have
    /// one that differs from the embedding, whatever config.json declares.
    ///
    /// # Errors
    /// As [`Origin::decoder_config`] and [`Checkpoint::open`].
    pub fn stored_config(&self) -> Result<DecoderConfig, LoadError> {
        let mut config = self.decoder_config()?;
        if config.tied_head && has_own_head(&Checkpoint::open(&self.dir)?) {
            config.tied_head = false;
        }
        Ok(config)
    }
}

/// Whether a file has a head whose numbers differ from its embedding.
///
/// # Source
/// `tie_weights` of `transformers` 5.24, which keeps such a head; 4.57 and earlier versions drop it.
fn has_own_head(stored: &Checkpoint) -> bool {
    let (Some(embedding), Some(head)) = (stored.find(EMBEDDING), stored.find(HEAD)) else {
        return false;
    };
    if (embedding.dtype, embedding.shape, embedding.bytes) == (head.dtype, head.shape, head.bytes) {
        return false;
    }
    !(embedding.shape == head.shape && same_numbers(embedding, head))
}

/// Whether two tensors of the same shape have the same numbers; zeros of either sign are equal. Stops at the first
/// difference and copies at most one piece at a time.
fn same_numbers(a: StoredTensor<'_>, b: StoredTensor<'_>) -> bool {
    const PIECE: usize = 1 << 16;
    let count: usize = a.shape.iter().product();
    (0..count).step_by(PIECE).all(|start| {
        let end = count.min(start + PIECE);
        match (a.piece(start..end), b.piece(start..end)) {
            (Some(a), Some(b)) => a == b,
            _ => false,
        }
    })
}
