//! The keys of a pipeline, described for readers of its trace: `schema.json` of the run folder.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use verl_plan::{Plan, PlannedStage};
use verl_rules::format::FORMAT;
use verl_words::field::{DType, Field, LogProbTag};

/// Content of `schema.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TracedPipeline {
    /// Trace format number.
    pub format: u32,
    /// Name of the pipeline.
    pub pipeline: String,
    /// Number of rows in a step.
    pub rows: RowsOfStep,
    /// Stages in the order of execution.
    pub stages: Vec<TracedStage>,
}

/// Number of rows in a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RowsOfStep {
    /// Prompts of a step, or of each of its waves: what the symbol `P` stands for (rows).
    pub prompts: usize,
    /// Samples of a step: what `P·n` stands for, before any filter (rows).
    pub samples_of_a_step: usize,
}

/// A stage with the keys that it reads and writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TracedStage {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// Its configuration with every setting stated; null for a stage that was built in code.
    pub parameters: Option<Value>,
    /// Keys that it reads.
    pub reads: Vec<TracedKey>,
    /// Keys that it writes.
    pub writes: Vec<TracedKey>,
}

/// A key as a stage reads or writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TracedKey {
    /// The stage's own name of the key, as in the columns of the trace.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape: the first dim counts rows; a dim with `~` differs from row to row.
    pub shape: String,
    /// Unit; empty if there is none.
    pub unit: String,
    /// What a value means.
    pub meaning: String,
    /// Whether it may be null.
    pub nullable: bool,
    /// Whether every value is guaranteed to be finite.
    pub finite: bool,
    /// For a log-prob, the distribution that it belongs to, else null.
    pub distribution: Option<LogProbTag>,
    /// The pipeline's name of the key.
    pub key: String,
    /// For a key that is read, the stage that writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Number of rows of the key's table, as a symbol: `P` prompts, `P·n` samples, `F(P·n)` samples that a filter kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<String>,
}

/// The document as text: for each stage, in the order of execution, its configuration and the keys that it reads and
/// writes, with shape, type, unit, meaning, and the pipeline's names.
pub fn describe_pipeline(plan: &Plan) -> String {
    let document = TracedPipeline {
        format: FORMAT,
        pipeline: plan.pipe().name.clone(),
        rows: RowsOfStep {
            prompts: plan.batch().prompts,
            samples_of_a_step: plan.batch().rows,
        },
        stages: plan
            .stages()
            .iter()
            .map(|stage| of_stage(plan, stage))
            .collect(),
    };
    // Serialising texts, numbers and maps with text keys cannot fail.
    format!(
        "{}\n",
        serde_json::to_string_pretty(&document).unwrap_or_default()
    )
}

fn of_stage(plan: &Plan, stage: &PlannedStage) -> TracedStage {
    let decl = plan
        .pipe()
        .stages
        .iter()
        .find(|decl| decl.name == stage.name());
    let reads = stage.inputs().iter().filter_map(|edge| {
        let mut own = stage
            .spec()
            .reads
            .iter()
            .chain(&stage.spec().reads_optional);
        let field = own.find(|field| field.name == edge.local)?;
        Some(TracedKey {
            from: Some(plan.stages()[edge.writer].name().to_owned()),
            rows: Some(plan.tables()[edge.table].rows.clone()),
            ..of_field(field, &edge.key)
        })
    });
    let writes = stage.spec().writes.iter().map(|field| TracedKey {
        rows: stage
            .table_out()
            .map(|table| plan.tables()[table].rows.clone()),
        ..of_field(field, stage.key(&field.name))
    });
    TracedStage {
        name: stage.name().to_owned(),
        kind: stage.kind().to_owned(),
        parameters: decl.map(|decl| decl.config.clone()),
        reads: reads.collect(),
        writes: writes.collect(),
    }
}

fn of_field(field: &Field, key: &str) -> TracedKey {
    TracedKey {
        name: field.name.to_string(),
        dtype: field.dtype,
        shape: field.shape.to_string(),
        unit: field.unit.to_string(),
        meaning: field.meaning.to_string(),
        nullable: field.nullable,
        finite: field.finite,
        distribution: field.tag.clone(),
        key: key.to_owned(),
        from: None,
        rows: None,
    }
}
