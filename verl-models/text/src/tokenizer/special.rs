//! Which ids begin, end and pad a sequence, according to the files other than tokenizer.json.

use std::path::Path;

use serde_json::{Map, Value};

use super::declared::Declared;
use super::{MAX_IDS, TokenizerError, read_json};

/// Ids of special tokens, as declared by the files other than tokenizer.json.
pub(super) struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Vec<u32>,
    pub declared_pad: Option<u32>,
    pub unknown: Option<u32>,
    /// Tokens with a role that have no id: role and token.
    pub without_id: Vec<(String, String)>,
    /// Declared end-of-sequence ids that a model of this folder cannot sample.
    pub beyond: Vec<u32>,
}

/// Rows of the embedding, if the folder's config.json declares them.
pub(super) fn rows(folder: &Path) -> Result<Option<usize>, TokenizerError> {
    let config = read_json(folder, "config.json")?.unwrap_or_default();
    let rows = config.get("vocab_size").and_then(Value::as_u64);
    Ok(rows.and_then(|rows| usize::try_from(rows).ok()))
}

impl SpecialIds {
    /// Reads the ids of a folder; `id_of` returns the id of a token in its vocabulary, and `rows` are those of the
    /// embedding.
    ///
    /// # Errors
    /// A file is malformed, or every end-of-sequence id is beyond the embedding.
    pub fn read(
        folder: &Path,
        declared: &Declared,
        rows: Option<usize>,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let generation = read_json(folder, "generation_config.json")?.unwrap_or_default();
        let config = read_json(folder, "config.json")?.unwrap_or_default();
        let mut without_id = Vec::new();
        for role in &declared.roles {
            let token = &role.token.content;
            if !token.is_empty() && id_of(token).is_none() {
                without_id.push((role.name.clone(), token.clone()));
            }
        }
        let named = |name: &str| id_of(&declared.role(name)?.token.content);
        let ids = |key: &str| -> Result<(Vec<u32>, &'static str), TokenizerError> {
            let files = [
                (&generation, "generation_config.json"),
                (&config, "config.json"),
            ];
            for (map, file) in files {
                let ids = token_ids(map, key).map_err(|reason| TokenizerError::Malformed {
                    path: folder.join(file).display().to_string(),
                    reason,
                })?;
                if !ids.is_empty() {
                    return Ok((ids, file));
                }
            }
            Ok((Vec::new(), "config.json"))
        };
        let first =
            |key: &str| -> Result<Option<u32>, TokenizerError> { Ok(ids(key)?.0.first().copied()) };

        let (mut eos, file) = ids("eos_token_id")?;
        let limit = rows.unwrap_or(MAX_IDS);
        let beyond: Vec<u32> = eos.extract_if(.., |id| *id as usize >= limit).collect();
        if eos.is_empty()
            && let Some(id) = beyond.first()
        {
            return Err(TokenizerError::EndBeyond {
                path: folder.join(file).display().to_string(),
                id: *id,
                rows: limit,
            });
        }
        if eos.is_empty() {
            eos.extend(named("eos_token"));
        }
        let bos = match named("bos_token") {
            Some(id) => Some(id),
            None => first("bos_token_id")?,
        };
        let declared_pad = match named("pad_token") {
            Some(id) => Some(id),
            None => first("pad_token_id")?,
        };
        let unknown = declared_pad.is_none().then(|| named("unk_token")).flatten();
        Ok(SpecialIds {
            bos,
            eos,
            declared_pad,
            unknown,
            without_id,
            beyond,
        })
    }
}

/// The id or list of ids under `key`; negative ids, as in old files, mean none.
fn token_ids(map: &Map<String, Value>, key: &str) -> Result<Vec<u32>, String> {
    let one = |value: &Value| match value.as_i64() {
        Some(..0) => Ok(None),
        _ => value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .map(Some)
            .ok_or_else(|| format!("`{key}` is {value}, which is not a token id")),
    };
    let ids: Result<Vec<Option<u32>>, String> = match map.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    };
    Ok(ids?.into_iter().flatten().collect())
}
