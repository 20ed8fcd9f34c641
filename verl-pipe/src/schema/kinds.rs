//! One document per kind: a JSON Schema of its settings, and under `$defs` the schemas of a row that it reads and of a
//! row that it writes.
//!
//! ```
//! # use schemars::JsonSchema;
//! # use serde::{Deserialize, Serialize};
//! # use verl_pipe::{batch::Batch, keys::{RESPONSES, REWARDS}, stage::*};
//! use verl_pipe::registry::Registry;
//! use verl_pipe::schema::kinds::Catalogue;
//!
//! # #[derive(Clone, Default, Serialize, Deserialize, JsonSchema)]
//! # #[serde(deny_unknown_fields, default)]
//! # struct Judge { strict: bool }
//! # struct Judging;
//! # impl Stage for Judging {
//! #     fn spec(&self) -> StageSpec { StageSpec::new().reads(RESPONSES).writes(REWARDS) }
//! #     fn run(&mut self, _: Batch, _: &mut StageContext<'_>) -> Result<(), StageError> { Ok(()) }
//! # }
//! # impl StageConfig for Judge {
//! #     const KIND: &'static str = "judge";
//! #     const SUMMARY: &'static str = "judges";
//! #     fn build(&self, _: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> { Ok(Box::new(Judging)) }
//! # }
//! let registry = Registry::new().stage::<Judge>();
//! let document = Catalogue::of(&registry).stage("judge").unwrap();
//! assert_eq!(document["properties"]["strict"]["type"], "boolean");
//! assert_eq!(document["$defs"]["input"]["required"][0], "responses");
//! assert_eq!(document["$defs"]["output"]["properties"]["rewards"]["x-verl"]["dtype"], "f32");
//! ```

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};
use verl_declare::registry::{FILE, Kind, Registry};
use verl_words::field::Field;
use verl_words::stage::{Access, Cadence, Cardinality, Metric, RowRule, StageSpec};

use super::declared::{Change, Declaration, Declared, Use, part_users};
use super::fields::column;
use super::{DRAFT, NOTE, common_settings, entry, fill_slots};

/// The declarations of the kinds of a registry, collected once for all documents.
pub struct Catalogue<'a> {
    /// The kinds.
    pub registry: &'a Registry,
    /// Kinds of stages, each with what it declares.
    pub stages: Vec<(&'static str, Declared)>,
    /// Kinds of parts: slot, name, and the declarations of the stages that use the part.
    pub parts: Vec<(&'static str, &'static str, Vec<PartUser>)>,
}

/// A stage that uses a part.
pub struct PartUser {
    /// Kind of the stage.
    pub stage: &'static str,
    /// The setting that selects the part.
    pub setting: String,
    /// What the stage declares with the part, also with other settings of the part.
    pub declared: Declared,
}

