//! Which ids begin, end and pad a sequence, by the files beside tokenizer.json.

use std::path::Path;

use serde_json::{Map, Value};

use super::{TokenizerError, read_json};

/// Ids of special tokens, as the files beside tokenizer.json declare them.
pub(super) struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Vec<u32>,
    pub declared_pad: Option<u32>,
    pub unknown: Option<u32>,
}

impl SpecialIds {
    /// Those of a folder; `id_of` is the id of a token of its vocabulary.
    ///
    /// # Errors
    /// A file that is malformed; a special token that is not in the vocabulary.
    pub fn read(
        folder: &Path,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let tokenizer_config = read_json(folder, "tokenizer_config.json")?.unwrap_or_default();
        let generation = read_json(folder, "generation_config.json")?.unwrap_or_default();
        let config = read_json(folder, "config.json")?.unwrap_or_default();
        let named = |role: &'static str| -> Result<Option<u32>, TokenizerError> {
            let Some(token) = special_token(&tokenizer_config, role) else {
                return Ok(None);
            };
            match id_of(&token) {
                Some(id) => Ok(Some(id)),
                None => Err(TokenizerError::UnknownToken {
                    path: folder.join("tokenizer_config.json").display().to_string(),
                    role,
                    token,
                }),
            }
        };
        let declared = |key: &str| -> Result<Vec<u32>, TokenizerError> {
            for (map, file) in [
                (&generation, "generation_config.json"),
                (&config, "config.json"),
            ] {
                let ids = token_ids(map, key).map_err(|reason| TokenizerError::Malformed {
                    path: folder.join(file).display().to_string(),
                    reason,
                })?;
                if !ids.is_empty() {
                    return Ok(ids);
                }
            }
            Ok(Vec::new())
        };

        let mut eos = declared("eos_token_id")?;
        if eos.is_empty() {
            eos.extend(named("eos_token")?);
        }
        let bos = match named("bos_token")? {
            Some(id) => Some(id),
            None => declared("bos_token_id")?.first().copied(),
        };
        let declared_pad = match named("pad_token")? {
            Some(id) => Some(id),
            None => declared("pad_token_id")?.first().copied(),
        };
        let unknown = match declared_pad {
            Some(_) => None,
            None => named("unk_token")?,
        };
        Ok(SpecialIds {
            bos,
            eos,
            declared_pad,
            unknown,
        })
    }
}

/// A special token of `tokenizer_config.json`: a text, or an object with `content`.
pub(crate) fn special_token(config: &Map<String, Value>, role: &str) -> Option<String> {
    let value = config.get(role)?;
    let text = value
        .as_str()
        .or_else(|| value.get("content").and_then(Value::as_str))?;
    Some(text.to_owned())
}

/// The id or list of ids under `key`.
fn token_ids(map: &Map<String, Value>, key: &str) -> Result<Vec<u32>, String> {
    let one = |value: &Value| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| format!("`{key}` holds {value}, which is no token id"))
    };
    match map.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}
