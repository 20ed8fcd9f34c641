//! Turns faults into diagnostics: what is wrong with a value, where it is, and what to write instead.

use serde_json::{Map, Value};
use verl_words::diagnostic::{Diagnostic, nearest, quoted, suggest};

use super::Synonyms;
use super::decode::Fault;
use super::reader::Reader;

impl Reader<'_> {
    /// A table; a string stands for the table with that `path`.
    pub(super) fn table(
        &mut self,
        path: &[&str],
        place: &str,
        value: Value,
    ) -> Option<Map<String, Value>> {
        match value {
            Value::Object(table) => Some(table),
            Value::String(text) => Some(Map::from_iter([("path".to_owned(), Value::String(text))])),
            _ => {
                self.invalid(path, place, "expected a path or a table");
                None
            }
        }
    }

    pub(super) fn text(&mut self, path: &[&str], place: &str, value: Value) -> Option<String> {
        match value {
            Value::String(text) => Some(text),
            _ => {
                self.invalid(path, place, "expected a string");
                None
            }
        }
    }

    pub(super) fn unknown_kind(
        &mut self,
        path: &[&str],
        place: &str,
        what: &'static str,
        kind: String,
        help: String,
    ) {
        let fault = Fault::UnknownKind {
            path: vec!["kind".to_owned()],
            what,
            kind,
            help,
        };
        self.fault(path, place, fault);
    }

    pub(super) fn invalid(&mut self, path: &[&str], place: &str, reason: &str) {
        let fault = Fault::Invalid {
            path: Vec::new(),
            reason: reason.to_owned(),
            known: Vec::new(),
        };
        self.fault(path, place, fault);
    }

    pub(super) fn faults(&mut self, at: &[&str], place: &str, faults: Vec<Fault>) {
        let synonyms = self.registry.known_synonyms();
        let misspelt = faults.iter().filter_map(|fault| meant(fault, synonyms));
        let misspelt: Vec<Vec<String>> = misspelt.collect();
        for fault in faults {
            // A setting that is present under a misspelt name is not also reported as missing.
            if !(matches!(fault, Fault::Missing { .. })
                && misspelt.iter().any(|path| path == fault.path()))
            {
                self.fault(at, place, fault);
            }
        }
    }

    pub(super) fn fault(&mut self, at: &[&str], place: &str, fault: Fault) {
        let mut path = owned(at);
        path.extend(fault.path().iter().cloned());
        let where_ = self.source.place(&path, place);
        let setting = match fault.path() {
            [] => at.last().copied().unwrap_or_default().to_owned(),
            own => own.join("."),
        };
        let key = path.last().cloned().unwrap_or_default();
        self.findings.push(match fault {
            Fault::Unknown { known, .. } => {
                Diagnostic::error("C002", format!("unknown setting `{setting}`"))
                    .at(where_)
                    .because("an unknown setting would be silently ignored")
                    .help(unknown_key_help(
                        &key,
                        &known,
                        self.registry.known_synonyms(),
                    ))
            }
            Fault::UnknownKind {
                what, kind, help, ..
            } => Diagnostic::error("C003", format!("unknown {what} kind `{kind}`"))
                .at(where_)
                .because(format!(
                    "`{setting}` selects a registered kind; `{kind}` is not registered"
                ))
                .help(help),
            Fault::Missing { .. } => Diagnostic::error("C004", format!("`{setting}` must be set"))
                .at(where_)
                .because("it has no default")
                .help(format!("add `{key} = …`")),
            Fault::Invalid { reason, known, .. } => {
                // The reason starts with a string that is not a valid value; other values have no similar ones.
                let text = reason
                    .strip_prefix('`')
                    .and_then(|rest| rest.split('`').next());
                let near = text.and_then(|text| nearest(text, known.iter().map(String::as_str)));
                let help = match (known.as_slice(), near) {
                    ([], _) => "run `pipe schema` to see the valid values".to_owned(),
                    (known, None) => {
                        format!("use one of {}", quoted(known.iter().map(String::as_str)))
                    }
                    (known, Some(near)) => {
                        format!(
                            "did you mean `{near}`? valid values: {}",
                            quoted(known.iter().map(String::as_str))
                        )
                    }
                };
                Diagnostic::error("C004", format!("invalid value for `{setting}`"))
                    .at(where_)
                    .because(plain(&reason))
                    .help(help)
            }
        });
    }
}

