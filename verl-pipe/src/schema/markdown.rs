//! A document as a page of Markdown that reads well in a terminal too: lists instead of wide tables, lines that keep to
//! a width.

use serde_json::{Map, Value};

use super::NOTE;
use super::declared::{definition, words};
use super::edges::{DimOfPipeline, EdgeOfPipeline, PipelineEdges};
use super::run_folder::ANY_STAGE;
use crate::run::records::STAGE;

/// Columns that a line keeps to where its words allow.
const WIDTH: usize = 100;

/// How deep settings within settings are told.
const DEPTH: usize = 4;

/// The page of a document of [`kinds`](super::kinds), [`run_folder`](super::run_folder) or the pipeline file.
pub fn page(document: &Value) -> String {
    let mut page = Page::new(document);
    let note = &document[NOTE];
    let name = text(&document["title"]);
    match note["sort"].as_str() {
        Some("stage") => page.stage(name, note),
        Some("part") => page.part(name, note),
        Some("model") => page.model(name, note),
        Some("data set") => page.data(name, note),
        Some(_) => {
            page.title(&format!("`{name}`"), document);
            page.section("Fields");
            page.fields(document);
        }
        None => page.pipeline(),
    }
    page.out
}

/// The page of one concrete pipeline.
pub fn edges_page(edges: &PipelineEdges) -> String {
    let mut page = Page::new(&Value::Null);
    page.out = format!("# Edges of pipeline `{}`\n", edges.pipeline);
    for edge in &edges.edges {
        page.section(&format!("`{}`", edge.key));
        page.edge(edge);
    }
    page.out
}

struct Page<'a> {
    out: String,
    definitions: &'a Map<String, Value>,
    document: &'a Value,
}

static NOTHING: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);

impl<'a> Page<'a> {
    fn new(document: &'a Value) -> Self {
        Page {
            out: String::new(),
            definitions: document["$defs"].as_object().unwrap_or(&NOTHING),
            document,
        }
    }

    fn title(&mut self, title: &str, schema: &Value) {
        self.out += &format!("# {title}\n\n");
        self.wrapped("", "", &sentence(text(&schema["description"])));
    }

    fn section(&mut self, title: &str) {
        self.out += &format!("\n## {title}\n\n");
    }

    fn stage(&mut self, name: &str, note: &Value) {
        self.title(&format!("Stage `{name}`"), self.document);
        self.out.push('\n');
        self.declared(note);
        self.in_rust(note);
        self.example("[[stages]]", name);
        self.section("Settings");
        self.settings(self.document, 0, &["name", "rename"]);
        self.keys("Reads", "input");
        self.keys("Writes", "output");
        self.metrics(note);
        if note["sample"]["properties"].is_object() {
            self.section("Samples");
            self.settings(&note["sample"], 0, &[]);
        }
    }

    fn part(&mut self, name: &str, note: &Value) {
        let slot = text(&note["slot"]);
        self.title(&format!("Kind of {slot}: `{name}`"), self.document);
        self.out.push('\n');
        self.in_rust(note);
        for holder in list(&note["held_by"]) {
            let (stage, setting) = (text(&holder["stage"]), text(&holder["setting"]));
            let how = format!("{setting} = {{ kind = \"{name}\" }}");
            self.out += &format!("\n```toml\n[[stages]]\nkind = \"{stage}\"\n{how}\n```\n");
        }
        self.section("Settings");
        self.settings(self.document, 0, &[]);
        for holder in list(&note["held_by"]) {
            let stage = text(&holder["stage"]);
            self.missing(holder);
            self.keys(
                &format!("What `{stage}` reads with it"),
                &format!("input_of_{stage}"),
            );
            self.keys(
                &format!("What `{stage}` writes with it"),
                &format!("output_of_{stage}"),
            );
            self.metrics(holder);
        }
    }

    fn model(&mut self, name: &str, note: &Value) {
        self.title(&format!("Model kind `{name}`"), self.document);
        self.out.push('\n');
        self.in_rust(note);
        self.example("[models.actor]", name);
        self.section("Settings");
        self.settings(self.document, 0, &[]);
    }

    fn data(&mut self, name: &str, note: &Value) {
        self.title(&format!("Data set kind `{name}`"), self.document);
        self.out.push('\n');
        let extensions = list(&note["extensions"]).iter().map(text);
        let extensions: Vec<String> = extensions.map(|word| format!("`.{word}`")).collect();
        if !extensions.is_empty() {
            let all = extensions.join(", ");
            self.item(0, &format!("Meant by a path alone that ends in {all}."));
        }
        self.in_rust(note);
        self.example("[data.train]", name);
        self.section("Settings");
        self.settings(self.document, 0, &[]);
    }

