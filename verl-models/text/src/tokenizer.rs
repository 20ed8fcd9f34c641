//! Tokenizers of Hugging Face folders: convert text to token ids and back, and know which ids begin, end and pad a
//! sequence.
//!
//! Six files of the folder define the ids; all but the first may be absent:
//!
//! | file | what is read |
//! |---|---|
//! | `tokenizer.json` | the tokenizer itself; its truncation and padding settings are ignored |
//! | `tokenizer_config.json` | `added_tokens_decoder`; `bos_token`, `eos_token` and every other `…_token`; `additional_special_tokens`, `extra_special_tokens`; `split_special_tokens` |
//! | `special_tokens_map.json` | the same tokens; they replace those above, unless there is an `added_tokens_decoder` |
//! | `added_tokens.json` | tokens and their ids, unless there is an `added_tokens_decoder` |
//! | `generation_config.json` | every id of `eos_token_id`; `bos_token_id`, `pad_token_id`; negative ids mean none |
//! | `config.json` | the same ids, if the file above does not have them |
//!
//! A declared token that tokenizer.json lacks gets the next id, as in `transformers`. If a file places it at another
//! id, the folder is refused.

mod added;
mod declared;
mod guarded;
mod pieces;
mod special;

use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};

pub(crate) use declared::Declared;
use guarded::guarded;
pub use pieces::Piece;
use special::SpecialIds;

use crate::files::{json_object, stand_in, text, without_bom};

/// Maximum ids of a tokenizer, and rows of an embedding; more means that the file is damaged.
pub const MAX_IDS: usize = 1 << 24;

