//! A document as a page of Markdown that is also readable in a terminal: lists instead of wide tables, and lines of
//! limited width.

mod edges;
mod keys;
mod kinds;
mod settings;
mod words;

use serde_json::{Map, Value};

use super::NOTE;
use super::declared::definition;
use words::{list, text, wrapped};

pub use edges::edges_page;
pub(crate) use words::sentence;

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
            page.file(note);
        }
        None => page.pipeline(),
    }
    page.out
}

struct Page<'a> {
    out: String,
    /// Whether the legend has been written.
    legend: bool,
    definitions: &'a Map<String, Value>,
    document: &'a Value,
}

/// How to read the shape of a key.
pub(crate) const LEGEND: &str = "Each key is listed with its type and shape. The first dim of a shape counts rows: `P` counts prompts, `B` the rows that the stage works on, which are samples from `generate` on. A dim with `~`, such as `T~`, is a length that differs from row to row; keys with the same such dim have equal lengths in each row.";

/// A short pipeline file.
const SKELETON: &str = r#"
```toml
name = "grpo"
[run]
steps = 100
[data]
train = "train.jsonl"          # a file, or a table with `kind` and that kind's settings
[models.actor]                 # as many as needed, each with a name
path = "models/actor"
[[stages]]                     # as many as needed, in any order
kind = "generate"
max_new_tokens = 256
```
"#;

static NOTHING: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);

impl<'a> Page<'a> {
    fn new(document: &'a Value) -> Self {
        Page {
            out: String::new(),
            legend: false,
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

    fn pipeline(&mut self) {
        let properties = &self.document["properties"];
        self.out += "# Pipeline file\n\n";
        self.wrapped(
            "",
            "",
            "All settings of a pipeline file. A key that is not listed here is an error; an omitted key has its default.",
        );
        self.out += SKELETON;
        for (name, section) in properties.as_object().into_iter().flatten() {
            if section[NOTE]["rust"].is_string() {
                self.section(&format!("[{name}]"));
                self.settings(section, 0, &|_| true);
            }
        }
        for (title, flag, kinds) in [
            (
                "Kinds of data sets",
                "--data",
                &properties["data"]["additionalProperties"],
            ),
            (
                "Kinds of models",
                "--model",
                &properties["models"]["additionalProperties"],
            ),
            ("Kinds of stages", "--stage", &properties["stages"]["items"]),
        ] {
            self.section(title);
            self.paragraph(&format!(
                "Run `pipe schema {flag} KIND --format md` for the documentation of a kind."
            ));
            for kind in list(&kinds["anyOf"]) {
                let kind = definition(kind, self.definitions);
                if let Some(name) = kind["title"].as_str() {
                    let about = sentence(text(&kind["description"]));
                    self.item(0, &format!("`{name}`: {about}"));
                }
            }
        }
    }

    /// A separate paragraph.
    fn paragraph(&mut self, words: &str) {
        self.wrapped("", "", words);
        self.out.push('\n');
    }

    fn item(&mut self, depth: usize, words: &str) {
        let indent = "  ".repeat(depth);
        self.wrapped(&format!("{indent}- "), &format!("{indent}  "), words);
    }

    fn wrapped(&mut self, head: &str, indent: &str, words: &str) {
        wrapped(&mut self.out, head, indent, words);
    }
}
