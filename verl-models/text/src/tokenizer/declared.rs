//! Special tokens declared in the files other than tokenizer.json, with the precedence of `transformers`.
//!
//! `tokenizer_config.json` with `added_tokens_decoder` is complete: then the legacy files are not read. Without it,
//! `special_tokens_map.json` replaces its entries, and `added_tokens.json` places tokens at ids. Both generations of
//! `transformers` (4.57 and 5.24) do the same; `scripts/tokenizers/special_tokens.py` compares.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::{TokenizerError, read_json};

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
/// Names of the list of further special tokens, in version 5 and in version 4.
const FURTHER: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// Roles that any tokenizer may declare, in the order in which missing tokens get ids.
const ROLES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// A token that a file places at an id.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    pub id: u32,
    pub token: AddedToken,
    /// Whether the file declares the token's flags.
    pub has_flags: bool,
    pub file: &'static str,
}

/// A token with a role: `eos_token`, or a tokenizer-specific role such as `image_token`.
#[derive(Debug, Clone)]
pub(super) struct Role {
    pub name: String,
    pub token: AddedToken,
    pub file: &'static str,
}

/// The special tokens that the files of a folder declare.
#[derive(Debug, Clone, Default)]
pub(crate) struct Declared {
    /// In ascending order of ids.
    pub(super) placed: Vec<Placed>,
    pub(super) roles: Vec<Role>,
    /// `additional_special_tokens`.
    pub(super) further: Vec<AddedToken>,
    /// Whether special tokens in a text are tokenised like any other text.
    pub(super) split: bool,
}

impl Declared {
    /// Reads a folder.
    ///
    /// # Errors
    /// A file that is malformed.
    pub(crate) fn read(folder: &Path) -> Result<Self, TokenizerError> {
        let mut config = read_json(folder, CONFIG)?.unwrap_or_default();
        let malformed = |file: &str, reason: String| TokenizerError::Malformed {
            path: folder.join(file).display().to_string(),
            reason,
        };
        let in_config = |reason| malformed(CONFIG, reason);
        let decoder = config
            .get("added_tokens_decoder")
            .filter(|v| !v.is_null())
            .cloned();
        let mut legacy = Map::new();
        if decoder.is_none() {
            legacy = read_json(folder, MAP)?.unwrap_or_default();
        }

        let mut further = listed(&config).map_err(in_config)?;
        for token in listed(&legacy).map_err(|reason| malformed(MAP, reason))? {
            if !further.contains(&token) {
                further.push(token);
            }
        }
        let mut own = named_objects(&config);
        own.extend(named_objects(&legacy));
        for name in FURTHER {
            config.shift_remove(name);
            legacy.shift_remove(name);
        }
        let from_map: Vec<String> = legacy.keys().cloned().collect();
        config.extend(legacy);
        let named: Vec<String> = own.keys().cloned().collect();
        config.extend(own);
        let roles = roles(&config, &named, |name| {
            match from_map.iter().any(|other| other == name) {
                true => MAP,
                false => CONFIG,
            }
        })
        .map_err(|(file, reason)| malformed(file, reason))?;

        let mut declared = Declared {
            placed: Vec::new(),
            roles,
            further,
            split: config.get("split_special_tokens") == Some(&Value::Bool(true)),
        };
        declared.placed = match decoder {
            Some(decoder) => placed_by_decoder(&decoder).map_err(in_config)?,
            None => declared
                .placed_by_added(&read_json(folder, ADDED)?.unwrap_or_default())
                .map_err(|reason| malformed(ADDED, reason))?,
        };
        declared.placed.sort_by_key(|placed| placed.id);
        // If a file places the token of a role, its flags apply.
        for role in &mut declared.roles {
            let mut placed = declared.placed.iter();
            if let Some(placed) = placed.find(|p| p.token.content == role.token.content) {
                role.token = placed.token.clone();
            }
        }
        Ok(declared)
    }

    /// The token of a role.
    pub(super) fn role(&self, name: &str) -> Option<&Role> {
        self.roles.iter().find(|role| role.name == name)
    }

    /// The variables of a chat template: the token of each role, and the list of further tokens if there is one.
    pub(crate) fn variables(&self) -> Map<String, Value> {
        let text = |token: &AddedToken| Value::from(token.content.as_str());
        let roles = self.roles.iter();
        let mut variables: Map<String, Value> = roles
            .map(|role| (role.name.clone(), text(&role.token)))
            .collect();
        if !self.further.is_empty() {
            let further = self.further.iter().map(text).collect();
            variables.insert(FURTHER[1].to_owned(), further);
        }
        variables
    }

