//! config.json: reads it as an object, and its settings with errors that name them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use verl_text::files;

use super::{LoadError, weights};
use crate::decoder::DecoderConfig;
use crate::families;

/// The folder that a model was loaded from, with its original config.json.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The folder.
    pub dir: PathBuf,
    /// config.json.
    pub config: Map<String, Value>,
}

impl Origin {
    /// Reads the config.json of a folder.
    ///
    /// # Errors
    /// The folder does not exist or contains an adapter, or config.json does not exist or is not a JSON object.
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let missing = |reason| LoadError::Folder {
            dir: dir.to_path_buf(),
            reason,
        };
        if !dir.exists() {
            return Err(missing("does not exist"));
        }
        if !dir.is_dir() {
            return Err(missing("is not a folder"));
        }
        refuse_adapter(dir)?;
        if !dir.join("config.json").exists()
            && let Some(found) = weights::other_weights(dir)
        {
            return Err(LoadError::NoConfig {
                dir: dir.to_path_buf(),
                found,
            });
        }
        Ok(Origin {
            dir: dir.to_path_buf(),
            config: read_object(&dir.join("config.json"))?,
        })
    }

    /// The decoder that config.json describes.
    ///
    /// # Errors
    /// See [`families::decoder_config`].
    pub fn decoder_config(&self) -> Result<DecoderConfig, LoadError> {
        families::decoder_config(&self.settings())
    }

    /// The settings of config.json.
    pub fn settings(&self) -> Settings<'_> {
        Settings {
            path: self.dir.join("config.json"),
            map: &self.config,
        }
    }
}

/// Refuses the folder of an adapter (PEFT), with or without a model in it: an adapter is not a model on its own, and
/// next to a model it changes that model.
fn refuse_adapter(dir: &Path) -> Result<(), LoadError> {
    let path = dir.join("adapter_config.json");
    if !path.exists() {
        return Ok(());
    }
    let config = read_object(&path)?;
    let text = |name: &str| config.get(name).and_then(Value::as_str);
    Err(LoadError::Adapter {
        dir: dir.to_path_buf(),
        kind: text("peft_type").unwrap_or("PEFT").to_owned(),
        base: text("base_model_name_or_path").map_or_else(
            || "an unnamed base model".to_owned(),
            |base| format!("`{base}`"),
        ),
    })
}

/// The JSON object in a file. A byte-order mark is skipped.
///
/// # Errors
/// The file cannot be read or contains anything else.
pub fn read_object(path: &Path) -> Result<Map<String, Value>, LoadError> {
    let bytes = fs::read(path).map_err(|error| LoadError::file(path, error))?;
    files::json_object(&bytes).map_err(|reason| LoadError::file(path, reason))
}

/// Settings of a JSON object. `null` counts as absent, as it does in `transformers`.
#[derive(Debug, Clone)]
pub struct Settings<'a> {
    /// The file they come from, for messages.
    pub path: PathBuf,
    /// The object.
    pub map: &'a Map<String, Value>,
}

impl<'a> Settings<'a> {
    /// An error about this file.
    pub fn error(&self, reason: impl Into<String>) -> LoadError {
        LoadError::Config {
            path: self.path.clone(),
            reason: reason.into(),
        }
    }

