//! Edges of a recorded step: compares what a stage read with what the writers of those keys emitted.

use std::borrow::Cow;
use std::collections::HashMap;

use verl_plan::schedule::placement::Schedule;
use verl_plan::schedule::wiring::{Hop, InputColumn};
use verl_run::convert::convert;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RowId};

use crate::compare::difference::{Comparison, Tolerance};
use crate::compare::rows::{ComparedKey, Pairing, Rows, compare_rows};
use crate::files::{RecordedStage, RecordedStep};

/// The edges between two stages, compared; left is what the reader got, right what the writer emitted.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ComparedEdges {
    /// Index of the writer in the plan.
    pub writer: usize,
    pub compared: Comparison,
}

/// Compares the complete input of stage `reader` with what was written, writer by writer. Writers that were not
/// recorded are skipped.
pub(crate) fn compare_inputs(
    schedule: &Schedule,
    recorded: &RecordedStep,
    reader: usize,
) -> Vec<ComparedEdges> {
    let planned = &schedule.plan().stages()[reader];
    let Some(stage) = recorded.stages.get(planned.name()) else {
        return Vec::new();
    };
    let given = Rows::new(stage.inputs.iter().map(|input| &input.batch));
    let mut found = Vec::from_iter(compare_identities(schedule, recorded, reader, &given));
    let wires = &schedule.wiring().stages[reader];
    for (at, source) in wires.sources.iter().enumerate() {
        let writer = &schedule.plan().stages()[source.writer];
        let Some(written) = recorded.stages.get(writer.name()) else {
            continue;
        };
        let columns: Vec<&InputColumn> = wires
            .inputs
            .iter()
            .filter(|input| input.source == at)
            .collect();
        let outputs = &schedule.wiring().stages[source.writer].outputs;
        let keys: Vec<ComparedKey<'_>> = columns
            .iter()
            .map(|column| ComparedKey {
                left: &column.local,
                right: &outputs[column.column].local,
                tolerance: Tolerance::EXACT,
            })
            .collect();
        let batches = as_read(written, &columns, &keys);
        let right = Rows::new(batches.iter().map(AsRef::as_ref));
        let expands = source.path.iter().any(|hop| matches!(hop, Hop::Expand(_)));
        let of_group = first_of_groups(right.ids());
        let partner = |id: u64| match expands {
            true => of_group.get(&RowId(id).group()).copied().unwrap_or(id),
            false => id,
        };
        let pairing = Pairing {
            stage: planned.name(),
            order: given.ids(),
            partner: &partner,
            absent_is_null: schedule.tolerates_row_errors(source.writer),
            both_ways: None,
        };
        found.push(ComparedEdges {
            writer: source.writer,
            compared: compare_rows(&pairing, &keys, &given, &right),
        });
    }
    found
}

/// Compares the input rows of a stage with those of its table: none may be missing and none may be foreign.
fn compare_identities(
    schedule: &Schedule,
    recorded: &RecordedStep,
    reader: usize,
    given: &Rows<'_>,
) -> Option<ComparedEdges> {
    let plan = schedule.plan();
    let planned = &plan.stages()[reader];
    let maker = plan.tables()[planned.table_in()?].made_by;
    let made = recorded.stages.get(plan.stages()[maker].name())?;
    let right = Rows::new(made.outputs.iter().map(|output| &output.batch));
    let order = right.ordered(&made.input_ids());
    let pairing = Pairing {
        stage: planned.name(),
        order: given.ids(),
        partner: &|id| id,
        absent_is_null: false,
        // Rows that a filter kept beyond the wanted number of groups are not passed on.
        both_ways: plan.stages()[maker]
            .spec()
            .refill
            .is_none()
            .then_some(&order[..]),
    };
    Some(ComparedEdges {
        writer: maker,
        compared: compare_rows(&pairing, &[], given, &right),
    })
}

/// The writer's output, in the types that the reader requested.
fn as_read<'a>(
    written: &'a RecordedStage,
    columns: &[&InputColumn],
    keys: &[ComparedKey<'_>],
) -> Vec<Cow<'a, Batch>> {
    let batches = written.outputs.iter().map(|output| &output.batch);
    if columns.iter().all(|column| column.convert.is_none()) {
        return batches.map(Cow::Borrowed).collect();
    }
    batches
        .map(|batch| {
            let mut converted = batch.clone();
            for (column, key) in columns.iter().zip(keys) {
                let Some((from, to)) = column.convert else {
                    continue;
                };
                let array = batch.column(key.right);
                let array = array.and_then(|array| convert(array, key.right, from, to).ok());
                if let Some(array) = array {
                    // The number of rows is the same, so this cannot fail.
                    let _ = converted.put_array(key.right, array);
                }
            }
            Cow::Owned(converted)
        })
        .collect()
}

/// The first row of each group; for expanded rows, the row that they came from.
fn first_of_groups(ids: &[u64]) -> HashMap<u64, u64> {
    let mut first = HashMap::new();
    for id in ids {
        first.entry(RowId(*id).group()).or_insert(*id);
    }
    first
}
