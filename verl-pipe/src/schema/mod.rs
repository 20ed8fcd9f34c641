//! Generated documentation: JSON Schema (draft 2020-12) of the pipeline file, of every kind and of the run folder, from
//! the registry and from the types that run.
//!
//! | module | content |
//! |---|---|
//! | this one | the complete pipeline file |
//! | [`declared`] | what a stage declares with its defaults, and how other settings change it |
//! | [`kinds`] | one document per kind: settings, keys read and written, metrics |
//! | [`run_folder`] | the files that a run writes |
//! | [`edges`] | one concrete pipeline: every edge with its writer, readers, sizes |
//! | [`folder`] | all documents as files, with an index |
//! | [`markdown`] | a document as a page |
//!
//! Properties that JSON Schema cannot express (dtype, symbolic shape, unit, distribution of log-probs) are under the
//! keyword [`NOTE`], which validators ignore.

pub mod declared;
pub mod edges;
mod fields;
pub mod folder;
pub mod kinds;
pub mod markdown;
pub mod run_folder;

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};
use verl_declare::part::AnyPart;
use verl_declare::pipe::RunConfig;
use verl_declare::registry::{FILE, Kind, Kinds, Registry};
use verl_declare::sizes::{BatchConfig, DevicesConfig, GroupConfig};
use verl_rules::config::TraceConfig;

/// The dialect of every schema in this module.
pub(crate) const DRAFT: &str = "https://json-schema.org/draft/2020-12/schema";

/// Keyword for properties that JSON Schema cannot express.
pub const NOTE: &str = "x-verl";

/// The schema of pipeline files that may use the kinds of `registry`.
///
/// ```
/// use verl_pipe::registry::Registry;
/// use verl_pipe::schema::pipeline_schema;
///
/// let schema = pipeline_schema(&Registry::new());
/// assert_eq!(schema["properties"]["batch"]["properties"]["prompts"]["type"], "integer");
/// ```
pub fn pipeline_schema(registry: &Registry) -> Value {
    let mut generator = SchemaGenerator::default();
    let run = section::<RunConfig>(&mut generator);
    let batch = section::<BatchConfig>(&mut generator);
    let devices = section::<DevicesConfig>(&mut generator);
    let group = section::<GroupConfig>(&mut generator);
    let mut trace = section::<TraceConfig>(&mut generator);
    if let Some(Value::Array(names)) = trace.pointer_mut("/properties/rules/propertyNames/enum") {
        names.extend(registry.rules().iter().map(|rule| json!(rule.name)));
    }
    let default_model = registry.default_model();
    let models = registry.models().iter();
    let of_models = model_settings();
    let models: Vec<Value> = models
        .map(|kind| {
            entry(
                kind,
                &mut generator,
                Some(kind.name) != default_model,
                &of_models,
            )
        })
        .collect();
    let data = registry.data_kinds().iter();
    let data: Vec<Value> = data
        .map(|kind| {
            let by_path = kind.name == FILE || !kind.extensions.is_empty();
            entry(kind, &mut generator, !by_path, &[])
        })
        .collect();
    let common = common_settings();
    let stages = registry.stages().iter();
    let stages: Vec<Value> = stages
        .map(|kind| entry(kind, &mut generator, true, &common))
        .collect();
    let definitions = generator.definitions_mut();
    let models = by_kind("model", models, default_model, definitions);
    let mut data = by_kind("data", data, Some(FILE), definitions);
    let stages = by_kind("stage", stages, None, definitions);
    if data.is_object() {
        data["type"] = json!(["object", "string"]);
    }
    fill_slots(registry, &mut generator);
    let mut schema = json!({
        "$schema": DRAFT,
        "title": "Pipeline file",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "name": { "type": "string", "description": "Name of the pipeline." },
            "run": run,
            "batch": batch,
            "devices": devices,
            "groups": {
                "type": "object",
                "description": "Device groups by name. Groups work at the same time.",
                "additionalProperties": group
            },
            "trace": trace,
            "data": {
                "type": "object",
                "description": "Data sets by name: the path of a file, or a table.",
                "additionalProperties": data
            },
            "models": {
                "type": "object",
                "description": "Models by name.",
                "additionalProperties": models
            },
            "stages": {
                "type": "array",
                "description": "Stages, in any order; keys determine which stage reads from which.",
                "items": stages
            }
        }
    });
    let definitions = generator.take_definitions(true);
    if let (false, Value::Object(schema)) = (definitions.is_empty(), &mut schema) {
        schema.insert("$defs".to_owned(), Value::Object(definitions));
    }
    without_null(&mut schema);
    with_names_of_kinds(&mut schema);
    schema
}

