//! One concrete pipeline: each key with its writer, its readers, and its dims with their sizes.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_plan::{Edge, Plan, PlannedStage};
use verl_words::field::{DType, Field, LogProbTag};
use verl_words::shape::{Dim, Shape};
use verl_words::stage::{Access, Cardinality};

/// A checked pipeline, as `pipe schema --pipeline FILE` prints it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PipelineEdges {
    /// Name of the pipeline.
    pub pipeline: String,
    /// Stages in the order of execution.
    pub stages: Vec<StageOfPipeline>,
    /// Keys in the order in which they are written.
    pub edges: Vec<EdgeOfPipeline>,
}

/// A stage of a checked pipeline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StageOfPipeline {
    /// Its name.
    pub name: String,
    /// Its registered kind.
    pub kind: String,
    /// How finely its input may be cut into slices.
    pub cut: Cardinality,
    /// Rows of one call.
    pub rows_of_a_call: usize,
    /// Models by name, and how it accesses them.
    pub models: Vec<(String, Access)>,
}

/// A key of a checked pipeline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EdgeOfPipeline {
    /// The pipeline's name of the key.
    pub key: String,
    /// Element type.
    pub dtype: DType,
    /// Shape with the table of the rows in place of the letter for rows.
    pub shape: String,
    /// Each dim of the shape.
    pub dims: Vec<DimOfPipeline>,
    /// Unit of a value; empty if there is none.
    pub unit: String,
    /// What a value means.
    pub meaning: String,
    /// Values may be null.
    pub nullable: bool,
    /// Every value is guaranteed to be finite.
    pub finite: bool,
    /// The distribution of a log-prob.
    pub distribution: Option<LogProbTag>,
    /// The stage that writes it.
    pub writer: Writer,
    /// The stages that read it.
    pub readers: Vec<Reader>,
}

/// A dim of a key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DimOfPipeline {
    /// Its symbol; `~` marks a dim whose length differs from row to row.
    pub dim: String,
    /// Its size, if it is the same for all rows.
    pub size: Option<usize>,
    /// Whether the size is an upper bound because a filter may remove rows.
    pub at_most: bool,
    /// Maximum number of waves of that size in a step.
    pub waves: usize,
    /// For a length that differs from row to row: the stage that first writes keys with these lengths.
    pub lengths_of: Option<String>,
}

/// The stage that writes a key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Writer {
    /// Name of the stage.
    pub stage: String,
    /// The stage's own name of the key.
    pub key: String,
}

/// A stage that reads a key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Reader {
    /// Name of the stage.
    pub stage: String,
    /// The stage's own name of the key.
    pub key: String,
    /// The dtype in which it reads the key, if it differs from the writer's.
    pub converted_to: Option<DType>,
    /// How often a row is repeated because the reader works on finer rows.
    pub repeated: usize,
}

/// Lengths of rows, identified by their origin: the stage that first wrote them and its letter.
type Lengths = (usize, String);

impl PipelineEdges {
    /// The edges of a plan.
    ///
    /// ```
    /// use verl_pipe::keys::{RESPONSES, REWARDS};
    /// use verl_pipe::pipe::{DataPipe, stage_fn};
    /// use verl_pipe::plan::Plannable;
    /// use verl_pipe::schema::edges::PipelineEdges;
    /// use verl_pipe::stage::{RowRule, StageSpec};
    ///
    /// let source = StageSpec::new().rows(RowRule::Source).writes(RESPONSES);
    /// let judge = StageSpec::new().reads(RESPONSES).writes(REWARDS);
    /// let pipe = DataPipe::new("judged")
    ///     .add_stage("source", stage_fn(source, |batch, ctx| ctx.emit(batch)))
    ///     .add_stage("judge", stage_fn(judge, |batch, ctx| ctx.emit(batch)));
    /// let edges = PipelineEdges::of(&pipe.plan().unwrap());
    /// let responses = &edges.edges[0];
    /// assert_eq!((responses.shape.as_str(), responses.dims[0].size), ("[P, T~]", Some(8)));
    /// assert_eq!(responses.readers[0].stage, "judge");
    /// ```
    pub fn of(plan: &Plan) -> PipelineEdges {
        let lengths = lengths(plan);
        let stages = plan.stages().iter().map(|stage| StageOfPipeline {
            name: stage.name().to_owned(),
            kind: stage.kind().to_owned(),
            cut: stage.spec().cardinality,
            rows_of_a_call: stage.slice_rows(),
            models: stage.spec().models.clone(),
        });
        let written = plan.stages().iter().flat_map(|stage| {
            let fields = stage.spec().writes.iter();
            fields.map(move |field| (stage, field))
        });
        PipelineEdges {
            pipeline: plan.pipe().name.clone(),
            stages: stages.collect(),
            edges: written
                .map(|(stage, field)| edge(plan, stage, field, &lengths))
                .collect(),
        }
    }
}

