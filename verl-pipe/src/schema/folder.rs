//! Every document as a file, with an index: the output of `pipe schema --out DIR`.
//!
//! | file | content |
//! |---|---|
//! | `index.json` or `README.md` | all files, and all keys with their writers and readers |
//! | `pipeline` | the pipeline file |
//! | `edges` | the output of `pipe schema --pipeline FILE` |
//! | `stages/<kind>` | one kind of stage |
//! | `parts/<slot>/<kind>` | one kind of part |
//! | `models/<kind>`, `data/<kind>` | one kind of model or data set |
//! | `run/<file>` | a file of a run folder, a line of it, or a row of its table |

use std::collections::BTreeMap;

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use super::edges::PipelineEdges;
use super::kinds::Catalogue;
use super::markdown::{LEGEND, page, sentence};
use super::{DRAFT, NOTE, pipeline_schema};

/// The format of documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// JSON Schema.
    #[default]
    Json,
    /// Markdown, for the terminal or a web page.
    Md,
}

/// A document and its path in the folder, without extension.
#[derive(Debug, Clone)]
pub struct Document {
    /// The path, for example `stages/generate`.
    pub path: String,
    /// The schema.
    pub schema: Value,
}

impl Format {
    /// The file name of a document.
    pub fn file(self, path: &str) -> String {
        match self {
            Format::Json => format!("{path}.json"),
            Format::Md => format!("{path}.md"),
        }
    }

    /// The text of a document.
    pub fn text(self, schema: &Value) -> String {
        match self {
            Format::Json => json_text(schema),
            Format::Md => page(schema),
        }
    }
}

/// A value as the text of a file.
pub fn json_text(value: &impl serde::Serialize) -> String {
    // Schemas contain only strings, numbers and tables with string keys, which always serialise.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

impl Catalogue<'_> {
    /// All documents, in the order of their paths.
    pub fn documents(&self) -> Vec<Document> {
        let named = |path: String, schema: Option<Value>| {
            Some(Document {
                path,
                schema: schema?,
            })
        };
        let registry = self.registry;
        let stages = self.stages.iter();
        let stages = stages.map(|(name, _)| named(format!("stages/{name}"), self.stage(name)));
        let parts = self.parts.iter();
        let parts = parts
            .map(|(slot, name, _)| named(format!("parts/{slot}/{name}"), self.part(slot, name)));
        let models = registry.models().iter();
        let models =
            models.map(|kind| named(format!("models/{}", kind.name), self.model(kind.name)));
        let data = registry.data_kinds().iter();
        let data = data.map(|kind| named(format!("data/{}", kind.name), self.data(kind.name)));
        let run = self
            .run_files()
            .into_iter()
            .map(|file| named(format!("run/{}", file.document), Some(file.schema)));
        let top_level = [
            named("edges".to_owned(), Some(edges_schema())),
            named("pipeline".to_owned(), Some(pipeline_schema(registry))),
        ];
        let all = stages
            .chain(parts)
            .chain(models)
            .chain(data)
            .chain(run)
            .chain(top_level);
        let mut all: Vec<Document> = all.flatten().collect();
        all.sort_by(|a, b| a.path.cmp(&b.path));
        all
    }

    /// All files with their texts, the index first.
    pub fn files(&self, format: Format) -> Vec<(String, String)> {
        let documents = self.documents();
        let index = index(&documents, format);
        let index = match format {
            Format::Json => ("index.json".to_owned(), json_text(&index)),
            Format::Md => ("README.md".to_owned(), index_page(&index)),
        };
        let files = documents.iter();
        let files = files.map(|doc| (format.file(&doc.path), format.text(&doc.schema)));
        std::iter::once(index).chain(files).collect()
    }

    /// Only the index.
    pub fn index(&self, format: Format) -> String {
        let index = index(&self.documents(), format);
        match format {
            Format::Json => json_text(&index),
            Format::Md => index_page(&index),
        }
    }
}

/// The schema of [`PipelineEdges`].
fn edges_schema() -> Value {
    let schema = SchemaGenerator::default().into_root_schema_for::<PipelineEdges>();
    let mut schema = schema.to_value();
    schema["$schema"] = DRAFT.into();
    schema["title"] = "edges".into();
    schema[NOTE] = json!({ "sort": "edges of a pipeline" });
    schema
}

