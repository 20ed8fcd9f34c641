//! What is wrong with a value, where it stands, and what to write instead.

use serde_json::{Map, Value};

use super::decode::Fault;
use super::reader::Reader;
use super::synonyms;
use crate::diagnostic::{Diagnostic, nearest, quoted, suggest};

impl Reader<'_> {
    /// A table; a text stands for the table whose `path` it is.
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
                self.invalid(path, place, "it is neither a path nor a table");
                None
            }
        }
    }

    pub(super) fn text(&mut self, path: &[&str], place: &str, value: Value) -> Option<String> {
        match value {
            Value::String(text) => Some(text),
            _ => {
                self.invalid(path, place, "it is not a text");
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
        let misspelt: Vec<Vec<String>> = faults.iter().filter_map(meant).collect();
        for fault in faults {
            // A setting that is there under a misspelt name is not told twice.
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
                Diagnostic::error("C002", format!("there is no setting `{setting}`"))
                    .at(where_)
                    .because("a setting that nothing reads would silently change nothing")
                    .help(known_instead(&key, &known))
            }
            Fault::UnknownKind {
                what, kind, help, ..
            } => Diagnostic::error(
                "C003",
                format!("there is no kind of {what} called `{kind}`"),
            )
            .at(where_)
            .because(format!(
                "`{setting}` chooses what {} {what} is; `{kind}` is not registered",
                article(what)
            ))
            .help(help),
            Fault::Missing { .. } => Diagnostic::error("C004", format!("`{setting}` must be set"))
                .at(where_)
                .because("it has no default")
                .help(format!("add `{key} = …`")),
            Fault::Invalid { reason, known, .. } => {
                // A text that is none of the words stands at the beginning; other values are like none of them.
                let text = reason
                    .strip_prefix('`')
                    .and_then(|rest| rest.split('`').next());
                let near = text.and_then(|text| nearest(text, known.iter().map(String::as_str)));
                let help = match (known.as_slice(), near) {
                    ([], _) => "see `pipe schema` for what may stand here".to_owned(),
                    (known, None) => format!("one of {}", quoted(known.iter().map(String::as_str))),
                    (known, Some(near)) => {
                        format!(
                            "did you mean `{near}`? one of {}",
                            quoted(known.iter().map(String::as_str))
                        )
                    }
                };
                Diagnostic::error("C004", format!("`{setting}` has a value that does not fit"))
                    .at(where_)
                    .because(plain(&reason))
                    .help(help)
            }
        });
    }
}

/// What to write instead of an unknown key: the setting that is called so elsewhere, or the one that is spelt nearly so.
fn known_instead(key: &str, known: &[String]) -> String {
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    if let Some(meant) = synonyms::meant_by(key, &known) {
        return format!(
            "did you mean `{meant}`? known settings here: {}",
            quoted(known)
        );
    }
    let near = nearest(key, known.iter().copied());
    let list = suggest(key, "settings here", known.iter().copied());
    match synonyms::elsewhere(key).filter(|_| near.is_none()) {
        Some(elsewhere) => format!("{elsewhere}; {list}"),
        None => list,
    }
}

/// The path of the setting that an unknown key probably means.
fn meant(fault: &Fault) -> Option<Vec<String>> {
    let Fault::Unknown { path, known } = fault else {
        return None;
    };
    let (last, parents) = path.split_last()?;
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let near = synonyms::meant_by(last, &known).or_else(|| nearest(last, known))?;
    Some(parents.iter().cloned().chain([near.to_owned()]).collect())
}

/// What the deserialiser expects of a whole number, and the largest one that can be written there: a TOML file has none
/// above that of i64.
const WHOLE_NUMBERS: [(&str, i64); 4] = [
    ("expected usize", i64::MAX),
    ("expected u64", i64::MAX),
    ("expected u32", u32::MAX as i64),
    ("expected i64", i64::MAX),
];

/// The number that words such as ``it is the number `1e30` `` tell.
fn number_in(words: &str) -> Option<f64> {
    let number = words.strip_prefix("it is the number `")?;
    number.split('`').next()?.parse().ok()
}

/// The words of the deserialiser without the names of Rust's types.
fn plain(reason: &str) -> String {
    let mut words = reason
        .replace("invalid type: ", "it is ")
        .replace("invalid value: ", "it is ")
        .replace("it is string", "it is the text")
        .replace("it is integer `", "it is the number `")
        .replace("it is floating point `", "it is the number `")
        .replace("it is boolean `", "it is `")
        .replace("it is sequence", "it is a list")
        .replace("it is map", "it is a table");
    for (from, most) in WHOLE_NUMBERS {
        if let Some(start) = words.strip_suffix(from) {
            let needed = match number_in(start) {
                Some(number) if number.fract() == 0.0 && number >= most as f64 + 1.0 => {
                    format!("which is too large: the largest is {most}")
                }
                _ if from == "expected i64" => "but a whole number is needed".to_owned(),
                _ => "but a whole number from 0 is needed".to_owned(),
            };
            words = format!("{start}{needed}");
        }
    }
    for (from, to) in [
        ("expected path string", "but a text is needed"),
        ("expected f64", "but a number is needed"),
        ("expected f32", "but a number is needed"),
        ("expected a string", "but a text is needed"),
        ("expected a boolean", "but true or false is needed"),
        ("expected a sequence", "but a list is needed"),
    ] {
        if let Some(start) = words.strip_suffix(from) {
            words = format!("{start}{to}");
        }
    }
    // What is left names types of Rust.
    match words
        .find(", expected ")
        .filter(|_| words.starts_with("it is "))
    {
        Some(end) => format!("{}, which does not fit here", &words[..end]),
        None => words,
    }
}

/// The article before a word.
fn article(word: &str) -> &'static str {
    if word.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    }
}

/// A path of its own.
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
            .expect("it does not fit");
        assert_eq!(plain(&error.to_string()), expected);
    }

    #[test]
    fn numbers_that_are_too_large_are_told_apart_from_those_of_another_kind() {
        let most = "9223372036854775807";
        check::<u64>(
            1e30.into(),
            &format!("it is the number `1e+30`, which is too large: the largest is {most}"),
        );
        check::<usize>(
            1e20.into(),
            &format!("it is the number `1e+20`, which is too large: the largest is {most}"),
        );
        check::<u32>(
            4_294_967_296_u64.into(),
            "it is the number `4294967296`, which is too large: the largest is 4294967295",
        );
        for (value, told) in [
            (Value::from(-1), "-1"),
            (Value::from(1.5), "1.5"),
            (Value::from(1e3), "1000.0"),
            (Value::from(-1e30), "-1e+30"),
            (Value::from(4_294_967_295.5), "4294967295.5"),
        ] {
            let words = format!("it is the number `{told}`, but a whole number from 0 is needed");
            check::<u32>(value, &words);
        }
        check::<i64>(
            1.5.into(),
            "it is the number `1.5`, but a whole number is needed",
        );
    }
}
