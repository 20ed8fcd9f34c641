//! The pipeline file (TOML) into a [`DataPipe`] and back.
//!
//! ```toml
//! name = "grpo"
//! [run]                      # RunConfig
//! [batch]                    # BatchConfig
//! [devices]                  # DevicesConfig
//! [trace]                    # TraceConfig
//! [data]
//! train = "train.jsonl"      # a path, or a table with `kind` and the kind's settings
//! [models.actor]             # `kind` (by default the first one registered) and the kind's settings
//! path = "models/actor"
//! [[stages]]
//! kind = "generate"          # and the kind's settings
//! name = "rollout"           # by default the kind
//! rename = { responses = "answers" }
//! debug = true               # records it in full at every step
//! ```
//!
//! Relative paths of data and models are read against the file's folder, `run.dir` against the working directory.
//! An override comes from the command line: its relative paths of data and models are read against the working
//! directory, and against the file's folder only where nothing is there.
//! A key that nothing reads is an error, wherever it stands; all faults of a file are told at once.

pub(crate) mod decode;
mod overrides;
mod source;

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::config::decode::{Decoded, Fault, decode, keys_of};
use crate::config::overrides::Folders;
use crate::config::source::Source;
use crate::diagnostic::{Diagnostic, nearest, quoted, suggest};
use crate::pipe::{DataDecl, DataPipe, ModelDecl, RunConfig, StageDecl};
use crate::plan::build::prepare;
use crate::plan::checks::batch_sizes;
use crate::registry::Registry;

/// Sections of a pipeline file.
pub(crate) const SECTIONS: [&str; 8] = [
    "name", "run", "batch", "devices", "trace", "data", "models", "stages",
];

/// Reads a pipeline file and applies overrides (`key=value`).
///
/// # Errors
/// All faults of the file and the overrides.
pub fn read_pipeline<S: AsRef<str>>(
    path: &Path,
    overrides: &[S],
    registry: &Registry,
) -> Result<DataPipe, Vec<Diagnostic>> {
    let text = read_text(path).map_err(|finding| vec![finding])?;
    // A bare name lies in the working folder, which has a name too.
    let base = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    let working = std::env::current_dir().unwrap_or_default();
    let folders = Folders {
        working: &working,
        file: &base,
    };
    let origin = path.display().to_string();
    let mut pipe = parse(&text, &origin, overrides, registry, Some(folders))?;
    pipe.base = base;
    Ok(pipe)
}

/// The text of a pipeline file.
fn read_text(path: &Path) -> Result<String, Diagnostic> {
    let bytes = std::fs::read(path).map_err(|error| {
        Diagnostic::error("C001", "the pipeline file cannot be read")
            .at(path.display().to_string())
            .because(error.to_string())
            .help("give the path of a pipeline file, for example examples/pipelines/grpo_addition.toml")
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let (valid, rest) = error.as_bytes().split_at(error.utf8_error().valid_up_to());
        let line = valid.iter().filter(|byte| **byte == b'\n').count() + 1;
        Diagnostic::error("C001", "the pipeline file is not text in UTF-8")
            .at(format!("{}:{line}", path.display()))
            .because(format!(
                "the byte 0x{:02x} begins no character",
                rest.first().copied().unwrap_or_default()
            ))
            .help("save the file as UTF-8; if it is no TOML file at all, give the path of one")
    })
}

/// Reads the text of a pipeline file that is called `origin` in messages; [`DataPipe::base`] stays empty.
///
/// # Errors
/// All faults of the text and the overrides.
pub fn parse_pipeline<S: AsRef<str>>(
    text: &str,
    origin: &str,
    overrides: &[S],
    registry: &Registry,
) -> Result<DataPipe, Vec<Diagnostic>> {
    parse(text, origin, overrides, registry, None)
}

