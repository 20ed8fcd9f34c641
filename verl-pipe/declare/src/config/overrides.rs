//! Overrides: `key=value` on the command line sets any setting of a pipeline file.
//!
//! The first part of the dotted key is a section of the file, else a model, else a stage; a key without a dot is a
//! setting of `[run]`.
//!
//! An empty value removes a setting from the file, so that its default applies; an empty string is `key=""`.
//!
//! A string given for a part of a stage (its loss, its estimator) is the part's kind: that kind with its defaults
//! replaces what the file says.
//!
//! A string given for an entire data set or model is its `path`. A relative path of data or a model is resolved against
//! the working directory, or against the pipeline file's folder if it exists only there.

use std::path::Path;

use serde_json::{Map, Value};
use verl_words::diagnostic::{Diagnostic, quoted, suggest};

use super::{SECTIONS, Synonyms, source};

/// The folders against which a relative path of an override may be resolved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folders<'a> {
    /// The working directory.
    pub working: &'a Path,
    /// Folder of the pipeline file.
    pub file: &'a Path,
}

/// Names that an override may use or mean.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownNames<'a> {
    /// The settings of `[run]`.
    pub run_keys: &'a [String],
    /// Names of settings in other trainers.
    pub synonyms: Synonyms<'a>,
}

/// Applies `text`; returns the path that it set. Without `folders`, relative paths stay unchanged.
pub(crate) fn apply(
    document: &mut Map<String, Value>,
    text: &str,
    names: KnownNames<'_>,
    folders: Option<Folders<'_>>,
) -> Result<Vec<String>, Diagnostic> {
    let fault = |why: String, help: String| {
        Diagnostic::error("C006", format!("cannot apply the override `{text}`"))
            .at("command line")
            .because(why)
            .help(help)
    };
    let form =
        "write key=value, for example `steps=10`, `generate.temperature=0.7`, `data.train=FILE`";
    let Some((key, value)) = text.split_once('=') else {
        return Err(fault("it has no `=`".to_owned(), form.to_owned()));
    };
    let parts: Vec<String> = key
        .trim()
        .split('.')
        .map(|part| part.trim().to_owned())
        .collect();
    if parts.iter().any(String::is_empty) {
        return Err(fault(
            "a part of its key is empty".to_owned(),
            form.to_owned(),
        ));
    }
    let path = resolve(document, &parts, names).map_err(|(why, help)| fault(why, help))?;
    if value.trim().is_empty() {
        return unset(document, &path).map_err(|(why, help)| fault(why, help));
    }
    let mut value = parse(value);
    if let (Some(folders), Value::String(text), true) = (folders, &mut value, is_file(&path)) {
        *text = folders.absolute(text);
    }
    set(document, &path, value).map_err(|why| fault(why, form.to_owned()))
}

/// Reports an override that sets the same setting of a trace rule as an earlier one. For other settings the last
/// override wins, but a rule guards a run, so the order of two overrides must not decide its limit.
pub(crate) fn duplicate_rule(
    earlier: &[(Vec<String>, String)],
    path: &[String],
    text: &str,
) -> Option<Diagnostic> {
    let of_rule = path
        .iter()
        .map(String::as_str)
        .take(2)
        .eq(["trace", "rules"]);
    let (_, first) = earlier.iter().find(|(set, _)| of_rule && set == path)?;
    let finding = Diagnostic::error("C006", format!("cannot apply the override `{text}`"))
        .at("command line")
        .because(format!("`{first}` sets the same setting of the rule"))
        .help("remove one of the two");
    Some(finding)
}

/// Whether a string at `path` of the document is the path of data or of a model.
fn is_file(path: &[String]) -> bool {
    match path {
        [section, _] => section == "data" || section == "models",
        [section, _, key] => (section == "data" || section == "models") && key == "path",
        _ => false,
    }
}

impl Folders<'_> {
    /// The path `text` resolved against the working directory, or `text` itself if only the file's folder has it.
    fn absolute(self, text: &str) -> String {
        let joined = self.working.join(text);
        if !joined.exists() && self.file.join(text).exists() {
            return text.to_owned();
        }
        // Fails only for a working directory that is not valid UTF-8.
        joined.to_str().unwrap_or(text).to_owned()
    }
}

