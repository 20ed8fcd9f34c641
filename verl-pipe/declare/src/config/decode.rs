//! Deserialises configurations and collects every fault instead of stopping at the first.

use std::fmt;

use schemars::{JsonSchema, SchemaGenerator};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use serde_path_to_error::{Path, Segment};

use super::fit::Shape;
use crate::part::take_faults;

/// What is wrong with one setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A key that the configuration does not have, and the keys that it has.
    Unknown {
        path: Vec<String>,
        known: Vec<String>,
    },
    /// A setting that must be given.
    Missing { path: Vec<String> },
    /// A value that is not valid.
    Invalid {
        path: Vec<String>,
        reason: String,
        known: Vec<String>,
    },
    /// A `kind` that is not registered.
    UnknownKind {
        path: Vec<String>,
        /// What it should be a kind of, such as `loss`.
        what: &'static str,
        kind: String,
        /// Help that lists the known kinds.
        help: String,
    },
}

impl Fault {
    /// Its path, the setting itself last.
    pub fn path(&self) -> &[String] {
        match self {
            Fault::Unknown { path, .. }
            | Fault::Missing { path }
            | Fault::Invalid { path, .. }
            | Fault::UnknownKind { path, .. } => path,
        }
    }

    /// The same fault with `place` in front of its path.
    fn within(mut self, place: &[String]) -> Fault {
        match &mut self {
            Fault::Unknown { path, .. }
            | Fault::Missing { path }
            | Fault::Invalid { path, .. }
            | Fault::UnknownKind { path, .. } => {
                path.splice(0..0, place.iter().cloned());
            }
        }
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setting = self.path().join(".");
        match self {
            Fault::Unknown { .. } => write!(f, "unknown setting `{setting}`"),
            Fault::Missing { .. } => write!(f, "`{setting}` must be set"),
            Fault::Invalid { reason, .. } => write!(f, "invalid value for `{setting}`: {reason}"),
            Fault::UnknownKind {
                what, kind, help, ..
            } => write!(f, "unknown {what} kind `{kind}`; {help}"),
        }
    }
}

/// A configuration and the faults that were found in it. With faults, the configuration may be missing.
pub struct Decoded<T> {
    pub value: Option<T>,
    pub faults: Vec<Fault>,
}

impl<T> Decoded<T> {
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Decoded<U> {
        Decoded {
            value: self.value.map(f),
            faults: self.faults,
        }
    }
}

/// The schema of a configuration, with the definitions that it refers to.
fn schema_of<C: JsonSchema>() -> Value {
    let generator = SchemaGenerator::default();
    generator.into_root_schema_for::<C>().to_value()
}

/// The keys of a configuration, from its schema.
pub(crate) fn keys_of<C: JsonSchema>() -> Vec<String> {
    let schema = schema_of::<C>();
    let properties = schema.get("properties").and_then(Value::as_object);
    properties.map_or_else(Vec::new, |map| map.keys().cloned().collect())
}

/// Like [`decode`], but keys that the schema of `C` does not have are faults even if its `Deserialize` does not check
/// them: with `flatten` it cannot. `more` are keys that other code reads.
pub(crate) fn decode_known<C: DeserializeOwned + JsonSchema>(
    value: Value,
    more: &[&str],
) -> Decoded<C> {
    let Value::Object(settings) = value else {
        return decode(value);
    };
    let mut known = keys_of::<C>();
    let (own, unknown): (Map<_, _>, Map<_, _>) = settings
        .into_iter()
        .partition(|(key, _)| known.contains(key));
    let Decoded { value, mut faults } = decode(Value::Object(own));
    known.extend(more.iter().map(|key| (*key).to_owned()));
    faults.extend(unknown.into_iter().map(|(key, _)| Fault::Unknown {
        path: vec![key],
        known: known.clone(),
    }));
    Decoded { value, faults }
}

