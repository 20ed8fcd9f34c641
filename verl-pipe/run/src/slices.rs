//! Slices: their bounds, which depend only on rows, and when a slice is ready.
//!
//! Invariants between calls:
//! - The slices of a stage are contiguous, ordered, and cover the rows `0..cut`: each is added at `cut`. So no row is
//!   in two slices, and `wake_readers` can find the affected slices by bisection.
//! - The bounds of a slice never change once it is cut. A slice is cut as soon as it is full, or at the end of its
//!   wave, whichever comes first in row order; so the number of rows that arrive at a time does not affect the bounds.
//! - Every waiting slice was checked after the last change that could make it ready: when it was cut, when one of its
//!   sources gained rows, and when the last stage it waits for was done. So no wake-up is lost.

use std::ops::Range;

use verl_plan::schedule::placement::Place;
use verl_words::batch::RowId;
use verl_words::stage::Cardinality;

use crate::step::{Phase, Slice, StepState};
use crate::table::{down_range, up};

impl StepState {
    /// Cuts the rows of the stage that are known but not yet cut; no slice crosses the end of a wave.
    pub(super) fn cut_slices(&mut self, stage: usize, table: usize) {
        let (known, total) = (self.tables[table].len(), self.tables[table].total);
        let ended = total == Some(known);
        if self.stages[stage].all_cut {
            return;
        }
        if self.schedule.plan().stages()[stage].spec().cardinality == Cardinality::Batch {
            if ended {
                self.push_slice(stage, 0..known);
            }
        } else {
            for wave in 0..self.tables[table].ends.len() {
                self.cut_until(stage, table, self.tables[table].ends[wave], true);
            }
            self.cut_until(stage, table, known, ended);
        }
        self.stages[stage].all_cut = ended;
    }

    /// Cuts the uncut rows before `end`. If those rows are `complete`, all of them are cut, including a short last
    /// slice.
    fn cut_until(&mut self, stage: usize, table: usize, end: usize, complete: bool) {
        let size = self.schedule.slice_rows()[stage].max(1);
        let start = self.stages[stage].cut;
        if end <= start {
            return;
        }
        if self.schedule.plan().stages()[stage].spec().cardinality == Cardinality::Group {
            for cut in complete_groups(&self.tables[table].ids()[start..end], size, complete) {
                self.push_slice(stage, start + cut.start..start + cut.end);
            }
            return;
        }
        while self.stages[stage].cut + size <= end {
            let start = self.stages[stage].cut;
            self.push_slice(stage, start..start + size);
        }
        if complete {
            self.push_slice(stage, self.stages[stage].cut..end);
        }
    }

    /// Adds a slice. An empty slice is added only for a stage that takes no rows.
    pub(super) fn push_slice(&mut self, stage: usize, rows: Range<usize>) {
        let takes_rows = self.schedule.plan().stages()[stage].table_in().is_some();
        let state = &mut self.stages[stage];
        state.cut = rows.end;
        if rows.is_empty() && takes_rows {
            return;
        }
        let resume_at = (0, rows.start);
        state.slices.push(Slice {
            rows,
            phase: Phase::Waiting,
            resume_at,
            emitted: 0,
            kept: Vec::new(),
        });
    }

    pub(super) fn try_ready_from(&mut self, stage: usize, from: usize) {
        for slice in from..self.stages[stage].slices.len() {
            self.try_ready(stage, slice);
        }
    }

    pub(super) fn wake_readers(&mut self, writer: usize, runs: &[Range<usize>]) {
        let schedule = self.schedule.clone();
        for reader in &schedule.wiring().stages[writer].readers {
            let wires = &schedule.wiring().stages[*reader];
            let Some(source) = wires.sources.iter().find(|s| s.writer == writer) else {
                continue;
            };
            for run in runs {
                let rows = down_range(&self.tables, &source.path, run);
                let slices = &self.stages[*reader].slices;
                let first = slices.partition_point(|s| s.rows.end <= rows.start);
                let end = slices.partition_point(|s| s.rows.start < rows.end);
                for slice in first..end {
                    self.try_ready(*reader, slice);
                }
            }
        }
    }

