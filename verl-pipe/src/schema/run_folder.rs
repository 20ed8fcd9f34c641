//! The files of a run folder as JSON Schema, of the types that write them.
//!
//! `config.toml` is a pipeline file, so its schema is that of pipeline files.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::kinds::{Catalogue, metric_note};
use super::{DRAFT, NOTE};
use crate::run::records::{
    DataFile, ENGINE_METRICS, MetricsLine, STAGE, SampleLine, StatusFile, VersionsFile,
};
use crate::stage::Metric;

/// What stands for the name of a stage in a pattern.
pub(crate) const ANY_STAGE: &str = "[^/]+";

/// A file of a run folder.
#[derive(Debug, Clone)]
pub struct RunFile {
    /// Its name, for example `status.json`.
    pub name: &'static str,
    /// The schema of the file, or of each of its lines.
    pub schema: Value,
}

impl Catalogue<'_> {
    /// The files of a run folder that are JSON, by name.
    pub fn run_files(&self) -> Vec<RunFile> {
        vec![
            file::<DataFile>("data.json", "where each data set's rows come from"),
            self.metrics_file(),
            self.samples_file(),
            file::<StatusFile>("status.json", "whether what lies in the folder is whole"),
            // A further file of a run folder is one line here: its name, its type, what it tells.
            file::<VersionsFile>("versions.json", "what the run was made with"),
        ]
    }

    /// A line of `metrics.jsonl`, with every metric that any kind of stage declares.
    fn metrics_file(&self) -> RunFile {
        let mut file =
            file::<MetricsLine>("metrics.jsonl", "a line for each step: what it came to");
        let number = |metric: &Metric, recorded_by: Vec<&str>| {
            let mut note = metric_note(metric);
            let meaning = note.remove("meaning");
            if !recorded_by.is_empty() {
                note.insert("recorded_by".to_owned(), json!(recorded_by));
            }
            json!({ "type": ["number", "null"], "description": meaning, NOTE: note })
        };
        let mut named = Map::new();
        let mut patterns = Map::new();
        for metric in &ENGINE_METRICS {
            match metric.name.split_once(STAGE) {
                None => drop(named.insert(metric.name.to_owned(), number(metric, Vec::new()))),
                Some((before, after)) => {
                    let pattern = format!("^{before}{ANY_STAGE}{after}$");
                    patterns.insert(pattern, number(metric, Vec::new()));
                }
            }
        }
        let mut declared: Vec<(Metric, Vec<&str>)> = Vec::new();
        for (stage, metric) in self.declared_metrics() {
            match declared
                .iter_mut()
                .find(|(known, _)| known.name == metric.name)
            {
                Some((_, by)) if by.contains(&stage) => {}
                Some((_, by)) => by.push(stage),
                None => declared.push((metric, vec![stage])),
            }
        }
        let declared = declared.into_iter();
        named.extend(declared.map(|(metric, by)| (metric.name.to_owned(), number(&metric, by))));
        named.sort_keys();
        if let Some(properties) = file.schema["properties"].as_object_mut() {
            properties.extend(named);
        }
        file.schema["patternProperties"] = Value::Object(patterns);
        // A loss or a rule of one's own may record names that nobody declares.
        file.schema["additionalProperties"] = json!({ "type": ["number", "null"] });
        file
    }

    /// Metrics of stages, alone and with each part that they hold.
    fn declared_metrics(&self) -> Vec<(&'static str, Metric)> {
        let alone = self
            .stages
            .iter()
            .map(|(stage, declared)| (*stage, declared));
        let held = self.parts.iter().flat_map(|(_, _, held)| held);
        let held = held.map(|holder| (holder.stage, &holder.declared));
        let all = alone.chain(held);
        all.flat_map(|(stage, declared)| {
            let seen = declared.metrics().into_iter();
            seen.map(move |seen| (stage, seen.item))
        })
        .collect()
    }

    /// A line of `samples.jsonl`, with what each kind of stage shows.
    fn samples_file(&self) -> RunFile {
        let mut file = file::<SampleLine>("samples.jsonl", "a few samples of each step");
        let shown = self.stages.iter().filter_map(|(stage, declared)| {
            let sample = declared.default.as_ref()?.sample.clone()?;
            let mut sample = sample;
            if let Some(schema) = sample.as_object_mut() {
                schema.remove("$schema");
                schema.insert(NOTE.to_owned(), json!({ "shown_by": stage }));
            }
            Some(sample)
        });
        let mut shown: Vec<Value> = shown.collect();
        if !shown.is_empty() {
            shown.push(json!({ "description": "What a stage of one's own shows." }));
            file.schema["anyOf"] = shown.into();
        }
        file
    }
}

/// The schema of type `T` as that of file `name`.
fn file<T: JsonSchema>(name: &'static str, about: &str) -> RunFile {
    let schema = SchemaGenerator::default().into_root_schema_for::<T>();
    let Value::Object(own) = schema.to_value() else {
        return RunFile {
            name,
            schema: Value::Null,
        };
    };
    let mut schema = Map::new();
    schema.insert("$schema".to_owned(), DRAFT.into());
    schema.insert("title".to_owned(), name.into());
    schema.insert("description".to_owned(), about.into());
    schema.insert(NOTE.to_owned(), json!({ "sort": "file of a run folder" }));
    for (key, value) in own {
        schema.entry(key).or_insert(value);
    }
    RunFile {
        name,
        schema: Value::Object(schema),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;

    #[test]
    fn metrics_of_stages_go_by_patterns() {
        let registry = Registry::new();
        let files = Catalogue::of(&registry).run_files();
        let metrics = files
            .iter()
            .find(|file| file.name == "metrics.jsonl")
            .unwrap();
        let validator = jsonschema::draft202012::new(&metrics.schema).unwrap();
        let line = |name: &str, value: Value| {
            let mut line = json!({"step": 1, "epoch": 0, "timestamp": 1.5});
            line[name] = value;
            line
        };
        assert!(validator.is_valid(&line("perf/stage/generate_s", json!(0.5))));
        assert!(validator.is_valid(&line("anything/else", Value::Null)));
        assert!(!validator.is_valid(&line("perf/step_s", json!("long"))));
        assert!(!validator.is_valid(&json!({"step": 1})));
    }
}