/// Deserialises `value`. After each fault it removes the offending setting and tries again, so that all faults are
/// found; a fault whose setting cannot be removed ends the search.
///
/// Where a table with a `kind` is expected, just the name of the kind stands for the kind with its defaults.
pub(crate) fn decode<T: DeserializeOwned + JsonSchema>(mut value: Value) -> Decoded<T> {
    let schema = schema_of::<T>();
    let shape = Shape::of(&schema);
    shape.expand_kinds(&mut value);
    let mut faults: Vec<Fault> = Vec::new();
    loop {
        take_faults();
        let error = match serde_path_to_error::deserialize(&value) {
            Ok(config) => {
                return Decoded {
                    value: Some(config),
                    faults,
                };
            }
            Err(error) => error,
        };
        let at = segments(error.path());
        let of_part = take_faults();
        if !of_part.is_empty() {
            faults.extend(of_part.into_iter().map(|fault| fault.within(&at)));
            if remove(&mut value, &at) {
                continue;
            }
            return Decoded {
                value: None,
                faults,
            };
        }
        let message = error.inner().to_string();
        let at = match at.as_slice() {
            [] => Vec::from_iter(offending_key::<T>(&value, &message)),
            _ => at,
        };
        let fault = refine(fault(at, &message, &value), shape, &value);
        let missing = matches!(fault, Fault::Missing { .. });
        // A setting that was removed because of its own fault, or one inside it, is not also missing.
        let known_already = faults.iter().any(|other| {
            other.path() == fault.path() || (missing && other.path().starts_with(fault.path()))
        });
        let removed = !missing && remove(&mut value, fault.path());
        if !known_already {
            faults.push(fault);
        }
        if !removed {
            return Decoded {
                value: None,
                faults,
            };
        }
    }
}

/// Adds to a fault what the schema knows and the deserialiser does not: the path of the value, and the valid values.
fn refine(fault: Fault, shape: Shape<'_>, value: &Value) -> Fault {
    let Fault::Invalid {
        mut path,
        reason,
        known,
    } = fault
    else {
        return fault;
    };
    let found = shape.follow(value, &path);
    let Some(mismatch) = found.and_then(|(shape, value)| shape.mismatch(value)) else {
        return Fault::Invalid {
            path,
            reason,
            known,
        };
    };
    path.extend(mismatch.path);
    Fault::Invalid {
        path,
        reason: mismatch.reason.unwrap_or(reason),
        known: mismatch.known,
    }
}

/// The setting that causes an error without a path: the one whose removal makes the error disappear. Values that go
/// through `flatten` are buffered, which loses their path.
fn offending_key<T: DeserializeOwned>(value: &Value, message: &str) -> Option<String> {
    if message.starts_with("unknown field `") || message.starts_with("missing field `") {
        return None;
    }
    let table = value.as_object()?;
    let found = table.keys().find(|key| {
        let mut rest = table.clone();
        rest.shift_remove(*key);
        let without = T::deserialize(&Value::Object(rest));
        without.map_or_else(|error| error.to_string() != message, |_| true)
    });
    found.cloned()
}

fn segments(path: &Path) -> Vec<String> {
    path.iter()
        .filter_map(|segment| match segment {
            Segment::Map { key } => Some(key.clone()),
            Segment::Seq { index } => Some(index.to_string()),
            Segment::Enum { .. } | Segment::Unknown => None,
        })
        .collect()
}

/// Parses serde's message, the only source of the unknown or missing name, about `path` of `value`.
fn fault(mut path: Vec<String>, message: &str, value: &Value) -> Fault {
    let mut names = message.split('`').skip(1).step_by(2).map(str::to_owned);
    if message.starts_with("unknown field `") {
        let key = names.next().unwrap_or_default();
        if path.last() != Some(&key) {
            path.push(key);
        }
        return Fault::Unknown {
            path,
            known: names.collect(),
        };
    }
    if message.starts_with("missing field `") {
        path.extend(names.next());
        return Fault::Missing { path };
    }
    if message.starts_with("unknown variant `") {
        let given = names.next().unwrap_or_default();
        let at = |path: &[String]| {
            value.pointer(&path.iter().map(|key| format!("/{key}")).collect::<String>())
        };
        let is_value = at(&path).and_then(Value::as_str) == Some(&given);
        let is_key = at(&path).and_then(|table| table.get(&given)).is_some();
        // A key of a table whose keys are words of a list; the path may end at the table or at the key.
        if is_key || path.last() == Some(&given) && !is_value {
            if is_key {
                path.push(given);
            }
            return Fault::Unknown {
                path,
                known: names.collect(),
            };
        }
        return Fault::Invalid {
            path,
            reason: format!("`{given}` is not a valid value"),
            known: names.collect(),
        };
    }
    Fault::Invalid {
        path,
        reason: message.to_owned(),
        known: Vec::new(),
    }
}