/// Removes the setting at `path` of the document.
fn unset(
    document: &mut Map<String, Value>,
    path: &[String],
) -> Result<Vec<String>, (String, String)> {
    let mut root = Value::Object(std::mem::take(document));
    let done = unset_in(&mut root, path);
    if let Value::Object(map) = root {
        *document = map;
    }
    done.map(|()| path.to_vec())
}

fn unset_in(root: &mut Value, path: &[String]) -> Result<(), (String, String)> {
    let Some((last, parents)) = path.split_last() else {
        return Err(not_set("", &[]));
    };
    let mut at = root;
    for key in parents {
        let child = match at {
            Value::Object(table) => table.get_mut(key),
            Value::Array(list) => key
                .parse()
                .ok()
                .and_then(|index: usize| list.get_mut(index)),
            _ => None,
        };
        at = child.ok_or_else(|| not_set(last, &[]))?;
    }
    let Value::Object(table) = at else {
        return Err((
            "it would remove an entire stage".to_owned(),
            "use overrides for settings only; remove the stage in a copy of the file".to_owned(),
        ));
    };
    if table.shift_remove(last).is_none() {
        let known: Vec<&str> = table.keys().map(String::as_str).collect();
        return Err(not_set(last, &known));
    }
    Ok(())
}

/// Reports a setting that cannot be removed because the file does not set it.
fn not_set(key: &str, known: &[&str]) -> (String, String) {
    let known = match known {
        [] => String::new(),
        known => {
            let known = suggest(
                key,
                "settings in this table of the file",
                known.iter().copied(),
            );
            format!("; {known}")
        }
    };
    (
        format!("an empty value removes `{key}`, but the file does not set it"),
        format!("omit it, since the default already applies; an empty string is `=\"\"`{known}"),
    )
}

/// A TOML value, or a string if the text is not one. Integers that are too large for TOML are still numbers.
fn parse(value: &str) -> Value {
    let value = value.trim();
    let mut line = format!("v = {value}");
    let mut table = line.parse::<toml::Table>();
    while let Err(error) = &table {
        let large = error.span().and_then(|span| {
            let number = source::out_of_range_integer(line.get(span.clone())?)?;
            number.is_finite().then_some((span, number))
        });
        let Some((span, number)) = large else { break };
        line.replace_range(span, &format!("{number:e}"));
        table = line.parse();
    }
    let parsed = table.ok().filter(|table| table.len() == 1);
    match parsed.and_then(|mut table| table.remove("v")) {
        Some(value) => source::json(value, None),
        None => Value::String(value.to_owned()),
    }
}