/// Errors of a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A folder without `tokenizer.json`.
    #[error(
        "`{folder}` has no tokenizer.json; slow tokenizers (tokenizer.model, vocab.json) must be converted first"
    )]
    Missing {
        /// The folder.
        folder: String,
    },
    /// A file that cannot be read or parsed.
    #[error("cannot read `{path}`: {reason}")]
    Malformed {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// A special token that is not in the vocabulary.
    #[error("`{path}`: {role} is `{token}`, which is not in the vocabulary")]
    UnknownToken {
        /// The file that names it.
        path: String,
        /// Its role: `eos_token`, `pad_token`.
        role: &'static str,
        /// The token.
        token: String,
    },
    /// A token that cannot have the id at which a file places it.
    #[error("`{path}` places the token `{token}` at id {id}, but {reason}")]
    Misplaced {
        /// The file that places it.
        path: String,
        /// The token.
        token: String,
        /// The id.
        id: u32,
        /// The id that it has or would get, or the token that has this id.
        reason: String,
    },
    /// Every end-of-sequence id is beyond the vocabulary, so no response could end.
    #[error("`{path}`: `eos_token_id` is {id}, but the vocabulary ends at {rows}")]
    EndBeyond {
        /// The file that names it.
        path: String,
        /// The id.
        id: u32,
        /// Rows of the embedding.
        rows: usize,
    },
    /// Text that the tokenizer cannot encode.
    #[error("the tokenizer cannot encode the text: {reason}")]
    Encode {
        /// Why.
        reason: String,
    },
    /// A folder that cannot be written.
    #[error("cannot write `{path}`: {reason}")]
    Write {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
}

/// Files that make up a tokenizer; [`Tokenizer::save`] copies those that exist.
pub const FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Folder of additional chat templates; it is copied too.
pub(crate) const TEMPLATES: &str = "additional_chat_templates";

/// The tokenizer of a model folder.
///
/// ```no_run
/// use verl_text::tokenizer::Tokenizer;
///
/// let tokenizer = Tokenizer::load("models/smollm2".as_ref())?;
/// let ids = tokenizer.encode("12+34", false)?;
/// assert_eq!(tokenizer.decode(&ids), "12+34");
/// # Ok::<(), verl_text::tokenizer::TokenizerError>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    bos: Option<u32>,
    eos: Vec<u32>,
    declared_pad: Option<u32>,
    pad: u32,
    without_id: Vec<(String, String)>,
    beyond: Vec<u32>,
    files: Vec<(String, Vec<u8>)>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("pad", &self.pad)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a Hugging Face folder.
    ///
    /// - **Ends of sequence**: every id of `generation_config.json`, else of `config.json`, else the `eos_token`. The
    ///   first one is [`eos_id`](Self::eos_id). Ids beyond the embedding are ignored with a warning, because no
    ///   response can contain them; if all are, the folder is refused.
    /// - **Pad**: `pad_token`, else `pad_token_id` of `generation_config.json` or `config.json`, else `unk_token`, else
    ///   id 0. Nothing in this workspace reads a pad id back (lengths are stored, nothing is padded between stages), so
    ///   the last two are as good as any. A declared pad that also ends sequences causes a warning, because other
    ///   programs that mask by pad id would hide the end.
    /// - **Tokens without an id**: a special token that the vocabulary lacks gets the next id, if the embedding has a
    ///   row for it. Otherwise it is ignored with a warning, except for `eos_token`, without which nothing would end.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, a file is malformed, `eos_token` is not in the vocabulary, or a file places a token
    /// at an id that it cannot have.
    pub fn load(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let tokenizer = Self::read(folder)?;
        for (role, token) in &tokenizer.without_id {
            tracing::warn!(
                folder = %folder.display(),
                "`{role}` is `{token}`, which is not in the vocabulary and has no row in the embedding; it is ignored, and text \
                 that contains it is tokenised like any other text"
            );
        }
        if !tokenizer.beyond.is_empty() {
            tracing::warn!(
                folder = %folder.display(), ids = ?tokenizer.beyond,
                "end-of-sequence ids beyond the vocabulary are ignored"
            );
        }
        let eos = tokenizer.eos_ids();
        if let Some(id) = eos.iter().find(|&&id| tokenizer.id_to_token(id).is_none()) {
            tracing::warn!(
                folder = %folder.display(), id,
                "an end-of-sequence id is not in the tokenizer's vocabulary"
            );
        }
        if let Some(pad) = tokenizer.declared_pad
            && eos.contains(&pad)
        {
            tracing::warn!(
                folder = %folder.display(), pad,
                "the pad token also ends sequences; this program stores lengths, but one that masks by pad id would hide the end"
            );
        }
        Ok(tokenizer)
    }

    /// [`Self::load`] without warnings, to check whether a run can load the tokenizer.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn read(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let files = read_files(folder)?;
        let bytes = match files.first() {
            Some((name, bytes)) if name == FILES[0] => bytes,
            _ => {
                return Err(TokenizerError::Missing {
                    folder: folder.display().to_string(),
                });
            }
        };
        let malformed = |reason: String| TokenizerError::Malformed {
            path: folder.join(FILES[0]).display().to_string(),
            reason,
        };
        text(bytes).map_err(malformed)?;
        let mut inner =
            guarded(|| tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| e.to_string()))
                .map_err(malformed)?;
        inner
            .with_truncation(None)
            .map_err(|e| malformed(e.to_string()))?;
        inner.with_padding(None);
        let declared = Declared::read(folder)?;
        let rows = special::rows(folder)?;
        added::add(&mut inner, &declared, folder, rows)?;
        let vocabulary = inner.get_vocab(true);
        let (token, last) = vocabulary
            .iter()
            .max_by_key(|(_, id)| **id)
            .ok_or_else(|| malformed("the vocabulary is empty".to_owned()))?;
        let vocab_size = *last as usize + 1;
        if vocab_size > MAX_IDS {
            return Err(malformed(format!(
                "token `{token}` has the id {last}, but the limit is {MAX_IDS} ids"
            )));
        }

        let special = SpecialIds::read(folder, &declared, rows, |token| inner.token_to_id(token))?;
        Ok(Tokenizer {
            inner,
            vocab_size,
            bos: special.bos,
            eos: special.eos,
            declared_pad: special.declared_pad,
            pad: special.declared_pad.or(special.unknown).unwrap_or(0),
            without_id: special.without_id,
            beyond: special.beyond,
            files,
        })
    }

    /// Token ids of `text`. With `special`, the tokenizer adds the special tokens of a sequence (often a begin token);
    /// a rendered chat template already contains them.
    ///
    /// Special tokens that are spelled out in `text` become their ids in both cases.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the text cannot be tokenised (for example, for lack of an unknown token).
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        self.inner
            .encode_fast(text, special)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|e| TokenizerError::Encode {
                reason: e.to_string(),
            })
    }

    /// Text of `ids` without special tokens. Ids outside the vocabulary (rows that only pad an embedding) are skipped,
    /// and bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Differences
    /// `clean_up_tokenization_spaces` is not applied: it changes text that byte-level tokenizers reproduce exactly.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_as(ids, true)
    }

    /// Text of `ids`, special tokens included.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        self.decode_as(ids, false)
    }

    fn decode_as(&self, ids: &[u32], skip_special: bool) -> String {
        match self.inner.decode(ids, skip_special) {
            Ok(text) => text,
            Err(error) => {
                tracing::warn!(%error, "the tokenizer's decoder failed; its tokens are joined unchanged");
                ids.iter().filter_map(|&id| self.id_to_token(id)).collect()
            }
        }
    }

    /// Id of a token, spelled as in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Token of an id, spelled as in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The token of each id, starting at 0; `None` for an id without a token.
    pub fn tokens(&self) -> impl Iterator<Item = Option<String>> {
        (0..self.vocab_size as u32).map(|id| self.id_to_token(id))
    }

    /// Largest id plus one, including added tokens: the minimum number of embedding rows that a model needs.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Id that begins a sequence.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// Every id that ends a sequence; empty if the folder declares none.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// Declared end-of-sequence ids that are ignored because the embedding has no row for them.
    pub fn ignored_eos_ids(&self) -> &[u32] {
        &self.beyond
    }

    /// The first of [`eos_ids`](Self::eos_ids).
    pub fn eos_id(&self) -> Option<u32> {
        self.eos.first().copied()
    }

    /// Id for slots that nothing reads.
    pub fn pad_id(&self) -> u32 {
        self.pad
    }

    /// Writes the tokenizer's files to `folder`, byte for byte as loaded except for a byte-order mark, so that the
    /// folder gives the same ids, here and in `transformers`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), TokenizerError> {
        let failed = |path: &Path, e: std::io::Error| TokenizerError::Write {
            path: path.display().to_string(),
            reason: e.to_string(),
        };
        std::fs::create_dir_all(folder).map_err(|e| failed(folder, e))?;
        for (name, bytes) in &self.files {
            let path = folder.join(name);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).map_err(|e| failed(parent, e))?;
            }
            std::fs::write(&path, bytes).map_err(|e| failed(&path, e))?;
        }
        Ok(())
    }
}