fn edge(
    plan: &Plan,
    writer: &PlannedStage,
    field: &Field,
    lengths: &BTreeMap<String, Lengths>,
) -> EdgeOfPipeline {
    let key = writer.key(&field.name);
    let dims = field
        .parsed_shape()
        .map_or_else(|_| Vec::new(), |Shape(dims)| dims);
    let dims: Vec<DimOfPipeline> = dims
        .iter()
        .enumerate()
        .map(|(at, dim)| match writer.table_out().filter(|_| at == 0) {
            Some(table) => rows(plan, table),
            None => inner(plan, dim, lengths.get(key)),
        })
        .collect();
    let shape: Vec<&str> = dims.iter().map(|dim| dim.dim.as_str()).collect();
    let readers = plan.stages().iter().flat_map(|stage| {
        let inputs = stage.inputs().iter().filter(|edge| edge.key == key);
        inputs.map(move |edge| reader(plan, stage, edge))
    });
    EdgeOfPipeline {
        key: key.to_owned(),
        dtype: field.dtype,
        shape: format!("[{}]", shape.join(", ")),
        unit: field.unit.to_string(),
        meaning: field.meaning.to_string(),
        nullable: field.nullable,
        finite: field.finite,
        distribution: field.tag.clone(),
        writer: Writer {
            stage: writer.name().to_owned(),
            key: field.name.to_string(),
        },
        readers: readers.collect(),
        dims,
    }
}

fn rows(plan: &Plan, table: usize) -> DimOfPipeline {
    let table = &plan.tables()[table];
    DimOfPipeline {
        dim: table.rows.clone(),
        size: Some(table.num_rows),
        at_most: table.filtered,
        waves: table.waves,
        lengths_of: None,
    }
}

fn inner(plan: &Plan, dim: &Dim, lengths: Option<&Lengths>) -> DimOfPipeline {
    let (size, from) = match dim {
        Dim::Fixed(size) => (Some(*size), None),
        Dim::Ragged(_) => (
            None,
            lengths.map(|(stage, _)| plan.stages()[*stage].name().to_owned()),
        ),
        Dim::Symbol(_) => (None, None),
    };
    DimOfPipeline {
        dim: dim.to_string(),
        size,
        at_most: false,
        waves: 1,
        lengths_of: from,
    }
}

fn reader(plan: &Plan, stage: &PlannedStage, edge: &Edge) -> Reader {
    let finer = stage
        .table_in()
        .map_or(1, |table| plan.rows_per_prompt(table));
    Reader {
        stage: stage.name().to_owned(),
        key: edge.local.clone(),
        converted_to: edge.convert.map(|(_, to)| to),
        repeated: (finer / plan.rows_per_prompt(edge.table).max(1)).max(1),
    }
}

/// The origin of the lengths of each ragged key; for a letter that a stage also reads, the origin of the read key.
fn lengths(plan: &Plan) -> BTreeMap<String, Lengths> {
    let mut of_key: BTreeMap<String, Lengths> = BTreeMap::new();
    for (index, stage) in plan.stages().iter().enumerate() {
        let spec = stage.spec();
        let mut bound: BTreeMap<String, Lengths> = BTreeMap::new();
        for field in spec.reads.iter().chain(&spec.reads_optional) {
            let known = of_key.get(stage.key(&field.name)).cloned();
            if let (Some(letter), Some(known)) = (letter(field), known) {
                bound.entry(letter).or_insert(known);
            }
        }
        for field in &spec.writes {
            if let Some(letter) = letter(field) {
                let from = bound.get(&letter).cloned().unwrap_or((index, letter));
                of_key.insert(stage.key(&field.name).to_owned(), from);
            }
        }
    }
    of_key
}

fn letter(field: &Field) -> Option<String> {
    field.parsed_shape().ok()?.ragged().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use verl_declare::pipe::{DataPipe, stage_fn};
    use verl_plan::Plannable;
    use verl_words::keys::{ADVANTAGES, PROMPTS, RESPONSES, REWARDS};
    use verl_words::stage::{RowRule, StageSpec};

    use super::*;

    #[test]
    fn edges_have_writer_readers_and_sizes() {
        let stage = |spec: StageSpec| stage_fn(spec, |batch, ctx| ctx.emit(batch));
        let spec = StageSpec::new;
        let plan = DataPipe::new("edges")
            .add_stage(
                "source",
                stage(spec().rows(RowRule::Source).writes(PROMPTS)),
            )
            .add_stage(
                "expand",
                stage(
                    spec()
                        .reads(PROMPTS)
                        .rows(RowRule::Expand(3))
                        .writes(RESPONSES),
                ),
            )
            .add_stage("judge", stage(spec().reads(RESPONSES).writes(REWARDS)))
            .writing("rewards", "scores")
            .add_stage(
                "advise",
                stage(
                    spec()
                        .reads(PROMPTS)
                        .reads(RESPONSES)
                        .reads(REWARDS)
                        .writes(ADVANTAGES),
                ),
            )
            .reading("rewards", "scores")
            .plan()
            .unwrap();
        let pipeline = PipelineEdges::of(&plan);
        let find = |key: &str| pipeline.edges.iter().find(|edge| edge.key == key).unwrap();
        let readers = |key: &str| -> Vec<(String, String, usize)> {
            let readers = find(key).readers.iter().cloned();
            readers
                .map(|reader| (reader.stage, reader.key, reader.repeated))
                .collect()
        };
        let own = |stage: &str, key: &str, times| (stage.to_owned(), key.to_owned(), times);
        assert_eq!(
            readers("prompts"),
            [own("expand", "prompts", 1), own("advise", "prompts", 3)]
        );
        assert_eq!(readers("scores"), [own("advise", "rewards", 1)]);
        assert_eq!(
            find("scores").writer,
            Writer {
                stage: "judge".into(),
                key: "rewards".into()
            }
        );
        let advantages = find("advantages");
        assert_eq!(advantages.shape, "[P·n, T~]");
        assert_eq!(advantages.dims[0].size, Some(24));
        assert_eq!(advantages.dims[1].lengths_of.as_deref(), Some("expand"));
        assert_eq!(
            find("prompts").dims[1].lengths_of.as_deref(),
            Some("source")
        );
    }
}
