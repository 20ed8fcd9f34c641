//! The files of a run folder as JSON Schema, generated from the types and tables that write them.
//!
//! `config.toml` is a pipeline file, so its schema is that of pipeline files.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};
use verl_rules::Anomaly;
use verl_run::records::{
    DataFile, ENGINE_METRICS, MetricsLine, RowErrorLine, STAGE, SampleLine, StartFile, StatusFile,
    VersionsFile, WarningLine,
};
use verl_run::spans::TimelineLine;
use verl_run::stall::StallReport;
use verl_trace::files::{
    Beside, Column, Conditions, MANIFEST_KEY, STAT_COLUMNS, STEP_COLUMNS, StageManifest,
    StepManifest, TraceFormat, TracedPipeline,
};
use verl_words::stage::Metric;

use super::kinds::{Catalogue, metric_note};
use super::{DRAFT, NOTE};

/// Pattern of the name of a stage.
pub(crate) const ANY_STAGE: &str = "[^/]+";

/// The format of a file of a run folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// One JSON document.
    Json,
    /// One JSON object per line.
    JsonLines,
    /// A table in Parquet.
    Parquet,
    /// A table as a stream of Arrow IPC messages.
    ArrowStream,
    /// A file without documented fields.
    Other(&'static str),
}

impl Written {
    /// The word for it in documents.
    pub fn word(self) -> &'static str {
        match self {
            Written::Json => "JSON",
            Written::JsonLines => "JSON, one object per line",
            Written::Parquet => "Parquet, a table",
            Written::ArrowStream => "Arrow IPC stream, a table",
            Written::Other(word) => word,
        }
    }
}

/// A file of a run folder.
#[derive(Debug, Clone)]
pub struct RunFile {
    /// Its path in the folder, for example `status.json`; variable parts are written as `<…>`.
    pub name: &'static str,
    /// The path of its document below `run/`, without extension.
    pub document: &'static str,
    /// Its format.
    pub written: Written,
    /// The schema of the file, of each of its lines, or of each row of its table.
    pub schema: Value,
}

impl RunFile {
    /// Whether the file at `path`, relative to the run folder, is this file.
    ///
    /// ```
    /// use verl_pipe::registry::Registry;
    /// use verl_pipe::schema::kinds::Catalogue;
    ///
    /// let registry = Registry::new();
    /// let files = Catalogue::of(&registry).run_files();
    /// let step = files.iter().find(|file| file.is("trace/steps/00000007/step.json")).unwrap();
    /// assert_eq!(step.name, "trace/steps/<step>/step.json");
    /// ```
    pub fn is(&self, path: &str) -> bool {
        let (mut own, mut other) = (self.name.split('/'), path.split('/'));
        loop {
            match (own.next(), other.next()) {
                (None, None) => return true,
                // A model folder may contain any files.
                (Some("<file>"), Some(_)) => return true,
                (Some(own), Some(other)) if part_is(own, other) => {}
                _ => return false,
            }
        }
    }
}

/// Whether `name` is `pattern` with any text in place of its `<…>`.
fn part_is(pattern: &str, name: &str) -> bool {
    let Some((before, rest)) = pattern.split_once('<') else {
        return pattern == name;
    };
    let after = rest.split_once('>').map_or("", |(_, after)| after);
    name.len() > before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
}

