//! Placeholders for stages of a recorded run whose kind this build does not have, such as custom stages: they have the
//! recorded declaration in the plan, and are never called.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::batch::Batch;
use crate::config::{parse_pipeline, read_pipeline};
use crate::diagnostic::Diagnostic;
use crate::field::Field;
use crate::pipe::{DataPipe, StageDecl};
use crate::plan::PlannedStage;
use crate::registry::Registry;
use crate::stage::{
    Access, Cadence, Cardinality, OnRowError, Refill, RowRule, Stage, StageContext, StageError,
    StageSpec,
};
use crate::trace::conditions::Conditions;

/// A stage's declaration of rows, keys and models: enough to place it in a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageShape {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// Keys that it needs.
    pub reads: Vec<Field>,
    /// Keys that it reads if some stage writes them.
    pub reads_optional: Vec<Field>,
    /// Keys that it writes.
    pub writes: Vec<Field>,
    /// Keys that it reads once per group.
    pub broadcast: Vec<String>,
    /// What it does to rows.
    pub rows: RowRule,
    /// How its input may be split.
    pub cardinality: Cardinality,
    /// When it runs.
    pub cadence: Cadence,
    /// Models that it uses.
    pub models: Vec<(String, Access)>,
    /// Rows per call, if declared.
    pub slice_rows: Option<usize>,
    /// Longest time for a row, if declared (seconds).
    pub deadline_s: Option<f64>,
    /// What happens to a row that failed.
    pub on_row_error: OnRowError,
    /// Number of groups to keep.
    pub refill: Option<Refill>,
    /// Whether it draws different rows in each wave.
    pub draws_waves: bool,
}

impl StageShape {
    /// The declaration of a planned stage.
    pub fn of(stage: &PlannedStage) -> StageShape {
        let spec = stage.spec();
        StageShape {
            name: stage.name().to_owned(),
            kind: stage.kind().to_owned(),
            reads: spec.reads.clone(),
            reads_optional: spec.reads_optional.clone(),
            writes: spec.writes.clone(),
            broadcast: spec.broadcast.clone(),
            rows: spec.rows,
            cardinality: spec.cardinality,
            cadence: spec.cadence,
            models: spec.models.clone(),
            slice_rows: spec.slice_rows,
            deadline_s: spec.deadline.map(|deadline| deadline.as_secs_f64()),
            on_row_error: spec.on_row_error,
            refill: spec.refill,
            draws_waves: spec.draws_waves,
        }
    }

    fn spec(&self) -> StageSpec {
        StageSpec {
            reads: self.reads.clone(),
            reads_optional: self.reads_optional.clone(),
            writes: self.writes.clone(),
            broadcast: self.broadcast.clone(),
            rows: self.rows,
            cardinality: self.cardinality,
            cadence: self.cadence,
            models: self.models.clone(),
            slice_rows: self.slice_rows,
            deadline: self
                .deadline_s
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            on_row_error: self.on_row_error,
            refill: self.refill,
            draws_waves: self.draws_waves,
            not_replayed: Some(no_kind(&self.kind)),
            ..StageSpec::new()
        }
    }
}

fn no_kind(kind: &str) -> String {
    format!("this build has no stage kind `{kind}`")
}

/// Repeats a recorded declaration, and refuses to run.
struct StandIn(StageShape);

impl Stage for StandIn {
    fn spec(&self) -> StageSpec {
        self.0.spec()
    }

    fn run(&mut self, _: Batch, _: &mut StageContext<'_>) -> Result<(), StageError> {
        Err(StageError::failed(no_kind(&self.0.kind)))
    }
}

/// The pipeline of a run folder. Stages of unknown kinds become placeholders if the trace has their declarations.
///
/// # Errors
/// All errors in `config.toml`.
pub fn read_recorded(dir: &Path, registry: &Registry) -> Result<DataPipe, Vec<Diagnostic>> {
    let path = dir.join("config.toml");
    let none: [&str; 0] = [];
    let Some((known, unknown)) = split(dir, &path, registry) else {
        return read_pipeline(&path, &none, registry);
    };
    let mut pipe = parse_pipeline(&known, &path.display().to_string(), &none, registry)?;
    pipe.base = dir.to_owned();
    for (at, stage) in unknown {
        pipe.stages.insert(at.min(pipe.stages.len()), stage);
    }
    Ok(pipe)
}

/// The file without the stages of unknown kinds, and placeholders for these with their positions; `None` if there are
/// none, or if information is missing in the file or the trace.
fn split(
    dir: &Path,
    path: &Path,
    registry: &Registry,
) -> Option<(String, Vec<(usize, StageDecl)>)> {
    let mut document: toml::Table = fs::read_to_string(path).ok()?.parse().ok()?;
    let stages = document.get_mut("stages")?.as_array_mut()?;
    let is_known = |stage: &toml::Value| {
        let kind = stage.get("kind").and_then(toml::Value::as_str);
        kind.is_none_or(|kind| registry.stages().get(kind).is_some())
    };
    if stages.iter().all(is_known) {
        return None;
    }
    let conditions = Conditions::read(dir).ok()??;
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for (at, stage) in stages.drain(..).enumerate() {
        match is_known(&stage) {
            true => known.push(stage),
            false => unknown.push((at, stand_in(&stage, &conditions)?)),
        }
    }
    *stages = known;
    Some((toml::to_string(&document).ok()?, unknown))
}

fn stand_in(entry: &toml::Value, conditions: &Conditions) -> Option<StageDecl> {
    let mut config: Map<String, Value> = serde_json::to_value(entry).ok()?.as_object()?.clone();
    let mut text = |key: &str| config.shift_remove(key)?.as_str().map(str::to_owned);
    let kind = text("kind")?;
    let name = text("name").unwrap_or_else(|| kind.clone());
    let rename = config.shift_remove("rename");
    let debug = config.shift_remove("debug") == Some(Value::Bool(true));
    let mut shapes = conditions.stages.iter();
    let shape = shapes.find(|shape| shape.name == name && shape.kind == kind)?;
    let shape = shape.clone();
    Some(StageDecl {
        name,
        kind,
        config: Value::Object(config),
        rename: serde_json::from_value(rename.unwrap_or_default()).unwrap_or_default(),
        stated_reads: None,
        stated_writes: None,
        debug,
        build: Arc::new(move |_| Ok(Box::new(StandIn(shape.clone())))),
    })
}