    fn pipeline(&mut self) {
        let properties = &self.document["properties"];
        self.out += "# Pipeline file\n\n";
        self.wrapped(
            "",
            "",
            "What may stand in a pipeline file. A key that is not told here is an error.",
        );
        for (name, section) in properties.as_object().into_iter().flatten() {
            if section[NOTE]["rust"].is_string() {
                self.section(&format!("[{name}]"));
                self.settings(section, 0, &[]);
            }
        }
        for (title, kinds) in [
            (
                "Kinds of data sets",
                &properties["data"]["additionalProperties"],
            ),
            (
                "Kinds of models",
                &properties["models"]["additionalProperties"],
            ),
            ("Kinds of stages", &properties["stages"]["items"]),
        ] {
            self.section(title);
            for kind in list(&kinds["anyOf"]) {
                let kind = definition(kind, self.definitions);
                if let Some(name) = kind["title"].as_str() {
                    let about = sentence(text(&kind["description"]));
                    self.item(0, &format!("`{name}`: {about}"));
                }
            }
        }
    }

    /// The fields of a file or of a line of it, with those that go by a pattern and those that a stage adds.
    fn fields(&mut self, document: &Value) {
        if document["properties"].is_object() {
            self.settings(document, 0, &[]);
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
        for shown in list(&document["anyOf"]) {
            if let Some(stage) = shown[NOTE]["shown_by"].as_str() {
                self.section(&format!("What `{stage}` shows"));
                self.settings(shown, 0, &[]);
            }
        }
    }

    /// What a stage does besides reading and writing keys.
    fn declared(&mut self, note: &Value) {
        self.missing(note);
        for (what, key) in [("Runs", "runs"), ("Rows", "rows"), ("Cut", "cut")] {
            if let Some(words) = note[key].as_str() {
                self.item(0, &format!("{what}: {words}."));
            }
        }
        let models = list(&note["models"])
            .iter()
            .map(|model| format!("{} `{}`", text(&model["access"]), text(&model["name"])));
        let models: Vec<String> = models.collect();
        if !models.is_empty() {
            self.item(0, &format!("Models: {}.", models.join(", ")));
        }
    }

    fn missing(&mut self, note: &Value) {
        for fault in list(&note["missing"]) {
            let fault = text(fault);
            self.item(0, &format!("To be set: {fault}."));
        }
        let told_with = &note["told_with"];
        if told_with.as_object().is_some_and(|set| !set.is_empty()) {
            self.item(
                0,
                &format!("What follows is told with `{}`.", inline(told_with)),
            );
        }
    }

    fn in_rust(&mut self, note: &Value) {
        if let Some(name) = note["rust"].as_str() {
            self.item(0, &format!("In Rust: `{name}`."));
        }
    }

    /// The table of a pipeline file with what must be set.
    fn example(&mut self, head: &str, kind: &str) {
        let required = list(&self.document["required"]).iter().map(text);
        let settings = required.filter(|name| *name != "kind");
        let settings: String = settings.map(|name| format!("{name} = …\n")).collect();
        self.out += &format!("\n```toml\n{head}\nkind = \"{kind}\"\n{settings}```\n");
    }

    /// The properties of a schema, each with its type, default and meaning.
    fn settings(&mut self, schema: &Value, depth: usize, skip: &[&str]) {
        let properties = schema["properties"].as_object().into_iter().flatten();
        let told: Vec<_> = properties
            .filter(|(name, property)| {
                property["const"].is_null() && !skip.contains(&name.as_str())
            })
            .collect();
        if told.is_empty() && depth == 0 {
            self.out += "None.\n";
        }
        let required = list(&schema["required"]);
        for (name, property) in told {
            let mut head = format!("`{name}`: {}", self.type_of(property));
            match property.get("default") {
                Some(Value::Null) => head += ", absent by default",
                // The defaults of a table's keys are told with the keys.
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

    /// What stands inside a setting: keys of a table, words of a choice.
    fn within(&mut self, property: &Value, depth: usize) {
        let definitions = self.definitions;
        if let Some(slot) = slot(property, definitions) {
            let kinds = words(definition(property, definitions)).into_iter();
            let kinds: Vec<String> = kinds.map(|kind| format!("`{kind}`")).collect();
            let all = kinds.join(", ");
            self.item(
                depth,
                &format!("{all}; `pipe schema --part {slot}/KIND` tells of each."),
            );
            return;
        }
        if depth >= DEPTH {
            return;
        }
        let mut meant = definition(property, definitions);
        if meant["items"].is_object() {
            meant = definition(&meant["items"], definitions);
        }
        if meant["properties"].is_object() {
            self.settings(meant, depth, &[]);
        }
        let further = &meant["additionalProperties"];
        if further["properties"].is_object() || further["$ref"].is_string() {
            self.settings(definition(further, definitions), depth, &[]);
        }
        let choices = list(&meant["oneOf"]).iter().chain(list(&meant["anyOf"]));
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
                self.settings(choice, depth + 1, &[]);
            }
        }
    }

    /// The type of a property in words.
    fn type_of(&self, property: &Value) -> String {
        if let Some(slot) = slot(property, self.definitions) {
            return format!("a kind of {slot}");
        }
        let meant = definition(property, self.definitions);
        let known: Vec<String> = words(meant)
            .iter()
            .map(|word| format!("`{word}`"))
            .collect();
        if !known.is_empty() {
            return format!("one of {}", known.join(", "));
        }
        let types = list(&meant["type"]).iter().chain(Some(&meant["type"]));
        let name = types.filter_map(Value::as_str).find(|word| *word != "null");
        match name {
            Some("string") => "text".to_owned(),
            Some("integer") => "whole number".to_owned(),
            Some("number") => "number".to_owned(),
            Some("boolean") => "true or false".to_owned(),
            Some("array") if meant["items"].is_object() => {
                format!("list of {}", self.type_of(&meant["items"]))
            }
            Some("array") => "list".to_owned(),
            Some("object") => "table".to_owned(),
            _ if meant["oneOf"].is_array() => "table".to_owned(),
            _ => "anything".to_owned(),
        }
    }

    /// The keys of one side: those of the defaults, those that are read where written, those of other settings.
    fn keys(&mut self, title: &str, side: &str) {
        let rows = &self.definitions.get(side).unwrap_or(&Value::Null)["properties"];
        let Some(keys) = rows.as_object().filter(|keys| !keys.is_empty()) else {
            return;
        };
        self.section(title);
        let mut first = true;
        for (used, about) in [
            ("always", ""),
            ("where written", "Where some stage writes them:"),
            ("not", "With other settings:"),
        ] {
            let here = keys.iter().filter(|(_, key)| key[NOTE]["used"] == used);
            let here: Vec<_> = here.collect();
            if here.is_empty() {
                continue;
            }
            if !about.is_empty() {
                self.out += &format!("{}{about}\n\n", if first { "" } else { "\n" });
            }
            first = false;
            for (name, key) in here {
                let note = &key[NOTE];
                let mut line = format!(
                    "`{name}`: {} {}",
                    text(&note["dtype"]),
                    text(&note["shape"])
                );
                if let Some(unit) = note["unit"].as_str() {
                    line += &format!(", {unit}");
                }
                line += &format!(". {}", sentence(text(&key["description"])));
                if let Some(tag) = note["distribution"].as_object() {
                    let parts = tag
                        .iter()
                        .map(|(part, value)| format!("{part} {}", plain(value)));
                    let parts: Vec<String> = parts.collect();
                    line += &format!(" Under {}.", parts.join(", "));
                }
                line += &but_with(note);
                self.item(0, &line);
            }
        }
    }

    fn metrics(&mut self, note: &Value) {
        let metrics = list(&note["metrics"]);
        if metrics.is_empty() {
            return;
        }
        self.section("Metrics");
        for metric in metrics {
            let how = [&metric["unit"], &metric["over_a_step"]].into_iter();
            let how: Vec<&str> = how.filter_map(Value::as_str).collect();
            let line = format!(
                "`{}` ({}): {}{}",
                text(&metric["name"]),
                how.join(", "),
                sentence(text(&metric["meaning"])),
                but_with(metric)
            );
            self.item(0, &line);
        }
    }

    fn edge(&mut self, edge: &EdgeOfPipeline) {
        let mut line = format!("{} {}", edge.dtype, edge.shape);
        if !edge.unit.is_empty() {
            line += &format!(", {}", edge.unit);
        }
        line += &format!(". {}", sentence(&edge.meaning));
        if let Some(tag) = &edge.distribution {
            line += &format!(" Under {tag}.");
        }
        let mut rules = Vec::new();
        rules.extend(edge.finite.then_some("finite"));
        rules.extend(edge.nullable.then_some("may be null"));
        if !rules.is_empty() {
            line += &format!(" Values: {}.", rules.join(", "));
        }
        self.item(0, &line);
        let dims: Vec<String> = edge.dims.iter().map(dim).collect();
        self.item(0, &format!("Dims: {}.", dims.join("; ")));
        let writer = renamed(&edge.writer.stage, &edge.writer.key, &edge.key);
        self.item(0, &format!("Written by {writer}."));
        let readers = edge.readers.iter().map(|reader| {
            let mut told = renamed(&reader.stage, &reader.key, &edge.key);
            if let Some(to) = reader.converted_to {
                told += &format!(" converted to {to}");
            }
            if reader.repeated > 1 {
                told += &format!(" repeated {} times", reader.repeated);
            }
            told
        });
        let readers: Vec<String> = readers.collect();
        match readers.is_empty() {
            true => self.item(0, "Read by nobody."),
            false => self.item(0, &format!("Read by {}.", readers.join(", "))),
        }
    }

    fn item(&mut self, depth: usize, words: &str) {
        let indent = "  ".repeat(depth);
        self.wrapped(&format!("{indent}- "), &format!("{indent}  "), words);
    }

    /// `words` after `head`, further lines after `indent`.
    fn wrapped(&mut self, head: &str, indent: &str, words: &str) {
        let mut line = head.to_owned();
        let mut empty = true;
        for word in words.split_whitespace() {
            let fits = line.chars().count() + 1 + word.chars().count() <= WIDTH;
            if !empty && !fits && !begins_markup(word) {
                self.out += &format!("{line}\n");
                line = indent.to_owned();
                empty = true;
            }
            if !empty {
                line.push(' ');
            }
            line += word;
            empty = false;
        }
        self.out += &format!("{line}\n");
    }
}

/// Whether a line that begins with the word would be something else than text.
fn begins_markup(word: &str) -> bool {
    let numbered = word.trim_start_matches(|c: char| c.is_ascii_digit());
    matches!(word, "+" | "-" | "*" | "=")
        || word.starts_with(['#', '>', '|'])
        || (numbered.len() < word.len() && matches!(numbered, "." | ")"))
}

fn dim(dim: &DimOfPipeline) -> String {
    let most = if dim.at_most { "at most " } else { "" };
    let waves = match dim.waves {
        1 => String::new(),
        waves => format!(" a wave, at most {waves} waves"),
    };
    match (dim.size, &dim.lengths_of) {
        (Some(size), _) => format!("{} = {most}{size}{waves}", dim.dim),
        (None, Some(stage)) => {
            format!(
                "{} differs from row to row, with lengths from `{stage}`",
                dim.dim
            )
        }
        (None, None) => dim.dim.clone(),
    }
}

fn renamed(stage: &str, own: &str, key: &str) -> String {
    if own == key {
        format!("`{stage}`")
    } else {
        format!("`{stage}` as `{own}`")
    }
}

/// With which settings it is otherwise.
fn but_with(note: &Value) -> String {
    let mut groups: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for change in list(&note["but_with"]) {
        let (setting, used) = (text(&change["setting"]), text(&change["used"]));
        let value = format!("`{}`", inline(&change["value"]));
        match groups
            .iter_mut()
            .find(|group| (group.0, group.1) == (setting, used))
        {
            Some(group) => group.2.push(value),
            None => groups.push((setting, used, vec![value])),
        }
    }
    let told = groups.into_iter().map(|(setting, used, values)| {
        let word = match used {
            "always" => "Needed",
            "not" => "Not",
            _ => "Where written",
        };
        format!(" {word} with `{setting}` = {}.", values.join(", "))
    });
    told.collect()
}

/// Unit and origin of a metric among the fields of a line.
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

/// The slot that a property holds a part of.
fn slot<'a>(property: &'a Value, definitions: &'a Map<String, Value>) -> Option<&'a str> {
    definition(property, definitions)[NOTE]["slot"].as_str()
}

/// A value as a pipeline file has it; of a part its kind alone.
fn inline(value: &Value) -> String {
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

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// With a full stop at its end, and a capital at its beginning where that is a word and no symbol such as `k` or β.
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

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_keep_to_their_width_and_never_begin_as_markup() {
        let mut page = Page::new(&Value::Null);
        let words = "x ".repeat(47) + "1 + y " + &"z ".repeat(40);
        page.item(1, &words);
        let lines: Vec<&str> = page.out.lines().collect();
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
    fn values_are_told_as_a_pipeline_file_has_them() {
        for (value, told) in [
            (json!("a\"b"), r#""a\"b""#),
            (json!([1, 2.5]), "[1, 2.5]"),
            (json!({"kind": "grpo", "clip": 1}), "\"grpo\""),
            (json!({"a": true, "b": null}), "{ a = true }"),
        ] {
            assert_eq!(inline(&value), told);
        }
        assert_eq!(sentence("texts end"), "Texts end.");
        assert_eq!(sentence("β: how dear"), "β: how dear.");
        assert_eq!(sentence("k of it."), "k of it.");
        assert_eq!(sentence("a line"), "A line.");
        assert_eq!(sentence(""), "");
    }
}