/// Help for an unknown key: the setting that other trainers call so, or the one with the most similar spelling.
fn unknown_key_help(key: &str, known: &[String], synonyms: Synonyms<'_>) -> String {
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    if let Some(meant) = synonyms.find(key, &known) {
        return format!(
            "did you mean `{meant}`? known settings here: {}",
            quoted(known)
        );
    }
    let near = nearest(key, known.iter().copied());
    let list = suggest(key, "settings here", known.iter().copied());
    match synonyms.describe_place(key).filter(|_| near.is_none()) {
        Some(place) => format!("{place}; {list}"),
        None => list,
    }
}

/// The path of the setting that an unknown key probably means.
fn meant(fault: &Fault, synonyms: Synonyms<'_>) -> Option<Vec<String>> {
    let Fault::Unknown { path, known } = fault else {
        return None;
    };
    let (last, parents) = path.split_last()?;
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let near = synonyms
        .find(last, &known)
        .or_else(|| nearest(last, known))?;
    Some(parents.iter().cloned().chain([near.to_owned()]).collect())
}

/// What the deserialiser expects of an integer, and the largest one that can be written: TOML has none above that of
/// i64.
const INTEGERS: [(&str, i64); 4] = [
    ("expected usize", i64::MAX),
    ("expected u64", i64::MAX),
    ("expected u32", u32::MAX as i64),
    ("expected i64", i64::MAX),
];

/// The number in words such as ``found the number `1e30` ``.
fn number_in(words: &str) -> Option<f64> {
    let number = words.strip_prefix("found the number `")?;
    number.split('`').next()?.parse().ok()
}

/// The deserialiser's message without the names of Rust types; other reasons stay unchanged.
fn plain(reason: &str) -> String {
    let value = reason
        .strip_prefix("invalid type: ")
        .or_else(|| reason.strip_prefix("invalid value: "));
    let Some(value) = value else {
        return reason.to_owned();
    };
    let words = format!("found {value}")
        .replace("found string", "found the string")
        .replace("found integer `", "found the number `")
        .replace("found floating point `", "found the number `")
        .replace("found boolean `", "found `")
        .replace("found sequence", "found a list")
        .replace("found map", "found a table");
    for (from, most) in INTEGERS {
        if let Some(start) = words.strip_suffix(from) {
            let expected = match number_in(start) {
                Some(number) if number.fract() == 0.0 && number >= most as f64 + 1.0 => {
                    format!("which is too large: the largest is {most}")
                }
                _ if from == "expected i64" => "expected an integer".to_owned(),
                _ => "expected a non-negative integer".to_owned(),
            };
            return format!("{start}{expected}");
        }
    }
    for (from, to) in [
        ("expected path string", "expected a string"),
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected a string", "expected a string"),
        ("expected a boolean", "expected `true` or `false`"),
        ("expected a sequence", "expected a list"),
    ] {
        if let Some(start) = words.strip_suffix(from) {
            return format!("{start}{to}");
        }
    }
    // Anything else names Rust types.
    match words.find(", expected ") {
        Some(end) => format!("{}, which is not valid here", &words[..end]),
        None => words,
    }
}

/// An owned copy of a path.
pub(super) fn owned(path: &[&str]) -> Vec<String> {
    path.iter().map(|part| (*part).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check<T: serde::de::DeserializeOwned>(value: Value, expected: &str) {
        let error = serde_json::from_value::<T>(value)
            .err()
            .expect("it is invalid");
        assert_eq!(plain(&error.to_string()), expected);
    }

    #[test]
    fn too_large_numbers_and_other_numbers_have_different_messages() {
        let most = "9223372036854775807";
        check::<u64>(
            1e30.into(),
            &format!("found the number `1e+30`, which is too large: the largest is {most}"),
        );
        check::<usize>(
            1e20.into(),
            &format!("found the number `1e+20`, which is too large: the largest is {most}"),
        );
        check::<u32>(
            4_294_967_296_u64.into(),
            "found the number `4294967296`, which is too large: the largest is 4294967295",
        );
        for (value, number) in [
            (Value::from(-1), "-1"),
            (Value::from(1.5), "1.5"),
            (Value::from(1e3), "1000.0"),
            (Value::from(-1e30), "-1e+30"),
            (Value::from(4_294_967_295.5), "4294967295.5"),
        ] {
            let words = format!("found the number `{number}`, expected a non-negative integer");
            check::<u32>(value, &words);
        }
        check::<i64>(1.5.into(), "found the number `1.5`, expected an integer");
    }
}