/// Allows the name of a kind, with its default settings, wherever a table with a `kind` is allowed.
fn with_names_of_kinds(schema: &mut Value) {
    if let Some(choices) = schema.get_mut("oneOf").and_then(Value::as_array_mut) {
        let kind = |choice: &Value| {
            choice["properties"]["kind"]["const"]
                .as_str()
                .map(str::to_owned)
        };
        if choices.iter().all(|choice| kind(choice).is_some()) {
            let without_settings = choices.iter().filter(|choice| {
                let required = choice["required"].as_array();
                required.is_none_or(|names| names.len() <= 1)
            });
            let names: Vec<String> = without_settings.filter_map(kind).collect();
            choices.insert(0, by_name(&names));
        }
    }
    match schema {
        Value::Array(list) => list.iter_mut().for_each(with_names_of_kinds),
        Value::Object(map) => map.values_mut().for_each(with_names_of_kinds),
        _ => {}
    }
}

/// The schema of a string that names a kind.
fn by_name<S: AsRef<str>>(names: &[S]) -> Value {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    json!({
        "type": "string",
        "enum": names,
        "description": "A kind with its default settings."
    })
}

/// Removes null, which TOML does not have, from the types of optional settings. Validators then report an error as a
/// mismatch with the setting's only type, and not with both the type and null.
fn without_null(schema: &mut Value) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(without_null),
        Value::Object(map) => {
            let is_null = |choice: &Value| choice["type"] == "null";
            if let Some(Value::Array(choices)) = map.get_mut("anyOf")
                && choices.iter().any(is_null)
            {
                choices.retain(|choice| !is_null(choice));
                if let [Value::Object(only)] = choices.as_slice() {
                    let only = only.clone();
                    map.remove("anyOf");
                    for (key, value) in only {
                        map.entry(key).or_insert(value);
                    }
                }
            }
            if let Some(Value::Array(types)) = map.get_mut("type") {
                types.retain(|name| name != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    map.insert("type".to_owned(), only);
                }
            }
            map.values_mut().for_each(without_null);
        }
        _ => {}
    }
}

