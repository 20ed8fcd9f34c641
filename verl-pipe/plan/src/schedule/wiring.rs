//! Wires of a plan, resolved to indices once: which column of which writer becomes which column of which reader.

use std::sync::Arc;

use arrow_schema::{DataType, Field as ArrowField, Schema};
use verl_words::batch::{GROUP_ID, SAMPLE_ID, arrow_type};
use verl_words::diagnostic::Diagnostic;
use verl_words::field::{DType, Field};
use verl_words::keys::MASK_KINDS;
use verl_words::stage::{Cadence, RowRule};

use crate::schedule::placement::internal;
use crate::{Plan, PlannedStage};

/// One step up from a table to its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hop {
    /// Row r came from row r / n.
    Expand(usize),
    /// Row r came from the r-th row that the filter kept; the index is the filter's table.
    Filter(usize),
}

/// A stage that another one reads from.
#[derive(Debug, Clone)]
pub struct InputSource {
    /// Index of the stage in the plan.
    pub writer: usize,
    /// From the reader's table to the writer's.
    pub path: Vec<Hop>,
}

/// A column of a stage's input.
#[derive(Debug, Clone)]
pub struct InputColumn {
    /// Index into [`StageWires::sources`].
    pub source: usize,
    /// Column of the writer.
    pub column: usize,
    /// The reader's own name.
    pub local: String,
    /// The pipeline's name.
    pub key: String,
    /// Lossless conversion from the writer's dtype.
    pub convert: Option<(DType, DType)>,
}

/// A column that a stage writes.
#[derive(Debug, Clone)]
pub struct OutputColumn {
    /// The stage's own name.
    pub local: String,
    /// Its declaration.
    pub field: Field,
    /// Its Arrow type.
    pub data_type: DataType,
}

/// Keys of one stage that declare the same ragged dim, so their rows have equal lengths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedLength {
    /// The dim.
    pub dim: String,
    /// Columns of the input (indices into [`StageWires::inputs`]).
    pub inputs: Vec<usize>,
    /// Columns of the output (indices into [`StageWires::outputs`]).
    pub outputs: Vec<usize>,
}

/// The column of mask kinds that belongs to the rows of a stage and is written before them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskColumn {
    /// Its writer: the stage itself, or a stage that it reads from, directly or indirectly.
    pub writer: usize,
    /// Column of the writer.
    pub column: usize,
    /// The writer's own name of it.
    pub local: String,
    /// Dim of its rows.
    pub dim: String,
    /// From the rows that the stage emits to the writer's rows.
    pub path: Vec<Hop>,
}

/// The wires of one stage.
#[derive(Debug, Clone)]
pub struct StageWires {
    /// Stages that it reads from.
    pub sources: Vec<InputSource>,
    /// Columns that it reads.
    pub inputs: Vec<InputColumn>,
    /// Columns that it writes.
    pub outputs: Vec<OutputColumn>,
    /// Keys whose rows have equal lengths.
    pub lengths: Vec<SharedLength>,
    /// The column that shows which tokens of the stage's output rows the policy chose.
    pub mask: Option<MaskColumn>,
    /// Schema of the input batch.
    pub schema: Arc<Schema>,
    /// Stages that read from this one.
    pub readers: Vec<usize>,
    /// Stages that wait until this one is done.
    pub followers: Vec<usize>,
}

/// All wires.
#[derive(Debug, Clone)]
pub struct Wiring {
    /// The wires of each stage of the plan.
    pub stages: Vec<StageWires>,
    /// For each table the stages that take their rows from it.
    pub takers: Vec<Vec<usize>>,
    /// For each table the tables that expand it.
    pub expansions: Vec<Vec<usize>>,
}

impl Wiring {
    pub(crate) fn new(plan: &Plan) -> Result<Wiring, Vec<Diagnostic>> {
        let mut found = Vec::new();
        let mut stages: Vec<StageWires> = Vec::with_capacity(plan.stages().len());
        for stage in plan.stages() {
            match wires(plan, &stages, stage) {
                Ok(wires) => stages.push(wires),
                Err(why) => {
                    found.push(internal(stage.name(), why));
                    return Err(found);
                }
            }
        }
        for (index, stage) in plan.stages().iter().enumerate() {
            let writers: Vec<usize> = stages[index].sources.iter().map(|s| s.writer).collect();
            for writer in writers {
                stages[writer].readers.push(index);
            }
            for before in stage.after() {
                stages[*before].followers.push(index);
            }
        }
        let masks: Vec<Option<MaskColumn>> = (0..stages.len())
            .map(|index| mask_column(plan, &stages, index))
            .collect();
        for (stage, mask) in stages.iter_mut().zip(masks) {
            stage.mask = mask;
        }
        let mut takers = vec![Vec::new(); plan.tables().len()];
        for (index, stage) in plan.stages().iter().enumerate() {
            if let (Some(table), Cadence::Step) = (stage.table_in(), stage.spec().cadence) {
                takers[table].push(index);
            }
        }
        let mut expansions = vec![Vec::new(); plan.tables().len()];
        for (index, table) in plan.tables().iter().enumerate() {
            if let (Some(parent), false) = (table.parent, table.filtered) {
                expansions[parent].push(index);
            }
        }
        Ok(Wiring {
            stages,
            takers,
            expansions,
        })
    }
}