/// The files of a tokenizer by name, tokenizer.json first. Git LFS pointers to files that are not read here are skipped
/// with a warning.
fn read_files(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, TokenizerError> {
    let mut names: Vec<String> = FILES.iter().map(|name| (*name).to_owned()).collect();
    names.extend(templates(folder));
    let mut files = Vec::new();
    for name in names {
        let Some(bytes) = read_optional(&folder.join(&name))? else {
            continue;
        };
        if UNREAD.contains(&name.as_str())
            && let Some(reason) = stand_in(&bytes)
        {
            tracing::warn!(folder = %folder.display(), file = name, "a file is not copied: {reason}");
            continue;
        }
        files.push((name, without_bom(bytes)));
    }
    Ok(files)
}

/// Files of a tokenizer that are copied but not read.
const UNREAD: [&str; 3] = ["vocab.json", "merges.txt", "tokenizer.model"];

/// Additional chat templates of a folder, sorted: `additional_chat_templates/NAME.jinja`.
pub fn templates(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join(TEMPLATES));
    let names = entries.into_iter().flatten().flatten();
    let mut names: Vec<String> = names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".jinja"))
        .map(|name| format!("{TEMPLATES}/{name}"))
        .collect();
    names.sort();
    names
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(TokenizerError::Malformed {
            path: path.display().to_string(),
            reason: e.to_string(),
        }),
    }
}

/// The object in a JSON file of `folder`; `None` if the file does not exist.
pub(crate) fn read_json(
    folder: &Path,
    name: &str,
) -> Result<Option<Map<String, Value>>, TokenizerError> {
    let path = folder.join(name);
    let Some(bytes) = read_optional(&path)? else {
        return Ok(None);
    };
    json_object(&bytes)
        .map(Some)
        .map_err(|reason| TokenizerError::Malformed {
            path: path.display().to_string(),
            reason,
        })
}

#[cfg(test)]
pub(crate) mod tests;