impl<'a> Catalogue<'a> {
    /// Collects the declarations of every kind of `registry`; loads nothing.
    pub fn of(registry: &'a Registry) -> Self {
        let stages = registry.stages().iter();
        let stages = stages.map(|kind| (kind.name, Declared::of(kind, registry)));
        let parts = registry.slots().iter().flat_map(|(slot, kinds)| {
            let part = move |name: &'static str| {
                let users = part_users(slot, registry);
                let users = users.map(|(kind, setting)| part_user(kind, setting, name, registry));
                (slot, name, users.collect())
            };
            kinds.iter().map(move |kind| part(kind.name))
        });
        Catalogue {
            registry,
            stages: stages.collect(),
            parts: parts.collect(),
        }
    }

    /// The document of a kind of stage.
    pub fn stage(&self, name: &str) -> Option<Value> {
        let kind = self.registry.stages().get(name)?;
        let (_, declared) = self.stages.iter().find(|(known, _)| *known == name)?;
        let mut note = note_of(kind, "stage");
        let mut definitions = Map::new();
        add_declared(declared, &mut note);
        definitions.insert("input".to_owned(), row("reads", &declared.reads()));
        definitions.insert("output".to_owned(), row("writes", &declared.writes()));
        Some(self.document(kind, true, &common_settings(), note, definitions))
    }

    /// The document of a kind of part of `slot`.
    pub fn part(&self, slot: &str, name: &str) -> Option<Value> {
        let kind = self.registry.slot(slot)?.get(name)?;
        let known = |part: &&(&str, &str, Vec<PartUser>)| (part.0, part.1) == (slot, name);
        let (_, _, users) = self.parts.iter().find(known)?;
        let mut note = note_of(kind, "part");
        note.insert("slot".to_owned(), slot.into());
        let mut definitions = Map::new();
        let users = users.iter().map(|user| {
            let mut entry = Map::new();
            entry.insert("stage".to_owned(), user.stage.into());
            entry.insert("setting".to_owned(), user.setting.clone().into());
            add_declared(&user.declared, &mut entry);
            for (side, rows) in [
                ("input", row("reads", &user.declared.reads())),
                ("output", row("writes", &user.declared.writes())),
            ] {
                definitions.insert(format!("{side}_of_{}", user.stage), rows);
            }
            Value::Object(entry)
        });
        let users = Value::Array(users.collect());
        note.insert("held_by".to_owned(), users);
        Some(self.document(kind, true, &[], note, definitions))
    }

    /// The document of a kind of model.
    pub fn model(&self, name: &str) -> Option<Value> {
        let kind = self.registry.models().get(name)?;
        let named = Some(name) != self.registry.default_model();
        Some(self.document(kind, named, &[], note_of(kind, "model"), Map::new()))
    }

    /// The document of a kind of data set.
    pub fn data(&self, name: &str) -> Option<Value> {
        let kind = self.registry.data_kinds().get(name)?;
        let by_path = kind.name == FILE || !kind.extensions.is_empty();
        let mut note = note_of(kind, "data set");
        if !kind.extensions.is_empty() {
            note.insert("extensions".to_owned(), json!(kind.extensions));
        }
        Some(self.document(kind, !by_path, &[], note, Map::new()))
    }

    /// The schema of a kind's table with a note and further definitions.
    fn document<D>(
        &self,
        kind: &Kind<D>,
        kind_required: bool,
        common: &[(&str, Value)],
        note: Map<String, Value>,
        definitions: Map<String, Value>,
    ) -> Value {
        let mut generator = SchemaGenerator::default();
        let Value::Object(own) = entry(kind, &mut generator, kind_required, common) else {
            return Value::Null;
        };
        let mut all = definitions;
        fill_slots(self.registry, &mut generator);
        let settings = Value::Object(own.clone());
        let known = generator.take_definitions(true);
        all.extend(referred(&settings, &known));
        let mut schema = Map::new();
        schema.insert("$schema".to_owned(), DRAFT.into());
        for key in ["title", "description"] {
            schema.insert(key.to_owned(), own[key].clone());
        }
        schema.insert(NOTE.to_owned(), Value::Object(note));
        for (key, value) in own {
            schema.entry(key).or_insert(value);
        }
        if !all.is_empty() {
            schema.insert("$defs".to_owned(), Value::Object(all));
        }
        Value::Object(schema)
    }
}

fn part_user(
    stage: &Kind<verl_declare::pipe::StageDecl>,
    setting: String,
    part: &str,
    registry: &Registry,
) -> PartUser {
    let mut settings = Map::new();
    settings.insert(setting.clone(), json!({ "kind": part }));
    PartUser {
        stage: stage.name,
        declared: Declared::with(stage, &settings, Some(&setting), registry),
        setting,
    }
}