/// Removes the value at `path`; returns whether there was one.
fn remove(value: &mut Value, path: &[String]) -> bool {
    let Some((last, parents)) = path.split_last() else {
        return false;
    };
    let mut at = value;
    for key in parents {
        let next = match at {
            Value::Object(map) => map.get_mut(key),
            Value::Array(list) => key
                .parse::<usize>()
                .ok()
                .and_then(|index| list.get_mut(index)),
            _ => None,
        };
        match next {
            Some(next) => at = next,
            None => return false,
        }
    }
    match at {
        Value::Object(map) => map.shift_remove(last).is_some(),
        // Removing an element would renumber the others.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Deserialize, JsonSchema, Debug, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        needed: u32,
        #[serde(default)]
        inner: Option<Inner>,
        #[serde(default)]
        choice: Option<Choice>,
        #[serde(default)]
        shares: BTreeMap<Word, f64>,
    }

    #[derive(Deserialize, JsonSchema, Debug, PartialEq, Eq, PartialOrd, Ord)]
    #[serde(rename_all = "snake_case")]
    enum Word {
        Red,
        Blue,
    }

    #[derive(Deserialize, JsonSchema, Debug, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    #[derive(Default)]
    struct Inner {
        rate: f64,
    }

    #[derive(Deserialize, JsonSchema, Debug, PartialEq)]
    #[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
    enum Choice {
        First {
            #[serde(default)]
            size: u32,
        },
    }

    #[track_caller]
    fn check(value: Value, expected: &[(&str, &str)]) {
        let found: Vec<(String, String)> = decode::<Outer>(value)
            .faults
            .into_iter()
            .map(|fault| {
                let kind = match &fault {
                    Fault::Unknown { known, .. } => format!("unknown, not {}", known.join(" ")),
                    Fault::Missing { .. } => "missing".to_owned(),
                    Fault::Invalid { known, .. } => format!("invalid {}", known.join(" ")),
                    Fault::UnknownKind { kind, .. } => format!("no kind {kind}"),
                };
                (fault.path().join("."), kind.trim_end().to_owned())
            })
            .collect();
        let found: Vec<(&str, &str)> = found
            .iter()
            .map(|(path, kind)| (path.as_str(), kind.as_str()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn all_faults_are_found() {
        check(
            json!({"needed": 1, "inner": {"rate": 0.5}, "choice": {"kind": "first", "size": 2}}),
            &[],
        );
        check(
            json!({"neded": 1, "inner": {"rate": "x", "rat": 1.0}}),
            &[
                ("neded", "unknown, not needed inner choice shares"),
                ("inner.rate", "invalid"),
                ("inner.rat", "unknown, not rate"),
                ("needed", "missing"),
            ],
        );
        check(json!({"needed": "one"}), &[("needed", "invalid")]);
        check(
            json!({"needed": 1, "choice": {"kind": "first", "sise": 2}}),
            &[("choice.sise", "unknown, not size")],
        );
        check(
            json!({"needed": 1, "choice": {"kind": "frist"}}),
            &[("choice.kind", "invalid first")],
        );
        check(json!(3), &[("", "invalid")]);
        // Keys that are words.
        check(
            json!({"needed": 1, "shares": {"red": 0.5, "bleu": 0.5, "blue": "x"}}),
            &[
                ("shares.bleu", "unknown, not red blue"),
                ("shares.blue", "invalid"),
            ],
        );
        // Just the name of a kind.
        check(json!({"needed": 1, "choice": "first"}), &[]);
        check(
            json!({"needed": 1, "choice": "frist"}),
            &[("choice.kind", "invalid first")],
        );
        // Values that are buffered for their kind have lost their path.
        check(
            json!({"needed": 1, "choice": {"kind": "first", "size": -1}}),
            &[("choice.size", "invalid")],
        );
    }

    #[derive(Deserialize, JsonSchema)]
    #[expect(dead_code, reason = "only its faults are checked")]
    struct Flat {
        #[serde(flatten)]
        inner: Inner,
        #[serde(default)]
        size: u32,
    }

    #[test]
    fn faults_in_flattened_settings_name_the_setting() {
        let value = json!({"size": "x", "rate": "y"});
        let faults = decode::<Flat>(value).faults;
        let paths: Vec<String> = faults.iter().map(|fault| fault.path().join(".")).collect();
        assert_eq!(paths, ["size", "rate"]);
    }
}
