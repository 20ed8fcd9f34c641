//! Words, lines and values of a page.

use serde_json::Value;

/// Maximum width of a line in columns, if its words allow.
const WIDTH: usize = 100;

/// Adds `words` after `head` to `out`, broken between words; further lines after `indent`.
pub(super) fn wrapped(out: &mut String, head: &str, indent: &str, words: &str) {
    let mut line = head.to_owned();
    let mut empty = true;
    for word in words.split_whitespace() {
        let fits = line.chars().count() + 1 + word.chars().count() <= WIDTH;
        if !empty && !fits && !begins_markup(word) {
            *out += &format!("{line}\n");
            line = indent.to_owned();
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line += word;
        empty = false;
    }
    *out += &format!("{line}\n");
}

/// Whether a line that begins with the word would be markup instead of text.
fn begins_markup(word: &str) -> bool {
    let numbered = word.trim_start_matches(|c: char| c.is_ascii_digit());
    matches!(word, "+" | "-" | "*" | "=")
        || word.starts_with(['#', '>', '|'])
        || (numbered.len() < word.len() && matches!(numbered, "." | ")"))
}

/// A value as written in a pipeline file; for a part only its kind.
pub(super) fn inline(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(inline).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(table) => match table.get("kind") {
            Some(kind) => inline(kind),
            None => {
                let pairs = table.iter().filter(|(_, value)| !value.is_null());
                let pairs = pairs.map(|(key, value)| format!("{key} = {}", inline(value)));
                let pairs: Vec<String> = pairs.collect();
                match pairs.is_empty() {
                    true => "{}".to_owned(),
                    false => format!("{{ {} }}", pairs.join(", ")),
                }
            }
        },
        other => other.to_string(),
    }
}

pub(super) fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Adds a full stop, and a capital unless `words` begin with a symbol such as `k` or β.
pub(crate) fn sentence(words: &str) -> String {
    let words = words.trim();
    let mut letters = words.chars();
    let (first, second) = (letters.next(), letters.next());
    let mut out = match (first, second) {
        (Some(first), Some(second))
            if first.is_ascii_lowercase()
                && (second.is_alphabetic() || words.starts_with("a ")) =>
        {
            format!("{}{}", first.to_ascii_uppercase(), &words[1..])
        }
        _ => words.to_owned(),
    };
    if !out.is_empty() && !out.ends_with(['.', '!', '?', ':']) {
        out.push('.');
    }
    out
}

pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(super) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Words in backticks, separated by commas.
pub(super) fn ticked(words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_have_limited_width_and_never_begin_as_markup() {
        let mut out = String::new();
        let words = "x ".repeat(47) + "1 + y " + &"z ".repeat(40);
        wrapped(&mut out, "  - ", "    ", &words);
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("  - x") && lines[1].starts_with("    "));
        assert!(
            lines
                .iter()
                .all(|line| !line.trim_start().starts_with("+ "))
        );
        assert!(begins_markup("1.") && begins_markup("#") && !begins_markup("1.5x"));
    }

    #[test]
    fn values_are_written_as_in_a_pipeline_file() {
        for (value, expected) in [
            (json!("a\"b"), r#""a\"b""#),
            (json!([1, 2.5]), "[1, 2.5]"),
            (json!({"kind": "grpo", "clip": 1}), "\"grpo\""),
            (json!({"a": true, "b": null}), "{ a = true }"),
        ] {
            assert_eq!(inline(&value), expected);
        }
        assert_eq!(sentence("texts end"), "Texts end.");
        assert_eq!(sentence("β: how dear"), "β: how dear.");
        assert_eq!(sentence("k of it."), "k of it.");
        assert_eq!(sentence("a line"), "A line.");
        assert_eq!(sentence(""), "");
    }
}
