//! One step as a state machine without threads: which slices are ready, what their input is, and what they produced.
//!
//! The bounds of slices depend only on rows and waves, never on timing, so no result depends on timing either. A slice
//! is ready when its rows are known, all keys of all its rows have arrived, and the stages it waits for are done.
//!
//! Invariants between two calls from outside:
//! - Rows are only appended to tables and to [`Outputs`], never removed or moved. So a slice that is ready stays ready.
//! - `grown` is empty: all growth of tables has reached their expansions and the slices of their readers. `new`, `emit`
//!   and `finish` are the only entry points that grow a table, and each ends with `settle`.
//! - A slice is in `ready_host` or `ready_groups` only while its phase is [`Phase::Ready`]. Phases only advance and
//!   `begin` removes the slice from its set, so each slice starts once.
//! - `unfinished` is the number of stages that are not `done`. Only `finish_stage_if_done` sets `done`, once per stage.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, UInt64Array, new_null_array};
use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, BatchError, RowId};
use verl_words::stage::{Cadence, RowRule};

use crate::convert::convert;
use crate::error::RunError;
use crate::guard::{GuardError, GuardScope, MaskOf};
use crate::outputs::Outputs;
use crate::table::{TableState, runs, up_range};
use crate::waves::RefillState;

/// A call of a stage: stage and slice.
pub(crate) type CallId = (usize, usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Waiting,
    Ready,
    Running,
    Finished,
}

#[derive(Debug)]
pub(super) struct Slice {
    pub(super) rows: Range<usize>,
    pub(super) phase: Phase,
    /// First source and row that were missing at the last check. Everything before them has arrived and rows never
    /// disappear, so the next check resumes here.
    pub(super) resume_at: (usize, usize),
    pub(super) emitted: usize,
    /// For a filter: position, chunk and row in the chunk of each kept row.
    pub(super) kept: Vec<(u32, u32, u32)>,
}

#[derive(Debug, Default)]
pub(super) struct StageState {
    pub(super) slices: Vec<Slice>,
    /// Rows covered by slices so far. Slices are contiguous and in order, so their bounds can be searched by bisection.
    pub(super) cut: usize,
    /// No further slice will be added.
    pub(super) all_cut: bool,
    /// Slices before this one were made ready for dispatch (stages that take slices in order).
    pub(super) next: usize,
    pub(super) finished: usize,
    /// Slices before this one have added their rows to the filter's table.
    pub(super) appended: usize,
    pub(super) waits_for: usize,
    pub(super) done: bool,
    pub(super) outputs: Outputs,
}

/// The state of one step.
pub(crate) struct StepState {
    pub(super) schedule: Arc<Schedule>,
    pub(super) step: u64,
    pub(super) tables: Vec<TableState>,
    pub(super) stages: Vec<StageState>,
    /// Whether a stage takes its slices in order.
    pub(super) in_order: Vec<bool>,
    pub(super) ready_host: BTreeSet<CallId>,
    /// By device group.
    pub(super) ready_groups: Vec<BTreeSet<CallId>>,
    pub(super) unfinished: usize,
    pub(super) grown: VecDeque<usize>,
    /// The filter that may request further waves.
    pub(super) refill: Option<RefillState>,
}

