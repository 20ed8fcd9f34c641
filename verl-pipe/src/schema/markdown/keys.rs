//! Keys that a stage reads and writes, and metrics that it records.

use serde_json::Value;

use super::words::{inline, list, plain, sentence, text};
use super::{LEGEND, NOTE, Page};

impl Page<'_> {
    /// The keys of one side: keys of the defaults, keys that are read if written, keys of other settings.
    pub(super) fn keys(&mut self, title: &str, side: &str) {
        let rows = &self.definitions.get(side).unwrap_or(&Value::Null)["properties"];
        let Some(keys) = rows.as_object().filter(|keys| !keys.is_empty()) else {
            return;
        };
        self.section(title);
        if !std::mem::replace(&mut self.legend, true) {
            self.paragraph(LEGEND);
        }
        let mut first = true;
        for (used, about) in [
            ("always", ""),
            ("where written", "If some stage writes them:"),
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
                line += &distribution(&note["distribution"]);
                line += &but_with(note, "Needed");
                self.item(0, &line);
            }
        }
    }

    pub(super) fn metrics(&mut self, note: &Value) {
        let metrics = list(&note["metrics"]);
        if metrics.is_empty() {
            return;
        }
        self.section("Metrics");
        self.paragraph(
            "Each with its unit, and how the values of a step are combined into one number.",
        );
        for metric in metrics {
            let how = [&metric["unit"], &metric["over_a_step"]].into_iter();
            let how: Vec<&str> = how.filter_map(Value::as_str).collect();
            let line = format!(
                "`{}` ({}): {}{}",
                text(&metric["name"]),
                how.join(", "),
                sentence(text(&metric["meaning"])),
                but_with(metric, "Recorded")
            );
            self.item(0, &line);
        }
    }
}

/// The distribution of a log-prob in words; for another number of a model, the model.
pub(super) fn distribution(tag: &Value) -> String {
    let tag = tag.as_object().into_iter().flatten();
    let parts = tag.filter(|(_, value)| !value.is_null());
    let parts = parts.map(|(part, value)| match (part.as_str(), value.as_str()) {
        ("policy", Some(model)) => format!("by model `{model}`"),
        ("support", Some("full")) => "over the whole vocabulary".to_owned(),
        ("support", Some("sampling")) => "over the tokens that sampling keeps".to_owned(),
        ("weights", Some("step_start")) => "with the weights at the start of the step".to_owned(),
        ("weights", Some("frozen")) => "with weights that never change".to_owned(),
        ("temperature", _) => format!("at temperature {value}"),
        _ => format!("{part} {}", plain(value)),
    });
    let parts: Vec<String> = parts.collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!(" Computed {}.", parts.join(", ")),
    }
}

/// The settings that change the use of a key or metric; `always` is the word for an unconditional use.
fn but_with(note: &Value, always: &str) -> String {
    let mut groups: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for change in list(&note["but_with"]) {
        let (setting, used) = (text(&change["setting"]), text(&change["used"]));
        // A number stands for any other than the default, which is 0 or absent.
        let value = match &change["value"] {
            Value::Number(_) => "a number above 0".to_owned(),
            value => format!("`{}`", inline(value)),
        };
        match groups
            .iter_mut()
            .find(|group| (group.0, group.1) == (setting, used))
        {
            Some(group) => group.2.push(value),
            None => groups.push((setting, used, vec![value])),
        }
    }
    let sentences = groups.into_iter().map(|(setting, used, values)| {
        let word = match used {
            "always" => always,
            "not" => "Not",
            _ => "If written",
        };
        format!(" {word} with `{setting}` = {}.", values.join(", "))
    });
    sentences.collect()
}