/// The definitions that `schema` refers to, directly or through others, in the order of `known`.
fn referred(schema: &Value, known: &Map<String, Value>) -> Map<String, Value> {
    fn walk<'a>(value: &'a Value, known: &'a Map<String, Value>, found: &mut Vec<&'a str>) {
        match value {
            Value::Array(list) => list.iter().for_each(|value| walk(value, known, found)),
            Value::Object(map) => {
                let name = map.get("$ref").and_then(Value::as_str);
                let name = name.and_then(|text| text.strip_prefix("#/$defs/"));
                if let Some((name, definition)) = name.and_then(|name| known.get_key_value(name))
                    && !found.contains(&name.as_str())
                {
                    found.push(name);
                    walk(definition, known, found);
                }
                map.values().for_each(|value| walk(value, known, found));
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    walk(schema, known, &mut found);
    let used = known
        .iter()
        .filter(|(name, _)| found.contains(&name.as_str()));
    used.map(|(name, definition)| (name.clone(), definition.clone()))
        .collect()
}

fn note_of<D>(kind: &Kind<D>, sort: &str) -> Map<String, Value> {
    let mut note = Map::new();
    note.insert("sort".to_owned(), sort.into());
    note.insert("rust".to_owned(), kind.rust_type.into());
    note
}

/// Adds to `note` what a stage does besides reading and writing keys, or which settings are missing.
fn add_declared(declared: &Declared, note: &mut Map<String, Value>) {
    if !declared.missing.is_empty() {
        note.insert("missing".to_owned(), json!(declared.missing));
        let set = declared.set.iter();
        let set = set.map(|change| (change.setting.clone(), change.value.clone()));
        note.insert("declared_with".to_owned(), Value::Object(set.collect()));
    }
    if let Some(spec) = &declared.default {
        note.insert("runs".to_owned(), runs(spec).into());
        if spec.cadence == Cadence::Step {
            note.insert("rows".to_owned(), rows(spec, declared.by_samples).into());
            note.insert("cut".to_owned(), cut(spec).into());
        }
        let models = spec.models.iter().map(|(name, access)| {
            let access = match access {
                Access::Read => "reads",
                Access::Update => "updates",
            };
            json!({ "name": name, "access": access })
        });
        let models: Vec<Value> = models.collect();
        if !models.is_empty() {
            note.insert("models".to_owned(), models.into());
        }
        if let Some(sample) = &spec.sample {
            note.insert("sample".to_owned(), sample.clone());
        }
    }
    let metrics: Vec<Value> = declared.metrics().iter().map(metric).collect();
    if !metrics.is_empty() {
        note.insert("metrics".to_owned(), metrics.into());
    }
}

fn runs(spec: &StageSpec) -> String {
    match spec.cadence {
        Cadence::Step => "in every step".to_owned(),
        Cadence::Observer { every: 0 } => "before the first and after the last step".to_owned(),
        Cadence::Observer { every } => {
            format!("before the first step, after every {every}, and after the last")
        }
    }
}

fn rows(spec: &StageSpec, by_samples: bool) -> String {
    match spec.rows {
        RowRule::Source => "makes rows, one a prompt of the step".to_owned(),
        RowRule::Same => "one output row for each input row".to_owned(),
        RowRule::Expand(_) if by_samples => "each becomes `batch.samples` rows".to_owned(),
        RowRule::Expand(n) => format!("each becomes {n} rows"),
        RowRule::Filter => "drops some rows".to_owned(),
        RowRule::Sink => "reads rows and emits none".to_owned(),
    }
}

fn cut(spec: &StageSpec) -> &'static str {
    match spec.cardinality {
        _ if spec.rows == RowRule::Source => "all rows of a step at once",
        Cardinality::Row => "any slice of rows",
        Cardinality::Group => "whole groups, all rows of a prompt",
        Cardinality::Batch => "the whole batch of a step",
    }
}

/// A metric with the settings under which it is recorded.
fn metric(metric: &Declaration<Metric>) -> Value {
    let mut note = metric_note(&metric.item);
    note.insert("name".to_owned(), metric.item.name.into());
    add_use(metric.by_default, &metric.with, &mut note);
    Value::Object(note)
}

/// Unit, meaning and reduction of a metric.
pub(crate) fn metric_note(metric: &Metric) -> Map<String, Value> {
    let mut note = Map::new();
    if !metric.unit.is_empty() {
        note.insert("unit".to_owned(), metric.unit.into());
    }
    note.insert("meaning".to_owned(), metric.meaning.into());
    let reduce = serde_json::to_value(metric.reduce).unwrap_or_default();
    note.insert("over_a_step".to_owned(), reduce);
    note
}

/// A row of keys as an object; a key is required if the stage always uses it with its defaults.
fn row(verb: &str, keys: &[Declaration<Field>]) -> Value {
    let always = |key: &&Declaration<Field>| key.by_default == Use::Always;
    let required: Vec<&str> = keys
        .iter()
        .filter(always)
        .map(|key| &*key.item.name)
        .collect();
    let columns = keys.iter().map(|key| {
        let mut column = column(&key.item);
        if let Some(note) = column[NOTE].as_object_mut() {
            add_use(key.by_default, &key.with, note);
        }
        (key.item.name.to_string(), column)
    });
    json!({
        "type": "object",
        "description": format!("A row that the stage {verb}, with its own names of keys."),
        "properties": Map::from_iter(columns),
        "required": required,
    })
}

fn add_use(by_default: Use, with: &[(Change, Use)], note: &mut Map<String, Value>) {
    note.insert("used".to_owned(), by_default.word().into());
    let with = with.iter().map(|(change, used)| {
        json!({ "setting": change.setting, "value": change.value, "used": used.word() })
    });
    let with: Vec<Value> = with.collect();
    if !with.is_empty() {
        note.insert("but_with".to_owned(), with.into());
    }
}