impl StepState {
    /// A step in which nothing has run. `in_order[s]`: stage `s` takes its slices one after another.
    pub(crate) fn new(
        schedule: Arc<Schedule>,
        step: u64,
        in_order: Vec<bool>,
    ) -> Result<Self, RunError> {
        let plan = schedule.plan();
        let stages = plan.stages().iter().map(|stage| StageState {
            waits_for: stage.after().len(),
            ..StageState::default()
        });
        let mut state = StepState {
            step,
            tables: plan
                .tables()
                .iter()
                .map(|_| TableState::default())
                .collect(),
            stages: stages.collect(),
            in_order,
            ready_host: BTreeSet::new(),
            ready_groups: vec![BTreeSet::new(); schedule.groups().len()],
            unfinished: plan.stages().len(),
            grown: VecDeque::new(),
            refill: RefillState::of(plan),
            schedule: schedule.clone(),
        };
        for (index, stage) in plan.stages().iter().enumerate() {
            if stage.spec().cadence != Cadence::Step {
                state.stages[index].all_cut = true;
                state.finish_stage_if_done(index);
            } else if stage.spec().rows == RowRule::Source || stage.table_in().is_none() {
                state.push_slice(index, 0..0);
                state.stages[index].all_cut = state.max_waves(index) == 1;
                state.try_ready(index, 0);
            }
        }
        state.settle()?;
        Ok(state)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.unfinished == 0
    }

    /// Calls that can run on `place` now, most urgent first.
    pub(crate) fn ready(&self, place: Place) -> &BTreeSet<CallId> {
        match place {
            Place::Host => &self.ready_host,
            Place::Group(group) => &self.ready_groups[group],
        }
    }

    /// Marks a ready call as running.
    pub(crate) fn begin(&mut self, (stage, slice): CallId) {
        match self.schedule.places()[stage] {
            Place::Host => self.ready_host.remove(&(stage, slice)),
            Place::Group(group) => self.ready_groups[group].remove(&(stage, slice)),
        };
        self.stages[stage].slices[slice].phase = Phase::Running;
    }

    pub(crate) fn rows_of(&self, (stage, slice): CallId) -> Range<usize> {
        self.stages[stage].slices[slice].rows.clone()
    }

    /// Identity of the first row of the first source; determines the epoch.
    pub(crate) fn first_row(&self) -> Option<RowId> {
        let source = self
            .schedule
            .plan()
            .stages()
            .iter()
            .find(|s| s.spec().rows == RowRule::Source)?;
        self.tables[source.table_out()?]
            .ids()
            .first()
            .map(|id| RowId(*id))
    }

    /// The input of a call, in the stage's own names.
    pub(crate) fn input(&self, (stage, slice): CallId) -> Result<Batch, RunError> {
        let planned = &self.schedule.plan().stages()[stage];
        let rows = self.stages[stage].slices[slice].rows.clone();
        let ids = planned
            .table_in()
            .map_or(&[][..], |t| &self.tables[t].ids()[rows.clone()]);
        let input = self
            .gather(stage, &rows, ids)
            .map_err(|source| RunError::Input {
                step: self.step,
                stage: planned.name().to_owned(),
                source: Box::new(source),
            })?;
        let positions: Vec<u32> = rows.map(|r| r as u32).collect();
        let scope = self.scope(stage, &positions, ids);
        scope
            .lengths(Some((&input, ids)), &[])
            .map_err(|e| self.guard(e))?;
        Ok(input)
    }

    fn gather(&self, stage: usize, rows: &Range<usize>, ids: &[u64]) -> Result<Batch, BatchError> {
        let wires = &self.schedule.wiring().stages[stage];
        let mut columns: Vec<Option<ArrayRef>> = vec![None; wires.inputs.len()];
        for (at, source) in wires.sources.iter().enumerate() {
            let ancestors = up_range(&self.tables, &source.path, rows);
            let of_source = || {
                wires
                    .inputs
                    .iter()
                    .enumerate()
                    .filter(move |(_, input)| input.source == at)
            };
            let wanted: Vec<usize> = of_source().map(|(_, input)| input.column).collect();
            let arrays = self.stages[source.writer]
                .outputs
                .gather(&ancestors, &wanted)?;
            for ((slot, input), array) in of_source().zip(arrays) {
                columns[slot] = Some(match input.convert {
                    Some((from, to)) => convert(&array, &input.key, from, to)?,
                    None => array,
                });
            }
        }
        let samples: ArrayRef = Arc::new(UInt64Array::from_iter_values(ids.iter().copied()));
        let groups: ArrayRef = Arc::new(UInt64Array::from_iter_values(
            ids.iter().map(|id| RowId(*id).group()),
        ));
        let all = [samples, groups]
            .into_iter()
            .chain(columns.into_iter().flatten())
            .collect();
        Batch::from_record(RecordBatch::try_new(wires.schema.clone(), all)?)
    }