    /// The tokens of `added_tokens.json`, which has no flags: tokens that are also declared elsewhere are special.
    fn placed_by_added(&self, added: &Map<String, Value>) -> Result<Vec<Placed>, String> {
        let roles = self.roles.iter().map(|role| &role.token);
        let special: Vec<&str> = roles
            .chain(&self.further)
            .map(|token| token.content.as_str())
            .collect();
        let place = |(content, id): (&String, &Value)| {
            let id = id
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| format!("`{content}` is placed at {id}, which is not a token id"))?;
            Ok(Placed {
                id,
                token: AddedToken::from(content.as_str(), special.contains(&content.as_str())),
                has_flags: false,
                file: ADDED,
            })
        };
        let is_none = |id: &Value| id.as_i64().is_some_and(|id| id < 0);
        let added = added.iter().filter(|(_, id)| !is_none(id));
        added.map(place).collect()
    }
}

/// The tokens of `added_tokens_decoder`.
fn placed_by_decoder(decoder: &Value) -> Result<Vec<Placed>, String> {
    let entries = decoder
        .as_object()
        .ok_or_else(|| format!("`added_tokens_decoder` must be an object, got {decoder}"))?;
    let place = |(id, token): (&String, &Value)| {
        let entry = format!("`added_tokens_decoder` entry `{id}`");
        let id: u32 = id
            .parse()
            .map_err(|_| format!("{entry}: the key is not a token id"))?;
        let token = token.as_object().and_then(|token| flagged(token, false));
        Ok(Placed {
            id,
            token: token.ok_or_else(|| format!("{entry} is not an object with `content`"))?,
            has_flags: true,
            file: CONFIG,
        })
    };
    let is_none = |id: &str| id.parse().is_ok_and(|id: i64| id < 0);
    let entries = entries.iter().filter(|(id, _)| !is_none(id));
    entries.map(place).collect()
}

/// The lists of further special tokens.
fn listed(map: &Map<String, Value>) -> Result<Vec<AddedToken>, String> {
    let mut tokens: Vec<AddedToken> = Vec::new();
    for name in FURTHER {
        for value in map
            .get(name)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let token = token(value)
                .ok_or_else(|| format!("`{name}` contains {value}, which is not a token"))?;
            if !tokens.contains(&token) {
                tokens.push(token);
            }
        }
    }
    Ok(tokens)
}

/// `extra_special_tokens` if it is an object: tokenizer-specific roles.
fn named_objects(map: &Map<String, Value>) -> Map<String, Value> {
    let objects = FURTHER
        .iter()
        .filter_map(|name| map.get(*name)?.as_object());
    objects
        .flatten()
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect()
}

/// The roles of a configuration: the standard ones first, then those in `named` and every other `…_token` that is a
/// token.
fn roles(
    config: &Map<String, Value>,
    named: &[String],
    file: impl Fn(&str) -> &'static str,
) -> Result<Vec<Role>, (&'static str, String)> {
    let mut roles = Vec::new();
    let mut add = |name: &str, token: AddedToken| {
        roles.push(Role {
            name: name.to_owned(),
            token,
            file: file(name),
        });
    };
    for name in ROLES {
        let Some(value) = config.get(name).filter(|value| !value.is_null()) else {
            continue;
        };
        let reason = || format!("`{name}` must be a token, got {value}");
        add(name, token(value).ok_or_else(|| (file(name), reason()))?);
    }
    for (name, value) in config {
        if (name.ends_with("_token") || named.contains(name))
            && !ROLES.contains(&name.as_str())
            && let Some(token) = token(value)
        {
            add(name, token);
        }
    }
    Ok(roles)
}

/// A special token: a string, or an object with `content` and flags.
fn token(value: &Value) -> Option<AddedToken> {
    match value {
        Value::String(content) => Some(AddedToken::from(content.as_str(), true)),
        Value::Object(token) => flagged(token, true),
        _ => None,
    }
}

/// A token with its flags; it is special if `special` or the object says so.
fn flagged(object: &Map<String, Value>, special: bool) -> Option<AddedToken> {
    let content = object.get("content")?.as_str()?;
    let flag = |name: &str| object.get(name).and_then(Value::as_bool);
    let special = special || flag("special").unwrap_or(false);
    let token = AddedToken::from(content, special);
    let normalized = flag("normalized").unwrap_or(token.normalized);
    Some(
        token
            .normalized(normalized)
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false)),
    )
}
