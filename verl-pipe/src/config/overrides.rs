//! `key=value` on the command line: reaches every setting of a pipeline file.
//!
//! The first part of the dotted key is a section of the file, else a model, else a stage; a key alone is one of `[run]`.
//!
//! Nothing behind the `=` takes a setting out of the file, so that its default holds; an empty text is `key=""`.
//!
//! A text given for a part that a stage holds (its loss, its estimator) is the part's kind, and puts it with its defaults
//! in the place of what the file says.
//!
//! A text given for a whole data set or model is its `path`. A relative path of data or a model is read against the
//! working directory; only where nothing is there, but something is in the pipeline file's folder, against that.

use std::path::Path;

use serde_json::{Map, Value};

use super::{SECTIONS, source, synonyms};
use crate::diagnostic::{Diagnostic, quoted, suggest};

/// The folders that a relative path of an override may mean.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folders<'a> {
    /// The working directory.
    pub working: &'a Path,
    /// Folder of the pipeline file.
    pub file: &'a Path,
}

/// Applies `text`; returns the path that it set. Without `folders` paths stay as they are.
pub(crate) fn apply(
    document: &mut Map<String, Value>,
    text: &str,
    run_keys: &[String],
    folders: Option<Folders<'_>>,
) -> Result<Vec<String>, Diagnostic> {
    let fault = |why: String, help: String| {
        Diagnostic::error("C006", format!("the override `{text}` cannot be applied"))
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
    let path = resolve(document, &parts, run_keys).map_err(|(why, help)| fault(why, help))?;
    if value.trim().is_empty() {
        return take_out(document, &path).map_err(|(why, help)| fault(why, help));
    }
    let mut value = parse(value);
    if let (Some(folders), Value::String(text), true) = (folders, &mut value, is_file(&path)) {
        *text = folders.absolute(text);
    }
    set(document, &path, value).map_err(|why| fault(why, form.to_owned()))
}

/// What is wrong where an earlier override tuned the same rule in the same way: of other settings the last one holds,
/// but a rule guards a run, and which of two limits was meant is not for the order to say.
pub(crate) fn again(
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
    let finding = Diagnostic::error("C006", format!("the override `{text}` cannot be applied"))
        .at("command line")
        .because(format!("`{first}` tunes the same rule in the same way"))
        .help("leave one of the two out");
    Some(finding)
}

/// Whether a text at `path` of the document names a file or folder of data or a model.
fn is_file(path: &[String]) -> bool {
    match path {
        [section, _] => section == "data" || section == "models",
        [section, _, key] => (section == "data" || section == "models") && key == "path",
        _ => false,
    }
}

impl Folders<'_> {
    /// The path `text` as seen from the working directory, or `text` itself where only the file's folder has it.
    fn absolute(self, text: &str) -> String {
        let seen = self.working.join(text);
        if !seen.exists() && self.file.join(text).exists() {
            return text.to_owned();
        }
        // A path that is no text cannot come from one.
        seen.to_str().unwrap_or(text).to_owned()
    }
}

/// Removes the setting at `path` of the document.
fn take_out(
    document: &mut Map<String, Value>,
    path: &[String],
) -> Result<Vec<String>, (String, String)> {
    let mut root = Value::Object(std::mem::take(document));
    let done = take_out_of(&mut root, path);
    if let Value::Object(map) = root {
        *document = map;
    }
    done.map(|()| path.to_vec())
}

fn take_out_of(root: &mut Value, path: &[String]) -> Result<(), (String, String)> {
    let Some((last, parents)) = path.split_last() else {
        return Err(nothing_at("", &[]));
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
        at = child.ok_or_else(|| nothing_at(last, &[]))?;
    }
    let Value::Object(table) = at else {
        return Err((
            "it would take out a whole stage".to_owned(),
            "an override changes settings; take the stage out in a copy of the file".to_owned(),
        ));
    };
    if table.shift_remove(last).is_none() {
        let known: Vec<&str> = table.keys().map(String::as_str).collect();
        return Err(nothing_at(last, &known));
    }
    Ok(())
}

/// Why nothing can be taken out, and what could be.
fn nothing_at(key: &str, known: &[&str]) -> (String, String) {
    let known = match known {
        [] => String::new(),
        known => {
            let known = suggest(
                key,
                "settings that the file has here",
                known.iter().copied(),
            );
            format!("; {known}")
        }
    };
    (
        format!("with nothing behind the `=` it takes out `{key}`, which the file does not set"),
        format!("leave it out: the default holds anyway; an empty text is `=\"\"`{known}"),
    )
}

