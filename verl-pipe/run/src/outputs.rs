//! Rows that one stage has emitted in the current step: chunks in order of arrival, and the location of each row.

use arrow_array::{Array, ArrayRef};
use verl_words::batch::BatchError;

use crate::table::{AncestorRows, Ancestors};

/// Emitted rows of one stage.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    chunks: Vec<Vec<ArrayRef>>,
    /// Chunk and row of each position; `None` until the row arrives.
    places: Vec<Option<(u32, u32)>>,
}

/// Adjacent rows of one chunk.
struct Run {
    chunk: usize,
    start: usize,
    len: usize,
}

impl Outputs {
    pub(crate) fn add_chunk(&mut self, columns: Vec<ArrayRef>) -> u32 {
        self.chunks.push(columns);
        (self.chunks.len() - 1) as u32
    }

    /// Sets the location of the row at `position`; returns false if it was set before.
    pub(crate) fn place(&mut self, position: usize, chunk: u32, row: u32) -> bool {
        if self.places.len() <= position {
            self.places.resize(position + 1, None);
        }
        let slot = &mut self.places[position];
        let new = slot.is_none();
        *slot = Some((chunk, row));
        new
    }

    pub(crate) fn has(&self, position: usize) -> bool {
        self.places.get(position).is_some_and(Option::is_some)
    }

    /// The rows of each of `columns`; shares buffers if the rows are adjacent in one chunk.
    pub(crate) fn gather(
        &self,
        rows: &Ancestors,
        columns: &[usize],
    ) -> Result<Vec<ArrayRef>, BatchError> {
        let runs = match &rows.rows {
            AncestorRows::Span(span) => self.runs(span.clone())?,
            AncestorRows::Some(rows) => self.runs(rows.iter().copied())?,
        };
        columns
            .iter()
            .map(|column| {
                let array = self.gather_runs(&runs, *column)?;
                match &rows.pick {
                    Some(pick) => Ok(arrow_select::take::take(&array, pick, None)?),
                    None => Ok(array),
                }
            })
            .collect()
    }

    fn gather_runs(&self, runs: &[Run], column: usize) -> Result<ArrayRef, BatchError> {
        let piece = |run: &Run| {
            let array = &self.chunks[run.chunk][column];
            if run.start == 0 && run.len == array.len() {
                array.clone()
            } else {
                array.slice(run.start, run.len)
            }
        };
        if let [run] = runs {
            return Ok(piece(run));
        }
        let pieces: Vec<ArrayRef> = runs.iter().map(piece).collect();
        let pieces: Vec<&dyn Array> = pieces.iter().map(AsRef::as_ref).collect();
        Ok(arrow_select::concat::concat(&pieces)?)
    }

    fn runs(&self, positions: impl Iterator<Item = usize>) -> Result<Vec<Run>, BatchError> {
        let mut runs: Vec<Run> = Vec::new();
        for position in positions {
            let Some((chunk, row)) = self.places.get(position).copied().flatten() else {
                return Err(BatchError::Range {
                    start: position,
                    end: position + 1,
                    rows: self.places.len(),
                });
            };
            let (chunk, row) = (chunk as usize, row as usize);
            match runs.last_mut() {
                Some(run) if run.chunk == chunk && run.start + run.len == row => run.len += 1,
                _ => runs.push(Run {
                    chunk,
                    start: row,
                    len: 1,
                }),
            }
        }
        Ok(runs)
    }
}