impl Catalogue<'_> {
    /// Every file that a run may write into its folder, by name. To add a file, add an entry here: its name, the path
    /// of its document, its type and its description.
    pub fn run_files(&self) -> Vec<RunFile> {
        vec![
            other(
                "config.schema.json",
                "config_schema",
                "JSON Schema",
                "the schema of `config.toml`, for editors: the document `pipeline`; written only if the run knows its registry",
            ),
            other(
                "config.toml",
                "config",
                "TOML, a pipeline file",
                "the pipeline with all settings, which `pipe train` can run again; the document `pipeline` describes them",
            ),
            json::<DataFile>(
                "data.json",
                "data",
                "the origin of the rows of each data set",
            ),
            self.metrics_file(),
            other(
                "model/<model>/<file>",
                "model",
                "a Hugging Face folder",
                "a model at the end of the run, one folder per model: `config.json`, `model.safetensors`, and the tokenizer if it has one",
            ),
            other(
                "plan.txt",
                "plan",
                "text",
                "the checked graph, the batch arithmetic and the estimate of memory, as `pipe plan` prints them",
            ),
            lines::<RowErrorLine>(
                "row_errors.jsonl",
                "row_errors",
                "a line for each row that failed or was slow in a stage, with the reason; written only if there are such rows",
            ),
            self.samples_file(),
            json::<TracedPipeline>(
                "schema.json",
                "schema",
                "keys of every stage with shape, type, unit and meaning; written only if steps or stages are recorded in full",
            ),
            json::<StallReport>(
                "stall.json",
                "stall",
                "what the run was waiting for when it stalled; written only if it did, and overwritten each time",
            ),
            json::<StartFile>(
                "start.json",
                "start",
                "how long each part of the start took until the end of the first step, and which kernels were compiled; written after the first step",
            ),
            json::<StatusFile>(
                "status.json",
                "status",
                "whether the content of the folder is complete",
            ),
            lines::<TimelineLine>(
                "timeline.jsonl",
                "timeline",
                "a line for each step: where and when each call ran, and what the run did besides; `trace.timeline_mb` limits its size, so a long run leaves out steps",
            ),
            lines::<Anomaly>(
                "trace/anomalies.jsonl",
                "trace/anomalies",
                "a line for each time that a rule started to fire for a stage and key; written only if one did",
            ),
            json::<Conditions>(
                "trace/conditions.json",
                "trace/conditions",
                "the conditions of the recording: every setting, the machine, and the declarations of the stages",
            ),
            json::<TraceFormat>(
                "trace/format.json",
                "trace/format",
                "the recorded pipeline, and the format of the trace",
            ),
            json::<Beside>(
                "trace/state/<sha256>.json",
                "trace/state",
                "the content of a state other than tensors; written last, to mark both files as complete",
            ),
            other(
                "trace/state/<sha256>.safetensors",
                "trace/state_tensors",
                "safetensors",
                "tensors of the state of a model or stage at the start of a step: weights, optimiser; named after the hash of the content, so equal states are stored once",
            ),
            table(
                "trace/stats/live.arrows",
                "trace/stats_live",
                Written::ArrowStream,
                "statistics of the newest steps, one row per step, stage, side and key; steps that are also in a part count once",
                &stat_columns(),
            ),
            table(
                "trace/stats/part-<step>.parquet",
                "trace/stats",
                Written::Parquet,
                "statistics of `trace.part_steps` steps from `<step>` on, one row per step, stage, side and key",
                &stat_columns(),
            ),
            json::<StepManifest>(
                "trace/steps/<step>/step.json",
                "trace/step",
                "what was recorded of a step and why, and where the state of its models is stored; written last, so a step without it is incomplete",
            ),
            step_file(),
            json::<VersionsFile>(
                "versions.json",
                "versions",
                "versions of the program, and properties of the machine",
            ),
            lines::<WarningLine>(
                "warnings.jsonl",
                "warnings",
                "a line for each warning or error that the run, a stage or a model reported; written only if there is one",
            ),
        ]
    }

    /// A line of `metrics.jsonl`, with every metric that any kind of stage declares.
    fn metrics_file(&self) -> RunFile {
        let mut file = lines::<MetricsLine>(
            "metrics.jsonl",
            "metrics",
            "a line with the metrics of each step",
        );
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
        // Custom losses and rules may record undeclared names.
        file.schema["additionalProperties"] = json!({ "type": ["number", "null"] });
        file
    }

    /// Metrics of stages with their defaults, and with each part that they can use.
    fn declared_metrics(&self) -> Vec<(&'static str, Metric)> {
        let by_default = self
            .stages
            .iter()
            .map(|(stage, declared)| (*stage, declared));
        let users = self.parts.iter().flat_map(|(_, _, users)| users);
        let with_parts = users.map(|user| (user.stage, &user.declared));
        let all = by_default.chain(with_parts);
        all.flat_map(|(stage, declared)| {
            let metrics = declared.metrics().into_iter();
            metrics.map(move |metric| (stage, metric.item))
        })
        .collect()
    }

    /// A line of `samples.jsonl`, with the samples of each kind of stage.
    fn samples_file(&self) -> RunFile {
        let mut file =
            lines::<SampleLine>("samples.jsonl", "samples", "a few samples of each step");
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
            shown.push(json!({ "description": "Samples of a custom stage." }));
            file.schema["anyOf"] = shown.into();
        }
        file
    }
}

/// A file with a single document of type `T`.
fn json<T: JsonSchema>(name: &'static str, document: &'static str, about: &str) -> RunFile {
    let schema = SchemaGenerator::default().into_root_schema_for::<T>();
    file(name, document, Written::Json, about, schema.to_value())
}

/// A file with a document of type `T` per line.
fn lines<T: JsonSchema>(name: &'static str, document: &'static str, about: &str) -> RunFile {
    let schema = SchemaGenerator::default().into_root_schema_for::<T>();
    file(name, document, Written::JsonLines, about, schema.to_value())
}