fn wires(plan: &Plan, before: &[StageWires], stage: &PlannedStage) -> Result<StageWires, String> {
    let outputs: Vec<OutputColumn> = stage
        .spec()
        .writes
        .iter()
        .map(|field| OutputColumn {
            local: field.name.to_string(),
            data_type: arrow_type(field.dtype, is_ragged(field)),
            field: field.clone(),
        })
        .collect();
    let mut sources: Vec<InputSource> = Vec::new();
    let mut inputs = Vec::new();
    let mut fields = vec![
        ArrowField::new(SAMPLE_ID, DataType::UInt64, false),
        ArrowField::new(GROUP_ID, DataType::UInt64, false),
    ];
    let mut read = Vec::new();
    for edge in stage.inputs() {
        let writer = before
            .get(edge.writer)
            .ok_or("it reads from a later stage")?;
        let planned = &plan.stages()[edge.writer];
        let column = writer
            .outputs
            .iter()
            .position(|out| planned.rename().get(&out.local).unwrap_or(&out.local) == &edge.key)
            .ok_or_else(|| format!("`{}` does not write `{}`", planned.name(), edge.key))?;
        let source = match sources.iter().position(|s| s.writer == edge.writer) {
            Some(at) => at,
            None => {
                let from = stage
                    .table_in()
                    .ok_or("it reads keys but has no input rows")?;
                let path = path(plan, from, edge.table).ok_or_else(|| {
                    format!("the rows of `{}` are not ancestors of its rows", edge.key)
                })?;
                sources.push(InputSource {
                    writer: edge.writer,
                    path,
                });
                sources.len() - 1
            }
        };
        let data_type = match edge.convert {
            Some((_, to)) => arrow_type(to, is_ragged(&writer.outputs[column].field)),
            None => writer.outputs[column].data_type.clone(),
        };
        fields.push(ArrowField::new(edge.local.clone(), data_type, true));
        read.push(
            stage
                .spec()
                .reads
                .iter()
                .chain(&stage.spec().reads_optional)
                .find(|f| f.name == edge.local),
        );
        inputs.push(InputColumn {
            source,
            column,
            local: edge.local.clone(),
            key: edge.key.clone(),
            convert: edge.convert,
        });
    }
    let lengths = shared_lengths(&read, &outputs);
    Ok(StageWires {
        sources,
        inputs,
        outputs,
        lengths,
        mask: None,
        schema: Arc::new(Schema::new(fields)),
        readers: Vec::new(),
        followers: Vec::new(),
    })
}

fn is_ragged(field: &Field) -> bool {
    ragged_dim(field).is_some()
}

/// The ragged dim of a field.
pub fn ragged_dim(field: &Field) -> Option<String> {
    field.parsed_shape().ok()?.ragged().map(str::to_owned)
}

/// The mask kinds of the rows that stage `index` emits. Searches only stages that it reads from: others may write at
/// any time, and no result may depend on timing.
fn mask_column(plan: &Plan, stages: &[StageWires], index: usize) -> Option<MaskColumn> {
    let planned = plan.stages().get(index)?;
    let table = match planned.spec().rows {
        RowRule::Filter => planned.table_in()?,
        _ => planned.table_out()?,
    };
    let mut upstream = vec![index];
    let mut next = 0;
    while let Some(at) = upstream.get(next).copied() {
        next += 1;
        let column = stages[at].outputs.iter().position(|out| {
            let key = plan.stages()[at].key(&out.local);
            key == MASK_KINDS.name() && out.field.dtype == DType::U8
        });
        let Some(column) = column else {
            let writers = stages[at].sources.iter().map(|source| source.writer);
            let new: Vec<usize> = writers.filter(|at| !upstream.contains(at)).collect();
            upstream.extend(new);
            continue;
        };
        let out = &stages[at].outputs[column];
        let path = match at == index {
            true => Vec::new(),
            false => path(plan, table, plan.stages()[at].table_out()?)?,
        };
        return Some(MaskColumn {
            writer: at,
            column,
            local: out.local.clone(),
            dim: ragged_dim(&out.field)?,
            path,
        });
    }
    None
}

/// The way up from `table` to its ancestor `to`.
pub fn path(plan: &Plan, table: usize, to: usize) -> Option<Vec<Hop>> {
    let mut at = table;
    let mut path = Vec::new();
    while at != to {
        let table = plan.tables().get(at)?;
        path.push(if table.filtered {
            Hop::Filter(at)
        } else {
            Hop::Expand(table.factor.max(1))
        });
        at = table.parent?;
    }
    Some(path)
}

fn shared_lengths(read: &[Option<&Field>], outputs: &[OutputColumn]) -> Vec<SharedLength> {
    let mut shared: Vec<SharedLength> = Vec::new();
    let inputs = read
        .iter()
        .enumerate()
        .filter_map(|(i, f)| Some((ragged_dim((*f)?)?, i, true)));
    let outputs = outputs
        .iter()
        .enumerate()
        .filter_map(|(i, o)| Some((ragged_dim(&o.field)?, i, false)));
    for (dim, index, is_input) in inputs.chain(outputs) {
        let at = match shared.iter().position(|s| s.dim == dim) {
            Some(at) => at,
            None => {
                shared.push(SharedLength {
                    dim,
                    inputs: Vec::new(),
                    outputs: Vec::new(),
                });
                shared.len() - 1
            }
        };
        let list = if is_input {
            &mut shared[at].inputs
        } else {
            &mut shared[at].outputs
        };
        list.push(index);
    }
    shared.retain(|s| s.inputs.len() + s.outputs.len() > 1);
    shared
}