fn parse<S: AsRef<str>>(
    text: &str,
    origin: &str,
    overrides: &[S],
    registry: &Registry,
    folders: Option<Folders<'_>>,
) -> Result<DataPipe, Vec<Diagnostic>> {
    let (mut source, mut document) = Source::parse(origin, text)?;
    let mut findings = Vec::new();
    let run_keys = keys_of::<RunConfig>();
    for text in overrides {
        match overrides::apply(&mut document, text.as_ref(), &run_keys, folders) {
            Ok(path) => {
                let text = text.as_ref().to_owned();
                findings.extend(overrides::again(&source.overridden, &path, &text));
                source.overridden.push((path, text));
            }
            Err(finding) => findings.push(finding),
        }
    }
    let mut reader = Reader {
        source,
        registry,
        findings,
    };
    let pipe = registry.reading(|| reader.pipeline(document));
    let mut findings = reader.findings;
    if findings.is_empty() && pipe.stages.is_empty() {
        findings.push(
            Diagnostic::error("C004", "the pipeline has no stages")
                .at(origin.to_owned())
                .because("a run of it would do nothing")
                .help("add stages, each under `[[stages]]` with its `kind`"),
        );
    }
    if findings.is_empty() {
        return Ok(pipe);
    }
    // What else can be told although the pipeline is incomplete.
    let prepared = prepare(&pipe);
    findings.extend(prepared.violations.iter().map(batch_sizes::finding));
    Err(findings)
}

/// The pipeline as a file, every setting stated; what was given as objects appears by name only. Relative paths of
/// data and models that exist become absolute, so that the file means the same in any folder.
///
/// # Errors
/// A number that TOML cannot hold (above 2⁶³ − 1).
pub fn to_toml(pipe: &DataPipe) -> Result<String, toml::ser::Error> {
    let entry = |kind: &str, config: &Value| {
        let mut entry = Map::new();
        entry.insert("kind".to_owned(), kind.into());
        entry.extend(config.as_object().cloned().unwrap_or_default());
        if let Some(Value::String(path)) = entry.get_mut("path") {
            *path = from_anywhere(&pipe.base, path);
        }
        Value::Object(entry)
    };
    let mut document = Map::new();
    document.insert("name".to_owned(), pipe.name.clone().into());
    for (section, value) in [
        ("run", serde_json::to_value(&pipe.run)),
        ("batch", serde_json::to_value(&pipe.batch)),
        ("devices", serde_json::to_value(&pipe.devices)),
        ("trace", serde_json::to_value(&pipe.trace)),
    ] {
        document.insert(section.to_owned(), value.unwrap_or_default());
    }
    let data = pipe
        .data
        .iter()
        .map(|data| (data.name.clone(), entry(&data.kind, &data.config)));
    document.insert("data".to_owned(), Value::Object(data.collect()));
    let models = pipe
        .models
        .iter()
        .map(|model| (model.name.clone(), entry(&model.kind, &model.config)));
    document.insert("models".to_owned(), Value::Object(models.collect()));
    let stages = pipe.stages.iter().map(|stage| {
        let mut map = Map::new();
        map.insert("kind".to_owned(), stage.kind.clone().into());
        map.insert("name".to_owned(), stage.name.clone().into());
        if !stage.rename.is_empty() {
            let rename = stage
                .rename
                .iter()
                .map(|(own, key)| (own.clone(), key.clone().into()));
            map.insert("rename".to_owned(), Value::Object(rename.collect()));
        }
        if stage.debug {
            map.insert("debug".to_owned(), true.into());
        }
        map.extend(stage.config.as_object().cloned().unwrap_or_default());
        Value::Object(map)
    });
    document.insert("stages".to_owned(), stages.collect());
    let mut document = Value::Object(document);
    drop_nulls(&mut document);
    toml::to_string(&document)
}

/// A path that was read against `base`, so that it can be read from any folder; as it is where nothing is there.
fn from_anywhere(base: &Path, path: &str) -> String {
    let seen = base.join(path);
    if base.as_os_str().is_empty() || !seen.exists() {
        return path.to_owned();
    }
    let absolute = std::path::absolute(&seen).unwrap_or(seen);
    absolute.to_str().unwrap_or(path).to_owned()
}

/// TOML has no null: an option that is absent is not written.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

struct Reader<'a> {
    source: Source<'a>,
    registry: &'a Registry,
    findings: Vec<Diagnostic>,
}

