//! The sections of a pipeline file.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use verl_words::diagnostic::{Diagnostic, quoted};

use super::SECTIONS;
use super::decode::{Decoded, Fault, decode};
use super::faults::owned;
use super::source::Source;
use crate::pipe::{DataDecl, DataPipe, ModelDecl, StageDecl};
use crate::registry::Registry;
use crate::sizes::GroupConfig;

/// Reads a document section by section and collects its errors.
pub(super) struct Reader<'a> {
    pub source: Source<'a>,
    pub registry: &'a Registry,
    pub findings: Vec<Diagnostic>,
    /// Names of the stages that were read without an error.
    pub sound_stages: BTreeSet<String>,
}

impl Reader<'_> {
    /// The pipeline, as far as it can be read.
    pub fn pipeline(&mut self, mut document: Map<String, Value>) -> DataPipe {
        for kind in self.registry.duplicates() {
            self.findings.push(
                Diagnostic::error("C007", kind.to_string())
                    .at("registry")
                    .because("a pipeline file that uses this name could mean either")
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
                self.invalid(&["name"], "the top of the file", "expected a string");
                String::new()
            }
            None => "pipeline".to_owned(),
        };
        let mut pipe = DataPipe::new(name);
        pipe.run = self.section("run", document.remove("run"));
        pipe.batch = self.section("batch", document.remove("batch"));
        pipe.devices = self.section("devices", document.remove("devices"));
        pipe.groups = self.entries("groups", document.remove("groups"), Self::group);
        pipe.trace = self.section("trace", document.remove("trace"));
        pipe.data = self.entries("data", document.remove("data"), Self::data);
        pipe.models = self.entries("models", document.remove("models"), Self::model);
        let names_are_known = self.findings.is_empty();
        pipe.stages = self.stages(document.remove("stages"));
        if !names_are_known {
            // A stage may refer to what could not be read.
            self.sound_stages.clear();
        }
        pipe.rules = self.registry.rules().to_vec();
        pipe
    }

    fn section<C: DeserializeOwned + JsonSchema + Default>(
        &mut self,
        name: &str,
        value: Option<Value>,
    ) -> C {
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
                    "expected a table of names",
                );
                Vec::new()
            }
        }
    }

    fn group(&mut self, name: &str, value: Value) -> Option<(String, GroupConfig)> {
        let Decoded { value, faults } = decode::<GroupConfig>(value);
        self.faults(&["groups", name], &format!("[groups.{name}]"), faults);
        Some((name.to_owned(), value?))
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
                                format!("cannot determine the kind of data set `{name}`"),
                            )
                            .at(self.source.place(&owned(&["data", name]), &place))
                            .because(
                                "it does not set `kind`, and no kind reads files with its extension",
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
        let group = match table.shift_remove("group") {
            Some(group) => Some(self.text(&["models", name, "group"], &place, group)?),
            None => None,
        };
        let Some(entry) = self.registry.models().get(&kind) else {
            let help = self.registry.models().suggest(&kind);
            self.unknown_kind(&["models", name], &place, "model", kind, help);
            return None;
        };
        let Decoded { value, faults } = (entry.declare)(name, Value::Object(table));
        let faults = with_known(faults, &["kind", "group"]);
        self.faults(&["models", name], &place, faults);
        value.map(|model| ModelDecl { group, ..model })
    }

    fn stages(&mut self, value: Option<Value>) -> Vec<StageDecl> {
        match value {
            None => Vec::new(),
            Some(Value::Array(list)) => list
                .into_iter()
                .enumerate()
                .filter_map(|(index, value)| {
                    let before = self.findings.len();
                    let stage = self.stage(index, value)?;
                    if self.findings.len() == before {
                        self.sound_stages.insert(stage.name.clone());
                    }
                    Some(stage)
                })
                .collect(),
            Some(_) => {
                self.invalid(
                    &["stages"],
                    "[[stages]]",
                    "expected a list: write `[[stages]]` above each stage",
                );
                Vec::new()
            }
        }
    }

    fn stage(&mut self, index: usize, value: Value) -> Option<StageDecl> {
        let index = index.to_string();
        let here = ["stages", index.as_str()];
        let Value::Object(mut table) = value else {
            self.invalid(&here, "[[stages]]", "expected a table");
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
                    "expected `true` or `false`",
                );
                false
            }
        };
        let group = match table.shift_remove("group") {
            Some(group) => Some(self.text(&["stages", &index, "group"], &place, group)?),
            None => None,
        };
        let Some(entry) = self.registry.stages().get(&kind) else {
            let help = self.registry.stages().suggest(&kind);
            self.unknown_kind(&here, &place, "stage", kind, help);
            return None;
        };
        let Decoded { value, faults } = (entry.declare)(&name, Value::Object(table));
        let faults = with_known(faults, &["kind", "name", "rename", "debug", "group"]);
        self.faults(&here, &place, faults);
        value.map(|stage| StageDecl {
            rename: rename.unwrap_or_default(),
            debug,
            group,
            ..stage
        })
    }
}

/// Adds the keys that every entry of a section has, although they are not part of its configuration, to those that are
/// known where one is not.
fn with_known(faults: Vec<Fault>, every: &[&str]) -> Vec<Fault> {
    let add = |fault| match fault {
        Fault::Unknown { path, mut known } if path.len() == 1 => {
            known.extend(every.iter().map(|key| (*key).to_owned()));
            Fault::Unknown { path, known }
        }
        fault => fault,
    };
    faults.into_iter().map(add).collect()
}
