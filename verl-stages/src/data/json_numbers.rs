//! JSON numbers as written in the file.
//!
//! A JSON number may have any number of digits, while the parser keeps 64 bits. Numbers that need more are quoted before
//! parsing, so that they reach answers, prompts and templates as texts with all their digits.

use serde_json::{Map, Number, Value};

/// Significant digits of a decimal that 64 bits keep.
const KEPT_DIGITS: usize = 17;
/// Significant digits of a decimal that the parser reads without an error in the last bit.
const SAFE_DIGITS: usize = 15;
/// Marks decimals that are parsed here; a private-use character. A row that already contains it is not marked.
const MARK: char = '\u{e000}';

/// Parses a row; numbers that do not fit 64 bits become texts as written in the file: integers beyond 64 bits, and decimals
/// of more than 17 digits or out of range. A decimal that is the entire value of a column stays a number, since it may be a
/// reward; [`written`] returns it as a text.
///
/// # Errors
/// Those of the parser.
pub(super) fn parse(text: &str) -> serde_json::Result<Value> {
    let mut marked = false;
    let rewritten = rewrite(text, |number, depth| match form_of(number, depth) {
        NumberForm::Parsed => None,
        NumberForm::Marked => {
            marked = true;
            Some(format!("\"{MARK}{number}\""))
        }
        NumberForm::Text => Some(format!("\"{number}\"")),
    });
    let has_mark = || text.contains(MARK) || text.to_ascii_lowercase().contains("\\ue000");
    if marked && has_mark() {
        return serde_json::from_str(text);
    }
    let Some(rewritten) = rewritten else {
        return serde_json::from_str(text);
    };
    // On an error the original text is parsed, so that the message has the columns of the file.
    let mut value = serde_json::from_str(&rewritten).or_else(|_| serde_json::from_str(text))?;
    if marked {
        unmark(&mut value);
    }
    Ok(value)
}

/// The row with every number as its text in the file.
///
/// # Errors
/// Those of the parser.
pub(super) fn written(text: &str) -> serde_json::Result<Map<String, Value>> {
    let quoted = rewrite(text, |number, _| Some(format!("\"{number}\"")));
    serde_json::from_str(quoted.as_deref().unwrap_or(text))
}

/// How a number is passed to the parser.
#[derive(Debug, PartialEq, Eq)]
enum NumberForm {
    /// The parser reads it.
    Parsed,
    /// It is parsed here, without an error in the last bit.
    Marked,
    /// It becomes a text.
    Text,
}

fn form_of(number: &str, depth: usize) -> NumberForm {
    let digits = number.trim_start_matches('-');
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        let fits =
            number.len() < 19 || number.parse::<i64>().is_ok() || number.parse::<u64>().is_ok();
        return if fits {
            NumberForm::Parsed
        } else {
            NumberForm::Text
        };
    }
    let mantissa: String = digits
        .chars()
        .take_while(|c| !matches!(c, 'e' | 'E'))
        .filter(|c| *c != '.')
        .collect();
    let significant = mantissa.trim_matches('0').len();
    let parsed = number.parse::<f64>().unwrap_or(f64::NAN);
    let in_range = parsed.is_finite() && (parsed != 0.0 || significant == 0);
    match (in_range, significant) {
        (false, _) => NumberForm::Text,
        (true, significant) if significant > KEPT_DIGITS && depth > 1 => NumberForm::Text,
        (true, significant) if significant > SAFE_DIGITS || digits.contains(['e', 'E']) => {
            NumberForm::Marked
        }
        _ => NumberForm::Parsed,
    }
}

