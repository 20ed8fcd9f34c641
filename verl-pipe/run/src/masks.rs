//! Which tokens of a row the policy chose, for the guards: no stage reads the values of a key at other tokens.

use arrow_array::cast::AsArray;
use arrow_array::types::UInt8Type;
use arrow_array::{Array, ArrayRef};
use verl_words::batch::Batch;
use verl_words::batch::arrow::ArrowBatch;

use crate::step::StepState;
use crate::table::{AncestorRows, Ancestors, up};

impl StepState {
    /// Mask kinds of row `row` in the batch that `stage` emits; the row is at `position` of the stage's table.
    pub(super) fn mask_kinds(
        &self,
        stage: usize,
        batch: &Batch,
        position: usize,
        row: usize,
    ) -> Option<Vec<u8>> {
        let mask = self.schedule.wiring().stages[stage].mask.as_ref()?;
        if mask.writer == stage {
            return kinds_of(batch.column(&mask.local)?, row);
        }
        let at = up(&self.tables, &mask.path, position);
        let one = Ancestors {
            rows: AncestorRows::Span(at..at + 1),
            pick: None,
        };
        let outputs = &self.stages[mask.writer].outputs;
        let column = outputs.gather(&one, &[mask.column]).ok()?.pop()?;
        kinds_of(&column, 0)
    }
}

/// Mask kinds of a row.
pub fn kinds_of(column: &ArrayRef, row: usize) -> Option<Vec<u8>> {
    let list = column.as_list_opt::<i32>()?;
    let values = list.is_valid(row).then(|| list.value(row))?;
    Some(values.as_primitive_opt::<UInt8Type>()?.values().to_vec())
}