    /// Accepts rows that a call emitted.
    pub(crate) fn emit(
        &mut self,
        call: CallId,
        input: &Batch,
        batch: &Batch,
    ) -> Result<(), RunError> {
        self.accept(call, input, batch).map_err(|e| self.guard(e))?;
        self.settle()
    }

    fn accept(&mut self, call: CallId, input: &Batch, batch: &Batch) -> Result<(), GuardError> {
        let (stage, slice) = call;
        let schedule = self.schedule.clone();
        let planned = &schedule.plan().stages()[stage];
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let ids = ids_of(batch);
        let rule = planned.spec().rows;
        if rule == RowRule::Source {
            self.add_source_rows(call, ids)?;
        }
        let positions = self.positions(call, ids)?;
        let kinds = |row: usize| self.mask_kinds(stage, batch, positions[row] as usize, row);
        let mask = schedule.wiring().stages[stage].mask.as_ref();
        let scope = GuardScope {
            mask: mask.map(|mask| MaskOf {
                dim: &mask.dim,
                kinds: &kinds,
            }),
            ..self.scope(stage, &positions, ids)
        };
        let columns = scope.columns(batch)?;
        let same_rows = matches!(rule, RowRule::Same | RowRule::Filter);
        scope.lengths(same_rows.then(|| (input, ids_of(input))), &columns)?;
        let state = &mut self.stages[stage];
        let chunk = state.outputs.add_chunk(columns);
        state.slices[slice].emitted += ids.len();
        for (row, position) in positions.iter().enumerate() {
            let new = if rule == RowRule::Filter {
                let kept = &mut state.slices[slice].kept;
                let new = kept.iter().rev().all(|k| k.0 != *position);
                kept.push((*position, chunk, row as u32));
                new
            } else {
                state.outputs.place(*position as usize, chunk, row as u32)
            };
            if !new {
                return Err(GuardError::RepeatedRow {
                    stage: planned.name().to_owned(),
                    id: RowId(ids[row]),
                });
            }
        }
        if rule != RowRule::Filter {
            self.wake_readers(stage, &runs(&positions));
        }
        Ok(())
    }

    fn add_source_rows(&mut self, (stage, wave): CallId, ids: &[u64]) -> Result<(), GuardError> {
        let planned = &self.schedule.plan().stages()[stage];
        let Some(table) = planned.table_out() else {
            return Err(GuardError::NoOutput {
                stage: planned.name().to_owned(),
                rows: ids.len(),
            });
        };
        let rows = self.schedule.plan().tables()[table].num_rows;
        let limit = rows * (wave + 1);
        if self.tables[table].len() + ids.len() > limit {
            return Err(GuardError::ForeignRow {
                stage: planned.name().to_owned(),
                id: RowId(ids[(limit - self.tables[table].len()).min(ids.len() - 1)]),
                allowed: match self.max_waves(stage) {
                    1 => format!("{rows} rows a step"),
                    _ => format!("{rows} rows a wave"),
                },
            });
        }
        if let Some(id) = self.tables[table].extend(ids) {
            return Err(GuardError::RepeatedRow {
                stage: planned.name().to_owned(),
                id: RowId(id),
            });
        }
        self.grown.push_back(table);
        Ok(())
    }

