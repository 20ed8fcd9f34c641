//! Pages of kinds: what a stage, part, model or data set is, and the settings of its table.

use serde_json::Value;

use super::Page;
use super::words::{inline, list, text};

/// Settings that every stage has.
const OF_EVERY_STAGE: [&str; 4] = ["name", "rename", "debug", "group"];

impl Page<'_> {
    pub(super) fn stage(&mut self, name: &str, note: &Value) {
        self.title(&format!("Stage `{name}`"), self.document);
        self.out.push('\n');
        self.declared(note);
        self.in_rust(note);
        self.example("[[stages]]", name);
        self.section("Settings");
        let document = self.document;
        self.settings(document, 0, &|name| !OF_EVERY_STAGE.contains(&name));
        self.out += "\nSettings of every stage:\n\n";
        self.settings(document, 0, &|name| OF_EVERY_STAGE.contains(&name));
        self.keys("Reads", "input");
        self.keys("Writes", "output");
        self.metrics(note);
        if note["sample"]["properties"].is_object() {
            self.section("Samples");
            self.paragraph("Fields of a line of `samples.jsonl` from this stage.");
            self.settings(&note["sample"], 0, &|_| true);
        }
    }

    pub(super) fn part(&mut self, name: &str, note: &Value) {
        let slot = text(&note["slot"]);
        self.title(&format!("Kind of {slot}: `{name}`"), self.document);
        self.out.push('\n');
        self.in_rust(note);
        for user in list(&note["held_by"]) {
            let (stage, setting) = (text(&user["stage"]), text(&user["setting"]));
            let how = format!("{setting} = {{ kind = \"{name}\" }}");
            self.out += &format!("\n```toml\n[[stages]]\nkind = \"{stage}\"\n{how}\n```\n");
        }
        self.section("Settings");
        self.settings(self.document, 0, &|_| true);
        for user in list(&note["held_by"]) {
            let stage = text(&user["stage"]);
            self.missing(user);
            self.keys(
                &format!("Keys that `{stage}` reads with it"),
                &format!("input_of_{stage}"),
            );
            self.keys(
                &format!("Keys that `{stage}` writes with it"),
                &format!("output_of_{stage}"),
            );
            self.metrics(user);
        }
    }

    pub(super) fn model(&mut self, name: &str, note: &Value) {
        self.title(&format!("Model kind `{name}`"), self.document);
        self.out.push('\n');
        self.in_rust(note);
        self.example("[models.actor]", name);
        self.section("Settings");
        self.settings(self.document, 0, &|_| true);
    }

    pub(super) fn data(&mut self, name: &str, note: &Value) {
        self.title(&format!("Data set kind `{name}`"), self.document);
        self.out.push('\n');
        let extensions = list(&note["extensions"]).iter().map(text);
        let extensions: Vec<String> = extensions.map(|word| format!("`.{word}`")).collect();
        if !extensions.is_empty() {
            let all = extensions.join(", ");
            self.item(
                0,
                &format!("Selected by a path that ends in {all}, without `kind`."),
            );
        }
        self.in_rust(note);
        self.example("[data.train]", name);
        self.section("Settings");
        self.settings(self.document, 0, &|_| true);
    }

    /// The properties of a stage besides the keys that it reads and writes.
    fn declared(&mut self, note: &Value) {
        self.missing(note);
        for (what, key) in [("Runs", "runs"), ("Rows", "rows"), ("Works on", "cut")] {
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
        for reason in list(&note["missing"]) {
            let reason = text(reason);
            self.item(0, &format!("Required: {reason}."));
        }
        let settings = &note["declared_with"];
        if settings.as_object().is_some_and(|set| !set.is_empty()) {
            self.item(
                0,
                &format!("The following applies with `{}`.", inline(settings)),
            );
        }
    }

    fn in_rust(&mut self, note: &Value) {
        if let Some(name) = note["rust"].as_str() {
            self.item(0, &format!("In Rust: `{name}`."));
        }
    }

    /// The table of a pipeline file with the required settings.
    fn example(&mut self, head: &str, kind: &str) {
        let required = list(&self.document["required"]).iter().map(text);
        let settings = required.filter(|name| *name != "kind");
        let settings: String = settings.map(|name| format!("{name} = …\n")).collect();
        self.out += &format!("\n```toml\n{head}\nkind = \"{kind}\"\n{settings}```\n");
    }
}