/// Names of the folders, as titles of an index.
const SORTS: [(&str, &str); 6] = [
    ("", "The whole"),
    ("stages", "Stages"),
    ("parts", "Parts"),
    ("models", "Models"),
    ("data", "Data sets"),
    ("run", "Run folder"),
];

fn index(documents: &[Document], format: Format) -> Value {
    let sort = |path: &str| {
        path.split_once('/')
            .map_or("", |(folder, _)| folder)
            .to_owned()
    };
    let mut folders = Map::new();
    for (folder, title) in SORTS {
        let here = documents.iter().filter(|doc| sort(&doc.path) == folder);
        let here = here.map(|doc| {
            let about = doc.schema["description"].as_str();
            let about = about.unwrap_or("all settings of a pipeline file");
            let mut lines = about.lines();
            // A loss and an estimator may have the same name.
            let name = match doc.path.strip_prefix("parts/") {
                Some(part) => part.into(),
                None => doc.schema["title"].clone(),
            };
            json!({
                "file": format.file(&doc.path),
                "name": name,
                "about": lines.next().unwrap_or_default(),
            })
        });
        let here: Vec<Value> = here.collect();
        if !here.is_empty() {
            folders.insert(title.to_owned(), here.into());
        }
    }
    json!({ "documents": folders, "keys": keys(documents) })
}

/// All keys of stages, with their writers and readers.
fn keys(documents: &[Document]) -> Value {
    let mut keys: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    let stages = documents
        .iter()
        .filter(|doc| doc.path.starts_with("stages/"));
    for document in stages {
        for (side, by) in [("output", "written_by"), ("input", "read_by")] {
            let columns = document.schema["$defs"][side]["properties"].as_object();
            for (name, column) in columns.into_iter().flatten() {
                let key = keys.entry(name).or_insert_with(|| {
                    let note = &column[NOTE];
                    let properties = [
                        ("dtype", &note["dtype"]),
                        ("shape", &note["shape"]),
                        ("unit", &note["unit"]),
                        ("meaning", &column["description"]),
                    ];
                    let known = properties.into_iter().filter(|(_, value)| !value.is_null());
                    known
                        .map(|(what, value)| (what.to_owned(), value.clone()))
                        .collect()
                });
                let list = key.entry(by).or_insert_with(|| json!([]));
                if let Value::Array(list) = list {
                    list.push(document.schema["title"].clone());
                }
            }
        }
    }
    json!(keys)
}

fn index_page(index: &Value) -> String {
    let mut out =
        "# Schemas\n\nThe output of `pipe schema --format md --out DIR`, one page each.\n"
            .to_owned();
    for (title, documents) in index["documents"].as_object().into_iter().flatten() {
        out += &format!("\n## {title}\n\n");
        for document in documents.as_array().into_iter().flatten() {
            let [file, name, about] =
                ["file", "name", "about"].map(|key| document[key].as_str().unwrap_or_default());
            out += &format!("- [`{name}`]({file}): {}\n", sentence(about));
        }
    }
    out += &format!("\n## Keys\n\n{LEGEND}\n");
    for (name, key) in index["keys"].as_object().into_iter().flatten() {
        let [dtype, shape, unit, meaning] = ["dtype", "shape", "unit", "meaning"]
            .map(|part| key[part].as_str().unwrap_or_default());
        let unit = if unit.is_empty() {
            String::new()
        } else {
            format!(", {unit}")
        };
        out += &format!(
            "\n- `{name}`: {dtype} {shape}{unit}. {}\n",
            sentence(meaning)
        );
        for (by, word) in [("written_by", "written by"), ("read_by", "read by")] {
            let stages = key[by].as_array().into_iter().flatten();
            let stages: Vec<String> = stages
                .filter_map(Value::as_str)
                .map(|stage| format!("[`{stage}`](stages/{stage}.md)"))
                .collect();
            if !stages.is_empty() {
                out += &format!("  - {word} {}\n", stages.join(", "));
            }
        }
    }
    out
}
