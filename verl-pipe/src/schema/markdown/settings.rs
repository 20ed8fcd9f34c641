//! Settings of a kind and fields of a file: each with its type, default, unit and meaning.

use serde_json::{Map, Value};
use verl_words::stage::STAGE;

use super::words::{inline, list, sentence, text, ticked};
use super::{NOTE, Page};
use crate::schema::declared::{definition, words};
use crate::schema::run_folder::ANY_STAGE;

/// Maximum depth of nested settings.
const DEPTH: usize = 4;

impl Page<'_> {
    /// The description of a file of a run folder, with its fields.
    pub(super) fn file(&mut self, note: &Value) {
        let document = self.document;
        let written = note["written"].as_str();
        if let Some(written) = written {
            self.out.push('\n');
            self.item(0, &format!("Format: {written}."));
        }
        let table = written.is_some_and(|word| word.ends_with("a table"));
        let documented = ["properties", "additionalProperties", "anyOf", "oneOf"];
        if documented.iter().any(|key| !document[*key].is_null()) {
            self.section(if table { "Columns" } else { "Fields" });
            self.fields(document);
        }
        for (key, definition) in note["metadata"].as_object().into_iter().flatten() {
            self.section(&format!("Metadata `{key}` of the file, JSON"));
            let definitions = self.definitions;
            if let Some(schema) = definitions.get(text(definition)) {
                self.settings(schema, 0, &|_| true);
            }
        }
    }

    /// The fields of a file or of a line of it, including fields that match a pattern and fields that a stage adds.
    pub(super) fn fields(&mut self, document: &Value) {
        if document["properties"].is_object() {
            self.settings(document, 0, &|_| true);
        } else {
            self.within(document, 0);
        }
        let patterns = document["patternProperties"].as_object();
        for (pattern, property) in patterns.into_iter().flatten() {
            let name = pattern.trim_start_matches('^').trim_end_matches('$');
            let name = name.replace(ANY_STAGE, STAGE);
            let about = sentence(text(&property["description"]));
            let line = format!(
                "`{name}`: {}{}. {about}",
                self.type_of(property),
                noted(property)
            );
            self.item(0, &line);
        }
        if let Some(about) = document["additionalProperties"]["description"].as_str() {
            self.item(0, &format!("any other field: {}", sentence(about)));
        }
        for shown in list(&document["anyOf"]) {
            if let Some(stage) = shown[NOTE]["shown_by"].as_str() {
                self.section(&format!("Samples of `{stage}`"));
                self.settings(shown, 0, &|_| true);
            }
        }
    }

    /// The properties of a schema, each with its type, default and meaning.
    pub(super) fn settings(
        &mut self,
        schema: &Value,
        depth: usize,
        is_shown: &dyn Fn(&str) -> bool,
    ) {
        let properties = schema["properties"].as_object().into_iter().flatten();
        let shown: Vec<_> = properties
            .filter(|(name, property)| property["const"].is_null() && is_shown(name))
            .collect();
        if shown.is_empty() && depth == 0 {
            self.out += "None.\n";
        }
        let required = list(&schema["required"]);
        for (name, property) in shown {
            let dtype = property[NOTE]["dtype"].as_str();
            let mut head = match dtype {
                Some(dtype) => format!("`{name}`: {dtype}"),
                None => format!("`{name}`: {}", self.type_of(property)),
            };
            match property.get("default") {
                // Every row of a table has every column.
                _ if dtype.is_some() => {
                    let types = list(&property["type"]).iter();
                    if types.filter_map(Value::as_str).any(|word| word == "null") {
                        head += " or null";
                    }
                }
                Some(Value::Null) => head += ", absent by default",
                // The keys of a table have their own defaults.
                Some(Value::Object(table)) if !table.contains_key("kind") && !table.is_empty() => {}
                Some(default) => head += &format!(", default `{}`", inline(default)),
                None if required.iter().any(|word| word == name) => head += ", required",
                None => {}
            }
            head += &noted(property);
            let meaning = sentence(text(&property["description"]));
            self.item(depth, format!("{head}. {meaning}").trim_end());
            self.within(property, depth + 1);
        }
    }

    /// The content of a setting: keys of a table, words of a choice.
    fn within(&mut self, property: &Value, depth: usize) {
        let definitions = self.definitions;
        if let Some(slot) = slot(property, definitions) {
            let kinds = words(definition(property, definitions)).into_iter();
            let kinds: Vec<String> = kinds.map(|kind| format!("`{kind}`")).collect();
            let all = kinds.join(", ");
            self.item(
                depth,
                &format!(
                    "{all}; run `pipe schema --part {slot}/KIND` for the documentation of a kind."
                ),
            );
            return;
        }
        if depth >= DEPTH {
            return;
        }
        let mut schema = definition(property, definitions);
        if schema["items"].is_object() {
            schema = definition(&schema["items"], definitions);
        }
        if schema["properties"].is_object() {
            self.settings(schema, depth, &|_| true);
        }
        let names = list(&schema["propertyNames"]["enum"]);
        if !names.is_empty() {
            let names: Vec<&str> = names.iter().map(text).collect();
            self.item(depth, &format!("Names: {}.", ticked(&names)));
        }
        let further = &schema["additionalProperties"];
        if further["properties"].is_object() || further["$ref"].is_string() {
            self.settings(definition(further, definitions), depth, &|_| true);
        }
        let choices = list(&schema["oneOf"]).iter().chain(list(&schema["anyOf"]));
        for choice in choices {
            let about = sentence(text(&choice["description"]));
            let known: Vec<String> = words(choice)
                .iter()
                .map(|word| format!("`{word}`"))
                .collect();
            if !known.is_empty() && !about.is_empty() {
                self.item(depth, &format!("{}: {about}", known.join(", ")));
            }
            if let Some(tag) = choice["properties"]["kind"]["const"].as_str() {
                self.item(depth, format!("`kind = \"{tag}\"`: {about}").trim_end());
                self.settings(choice, depth + 1, &|_| true);
            }
        }
    }

    /// The type of a property in words.
    fn type_of(&self, property: &Value) -> String {
        if let Some(slot) = slot(property, self.definitions) {
            return format!("a kind of {slot}");
        }
        let schema = definition(property, self.definitions);
        let known: Vec<String> = words(schema)
            .iter()
            .map(|word| format!("`{word}`"))
            .collect();
        if !known.is_empty() {
            return format!("one of {}", known.join(", "));
        }
        let types = list(&schema["type"]).iter().chain(Some(&schema["type"]));
        let name = types.filter_map(Value::as_str).find(|word| *word != "null");
        match name {
            Some("string") => "string".to_owned(),
            Some("integer") => "integer".to_owned(),
            Some("number") => "number".to_owned(),
            Some("boolean") => "boolean".to_owned(),
            Some("array") if schema["items"].is_object() => {
                format!("list of {}", self.type_of(&schema["items"]))
            }
            Some("array") => "list".to_owned(),
            Some("object") if schema["additionalProperties"].is_object() => {
                "table by name".to_owned()
            }
            Some("object") => "table".to_owned(),
            _ if schema["oneOf"].is_array() => "table".to_owned(),
            _ => "any value".to_owned(),
        }
    }
}

/// Unit of a column; unit and recording stages of a metric among the fields of a line.
fn noted(property: &Value) -> String {
    let note = &property[NOTE];
    let unit = note["unit"].as_str().map(|unit| format!(", {unit}"));
    let by = list(&note["recorded_by"])
        .iter()
        .map(|stage| format!("`{}`", text(stage)));
    let by: Vec<String> = by.collect();
    let by = (!by.is_empty()).then(|| format!(", by {}", by.join(", ")));
    [unit, by].into_iter().flatten().collect()
}

/// The slot of the part that a property selects.
fn slot<'a>(property: &'a Value, definitions: &'a Map<String, Value>) -> Option<&'a str> {
    definition(property, definitions)[NOTE]["slot"].as_str()
}