    /// Positions of emitted rows in the stage's table (for a filter: in its input's table).
    fn positions(&mut self, (stage, slice): CallId, ids: &[u64]) -> Result<Vec<u32>, GuardError> {
        let planned = &self.schedule.plan().stages()[stage];
        let state = &self.stages[stage].slices[slice];
        let (table, within) = match (planned.spec().rows, planned.table_in(), planned.table_out()) {
            (RowRule::Source, _, Some(table)) => {
                let end = self.tables[table].len();
                return Ok((end as u32 - ids.len() as u32..end as u32).collect());
            }
            (RowRule::Same, Some(table), Some(_)) | (RowRule::Filter, Some(table), _) => {
                (table, state.rows.clone())
            }
            (RowRule::Expand(n), _, Some(table)) => {
                (table, state.rows.start * n..state.rows.end * n)
            }
            _ => {
                return Err(GuardError::NoOutput {
                    stage: planned.name().to_owned(),
                    rows: ids.len(),
                });
            }
        };
        let guess = within.start + state.emitted;
        self.tables[table]
            .positions(ids, guess, &within)
            .map_err(|id| {
                let ids = self.tables[table].ids();
                GuardError::ForeignRow {
                    stage: planned.name().to_owned(),
                    id: RowId(id),
                    allowed: format!(
                        "rows {}..{}, samples {} to {}",
                        within.start,
                        within.end,
                        RowId(ids[within.start]),
                        RowId(ids[within.end - 1])
                    ),
                }
            })
    }

    /// The rows of a call, with null in every key that the stage writes.
    pub(crate) fn nulls(&self, call: CallId, input: &Batch) -> Result<Batch, RunError> {
        let outputs = &self.schedule.wiring().stages[call.0].outputs;
        let mut nulls = input.rows_only();
        for out in outputs {
            nulls
                .put_array(&out.local, new_null_array(&out.data_type, input.num_rows()))
                .map_err(|source| RunError::Input {
                    step: self.step,
                    stage: self.schedule.plan().stages()[call.0].name().to_owned(),
                    source: Box::new(source),
                })?;
        }
        Ok(nulls)
    }

    /// Finishes a call that has emitted all its rows.
    pub(crate) fn finish(&mut self, call: CallId) -> Result<(), RunError> {
        self.check_complete(call).map_err(|e| self.guard(e))?;
        let (stage, slice) = call;
        self.stages[stage].slices[slice].phase = Phase::Finished;
        self.stages[stage].finished += 1;
        let planned = &self.schedule.plan().stages()[stage];
        match (planned.spec().rows, planned.table_out()) {
            (RowRule::Source, Some(table)) => self.end_wave(stage, table),
            (RowRule::Filter, Some(table)) => self.append_kept(stage, table),
            _ => {}
        }
        self.finish_stage_if_done(stage);
        self.settle()
    }

    fn check_complete(&self, (stage, slice): CallId) -> Result<(), GuardError> {
        let planned = &self.schedule.plan().stages()[stage];
        let state = &self.stages[stage].slices[slice];
        let (expected, table, start) = match (planned.spec().rows, planned.table_out()) {
            (RowRule::Source, Some(table)) => {
                let rows = self.schedule.plan().tables()[table].num_rows;
                (rows, table, slice * rows)
            }
            (RowRule::Same, Some(table)) => (state.rows.len(), table, state.rows.start),
            (RowRule::Expand(n), Some(table)) => {
                (state.rows.len() * n, table, state.rows.start * n)
            }
            _ => return Ok(()),
        };
        let may_be_silent =
            planned.spec().writes.is_empty() && planned.spec().rows != RowRule::Source;
        if state.emitted == expected || may_be_silent {
            return Ok(());
        }
        let outputs = &self.stages[stage].outputs;
        let first = (start..start + expected).find(|row| !outputs.has(*row));
        let first = first.and_then(|row| self.tables[table].ids().get(row));
        Err(GuardError::MissingRows {
            stage: planned.name().to_owned(),
            missing: expected - state.emitted,
            expected,
            first: first.map_or_else(|| "unknown".to_owned(), |id| RowId(*id).in_words()),
        })
    }

