//! The location of a setting: a line of the file, or an override on the command line.

use serde_json::{Map, Value};
use toml::de::{DeTable, DeValue};
use verl_words::diagnostic::Diagnostic;

/// The text of a pipeline file, for reporting line numbers.
pub(crate) struct Source<'a> {
    /// The file's name, for messages.
    name: String,
    text: &'a str,
    table: DeTable<'a>,
    /// Paths set by overrides, each with the text of its override.
    pub overridden: Vec<(Vec<String>, String)>,
}

impl<'a> Source<'a> {
    /// Parses the text.
    ///
    /// # Errors
    /// All syntax errors.
    pub fn parse(name: &str, text: &'a str) -> Result<(Self, Map<String, Value>), Vec<Diagnostic>> {
        let (table, errors) = DeTable::parse_recoverable(text);
        let source = Source {
            name: name.to_owned(),
            text,
            table: table.into_inner(),
            overridden: Vec::new(),
        };
        let mut findings: Vec<Diagnostic> =
            errors.iter().map(|error| source.syntax(error)).collect();
        if findings.is_empty() {
            match text.parse::<toml::Table>() {
                Ok(table) => {
                    let document = object(table, Some(&source.table));
                    return Ok((source, document));
                }
                Err(error) => findings.push(source.syntax(&error)),
            }
        }
        Err(findings)
    }

    fn syntax(&self, error: &toml::de::Error) -> Diagnostic {
        let line = error.span().map(|span| self.line(span.start));
        let quoted = line
            .and_then(|line| self.text.lines().nth(line - 1))
            .map_or(String::new(), |text| {
                format!(": `{}`", shortened(text.trim()))
            });
        let place = match line {
            Some(line) => format!("{}:{line}{quoted}", self.name),
            None => self.name.clone(),
        };
        let finding = Diagnostic::error("C001", "the pipeline file is not valid TOML").at(place);
        let spanned = error.span().and_then(|span| self.text.get(span));
        if let Some(number) = spanned.filter(|text| out_of_range_integer(text).is_some()) {
            let (word, extreme, limit) = match number.starts_with('-') {
                true => ("small", "smallest", i64::MIN),
                false => ("large", "largest", i64::MAX),
            };
            return finding
                .because(format!(
                    "the integer `{}` is too {word}: the {extreme} integer in TOML is {limit}",
                    shortened(number)
                ))
                .help("use a number in the range of the setting");
        }
        finding
            .because(error.message().to_owned())
            .help(match error.message() {
                "duplicate key" => "define each setting and each table only once",
                _ => "fix the line; put strings in quotes, start a table with `[name]` and a stage with `[[stages]]`",
            })
    }

    fn line(&self, offset: usize) -> usize {
        self.text
            .bytes()
            .take(offset)
            .filter(|&byte| byte == b'\n')
            .count()
            + 1
    }

    /// The location of the setting at `path`: file and line, or the override that set it; and its section.
    pub fn place(&self, path: &[String], section: &str) -> String {
        let by_override = self
            .overridden
            .iter()
            .rev()
            .find(|(set, _)| path.starts_with(set) || set.starts_with(path));
        if let Some((_, text)) = by_override {
            return format!("override `{text}`, {section}");
        }
        match self.offset(path) {
            Some(offset) => format!("{}:{}, {section}", self.name, self.line(offset)),
            None => format!("{}, {section}", self.name),
        }
    }

    /// Byte offset of the deepest part of `path` that the file contains.
    fn offset(&self, path: &[String]) -> Option<usize> {
        let (first, rest) = path.split_first()?;
        let (key, value) = self
            .table
            .iter()
            .find(|(key, _)| key.get_ref() == first.as_str())?;
        let (mut offset, mut at) = (key.span().start, value);
        for segment in rest {
            let next = match at.get_ref() {
                DeValue::Table(table) => table
                    .iter()
                    .find(|(key, _)| key.get_ref() == segment.as_str())
                    .map(|(key, value)| (key.span().start, value)),
                DeValue::Array(list) => segment
                    .parse::<usize>()
                    .ok()
                    .and_then(|index| list.get(index))
                    .map(|value| (value.span().start, value)),
                _ => None,
            };
            match next {
                Some((start, value)) => (offset, at) = (start, value),
                None => break,
            }
        }
        Some(offset)
    }
}

