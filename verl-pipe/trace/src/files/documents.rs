//! The documents of the `trace` folder, and the names of its files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use verl_rules::format::{FORMAT, Side};
use verl_words::resource::WeightsVersion;

use crate::files::error::TraceError;

/// Key of the [`StageManifest`] in the Parquet file metadata.
pub const MANIFEST_KEY: &str = "verl.trace";

/// Note of a step for which the flight recorder did not keep all rows, or could not write some.
pub const ROWS_MISSING: &str = "rows that did not fit into the flight recorder are missing";

/// Content of `trace/format.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TraceFormat {
    /// Trace format number; a reader of another format refuses the file.
    pub format: u32,
    /// Version of the program that wrote it.
    pub verl: String,
    /// Name of the pipeline.
    pub pipeline: String,
    /// SHA-256 of the printed plan; equal for two runs of one plan.
    pub plan_hash: String,
    /// Seed of the run.
    pub seed: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Stages in the order of execution.
    pub stages: Vec<StageInfo>,
}

/// A stage of the traced run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StageInfo {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
}

/// Rows of one slice in a stage's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SliceSpan {
    /// Input or output.
    pub side: Side,
    /// Wave that a source's call drew; 0 for any other stage.
    pub wave: u64,
    /// Call of the stage in the step, from 0.
    pub slice: usize,
    /// The slice's rows among the stage's input rows of the step: `start` is the first, `end` is one past the last.
    #[schemars(schema_with = "row_bounds")]
    pub rows: Range<usize>,
    /// First row in the file, from 0.
    pub first: usize,
    /// Number of rows in the file.
    pub len: usize,
}

/// JSON Schema of row bounds.
fn row_bounds(_: &mut SchemaGenerator) -> Schema {
    let row = |about: &str| json!({ "type": "integer", "minimum": 0, "description": about });
    json_schema!({
        "type": "object",
        "properties": { "start": row("First row, from 0."), "end": row("One past the last row.") },
        "required": ["start", "end"],
    })
}

/// A key of one side and its column in the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeyColumn {
    /// Input or output.
    pub side: Side,
    /// The stage's own name of the key.
    pub key: String,
    /// Column in the file: the key's name, followed by `@input` or `@output` if that name is taken.
    pub column: String,
    /// Arrow name of the column type.
    pub data_type: String,
    /// Whether the batch's schema allowed null.
    pub nullable: bool,
}

/// Metadata in a stage's file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageManifest {
    /// Trace format number; a reader of another format refuses the file.
    pub format: u32,
    /// Step of the run.
    pub step: u64,
    /// Name of the stage.
    pub stage: String,
    /// Its registered kind.
    pub kind: String,
    /// Its configuration with every setting stated.
    pub parameters: Value,
    /// The stage's own names of keys → the pipeline's, where they differ.
    pub rename: BTreeMap<String, String>,
    /// Seed of the run.
    pub seed: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Versions of the models before the stage.
    pub models: BTreeMap<String, WeightsVersion>,
    /// Keys of both sides, in the order of their batches' columns.
    pub keys: Vec<KeyColumn>,
    /// Slices of both sides.
    pub slices: Vec<SliceSpan>,
    /// Remarks, such as which rows were refused and why.
    pub notes: Vec<String>,
}

/// Why a step was recorded in full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Flags or settings requested it.
    Asked,
    /// A rule fired in this step or soon after it.
    Anomaly,
    /// The run ended with an error in this step or soon after it.
    Failed,
}

/// A stage's file of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StageFile {
    /// Name of the stage.
    pub stage: String,
    /// Name of the file in the step's folder.
    pub file: String,
    /// Rows in the file, both sides.
    pub rows: usize,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Reference to the state of a model or stage at the start of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StateRef {
    /// Version of the model's weights, or of the stage's state as the stage reports it.
    pub version: WeightsVersion,
    /// Name of the files in `trace/state` without extension; absent where only the version was recorded.
    pub state: Option<String>,
}

/// Content of a step's `step.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepManifest {
    /// Trace format number; a reader of another format refuses the file.
    pub format: u32,
    /// Step of the run.
    pub step: u64,
    /// Why it was recorded.
    pub reason: Reason,
    /// Whether the step completed; a step that failed contains only what came before the error.
    pub ended: bool,
    /// Files, in the order of execution of their stages.
    pub stages: Vec<StageFile>,
    /// State of the models at the start of the step, by name.
    pub models: BTreeMap<String, StateRef>,
    /// State of the stages at the start of the step, by name; only of stages that have state.
    pub stage_states: BTreeMap<String, StateRef>,
    /// Remarks, such as what was left out and why.
    pub notes: Vec<String>,
}

/// Paths inside a trace folder.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The `trace` folder.
    pub dir: PathBuf,
}

impl Layout {
    /// The trace folder of the run in `run_dir`.
    pub fn of_run(run_dir: &Path) -> Layout {
        Layout {
            dir: run_dir.join("trace"),
        }
    }

    /// The run folder.
    pub fn run_dir(&self) -> &Path {
        self.dir.parent().unwrap_or(&self.dir)
    }

    /// `format.json`.
    pub fn format(&self) -> PathBuf {
        self.dir.join("format.json")
    }

    /// `conditions.json`.
    pub fn conditions(&self) -> PathBuf {
        self.dir.join("conditions.json")
    }

    /// Folder of the statistics.
    pub fn stats(&self) -> PathBuf {
        self.dir.join("stats")
    }

    /// Folder of all steps.
    pub fn steps(&self) -> PathBuf {
        self.dir.join("steps")
    }

    /// Folder of one step.
    pub fn step(&self, step: u64) -> PathBuf {
        self.steps().join(format!("{step:08}"))
    }

    /// Manifest of one step.
    pub fn manifest(&self, step: u64) -> PathBuf {
        self.step(step).join("step.json")
    }

    /// Folder of states.
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// What the rules found.
    pub fn anomalies(&self) -> PathBuf {
        self.dir.join("anomalies.jsonl")
    }
}

/// File name of a stage: the stage's name, with `%` and two hexadecimal digits for each byte not allowed in a file
/// name.
///
/// ```
/// use verl_pipe::trace::files::stage_file;
///
/// assert_eq!(stage_file("old_log_probs"), "old_log_probs.parquet");
/// assert_eq!(stage_file("a/b"), "a%2Fb.parquet");
/// ```
pub fn stage_file(stage: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-+".contains(&byte);
    let name: String = stage
        .bytes()
        .map(|byte| match plain(byte) {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect();
    format!("{name}.parquet")
}

/// Parses the document in `text` after checking its format number. `path` is used in error messages.
///
/// # Errors
/// [`TraceError::UnknownFormat`]; [`TraceError::Damaged`] if it is not such a document.
pub fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, TraceError> {
    let value: Value = serde_json::from_str(text).map_err(|e| TraceError::damaged(path, e))?;
    let found = value.get("format");
    if found.and_then(Value::as_u64) != Some(u64::from(FORMAT)) {
        return Err(TraceError::UnknownFormat {
            path: path.to_owned(),
            found: found.map_or_else(|| "unknown".to_owned(), Value::to_string),
        });
    }
    serde_json::from_value(value).map_err(|e| TraceError::damaged(path, e))
}
