//! Adds declared special tokens to a tokenizer, at the same ids as in `transformers`.

use std::collections::HashMap;
use std::path::Path;

use tokenizers::AddedToken;

use super::TokenizerError;
use super::declared::{Declared, Placed, Role};

/// Adds the tokens of `declared` that tokenizer.json lacks. A token that has an id gets the declared flags; one without
/// gets the next id. `rows` are those of the embedding, if config.json declares them.
///
/// # Errors
/// A token's id differs from the declared one or belongs to another token, or an end-of-sequence token has no id.
pub(super) fn add(
    inner: &mut tokenizers::Tokenizer,
    declared: &Declared,
    folder: &Path,
    rows: Option<usize>,
) -> Result<(), TokenizerError> {
    let mut adding = Adding::new(inner, folder);
    for placed in &declared.placed {
        if placed.token.content.is_empty() {
            continue;
        }
        adding.check_place(placed)?;
        let mut token = placed.token.clone();
        // The legacy file has no flags, so it changes none.
        if placed.has_flags || !adding.is_added(&token.content) {
            token.special |= declared
                .roles
                .iter()
                .any(|role| role.token.content == token.content);
            adding.push(token);
        }
    }
    for role in &declared.roles {
        if adding.should_add(role, rows)? {
            adding.push(role.token.clone());
        }
    }
    for token in &declared.further {
        if !adding.is_added(&token.content) {
            adding.check_next(token)?;
            adding.push(token.clone());
        }
    }
    // Added all at once, because every call rebuilds the search for added tokens.
    let pending = adding.pending;
    if !pending.is_empty() {
        let added = inner.add_tokens(pending);
        added.map_err(|error| TokenizerError::Malformed {
            path: folder.join("tokenizer.json").display().to_string(),
            reason: error.to_string(),
        })?;
    }
    inner.set_encode_special_tokens(declared.split);
    Ok(())
}

/// Tokens to be added.
struct Adding<'a> {
    inner: &'a tokenizers::Tokenizer,
    folder: &'a Path,
    /// Added tokens by their content, those of tokenizer.json first.
    added: HashMap<String, AddedToken>,
    pending: Vec<AddedToken>,
    /// Ids of pending tokens that had none.
    fresh: HashMap<String, u32>,
    /// The id of the next new token: one past the last id.
    next: u32,
}

impl<'a> Adding<'a> {
    fn new(inner: &'a tokenizers::Tokenizer, folder: &'a Path) -> Self {
        let added = inner.get_added_tokens_decoder();
        let model = inner.get_vocab_size(false) as u32;
        let next = added
            .keys()
            .max()
            .map_or(model, |last| model.max(last.saturating_add(1)));
        let by_content = added
            .into_values()
            .map(|token| (token.content.clone(), token));
        Adding {
            inner,
            folder,
            added: by_content.collect(),
            pending: Vec::new(),
            fresh: HashMap::new(),
            next,
        }
    }

    fn is_added(&self, content: &str) -> bool {
        self.added.contains_key(content)
    }

    fn id_of(&self, content: &str) -> Option<u32> {
        let fresh = self.fresh.get(content).copied();
        fresh.or_else(|| self.inner.token_to_id(content))
    }

    fn token_at(&self, id: u32) -> Option<String> {
        let fresh = self.fresh.iter().find(|(_, other)| **other == id);
        let fresh = fresh.map(|(content, _)| content.clone());
        fresh.or_else(|| self.inner.id_to_token(id))
    }

    fn push(&mut self, token: AddedToken) {
        if token.content.is_empty() || self.added.get(&token.content) == Some(&token) {
            return;
        }
        if self.id_of(&token.content).is_none() {
            self.fresh.insert(token.content.clone(), self.next);
            self.next = self.next.saturating_add(1);
        }
        self.added.insert(token.content.clone(), token.clone());
        self.pending.push(token);
    }

    /// Refuses a token that would not get the id at which a file places it; `transformers` silently gives it the next
    /// id.
    fn check_place(&self, placed: &Placed) -> Result<(), TokenizerError> {
        let misplaced = |reason: String| {
            Err(TokenizerError::Misplaced {
                path: self.folder.join(placed.file).display().to_string(),
                token: placed.token.content.clone(),
                id: placed.id,
                reason,
            })
        };
        match self.id_of(&placed.token.content) {
            Some(found) if found == placed.id => return Ok(()),
            Some(found) => return misplaced(format!("the vocabulary has it at {found}")),
            None => {}
        }
        if let Some(other) = self.token_at(placed.id) {
            return misplaced(format!("that id belongs to `{other}`"));
        }
        match self.next == placed.id {
            true => Ok(()),
            false => misplaced(format!(
                "the next free id is {}, and new tokens follow without a gap",
                self.next
            )),
        }
    }

    /// Refuses a token without an id if the next id belongs to another token, which happens if ids have gaps.
    fn check_next(&self, token: &AddedToken) -> Result<(), TokenizerError> {
        let other = self.token_at(self.next);
        match other.filter(|_| self.id_of(&token.content).is_none()) {
            None => Ok(()),
            Some(other) => Err(TokenizerError::Misplaced {
                path: self
                    .folder
                    .join("tokenizer_config.json")
                    .display()
                    .to_string(),
                token: token.content.clone(),
                id: self.next,
                reason: format!("that id belongs to `{other}`"),
            }),
        }
    }

    /// Whether to add the token of a role: it has an id as an ordinary token, or can get the next one. If it cannot,
    /// the token is not used unless a text contains it.
    ///
    /// # Errors
    /// An end-of-sequence token has no id, so no response could end with it.
    fn should_add(&self, role: &Role, rows: Option<usize>) -> Result<bool, TokenizerError> {
        let content = role.token.content.as_str();
        if content.is_empty() || self.is_added(content) {
            return Ok(false);
        }
        if self.id_of(content).is_some() {
            return Ok(true);
        }
        if role.name == "eos_token" {
            return Err(TokenizerError::UnknownToken {
                path: self.folder.join(role.file).display().to_string(),
                role: "eos_token",
                token: content.to_owned(),
            });
        }
        let has_row = rows.is_none_or(|rows| (self.next as usize) < rows);
        Ok(has_row && self.token_at(self.next).is_none())
    }
}