/// Keys that every stage of a pipeline file may have.
fn common_settings() -> [(&'static str, Value); 4] {
    [
        (
            "name",
            json!({ "type": "string", "description": "Name of the stage in this pipeline, used in settings, messages and the trace; its kind by default." }),
        ),
        (
            "rename",
            json!({
                "type": "object",
                "description": "Keys that have another name in this pipeline: the stage's own name, and the pipeline's.",
                "default": {},
                "additionalProperties": { "type": "string" }
            }),
        ),
        (
            "debug",
            json!({
                "type": "boolean",
                "default": false,
                "description": "Records the stage in full at every step; see `docs/trace.md`."
            }),
        ),
        (
            "group",
            json!({
                "type": "string",
                "description": "The device group on which the stage runs, one of `[groups]`; by default that of its model."
            }),
        ),
    ]
}

/// Keys that every model of a pipeline file may have.
fn model_settings() -> [(&'static str, Value); 1] {
    [(
        "group",
        json!({
            "type": "string",
            "description": "Its device group, one of `[groups]`; by default the one that `[devices]` names."
        }),
    )]
}

/// Adds the kinds of each slot to the definitions that [`Part`](verl_declare::part::Part) refers to.
fn fill_slots(registry: &Registry, generator: &mut SchemaGenerator) {
    for (slot, kinds) in registry.slots().iter() {
        let parts = slot_schema(slot, kinds, generator);
        generator.definitions_mut().insert(slot.to_owned(), parts);
    }
}

/// A section of the file, with the Rust type that it is deserialised into.
fn section<C: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    let mut schema = C::json_schema(generator).to_value();
    schema[NOTE] = json!({ "rust": std::any::type_name::<C>() });
    schema
}

/// The schema of a table that matches the one of `kinds` that its `kind` names, or `default` without a `kind`. The
/// kinds become definitions of `sort`.
///
/// They are referenced twice. `if`/`then` rules lead from the name to the kind, so that validators report errors of the
/// named kind instead of a mismatch with all kinds. Editors look for keys to complete in `anyOf`, which accepts any
/// value.
fn by_kind(
    sort: &str,
    kinds: Vec<Value>,
    default: Option<&str>,
    definitions: &mut Map<String, Value>,
) -> Value {
    if kinds.is_empty() {
        // No value is valid.
        return Value::Bool(false);
    }
    let (mut names, mut rules, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for kind in kinds {
        let name = kind["title"].as_str().unwrap_or_default().to_owned();
        let definition = format!("{sort}_{name}");
        let reference = json!({ "$ref": format!("#/$defs/{definition}") });
        let named = json!({
            "type": "object",
            "properties": { "kind": { "const": name } },
            "required": ["kind"]
        });
        rules.push(json!({ "if": named, "then": reference }));
        if default == Some(name.as_str()) {
            let unnamed = json!({ "type": "object", "not": { "required": ["kind"] } });
            rules.push(json!({ "if": unnamed, "then": reference }));
        }
        names.push(name);
        all.push(reference);
        definitions.insert(definition, kind);
    }
    all.push(Value::Bool(true));
    let mut schema = json!({
        "type": "object",
        "properties": { "kind": { "enum": names } },
        "allOf": rules,
        "anyOf": all
    });
    if default.is_none_or(|default| !names_kind(&schema, default)) {
        schema["required"] = json!(["kind"]);
    }
    schema
}

fn names_kind(schema: &Value, name: &str) -> bool {
    let names = schema["properties"]["kind"]["enum"].as_array();
    names.is_some_and(|names| names.iter().any(|known| known == name))
}

/// The schema of a part of a slot: the name of a kind, or a table with `kind` and the kind's settings.
fn slot_schema(slot: &str, kinds: &Kinds<AnyPart>, generator: &mut SchemaGenerator) -> Value {
    let tables: Vec<Value> = kinds
        .iter()
        .map(|kind| entry(kind, generator, true, &[]))
        .collect();
    let without_settings = kinds.iter().zip(&tables).filter(|(_, table)| {
        let required = table["required"].as_array();
        required.is_none_or(|names| names.len() == 1)
    });
    let names: Vec<&str> = without_settings.map(|(kind, _)| kind.name).collect();
    let named = (!names.is_empty()).then(|| by_name(&names));
    let one_of: Vec<Value> = named.into_iter().chain(tables).collect();
    json!({ NOTE: { "slot": slot }, "oneOf": one_of })
}

/// The schema of a kind's configuration with `kind` and the keys that every entry may have.
fn entry<D>(
    kind: &Kind<D>,
    generator: &mut SchemaGenerator,
    kind_required: bool,
    common: &[(&str, Value)],
) -> Value {
    let mut schema = match (kind.schema)(generator).to_value() {
        Value::Object(schema) => schema,
        _ => Map::new(),
    };
    schema.insert("type".to_owned(), "object".into());
    schema.insert("title".to_owned(), kind.name.into());
    schema.insert("description".to_owned(), kind.summary.into());
    schema.insert("additionalProperties".to_owned(), Value::Bool(false));
    let own = schema
        .remove("properties")
        .and_then(|value| value.as_object().cloned())
        .unwrap_or_default();
    let mut properties = Map::new();
    properties.insert("kind".to_owned(), json!({ "const": kind.name }));
    properties.extend(
        common
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone())),
    );
    properties.extend(own);
    schema.insert("properties".to_owned(), Value::Object(properties));
    if kind_required {
        let required = schema.entry("required").or_insert_with(|| json!([]));
        if let Value::Array(required) = required {
            required.insert(0, "kind".into());
        }
    }
    Value::Object(schema)
}