    /// A setting; `None` if absent.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A nested object; `None` if absent.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn object(&self, name: &str) -> Result<Option<Settings<'a>>, LoadError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Settings {
                path: self.path.clone(),
                map,
            })),
            Some(other) => Err(self.wrong(name, "an object", other)),
        }
    }

    /// A whole number of at least 1.
    ///
    /// # Errors
    /// The setting is absent or is not such a number.
    pub fn size(&self, name: &str) -> Result<usize, LoadError> {
        self.optional_size(name)?
            .ok_or_else(|| self.error(format!("`{name}` is missing")))
    }

    /// A whole number of at least 1; `None` if absent.
    ///
    /// # Errors
    /// The value is not such a number.
    pub fn optional_size(&self, name: &str) -> Result<Option<usize>, LoadError> {
        let read = |value: &Value| match value.as_u64().map(usize::try_from) {
            Some(Ok(size)) if size > 0 => Ok(size),
            _ => Err(self.wrong(name, "a whole number of at least 1", value)),
        };
        self.get(name).map(read).transpose()
    }

    /// A whole number; `None` if absent.
    ///
    /// # Errors
    /// The value is not a whole number.
    pub fn count(&self, name: &str) -> Result<Option<usize>, LoadError> {
        let read = |value: &Value| match value.as_u64().map(usize::try_from) {
            Some(Ok(count)) => Ok(count),
            _ => Err(self.wrong(name, "a whole number", value)),
        };
        self.get(name).map(read).transpose()
    }

    /// A finite number above zero; `None` if absent.
    ///
    /// # Errors
    /// The value is not such a number.
    pub fn positive(&self, name: &str) -> Result<Option<f64>, LoadError> {
        let read = |value: &Value| match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(number),
            _ => Err(self.wrong(name, "a number above 0", value)),
        };
        self.get(name).map(read).transpose()
    }

    /// `true` or `false`; an absent setting counts as `false`.
    ///
    /// # Errors
    /// The value is not a boolean.
    pub fn flag(&self, name: &str) -> Result<bool, LoadError> {
        match self.get(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(name, "true or false", other)),
        }
    }

    /// A string; `None` if absent.
    ///
    /// # Errors
    /// The value is not a string.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, LoadError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", other)),
        }
    }

    /// A token id or a list of them; empty if absent. Negative ids, as in old configs, mean none.
    ///
    /// # Errors
    /// The value is neither.
    pub fn token_ids(&self, name: &str) -> Result<Vec<u32>, LoadError> {
        let value = match self.get(name) {
            None => return Ok(Vec::new()),
            Some(value) => value,
        };
        let wrong = || self.wrong(name, "a token id or a list of them", value);
        let values = match value {
            Value::Array(values) => values.as_slice(),
            single => std::slice::from_ref(single),
        };
        let ids = values.iter().map(|id| id.as_i64().ok_or_else(wrong));
        let ids = ids.collect::<Result<Vec<i64>, _>>()?;
        let known = ids.into_iter().filter(|id| *id >= 0);
        known
            .map(|id| u32::try_from(id).map_err(|_| wrong()))
            .collect()
    }

    fn wrong(&self, name: &str, expected: &str, got: &Value) -> LoadError {
        self.error(format!("`{name}` must be {expected}, got {got}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check<T: PartialEq + std::fmt::Debug>(
        json: Value,
        read: impl Fn(&Settings<'_>) -> Result<T, LoadError>,
        expected: Result<T, &str>,
    ) {
        let Value::Object(map) = json else {
            panic!("the test passes an object")
        };
        let settings = Settings {
            path: "config.json".into(),
            map: &map,
        };
        let got = read(&settings).map_err(|error| error.to_string());
        assert_eq!(
            got,
            expected.map_err(|reason| format!("`config.json`: {reason}"))
        );
    }

    #[test]
    fn sizes_are_at_least_one() {
        check(json!({"n": 3}), |s| s.size("n"), Ok(3));
        check(json!({}), |s| s.size("n"), Err("`n` is missing"));
        check(json!({"n": null}), |s| s.optional_size("n"), Ok(None));
        check(
            json!({"n": 0}),
            |s| s.size("n"),
            Err("`n` must be a whole number of at least 1, got 0"),
        );
        check(
            json!({"n": 1.5}),
            |s| s.size("n"),
            Err("`n` must be a whole number of at least 1, got 1.5"),
        );
    }

    #[test]
    fn token_ids_are_one_or_many() {
        check(json!({}), |s| s.token_ids("eos"), Ok(vec![]));
        check(json!({"eos": 2}), |s| s.token_ids("eos"), Ok(vec![2]));
        check(
            json!({"eos": [5, 2]}),
            |s| s.token_ids("eos"),
            Ok(vec![5, 2]),
        );
        check(json!({"eos": -1}), |s| s.token_ids("eos"), Ok(vec![]));
        check(
            json!({"eos": "</s>"}),
            |s| s.token_ids("eos"),
            Err("`eos` must be a token id or a list of them, got \"</s>\""),
        );
    }
}