impl Reader<'_> {
    fn pipeline(&mut self, mut document: Map<String, Value>) -> DataPipe {
        for kind in self.registry.duplicates() {
            self.findings.push(
                Diagnostic::error("C007", kind.to_string())
                    .at("registry")
                    .because("a pipeline file that names it could mean either")
                    .help("register one of them under another `KIND`"),
            );
        }
        let unknown: Vec<String> = document
            .keys()
            .filter(|key| !SECTIONS.contains(&key.as_str()))
            .cloned()
            .collect();
        for key in unknown {
            self.fault(
                &[],
                "the top of the file",
                Fault::Unknown {
                    path: vec![key],
                    known: SECTIONS.map(str::to_owned).to_vec(),
                },
            );
        }
        let name = match document.remove("name") {
            Some(Value::String(name)) => name,
            Some(_) => {
                self.invalid(&["name"], "the top of the file", "a name is a text");
                String::new()
            }
            None => "pipeline".to_owned(),
        };
        let mut pipe = DataPipe::new(name);
        pipe.run = self.section("run", document.remove("run"));
        pipe.batch = self.section("batch", document.remove("batch"));
        pipe.devices = self.section("devices", document.remove("devices"));
        pipe.trace = self.section("trace", document.remove("trace"));
        pipe.data = self.entries("data", document.remove("data"), Self::data);
        pipe.models = self.entries("models", document.remove("models"), Self::model);
        pipe.stages = self.stages(document.remove("stages"));
        pipe.rules = self.registry.rules().to_vec();
        pipe
    }

    fn section<C: DeserializeOwned + Default>(&mut self, name: &str, value: Option<Value>) -> C {
        let Some(value) = value else {
            return C::default();
        };
        let Decoded { value, faults } = decode::<C>(value);
        self.faults(&[name], &format!("[{name}]"), faults);
        value.unwrap_or_default()
    }

    fn entries<D>(
        &mut self,
        section: &str,
        value: Option<Value>,
        read: fn(&mut Self, &str, Value) -> Option<D>,
    ) -> Vec<D> {
        match value {
            None => Vec::new(),
            Some(Value::Object(table)) => table
                .into_iter()
                .filter_map(|(name, value)| read(self, &name, value))
                .collect(),
            Some(_) => {
                self.invalid(
                    &[section],
                    &format!("[{section}]"),
                    "it is not a table of names",
                );
                Vec::new()
            }
        }
    }

    fn data(&mut self, name: &str, value: Value) -> Option<DataDecl> {
        let place = format!("[data] `{name}`");
        let mut table = self.table(&["data", name], &place, value)?;
        let kind = match table.shift_remove("kind") {
            Some(kind) => self.text(&["data", name, "kind"], &place, kind)?,
            None => {
                let path = table.get("path").and_then(Value::as_str);
                match path.and_then(|path| self.registry.kind_of_path(path)) {
                    Some(kind) => kind.to_owned(),
                    None => {
                        let known = quoted(self.registry.data_kinds().iter().map(|kind| kind.name));
                        self.findings.push(
                            Diagnostic::error(
                                "C003",
                                format!("the kind of data set `{name}` is not clear"),
                            )
                            .at(self.source.place(&owned(&["data", name]), &place))
                            .because(
                                "it names no `kind`, and no kind reads a file with its extension",
                            )
                            .help(format!("set `kind` to one of {known}")),
                        );
                        return None;
                    }
                }
            }
        };
        let Some(entry) = self.registry.data_kinds().get(&kind) else {
            let help = self.registry.data_kinds().suggest(&kind);
            self.unknown_kind(&["data", name], &place, "data set", kind, help);
            return None;
        };
        let Decoded { value, faults } = (entry.declare)(name, Value::Object(table));
        self.faults(&["data", name], &place, faults);
        value
    }

    fn model(&mut self, name: &str, value: Value) -> Option<ModelDecl> {
        let place = format!("[models.{name}]");
        let mut table = self.table(&["models", name], &place, value)?;
        let kind = match (table.shift_remove("kind"), self.registry.default_model()) {
            (Some(kind), _) => self.text(&["models", name, "kind"], &place, kind)?,
            (None, Some(kind)) => kind.to_owned(),
            (None, None) => String::new(),
        };
        let Some(entry) = self.registry.models().get(&kind) else {
            let help = self.registry.models().suggest(&kind);
            self.unknown_kind(&["models", name], &place, "model", kind, help);
            return None;
        };
        let Decoded { value, faults } = (entry.declare)(name, Value::Object(table));
        self.faults(&["models", name], &place, faults);
        value
    }

    fn stages(&mut self, value: Option<Value>) -> Vec<StageDecl> {
        match value {
            None => Vec::new(),
            Some(Value::Array(list)) => list
                .into_iter()
                .enumerate()
                .filter_map(|(index, value)| self.stage(index, value))
                .collect(),
            Some(_) => {
                self.invalid(
                    &["stages"],
                    "[[stages]]",
                    "stages are a list: write `[[stages]]` above each of them",
                );
                Vec::new()
            }
        }
    }

    fn stage(&mut self, index: usize, value: Value) -> Option<StageDecl> {
        let index = index.to_string();
        let here = ["stages", index.as_str()];
        let Value::Object(mut table) = value else {
            self.invalid(&here, "[[stages]]", "a stage is a table");
            return None;
        };
        let place = format!(
            "[[stages]] number {}",
            index.parse::<usize>().unwrap_or_default() + 1
        );
        let kind = match table.shift_remove("kind") {
            Some(kind) => self.text(&["stages", &index, "kind"], &place, kind)?,
            None => {
                self.fault(
                    &here,
                    &place,
                    Fault::Missing {
                        path: vec!["kind".to_owned()],
                    },
                );
                return None;
            }
        };
        let name = match table.shift_remove("name") {
            Some(name) => self.text(&["stages", &index, "name"], &place, name)?,
            None => kind.clone(),
        };
        let place = format!("[[stages]] `{name}`");
        let rename = table
            .shift_remove("rename")
            .unwrap_or(Value::Object(Map::new()));
        let Decoded {
            value: rename,
            faults,
        } = decode(rename);
        self.faults(&["stages", &index, "rename"], &place, faults);
        let debug = match table.shift_remove("debug") {
            None => false,
            Some(Value::Bool(debug)) => debug,
            Some(_) => {
                self.invalid(
                    &["stages", &index, "debug"],
                    &place,
                    "it is not true or false",
                );
                false
            }
        };
        let Some(entry) = self.registry.stages().get(&kind) else {
            let help = self.registry.stages().suggest(&kind);
            self.unknown_kind(&here, &place, "stage", kind, help);
            return None;
        };
        let Decoded { value, faults } = (entry.declare)(&name, Value::Object(table));
        let faults = faults.into_iter().map(|fault| match fault {
            // These belong to every stage, so they are known although its configuration does not have them.
            Fault::Unknown { path, mut known } if path.len() == 1 => {
                known.extend(["kind", "name", "rename", "debug"].map(str::to_owned));
                Fault::Unknown { path, known }
            }
            fault => fault,
        });
        self.faults(&here, &place, faults.collect());
        value.map(|stage| StageDecl {
            rename: rename.unwrap_or_default(),
            debug,
            ..stage
        })
    }

    /// A table; a text stands for the table whose `path` it is.
    fn table(&mut self, path: &[&str], place: &str, value: Value) -> Option<Map<String, Value>> {
        match value {
            Value::Object(table) => Some(table),
            Value::String(text) => Some(Map::from_iter([("path".to_owned(), Value::String(text))])),
            _ => {
                self.invalid(path, place, "it is neither a path nor a table");
                None
            }
        }
    }

    fn text(&mut self, path: &[&str], place: &str, value: Value) -> Option<String> {
        match value {
            Value::String(text) => Some(text),
            _ => {
                self.invalid(path, place, "it is not a text");
                None
            }
        }
    }

    fn unknown_kind(
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

    fn invalid(&mut self, path: &[&str], place: &str, reason: &str) {
        let fault = Fault::Invalid {
            path: Vec::new(),
            reason: reason.to_owned(),
            known: Vec::new(),
        };
        self.fault(path, place, fault);
    }

    fn faults(&mut self, at: &[&str], place: &str, faults: Vec<Fault>) {
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

    fn fault(&mut self, at: &[&str], place: &str, fault: Fault) {
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
                    .help(suggest(
                        &key,
                        "settings here",
                        known.iter().map(String::as_str),
                    ))
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
                let help = match (
                    known.as_slice(),
                    nearest(
                        reason.split('`').nth(1).unwrap_or_default(),
                        known.iter().map(String::as_str),
                    ),
                ) {
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

/// The path of the setting that an unknown key probably means.
fn meant(fault: &Fault) -> Option<Vec<String>> {
    let Fault::Unknown { path, known } = fault else {
        return None;
    };
    let (last, parents) = path.split_last()?;
    let near = nearest(last, known.iter().map(String::as_str))?;
    Some(parents.iter().cloned().chain([near.to_owned()]).collect())
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
    for (from, to) in [
        ("expected usize", "but a whole number from 0 is needed"),
        ("expected u64", "but a whole number from 0 is needed"),
        ("expected u32", "but a whole number from 0 is needed"),
        ("expected i64", "but a whole number is needed"),
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
    words
}

/// The article before a word.
fn article(word: &str) -> &'static str {
    if word.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    }
}

fn owned(path: &[&str]) -> Vec<String> {
    path.iter().map(|part| (*part).to_owned()).collect()
}