fn unmark(value: &mut Value) {
    match value {
        Value::String(text) => {
            let number = text
                .strip_prefix(MARK)
                .and_then(|number| number.parse().ok());
            if let Some(number) = number.and_then(Number::from_f64) {
                *value = Value::Number(number);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(unmark),
        Value::Object(map) => map.values_mut().for_each(unmark),
        _ => {}
    }
}

/// `text` with numbers replaced by what `instead` returns for them; `None` if it replaces none.
fn rewrite(text: &str, mut instead: impl FnMut(&str, usize) -> Option<String>) -> Option<String> {
    let bytes = text.as_bytes();
    let mut out = String::new();
    let (mut copied, mut at, mut depth) = (0, 0, 0usize);
    while let Some(&byte) = bytes.get(at) {
        let start = at;
        at += 1;
        match byte {
            b'"' => at = after_string(bytes, at),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'-' | b'0'..=b'9' => {
                let in_number =
                    |b: &u8| matches!(b, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                while bytes.get(at).is_some_and(in_number) {
                    at += 1;
                }
                let number = &text[start..at];
                let key = text[at..].trim_start().starts_with(':');
                let value = depth > 0 && !key && is_number(number);
                if let Some(instead) = value.then(|| instead(number, depth)).flatten() {
                    out.push_str(&text[copied..start]);
                    out.push_str(&instead);
                    copied = at;
                }
            }
            _ => {}
        }
    }
    if copied == 0 {
        return None;
    }
    out.push_str(&text[copied..]);
    Some(out)
}

/// The position after the string whose opening quote is before `at`.
fn after_string(bytes: &[u8], mut at: usize) -> usize {
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Whether `text` is a valid JSON number; malformed numbers are left to the parser.
fn is_number(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (text, None),
    };
    let mantissa = mantissa.strip_prefix('-').unwrap_or(mantissa);
    let (integer, fraction) = match mantissa.split_once('.') {
        Some((integer, fraction)) => (integer, Some(fraction)),
        None => (mantissa, None),
    };
    let sound = digits(integer) && (integer == "0" || !integer.starts_with('0'));
    let exponent = exponent.map(|text| text.strip_prefix(['+', '-']).unwrap_or(text));
    sound && fraction.is_none_or(digits) && exponent.is_none_or(digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(text: &str, row: Value, texts: Value) {
        assert_eq!(parse(text).unwrap(), row);
        assert_eq!(Value::Object(written(text).unwrap()), texts);
    }

    /// Row A3: `"answer": 123456789012345678901234567890`.
    #[test]
    fn large_integers_stay_as_written_at_any_depth() {
        let large = "123456789012345678901234567890";
        check(
            &format!(
                r#"{{"a": {large}, "b": [-{large}, {{"c": {large}}}], "d": 18446744073709551615}}"#
            ),
            json!({"a": large, "b": [format!("-{large}"), {"c": large}], "d": u64::MAX}),
            json!({"a": large, "b": [format!("-{large}"), {"c": large}], "d": "18446744073709551615"}),
        );
        check(
            r#"{"a": 18446744073709551616, "b": -9223372036854775808, "c": -9223372036854775809}"#,
            json!({"a": "18446744073709551616", "b": i64::MIN, "c": "-9223372036854775809"}),
            json!({"a": "18446744073709551616", "b": "-9223372036854775808", "c": "-9223372036854775809"}),
        );
    }

    #[test]
    fn decimals_stay_numbers_where_64_bits_keep_them() {
        check(
            r#"{"a": 1.10, "b": [0.30000000000000004, 0.12345678901234567890], "c": 1e400, "d": -0}"#,
            json!({"a": 1.1, "b": [0.30000000000000004, "0.12345678901234567890"], "c": "1e400", "d": -0.0}),
            json!({"a": "1.10", "b": ["0.30000000000000004", "0.12345678901234567890"], "c": "1e400", "d": "-0"}),
        );
        // A column of rewards is read as numbers, however many digits its writer gives.
        let row = parse(r#"{"reward": 0.12345678901234567890, "r": 0.10000000000000001}"#).unwrap();
        assert_eq!(row["reward"].as_f64(), Some(0.123_456_789_012_345_68));
        assert_eq!(row["r"].as_f64(), Some(0.1));
        let texts = written(r#"{"reward": 0.12345678901234567890}"#).unwrap();
        assert_eq!(texts["reward"], "0.12345678901234567890");
    }

    #[test]
    fn texts_and_malformed_numbers_are_unchanged() {
        let text = r#"{"a": "99999999999999999999 \" 1.10", "99999999999999999999": "\\"}"#;
        check(
            text,
            serde_json::from_str(text).unwrap(),
            serde_json::from_str(text).unwrap(),
        );
        for text in [
            r#"{"a": 099999999999999999999}"#,
            r#"{"a": 99999999999999999999.}"#,
            r#"{"a": 99999999999999999999e}"#,
            r#"{"a": --99999999999999999999}"#,
            r#"{"a": 1-99999999999999999999}"#,
            r#"{"a": "99999999999999999999"#,
            r#"{99999999999999999999: 1}"#,
        ] {
            let own = serde_json::from_str::<Value>(text).unwrap_err().to_string();
            assert_eq!(parse(text).unwrap_err().to_string(), own, "{text}");
            assert!(written(text).is_err(), "{text}");
        }
        let marked = "{\"a\": \"\u{e000}7\", \"b\": 0.30000000000000004}";
        assert_eq!(parse(marked).unwrap()["a"], "\u{e000}7");
        assert_eq!(
            parse(r#"{"a": "\uE0007", "b": 1e5}"#).unwrap()["a"],
            "\u{e000}7"
        );
    }
}
