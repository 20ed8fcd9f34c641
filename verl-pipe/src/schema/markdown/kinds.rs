//! Pages of kinds: what a stage, part, model or data set is, and what may stand in its table.

use serde_json::Value;

use super::Page;
use super::words::{inline, list, text};

/// Settings that every stage has.
const OF_EVERY_STAGE: [&str; 3] = ["name", "rename", "debug"];

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
        self.out += "\nAs of every stage:\n\n";
        self.settings(document, 0, &|name| OF_EVERY_STAGE.contains(&name));
        self.keys("Reads", "input");
        self.keys("Writes", "output");
        self.metrics(note);
        if note["sample"]["properties"].is_object() {
            self.section("Samples");
            self.paragraph("What a line of `samples.jsonl` shows of the stage.");
            self.settings(&note["sample"], 0, &|_| true);
        }
    }

    pub(super) fn part(&mut self, name: &str, note: &Value) {
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
        self.settings(self.document, 0, &|_| true);
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
            self.item(0, &format!("Meant by a path alone that ends in {all}."));
        }
        self.in_rust(note);
        self.example("[data.train]", name);
        self.section("Settings");
        self.settings(self.document, 0, &|_| true);
    }

    /// What a stage does besides reading and writing keys.
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
}