/// Resolves the parts of a key to a path in the document.
fn resolve(
    document: &Map<String, Value>,
    parts: &[String],
    names: KnownNames<'_>,
) -> Result<Vec<String>, (String, String)> {
    let path = |head: &[&str], rest: &[String]| -> Vec<String> {
        head.iter()
            .map(|part| (*part).to_owned())
            .chain(rest.iter().cloned())
            .collect()
    };
    let Some((first, rest)) = parts.split_first() else {
        return Ok(Vec::new());
    };
    let stages = stage_names(document);
    let stage_at = |name: &str| stages.iter().position(|stage| stage == name);
    match (first.as_str(), rest) {
        ("name", []) => return Ok(path(&["name"], &[])),
        ("stages", [stage, rest @ ..]) => {
            let index = stage_at(stage).ok_or_else(|| {
                let known = stages.iter().map(String::as_str);
                (
                    format!("there is no stage `{stage}`"),
                    suggest(stage, "stages", known),
                )
            })?;
            return Ok(path(&["stages", &index.to_string()], rest));
        }
        (section @ ("data" | "models"), [name, rest @ ..]) => {
            let known = table_names(document, section);
            if !known.is_empty() && !known.contains(&name.as_str()) {
                let what = if section == "data" {
                    "data sets"
                } else {
                    "models"
                };
                return Err((
                    format!("[{section}] declares no `{name}`"),
                    suggest(name, what, known.iter().copied()),
                ));
            }
            return Ok(path(&[section, name], rest));
        }
        (section, [_, ..]) if SECTIONS.contains(&section) => return Ok(path(&[section], rest)),
        (model, _) if table_names(document, "models").contains(&model) => {
            return Ok(path(&["models", model], rest));
        }
        (stage, [_, ..]) if stage_at(stage).is_some() => {
            let index = stage_at(stage).unwrap_or_default();
            return Ok(path(&["stages", &index.to_string()], rest));
        }
        (key, []) if names.run_keys.iter().any(|known| known == key) => {
            return Ok(path(&["run", key], &[]));
        }
        _ => {}
    }
    let models = table_names(document, "models");
    if rest.is_empty() {
        let known = names
            .run_keys
            .iter()
            .map(String::as_str)
            .chain(models.iter().copied());
        let known: Vec<&str> = known.collect();
        let meant = match names.synonyms.find(first, &known) {
            Some(meant) => format!("did you mean `{meant}`? "),
            None => match names.synonyms.describe_place(first) {
                Some(place) if verl_words::diagnostic::nearest(first, known.clone()).is_none() => {
                    format!("{place}; ")
                }
                _ => String::new(),
            },
        };
        return Err((
            format!("`{first}` is neither a setting of [run] nor a model"),
            format!(
                "{meant}{}; prefix other settings with their section, model or stage: `generate.temperature=0.7`",
                suggest(first, "settings", known)
            ),
        ));
    }
    let known: Vec<&str> = SECTIONS
        .iter()
        .copied()
        .chain(models.iter().copied())
        .chain(stages.iter().map(String::as_str))
        .collect();
    Err((
        format!("`{first}` is not a section, model or stage of the pipeline"),
        match verl_words::diagnostic::nearest(first, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}.{}`?", rest.join(".")),
            None => format!("start the key with one of {}", quoted(known)),
        },
    ))
}

fn table_names<'a>(document: &'a Map<String, Value>, section: &str) -> Vec<&'a str> {
    let table = document.get(section).and_then(Value::as_object);
    table.map_or_else(Vec::new, |table| table.keys().map(String::as_str).collect())
}

/// Names of the stages: `name`, else `kind`.
fn stage_names(document: &Map<String, Value>) -> Vec<String> {
    let list = document.get("stages").and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .map(|stage| {
            let name = stage
                .get("name")
                .or_else(|| stage.get("kind"))
                .and_then(Value::as_str);
            name.unwrap_or_default().to_owned()
        })
        .collect()
}

/// Sets the value at `path` and creates missing tables. A string given for a table (a model, a data set) is its `path`;
/// it replaces a data set that does not have one.
fn set(
    document: &mut Map<String, Value>,
    path: &[String],
    value: Value,
) -> Result<Vec<String>, String> {
    let mut root = Value::Object(std::mem::take(document));
    let done = set_in(&mut root, path, value);
    if let Value::Object(map) = root {
        *document = map;
    }
    done
}

fn set_in(root: &mut Value, path: &[String], value: Value) -> Result<Vec<String>, String> {
    let Some((last, parents)) = path.split_last() else {
        return Err("its key is empty".to_owned());
    };
    let is_data = path.first().is_some_and(|section| section == "data");
    let mut at = root;
    for (depth, key) in parents.iter().enumerate() {
        let child = match at {
            Value::Object(map) => Some(
                map.entry(key.clone())
                    .or_insert_with(|| Value::Object(Map::new())),
            ),
            Value::Array(list) => key
                .parse::<usize>()
                .ok()
                .and_then(|index| list.get_mut(index)),
            _ => None,
        };
        at = child.ok_or_else(|| format!("there is no `{}`", parents[..=depth].join(".")))?;
        // A data set that was given as a path becomes a table, so that it can have settings.
        if let (true, Value::String(text)) = (is_data, &mut *at) {
            *at = serde_json::json!({ "path": std::mem::take(text) });
        }
        // So does what was given as a kind: a part of a stage, or a table inside a model.
        if let (true, Value::String(text)) = (!is_data && depth >= 2, &mut *at) {
            *at = serde_json::json!({ "kind": std::mem::take(text) });
        }
        if !at.is_object() && !at.is_array() {
            return Err(format!("`{key}` is a value, not a table"));
        }
    }
    let Value::Object(table) = at else {
        return Err(format!("cannot set `{last}` in a list"));
    };
    let mut set = path.to_vec();
    let names_file = value.is_string() && is_file(path);
    match table.get_mut(last) {
        // The file replaces a data set without a path (a generator); its extension selects the kind.
        Some(Value::Object(old)) if names_file && (!is_data || old.contains_key("path")) => {
            old.insert("path".to_owned(), value);
            set.push("path".to_owned());
        }
        // Another kind replaces the part; the settings of the old kind do not apply to it.
        Some(old @ Value::Object(_))
            if !is_data && value.is_string() && old.get("kind").is_some() =>
        {
            *old = value;
        }
        Some(Value::Object(old)) if !value.is_object() && !names_file => {
            let known = quoted(old.keys().map(String::as_str));
            return Err(format!("`{last}` is a table, not a value; it has {known}"));
        }
        _ => {
            table.insert(last.clone(), value);
        }
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document() -> Map<String, Value> {
        let value = json!({
            "run": {"steps": 5},
            "data": {"train": {"kind": "questions", "path": "a"}, "eval": "b.jsonl", "sums": {"kind": "sums", "max": 9}},
            "models": {"actor": {"path": "m"}},
            "stages": [{"kind": "generate"}, {"kind": "log_probs", "name": "old"}, {"kind": "update", "loss": {"kind": "grpo"}, "rule": "near"}],
        });
        match value {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    /// Applies an override without registered synonyms.
    fn applied(
        document: &mut Map<String, Value>,
        text: &str,
        folders: Option<Folders<'_>>,
    ) -> Result<Vec<String>, Diagnostic> {
        let names = KnownNames {
            run_keys: &["steps", "seed", "dir"].map(str::to_owned),
            synonyms: Synonyms(&[]),
        };
        apply(document, text, names, folders)
    }

    #[track_caller]
    fn check(text: &str, pointer: &str, expected: Value) {
        let mut document = document();
        let path = applied(&mut document, text, None).expect("applies");
        let value = Value::Object(document);
        assert_eq!(value.pointer(pointer), Some(&expected));
        assert_eq!(format!("/{}", path.join("/")), pointer);
    }

    #[track_caller]
    fn check_rejected(text: &str, expected: &str) {
        let finding = applied(&mut document(), text, None).expect_err("is rejected");
        assert!(
            finding.to_string().contains(expected),
            "expected {expected:?} in:\n{finding}"
        );
    }

    #[test]
    fn reaches_every_setting() {
        check("steps=10", "/run/steps", json!(10));
        check("steps=99999999999999999999", "/run/steps", json!(1e20));
        check("run.dir=x", "/run/dir", json!("x"));
        check(
            "steps=0x8000000000000000",
            "/run/steps",
            json!(9223372036854775808.0),
        );
        check(
            "trace.steps=[1, 99999999999999999999, 0xFFFFFFFFFFFFFFFFFF]",
            "/trace/steps",
            json!([1, 1e20, 4722366482869645213696.0]),
        );
        check("run.dir=007", "/run/dir", json!("007"));
        check("name=other", "/name", json!("other"));
        check("batch.samples = 4", "/batch/samples", json!(4));
        check("actor.path=DIR", "/models/actor/path", json!("DIR"));
        check("actor=DIR", "/models/actor/path", json!("DIR"));
        check(
            "models.actor.optimizer.learning_rate=1e-4",
            "/models/actor/optimizer/learning_rate",
            json!(1e-4),
        );
        check("data.train=FILE", "/data/train/path", json!("FILE"));
        check("data.sums=FILE", "/data/sums", json!("FILE"));
        check("data.eval=c.jsonl", "/data/eval", json!("c.jsonl"));
        check("data.sums=c.jsonl", "/data/sums", json!("c.jsonl"));
        check(
            "data.eval.split=\"test\"",
            "/data/eval/split",
            json!("test"),
        );
        check(
            "generate.temperature=0.7",
            "/stages/0/temperature",
            json!(0.7),
        );
        check("stages.old.bypass=true", "/stages/1/bypass", json!(true));
        check(
            "generate.stop=[\"a=b\", \"c\"]",
            "/stages/0/stop",
            json!(["a=b", "c"]),
        );
        check("generate.note=a=b", "/stages/0/note", json!("a=b"));
        check("update.rule.far=2", "/stages/2/rule/far", json!(2));
        check("update.rule=far", "/stages/2/rule", json!("far"));
        check("update.loss=sft", "/stages/2/loss", json!("sft"));
        check("generate.note=\"\"", "/stages/0/note", json!(""));
    }

    #[test]
    fn an_empty_value_removes_a_setting() {
        let removed = |text: &str, pointer: &str| {
            let mut document = document();
            let before = Value::Object(document.clone());
            assert!(before.pointer(pointer).is_some(), "{pointer}");
            let path = applied(&mut document, text, None).expect("applies");
            assert_eq!(format!("/{}", path.join("/")), pointer);
            let after = Value::Object(document);
            assert_eq!(after.pointer(pointer), None);
            after
        };
        let after = removed("steps=", "/run/steps");
        assert_eq!(after["data"], json!(document())["data"]);
        removed("update.loss.kind= ", "/stages/2/loss/kind");
        removed("data.sums.max=", "/data/sums/max");
        removed("update.loss=", "/stages/2/loss");
        removed("models.actor.path=", "/models/actor/path");
    }

    #[test]
    fn overrides_that_cannot_be_resolved_are_rejected() {
        check_rejected("steps", "has no `=`");
        check_rejected("a..b=1", "part of its key is empty");
        check_rejected("stesp=1", "did you mean `steps`?");
        check_rejected(
            "genrate.temperature=1",
            "did you mean `generate.temperature`?",
        );
        check_rejected("models.acter.path=x", "did you mean `actor`?");
        check_rejected("data.trian=x", "did you mean `train`?");
        check_rejected("stages.olt.bypass=true", "did you mean `old`?");
        check_rejected("run.steps.more=1", "`steps` is a value");
        check_rejected("actor=3", "is a table");
        check_rejected(
            "update.loss=3",
            "`loss` is a table, not a value; it has `kind`",
        );
        check_rejected("run.dir=", "but the file does not set it");
        check_rejected("run.dir=", "an empty string is `=\"\"`; known");
        check_rejected("run.stpes=", "did you mean `steps`?");
        check_rejected("update.lost.kind=", "the default already applies");
        check_rejected("stages.old=", "it would remove an entire stage");
    }

    #[test]
    fn paths_are_resolved_against_the_working_directory() {
        let (working, file) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (folder, name) in [
            (&working, "both"),
            (&file, "both"),
            (&working, "here"),
            (&file, "there"),
        ] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let folders = Folders {
            working: working.path(),
            file: file.path(),
        };
        let given = |text: &str, pointer: &str| {
            let mut document = document();
            applied(&mut document, text, Some(folders)).expect("applies");
            let value = Value::Object(document).pointer(pointer).cloned();
            value
                .and_then(|value| value.as_str().map(str::to_owned))
                .expect("a string")
        };
        let here = |name: &str| working.path().join(name).display().to_string();
        assert_eq!(given("data.train=here", "/data/train/path"), here("here"));
        assert_eq!(given("data.sums=both", "/data/sums"), here("both"));
        assert_eq!(given("actor.path=both", "/models/actor/path"), here("both"));
        assert_eq!(given("actor=there", "/models/actor/path"), "there");
        assert_eq!(
            given("actor=nowhere", "/models/actor/path"),
            here("nowhere")
        );
        let absolute = here("here");
        assert_eq!(
            given(&format!("actor.path={absolute}"), "/models/actor/path"),
            absolute
        );
        // Not a path.
        assert_eq!(given("data.train.kind=here", "/data/train/kind"), "here");
        assert_eq!(given("generate.note=here", "/stages/0/note"), "here");
    }
}