/// A file without documented fields.
fn other(name: &'static str, document: &'static str, word: &'static str, about: &str) -> RunFile {
    file(name, document, Written::Other(word), about, json!({}))
}

/// A table; the schema is that of a row.
fn table(
    name: &'static str,
    document: &'static str,
    written: Written,
    about: &str,
    columns: &[Column],
) -> RunFile {
    let properties = columns.iter().map(|column| {
        let mut schema = column.holds.schema();
        if column.nullable {
            schema["type"] = json!([schema["type"], "null"]);
        }
        schema["description"] = column.meaning.into();
        schema[NOTE] = json!({ "dtype": column.holds.name() });
        if !column.unit.is_empty() {
            schema[NOTE]["unit"] = column.unit.into();
        }
        (column.name.to_owned(), schema)
    });
    let schema = json!({
        "type": "object",
        "properties": properties.collect::<Map<_, _>>(),
        "required": columns.iter().map(|column| column.name).collect::<Vec<_>>(),
    });
    file(name, document, written, about, schema)
}

fn stat_columns() -> Vec<Column> {
    STAT_COLUMNS.iter().map(|column| column.column()).collect()
}

/// A stage's file of a step: its own columns, then the keys, and the manifest in the file's metadata.
fn step_file() -> RunFile {
    let mut file = table(
        "trace/steps/<step>/<stage>.parquet",
        "trace/stage",
        Written::Parquet,
        "all rows that entered or left a stage in a step, one row each time, slices in declared order",
        &STEP_COLUMNS,
    );
    file.schema["additionalProperties"] = json!({
        "description": "A key, by the stage's own name; null on the side that does not have it. If another column has the same name, `@input` or `@output` is appended. The run's `schema.json` has its type, shape, unit and meaning."
    });
    let mut manifest = SchemaGenerator::default()
        .into_root_schema_for::<StageManifest>()
        .to_value();
    let definitions = manifest.as_object_mut().and_then(|map| map.remove("$defs"));
    file.schema[NOTE]["metadata"] = json!({ MANIFEST_KEY: "StageManifest" });
    let mut all = definitions
        .and_then(|all| all.as_object().cloned())
        .unwrap_or_default();
    if let Some(own) = manifest.as_object_mut() {
        own.remove("$schema");
    }
    all.insert("StageManifest".to_owned(), manifest);
    file.schema["$defs"] = Value::Object(all);
    file
}

/// The schema `own` as the schema of file `name`.
fn file(
    name: &'static str,
    document: &'static str,
    written: Written,
    about: &str,
    own: Value,
) -> RunFile {
    let mut schema = Map::new();
    schema.insert("$schema".to_owned(), DRAFT.into());
    schema.insert("title".to_owned(), name.into());
    schema.insert("description".to_owned(), about.into());
    let note = json!({ "sort": "file of a run folder", "written": written.word() });
    schema.insert(NOTE.to_owned(), note);
    for (key, value) in own.as_object().into_iter().flatten() {
        schema.entry(key.clone()).or_insert_with(|| value.clone());
    }
    RunFile {
        name,
        document,
        written,
        schema: Value::Object(schema),
    }
}

#[cfg(test)]
mod tests {
    use verl_declare::registry::Registry;

    use super::*;

    #[test]
    fn files_are_identified_by_their_paths() {
        let registry = Registry::new();
        let files = Catalogue::of(&registry).run_files();
        for (path, name) in [
            ("status.json", "status.json"),
            ("model/actor/config.json", "model/<model>/<file>"),
            ("model/actor/more/of_it", "model/<model>/<file>"),
            (
                "trace/stats/part-00000001.parquet",
                "trace/stats/part-<step>.parquet",
            ),
            (
                "trace/steps/00000002/step.json",
                "trace/steps/<step>/step.json",
            ),
            (
                "trace/steps/00000002/reward.parquet",
                "trace/steps/<step>/<stage>.parquet",
            ),
        ] {
            let found = files.iter().filter(|file| file.is(path));
            let found: Vec<&str> = found.map(|file| file.name).collect();
            assert_eq!(found, [name], "{path}");
        }
        for path in [
            "status.jsonl",
            "trace",
            "trace/stats/part-.parquet",
            "trace/x/step.json",
        ] {
            assert!(files.iter().all(|file| !file.is(path)), "{path}");
        }
        let names: Vec<&str> = files.iter().map(|file| file.name).collect();
        assert!(
            names
                .iter()
                .all(|name| names.iter().filter(|n| *n == name).count() == 1)
        );
        let documents: std::collections::BTreeSet<&str> =
            files.iter().map(|file| file.document).collect();
        assert_eq!(documents.len(), files.len());
    }

    #[test]
    fn metrics_of_stages_match_patterns() {
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