    pub(super) fn finish_stage_if_done(&mut self, stage: usize) {
        let state = &self.stages[stage];
        let is_running = !state.all_cut || state.finished < state.slices.len();
        if state.done || is_running || self.check_shortfall(stage) {
            return;
        }
        self.stages[stage].done = true;
        self.unfinished -= 1;
        let planned = &self.schedule.plan().stages()[stage];
        if let (RowRule::Filter, Some(table)) = (planned.spec().rows, planned.table_out()) {
            self.tables[table].total = Some(self.tables[table].len());
            self.grown.push_back(table);
        }
        let schedule = self.schedule.clone();
        for follower in &schedule.wiring().stages[stage].followers {
            self.stages[*follower].waits_for -= 1;
            if self.stages[*follower].waits_for == 0 {
                self.try_ready_from(*follower, 0);
            }
        }
    }

    /// Propagates the growth of tables to expansions and slices until nothing changes.
    ///
    /// This terminates: growth flows only from a table to its descendants, and `decide_wave` returns true at most once
    /// a step.
    fn settle(&mut self) -> Result<(), RunError> {
        self.propagate_growth()?;
        while self.decide_wave() {
            self.propagate_growth()?;
        }
        Ok(())
    }

    fn propagate_growth(&mut self) -> Result<(), RunError> {
        let schedule = self.schedule.clone();
        while let Some(table) = self.grown.pop_front() {
            for child in &schedule.wiring().expansions[table] {
                self.grow_expansion(table, *child)
                    .map_err(|source| RunError::Input {
                        step: self.step,
                        stage: schedule.plan().stages()[schedule.plan().tables()[*child].made_by]
                            .name()
                            .to_owned(),
                        source: Box::new(source),
                    })?;
            }
            for stage in &schedule.wiring().takers[table] {
                let first_new = self.stages[*stage].slices.len();
                self.cut_slices(*stage, table);
                self.try_ready_from(*stage, first_new);
                self.forward_ends(*stage);
                self.finish_stage_if_done(*stage);
            }
        }
        Ok(())
    }

    fn grow_expansion(&mut self, parent: usize, child: usize) -> Result<(), BatchError> {
        let n = self.schedule.plan().tables()[child].factor.max(1);
        let done = self.tables[child].len() / n;
        let mut ids = Vec::with_capacity((self.tables[parent].len() - done) * n);
        for id in &self.tables[parent].ids()[done..] {
            for sample in 0..n {
                ids.push(RowId(*id).sample(sample as u64)?.0);
            }
        }
        if let Some(id) = self.tables[child].extend(&ids) {
            return Err(BatchError::Arrow(format!(
                "{} was created twice",
                RowId(id).in_words()
            )));
        }
        self.tables[child].total = self.tables[parent].total.map(|rows| rows * n);
        self.tables[child].ends = self.tables[parent].ends.iter().map(|end| end * n).collect();
        self.grown.push_back(child);
        Ok(())
    }

    fn scope<'a>(&'a self, stage: usize, positions: &'a [u32], ids: &'a [u64]) -> GuardScope<'a> {
        GuardScope {
            stage: self.schedule.plan().stages()[stage].name(),
            wires: &self.schedule.wiring().stages[stage],
            positions,
            ids,
            mask: None,
        }
    }

    /// Number of rows that a stage has taken, and whether the stage is done.
    pub(super) fn rows_taken(&self, stage: usize) -> (usize, bool) {
        (self.stages[stage].cut, self.stages[stage].done)
    }

    /// Whether the stage had any call in the step, that is, whether it received rows.
    pub(super) fn was_called(&self, stage: usize) -> bool {
        !self.stages[stage].slices.is_empty()
    }

    fn guard(&self, source: GuardError) -> RunError {
        RunError::Guard {
            step: self.step,
            source: Box::new(source),
        }
    }
}

fn ids_of(batch: &Batch) -> &[u64] {
    use arrow_array::cast::AsArray;
    use arrow_array::types::UInt64Type;
    batch
        .record()
        .column(0)
        .as_primitive::<UInt64Type>()
        .values()
}