/// Parses an integer that is out of TOML's range; `None` for any other text.
pub(super) fn out_of_range_integer(text: &str) -> Option<f64> {
    const RADIXES: [(&str, u32); 3] = [("0x", 16), ("0o", 8), ("0b", 2)];
    let plain = text.replace('_', "");
    let mut radixes = RADIXES.iter();
    let prefixed = radixes.find_map(|(prefix, radix)| Some((plain.strip_prefix(prefix)?, *radix)));
    let (signed, radix) = prefixed.unwrap_or((&plain, 10));
    let digits = match radix {
        10 => signed.strip_prefix(['-', '+']).unwrap_or(signed),
        _ => signed,
    };
    let whole = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    if !whole || i64::from_str_radix(signed, radix).is_ok() {
        return None;
    }
    if radix == 10 {
        return plain.parse().ok();
    }
    let values = digits.chars().filter_map(|digit| digit.to_digit(radix));
    Some(values.fold(0.0, |number, digit| {
        number * f64::from(radix) + f64::from(digit)
    }))
}

/// A line of the file as shown in a message: shortened, with control characters escaped.
fn shortened(line: &str) -> String {
    const SHOWN: usize = 60; // bytes
    let mut text = String::new();
    for letter in line.chars() {
        if text.len() >= SHOWN {
            text.push('…');
            break;
        }
        if letter.is_control() {
            text.extend(letter.escape_default());
        } else {
            text.push(letter);
        }
    }
    text
}

/// A table as JSON. Keys keep the order of the text where it is known; dates become strings.
fn object(table: toml::Table, text: Option<&DeTable<'_>>) -> Map<String, Value> {
    let mut entries: Vec<_> = table
        .into_iter()
        .map(|(key, value)| {
            let place =
                text.and_then(|text| text.iter().find(|(other, _)| *other.get_ref() == key));
            let start = place.map_or(0, |(key, _)| key.span().start);
            (
                start,
                key,
                json(value, place.map(|(_, value)| value.get_ref())),
            )
        })
        .collect();
    entries.sort_by_key(|(start, ..)| *start);
    entries
        .into_iter()
        .map(|(_, key, value)| (key, value))
        .collect()
}

/// A value as JSON. Numbers that JSON cannot represent (inf, nan) become strings, which no numeric setting accepts.
pub(crate) fn json(value: toml::Value, text: Option<&DeValue<'_>>) -> Value {
    match value {
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => serde_json::Number::from_f64(number)
            .map_or_else(|| Value::String(number.to_string()), Value::Number),
        toml::Value::Boolean(flag) => Value::Bool(flag),
        toml::Value::Datetime(date) => Value::String(date.to_string()),
        toml::Value::Array(list) => {
            let texts = match text {
                Some(DeValue::Array(texts)) => Some(texts),
                _ => None,
            };
            let element = |index: usize| {
                texts
                    .and_then(|texts| texts.get(index))
                    .map(|text| text.get_ref())
            };
            list.into_iter()
                .enumerate()
                .map(|(index, value)| json(value, element(index)))
                .collect()
        }
        toml::Value::Table(table) => {
            let text = match text {
                Some(DeValue::Table(text)) => Some(text),
                _ => None,
            };
            Value::Object(object(table, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_integers_are_reported_with_the_limit() {
        let message = |number: &str| {
            let text = format!("[batch]\nprompts = {number}\n");
            let findings = Source::parse("a.toml", &text)
                .err()
                .expect("it is not TOML");
            findings[0].to_string().replace("\n         ", " ")
        };
        let large = "is too large: the largest integer in TOML is 9223372036854775807";
        for number in [
            "9223372036854775808",
            "18446744073709551616",
            "99_999_999_999_999_999_999",
            "+1000000000000000000000000000000000000000000",
            "0x8000000000000000",
            "0xFFFFFFFFFFFFFFFFFF",
            "0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF",
            "0o7777777777777777777777777",
        ] {
            let message = message(number);
            assert!(
                message.contains(&format!("`{number}` {large}")),
                "{message}"
            );
            assert!(message.contains("a.toml:2"), "{message}");
        }
        let small = message("-9223372036854775809");
        let limit = "is too small: the smallest integer in TOML is -9223372036854775808";
        assert!(small.contains(limit), "{small}");
        for other in ["007", "1__0", "1e", "12x"] {
            assert!(!message(other).contains("integer in TOML"), "{other}");
        }
    }
}
