//! How settings name columns: `answer`, or with dots for nested values, `reward_model.ground_truth`.

use serde_json::{Map, Value};

use crate::diagnostic::{nearest, quoted};

/// The value of `column` in a row. A column with exactly this name wins; otherwise a dot reaches into an object, or
/// with a number (from 0) into a list; null on the path gives null. `None` if there is no such value.
///
/// ```
/// use serde_json::json;
/// use verl_pipe::data::find_column;
///
/// let row = json!({"reward_model": {"ground_truth": "18"}, "choices": [{"text": "x"}], "a.b": 1, "a": {"b": 2}});
/// let row = row.as_object().unwrap();
/// assert_eq!(find_column(row, "reward_model.ground_truth").unwrap(), "18");
/// assert_eq!(find_column(row, "choices.0.text").unwrap(), "x");
/// assert_eq!(find_column(row, "a.b").unwrap(), 1);
/// assert_eq!(find_column(row, "choices.1"), None);
/// ```
pub fn find_column<'v>(row: &'v Map<String, Value>, column: &str) -> Option<&'v Value> {
    let whole = row.get(column);
    whole.or_else(|| {
        // At every level, the longest existing name wins.
        let mut dots = column.rmatch_indices('.');
        dots.find_map(|(at, _)| within(row.get(&column[..at])?, &column[at + 1..]))
    })
}

fn within<'v>(value: &'v Value, path: &str) -> Option<&'v Value> {
    match value {
        Value::Object(map) => find_column(map, path),
        Value::Array(list) => {
            let (number, rest) = path
                .split_once('.')
                .map_or((path, None), |(number, rest)| (number, Some(rest)));
            let item = list.get(list_index(number)?)?;
            rest.map_or(Some(item), |rest| within(item, rest))
        }
        Value::Null => Some(value),
        _ => None,
    }
}

/// A part of a column's name as a position in a list: digits only.
pub(crate) fn list_index(part: &str) -> Option<usize> {
    let digits = part.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| part.parse().ok()).flatten()
}

/// Maximum depth of the listed objects.
const DEPTH: usize = 4;
/// Maximum number of listed names, since some data sets have objects with very many keys.
const NAMES: usize = 200;

/// Names of the columns of a row, each followed by its nested columns with dots; lists are not expanded.
pub fn column_names(row: &Map<String, Value>) -> Vec<String> {
    let mut names = Vec::new();
    list_names("", row, DEPTH, &mut names);
    names
}

fn list_names(before: &str, row: &Map<String, Value>, depth: usize, names: &mut Vec<String>) {
    for (name, value) in row {
        if names.len() >= NAMES {
            return;
        }
        let path = format!("{before}{name}");
        names.push(path.clone());
        if let (Value::Object(inside), true) = (value, depth > 1) {
            list_names(&format!("{path}."), inside, depth - 1, names);
        }
    }
}

/// Help for a missing `column` of a row that has `names`.
pub(super) fn missing_column_help(column: &str, names: &[String]) -> String {
    let nested = |name: &&String| {
        let mut dots = name.match_indices('.');
        dots.any(|(at, _)| names.iter().any(|other| *other == name[..at]))
    };
    let top: Vec<&str> = names
        .iter()
        .filter(|name| !nested(name))
        .map(|name| name.as_str())
        .collect();
    let inside: Vec<&str> = names
        .iter()
        .filter(nested)
        .map(|name| name.as_str())
        .collect();
    let mut text = match likely(column, &top, &inside) {
        Some(near) => format!("did you mean `{near}`? "),
        None => String::new(),
    };
    text += &match top.is_empty() {
        true => "the row is empty".to_owned(),
        false => format!("the row has {}", quoted(top)),
    };
    if !inside.is_empty() {
        let more = if inside.len() > SHOWN { ", …" } else { "" };
        text += &format!(
            "; inside them {}{more}",
            quoted(inside.into_iter().take(SHOWN))
        );
    }
    text
}

/// Maximum number of nested names in a message.
const SHOWN: usize = 12;

/// The name that was probably meant: a nested column with the same last part, or one with a similar spelling.
fn likely<'n>(column: &str, top: &[&'n str], inside: &[&'n str]) -> Option<&'n str> {
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
    let asked = last(column);
    let alike = nearest(column, top.iter().chain(inside).copied());
    let same_end = top
        .iter()
        .chain(inside)
        .copied()
        .find(|name| last(name) == asked);
    let parts = inside
        .iter()
        .copied()
        .find(|name| nearest(&asked, [last(name).as_str()]).is_some());
    let near = match column.contains('.') {
        true => parts.or(alike),
        false => alike.or(parts),
    };
    same_end.or(near)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn found(row: &Value, column: &str) -> Option<Value> {
        find_column(row.as_object().expect("an object"), column).cloned()
    }

    /// Row #24 of the list of public reports: rows of verl's own preprocessing.
    #[test]
    fn dots_reach_into_objects_and_lists() {
        let row = json!({
            "prompt": [{"role": "user", "content": "1+1"}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 7, "a.b": {"c": 1}},
        });
        assert_eq!(found(&row, "reward_model.ground_truth"), Some(json!("2")));
        assert_eq!(found(&row, "prompt.0.content"), Some(json!("1+1")));
        assert_eq!(found(&row, "extra_info.index"), Some(json!(7)));
        assert_eq!(found(&row, "extra_info.a.b.c"), Some(json!(1)));
        assert_eq!(found(&json!({"a": null}), "a.b"), Some(Value::Null));
        for column in [
            "reward_model.",
            ".reward_model",
            "prompt.1",
            "prompt.+0",
            "prompt.-1",
            "prompt.0.content.0",
            "",
            ".",
        ] {
            assert_eq!(found(&row, column), None, "{column}");
        }
    }

    #[test]
    fn an_exact_column_name_wins() {
        let row =
            json!({"a.b": 1, "a": {"b": 2, "c": 3}, "x.y": {"z": 4}, "x": {"y": {"z": 5, "w": 6}}});
        assert_eq!(found(&row, "a.b"), Some(json!(1)));
        assert_eq!(found(&row, "a.c"), Some(json!(3)));
        assert_eq!(found(&row, "x.y.z"), Some(json!(4)));
        assert_eq!(found(&row, "x.y.w"), Some(json!(6)));
    }

    #[test]
    fn a_missing_column_is_reported_with_what_is_there() {
        let help = |row: Value, column: &str| {
            let names = column_names(row.as_object().expect("an object"));
            missing_column_help(column, &names)
        };
        let verl = json!({"prompt": [], "reward_model": {"style": "rule", "ground_truth": "2"}});
        assert_eq!(
            help(verl.clone(), "ground_truth"),
            "did you mean `reward_model.ground_truth`? the row has `prompt`, `reward_model`; inside them `reward_model.style`, `reward_model.ground_truth`"
        );
        assert!(
            help(verl.clone(), "ground_truht")
                .starts_with("did you mean `reward_model.ground_truth`?")
        );
        assert!(
            help(verl, "reward_model.ground")
                .starts_with("did you mean `reward_model.ground_truth`?")
        );
        assert_eq!(
            help(json!({"question": "", "answer": ""}), "anwser"),
            "did you mean `answer`? the row has `question`, `answer`"
        );
        assert_eq!(help(json!({"text": ""}), "labels"), "the row has `text`");
        assert_eq!(help(json!({}), "labels"), "the row is empty");
    }
}