    /// Makes a waiting slice ready if everything it needs has arrived.
    pub(super) fn try_ready(&mut self, stage: usize, slice: usize) {
        let state = &self.stages[stage];
        if state.waits_for > 0 || state.slices[slice].phase != Phase::Waiting {
            return;
        }
        if let Some(missing) = self.first_missing(stage, slice) {
            self.stages[stage].slices[slice].resume_at = missing;
            return;
        }
        self.stages[stage].slices[slice].phase = Phase::Ready;
        let ready = match self.schedule.places()[stage] {
            Place::Host => &mut self.ready_host,
            Place::Group(group) => &mut self.ready_groups[group],
        };
        if !self.in_order[stage] {
            ready.insert((stage, slice));
            return;
        }
        // A stage that takes slices in order gets a ready slice only after all slices before it; `next` never
        // decreases.
        let state = &mut self.stages[stage];
        while state
            .slices
            .get(state.next)
            .is_some_and(|s| s.phase != Phase::Waiting)
        {
            ready.insert((stage, state.next));
            state.next += 1;
        }
    }

    /// The first source and row that the slice is missing, if any.
    pub(super) fn first_missing(&self, stage: usize, slice: usize) -> Option<(usize, usize)> {
        let sources = &self.schedule.wiring().stages[stage].sources;
        let slice = &self.stages[stage].slices[slice];
        let (first, mut row) = slice.resume_at;
        for (at, source) in sources.iter().enumerate().skip(first) {
            let outputs = &self.stages[source.writer].outputs;
            let missing =
                (row..slice.rows.end).find(|r| !outputs.has(up(&self.tables, &source.path, *r)));
            if let Some(row) = missing {
                return Some((at, row));
            }
            row = slice.rows.start;
        }
        None
    }

    /// One line for each unfinished stage, stating what it waits for.
    pub(crate) fn waits(&self) -> String {
        let plan = self.schedule.plan();
        let mut lines = Vec::new();
        for (index, state) in self.stages.iter().enumerate().filter(|(_, s)| !s.done) {
            let name = plan.stages()[index].name();
            let waiting = state.slices.iter().position(|s| s.phase == Phase::Waiting);
            let what = match waiting {
                _ if state.waits_for > 0 => {
                    format!("{} earlier stages", state.waits_for)
                }
                Some(slice) => self.describe_wait(index, slice),
                None if state.all_cut => {
                    format!("{} running calls", state.slices.len() - state.finished)
                }
                None => "rows from earlier stages".to_owned(),
            };
            lines.push(format!("  `{name}` waits for {what}"));
        }
        lines.join("\n")
    }

    pub(super) fn describe_wait(&self, stage: usize, slice: usize) -> String {
        let wires = &self.schedule.wiring().stages[stage];
        let rows = &self.stages[stage].slices[slice].rows;
        let Some((at, row)) = self.first_missing(stage, slice) else {
            return format!("its turn with rows {}..{}", rows.start, rows.end);
        };
        let keys: Vec<&str> = wires
            .inputs
            .iter()
            .filter(|i| i.source == at)
            .map(|i| i.key.as_str())
            .collect();
        let writer = self.schedule.plan().stages()[wires.sources[at].writer].name();
        format!(
            "{} of row {row} (rows {}..{}) from `{writer}`",
            keys.join(", "),
            rows.start,
            rows.end
        )
    }
}

/// Ranges of complete groups with about `size` rows; the last group counts as complete only once the rows have `ended`.
fn complete_groups(ids: &[u64], size: usize, ended: bool) -> Vec<Range<usize>> {
    let group = |at: usize| RowId(ids[at]).group();
    let mut cuts = Vec::new();
    let (mut start, mut end) = (0, 0);
    let mut at = 0;
    while at < ids.len() {
        let mut next = at + 1;
        while next < ids.len() && group(next) == group(at) {
            next += 1;
        }
        if next == ids.len() && !ended {
            break;
        }
        if end > start && next - start > size {
            cuts.push(start..end);
            start = end;
        }
        end = next;
        if end - start >= size {
            cuts.push(start..end);
            start = end;
        }
        at = next;
    }
    if ended && end > start {
        cuts.push(start..end);
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(groups: &[u64], size: usize, ended: bool, expected: &[Range<usize>]) {
        let ids: Vec<u64> = groups
            .iter()
            .map(|row| RowId::prompt(0, *row).expect("fits").0)
            .collect();
        assert_eq!(complete_groups(&ids, size, ended), expected);
    }

    #[test]
    fn groups_are_not_split_and_the_last_group_waits() {
        check(&[1, 1, 2, 2, 3, 3], 2, true, &[0..2, 2..4, 4..6]);
        check(&[1, 1, 2, 2, 3, 3], 2, false, &[0..2, 2..4]);
        check(&[1, 1, 2, 2, 3, 3], 4, true, &[0..4, 4..6]);
        check(&[1, 2, 2, 2, 3], 2, true, &[0..1, 1..4, 4..5]);
        check(&[1, 2, 2, 2, 3], 9, false, &[]);
        check(&[], 2, true, &[]);
    }
}