/// A TOML value, or a text where it is none; whole numbers that are too large for TOML are numbers all the same.
fn parse(value: &str) -> Value {
    let value = value.trim();
    let mut line = format!("v = {value}");
    let mut table = line.parse::<toml::Table>();
    while let Err(error) = &table {
        let large = error.span().and_then(|span| {
            let number = source::beyond_toml(line.get(span.clone())?)?;
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

/// The path in the document that the parts of a key mean.
fn resolve(
    document: &Map<String, Value>,
    parts: &[String],
    run_keys: &[String],
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
        (key, []) if run_keys.iter().any(|known| known == key) => {
            return Ok(path(&["run", key], &[]));
        }
        _ => {}
    }
    let models = table_names(document, "models");
    if rest.is_empty() {
        let known = run_keys
            .iter()
            .map(String::as_str)
            .chain(models.iter().copied());
        let known: Vec<&str> = known.collect();
        let meant = match synonyms::meant_by(first, &known) {
            Some(meant) => format!("did you mean `{meant}`? "),
            None => match synonyms::elsewhere(first) {
                Some(elsewhere) if crate::diagnostic::nearest(first, known.clone()).is_none() => {
                    format!("{elsewhere}; ")
                }
                _ => String::new(),
            },
        };
        return Err((
            format!("`{first}` is no setting of [run] and no model"),
            format!(
                "{meant}{}; settings elsewhere need their section, model or stage: `generate.temperature=0.7`",
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
        format!("`{first}` is no section, model or stage of the pipeline"),
        match crate::diagnostic::nearest(first, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}.{}`?", rest.join(".")),
            None => format!("it begins with one of {}", quoted(known)),
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

/// Sets the value at `path`, making tables on the way. A text given for a table (a model, a data set) is its `path`;
/// a data set that is no file becomes that file.
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
        // A data set that was given as its path becomes a table, so that it can have settings.
        if let (true, Value::String(text)) = (is_data, &mut *at) {
            *at = serde_json::json!({ "path": std::mem::take(text) });
        }
        // So does what was given as its kind: the part of a stage, a table inside a model.
        if let (true, Value::String(text)) = (!is_data && depth >= 2, &mut *at) {
            *at = serde_json::json!({ "kind": std::mem::take(text) });
        }
        if !at.is_object() && !at.is_array() {
            return Err(format!("`{key}` is a value, not a table"));
        }
    }
    let Value::Object(table) = at else {
        return Err(format!("`{last}` is no setting of a list"));
    };
    let mut set = path.to_vec();
    let names_file = value.is_string() && is_file(path);
    match table.get_mut(last) {
        // A data set without a path (a generator) gives way to the file, whose kind its name tells.
        Some(Value::Object(old)) if names_file && (!is_data || old.contains_key("path")) => {
            old.insert("path".to_owned(), value);
            set.push("path".to_owned());
        }
        // A part that gives way to another kind; what its settings were says nothing of this one's.
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

    #[track_caller]
    fn check(text: &str, pointer: &str, expected: Value) {
        let mut document = document();
        let run_keys = ["steps".to_owned(), "seed".to_owned(), "dir".to_owned()];
        let path = apply(&mut document, text, &run_keys, None).expect("applies");
        let value = Value::Object(document);
        assert_eq!(value.pointer(pointer), Some(&expected));
        assert_eq!(format!("/{}", path.join("/")), pointer);
    }

    #[track_caller]
    fn check_refused(text: &str, expected: &str) {
        let run_keys = ["steps".to_owned(), "seed".to_owned()];
        let finding = apply(&mut document(), text, &run_keys, None).expect_err("is refused");
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
    fn nothing_behind_the_sign_takes_a_setting_out() {
        let taken = |text: &str, pointer: &str| {
            let mut document = document();
            let before = Value::Object(document.clone());
            assert!(before.pointer(pointer).is_some(), "{pointer}");
            let path = apply(&mut document, text, &["steps".to_owned()], None).expect("applies");
            assert_eq!(format!("/{}", path.join("/")), pointer);
            let after = Value::Object(document);
            assert_eq!(after.pointer(pointer), None);
            after
        };
        let after = taken("steps=", "/run/steps");
        assert_eq!(after["data"], json!(document())["data"]);
        taken("update.loss.kind= ", "/stages/2/loss/kind");
        taken("data.sums.max=", "/data/sums/max");
        taken("update.loss=", "/stages/2/loss");
        taken("models.actor.path=", "/models/actor/path");
    }

    #[test]
    fn refuses_what_it_cannot_place() {
        check_refused("steps", "has no `=`");
        check_refused("a..b=1", "part of its key is empty");
        check_refused("stesp=1", "did you mean `steps`?");
        check_refused(
            "genrate.temperature=1",
            "did you mean `generate.temperature`?",
        );
        check_refused("models.acter.path=x", "did you mean `actor`?");
        check_refused("data.trian=x", "did you mean `train`?");
        check_refused("stages.olt.bypass=true", "did you mean `old`?");
        check_refused("run.steps.more=1", "`steps` is a value");
        check_refused("actor=3", "is a table");
        check_refused(
            "update.loss=3",
            "`loss` is a table, not a value; it has `kind`",
        );
        check_refused("run.dir=", "which the file does not set");
        check_refused("run.dir=", "an empty text is `=\"\"`; known");
        check_refused("run.stpes=", "did you mean `steps`?");
        check_refused("update.lost.kind=", "the default holds anyway");
        check_refused("stages.old=", "it would take out a whole stage");
    }

    #[test]
    fn paths_are_seen_from_the_working_directory() {
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
            apply(&mut document, text, &[], Some(folders)).expect("applies");
            let value = Value::Object(document).pointer(pointer).cloned();
            value
                .and_then(|value| value.as_str().map(str::to_owned))
                .expect("a text")
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
