//! JSON Schema (draft 2020-12) of the pipeline file, from the registry and the types that read it.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::part::AnyPart;
use crate::pipe::RunConfig;
use crate::registry::{FILE, Kind, Kinds, Registry};
use crate::schedule::batching::{BatchConfig, DevicesConfig};

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
    let default_model = registry.default_model();
    let models: Vec<Value> = registry
        .models()
        .iter()
        .map(|kind| entry(kind, &mut generator, Some(kind.name) != default_model, &[]))
        .collect();
    let data: Vec<Value> = registry
        .data_kinds()
        .iter()
        .map(|kind| {
            let by_path = kind.name == FILE || !kind.extensions.is_empty();
            entry(kind, &mut generator, !by_path, &[])
        })
        .collect();
    let common = [
        (
            "name",
            json!({ "type": "string", "description": "Name of the stage; by default its kind." }),
        ),
        (
            "rename",
            json!({
                "type": "object",
                "description": "The stage's own names of keys and what this pipeline calls them.",
                "additionalProperties": { "type": "string" }
            }),
        ),
    ];
    let stages: Vec<Value> = registry
        .stages()
        .iter()
        .map(|kind| entry(kind, &mut generator, true, &common))
        .collect();
    for (slot, kinds) in registry.slots().iter() {
        let parts = slot_schema(kinds, &mut generator);
        generator.definitions_mut().insert(slot.to_owned(), parts);
    }
    let mut data_or_path = vec![json!({ "type": "string", "description": "Path of a file." })];
    data_or_path.extend(data);
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pipeline file",
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "name": { "type": "string", "description": "Name of the pipeline." },
            "run": run,
            "batch": batch,
            "devices": devices,
            "data": {
                "type": "object",
                "description": "Data sets by name.",
                "additionalProperties": { "anyOf": data_or_path }
            },
            "models": {
                "type": "object",
                "description": "Models by name.",
                "additionalProperties": any_of(models)
            },
            "stages": {
                "type": "array",
                "description": "Stages, in any order; keys decide who reads what.",
                "items": any_of(stages)
            }
        }
    });
    let definitions = generator.take_definitions(true);
    if let (false, Value::Object(schema)) = (definitions.is_empty(), &mut schema) {
        schema.insert("$defs".to_owned(), Value::Object(definitions));
    }
    schema
}

fn section<C: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    C::json_schema(generator).to_value()
}

/// Nothing at all fits an empty list of kinds.
fn any_of(kinds: Vec<Value>) -> Value {
    if kinds.is_empty() {
        Value::Bool(false)
    } else {
        json!({ "anyOf": kinds })
    }
}

/// What may stand for a part of a slot: the name of a kind, or a table with `kind` and the kind's settings.
fn slot_schema(kinds: &Kinds<AnyPart>, generator: &mut SchemaGenerator) -> Value {
    let tables: Vec<Value> = kinds
        .iter()
        .map(|kind| entry(kind, generator, true, &[]))
        .collect();
    let without_settings = kinds.iter().zip(&tables).filter(|(_, table)| {
        let required = table["required"].as_array();
        required.is_none_or(|names| names.len() == 1)
    });
    let names: Vec<&str> = without_settings.map(|(kind, _)| kind.name).collect();
    let by_name = json!({
        "type": "string",
        "enum": names,
        "description": "A kind with its default settings."
    });
    let named = (!names.is_empty()).then_some(by_name);
    let one_of: Vec<Value> = named.into_iter().chain(tables).collect();
    json!({ "oneOf": one_of })
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
