//! Waves: when a source draws again, and which of the rows that a filter keeps go on.
//!
//! A decision falls only when the filter has seen every group of every wave drawn so far, and it looks at rows in
//! declared order alone; so neither what is drawn nor what goes on depends on timing.

use crate::batch::RowId;
use crate::plan::Plan;
use crate::run::error::RunError;
use crate::run::step::{CallId, Phase, StepState};
use crate::stage::{OnShort, Refill, RowRule};

/// A filter with a number of groups to keep, and its source.
#[derive(Debug)]
pub(super) struct RefillState {
    filter: usize,
    source: usize,
    wanted: Refill,
    /// Groups that went on.
    kept: usize,
    /// Groups that the filter kept beyond those that were wanted.
    surplus: usize,
    /// Group of the newest row that the filter kept.
    newest: Option<u64>,
    /// The last wave is over and too few groups were kept.
    short: bool,
}

/// What came of a step's waves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaveCounts {
    /// Stage that kept the groups.
    pub filter: usize,
    /// Waves that were drawn.
    pub waves: usize,
    /// Groups that went on.
    pub kept: usize,
    /// Groups that were kept beyond those that were wanted.
    pub surplus: usize,
}

impl RefillState {
    /// The refilling filter of a plan; a plan has one at most.
    pub(super) fn of(plan: &Plan) -> Option<RefillState> {
        let filter = plan
            .stages
            .iter()
            .position(|stage| stage.spec.refill.is_some())?;
        let planned = &plan.stages[filter];
        let mut table = planned.table_in?;
        while let Some(parent) = plan.tables[table].parent {
            table = parent;
        }
        Some(RefillState {
            filter,
            source: plan.tables[table].made_by,
            wanted: planned.spec.refill?,
            kept: 0,
            surplus: 0,
            newest: None,
            short: false,
        })
    }

    /// Whether the next row that the filter kept goes on; `group` is the row's.
    fn admit(&mut self, group: u64) -> bool {
        if self.newest != Some(group) {
            self.newest = Some(group);
            if self.kept < self.wanted.groups {
                self.kept += 1;
            } else {
                self.surplus += 1;
            }
        }
        self.surplus == 0
    }
}

impl StepState {
    /// Wave that a call draws; 0 for a stage that is no source.
    pub(crate) fn wave(&self, (stage, slice): CallId) -> u64 {
        match self.schedule.plan.stages[stage].spec.rows {
            RowRule::Source => slice as u64,
            _ => 0,
        }
    }

    /// Waves that a source may draw.
    pub(super) fn max_waves(&self, source: usize) -> usize {
        let refill = self
            .refill
            .as_ref()
            .filter(|refill| refill.source == source);
        refill.map_or(1, |refill| refill.wanted.waves.max(1))
    }

    /// A source's call has ended: the rows so far are whole.
    pub(super) fn end_wave(&mut self, source: usize, table: usize) {
        let rows = self.tables[table].len();
        self.tables[table].ends.push(rows);
        if self.stages[source].slices.len() >= self.max_waves(source) {
            self.end_source(source);
        }
        self.grown.push_back(table);
    }

    /// No further wave will come.
    fn end_source(&mut self, source: usize) {
        if let Some(table) = self.schedule.plan.stages[source].table_out {
            self.tables[table].total = Some(self.tables[table].len());
            self.grown.push_back(table);
        }
        self.stages[source].all_cut = true;
    }

    /// Once the filter has seen all of the waves so far: ends the source, or lets it draw again. True when rows became
    /// known to be all.
    pub(super) fn judge_wave(&mut self) -> bool {
        let Some(refill) = &self.refill else {
            return false;
        };
        let source = refill.source;
        if self.stages[source].all_cut || !self.is_judged(refill) {
            return false;
        }
        if refill.kept >= refill.wanted.groups {
            self.end_source(source);
            self.finish_stage_if_done(source);
            return true;
        }
        self.push_slice(source, 0..0);
        self.look(source, self.stages[source].slices.len() - 1);
        false
    }

    /// Whether the filter has seen every row of the waves drawn so far.
    fn is_judged(&self, refill: &RefillState) -> bool {
        let (source, filter) = (&self.stages[refill.source], &self.stages[refill.filter]);
        let Some(table) = self.schedule.plan.stages[refill.filter].table_in else {
            return false;
        };
        let table = &self.tables[table];
        source.finished == source.slices.len()
            && table.ends.len() == source.slices.len()
            && filter.cut == table.len()
            && filter.finished == filter.slices.len()
    }

    /// Adds the rows that a filter kept to its table, slice by slice in declared order.
    pub(super) fn append_kept(&mut self, stage: usize, table: usize) {
        let parent = self.schedule.plan.stages[stage].table_in.unwrap_or(table);
        let first = self.tables[table].len();
        loop {
            let state = &mut self.stages[stage];
            let next = state.slices.get_mut(state.appended);
            let Some(slice) = next.filter(|slice| slice.phase == Phase::Finished) else {
                break;
            };
            let mut kept = std::mem::take(&mut slice.kept);
            state.appended += 1;
            kept.sort_unstable();
            for (position, chunk, row) in kept {
                let id = self.tables[parent].ids()[position as usize];
                let refill = self.refill.as_mut().filter(|refill| refill.filter == stage);
                if refill.is_some_and(|refill| !refill.admit(RowId(id).group())) {
                    continue;
                }
                let at = self.tables[table].len();
                self.tables[table].extend(&[id]);
                self.tables[table].kept.push(position);
                self.stages[stage].outputs.place(at, chunk, row);
            }
            self.pass_ends(stage);
        }
        let end = self.tables[table].len();
        self.grown.push_back(table);
        if end > first {
            self.wake_readers(stage, std::slice::from_ref(&(first..end)));
        }
    }

    /// Carries ends of waves on to the table of a plain filter, once all rows before them were judged. The table of a
    /// refilling filter has none: what goes on is one list.
    pub(super) fn pass_ends(&mut self, stage: usize) {
        let planned = &self.schedule.plan.stages[stage];
        let (RowRule::Filter, None, Some(parent), Some(table)) = (
            planned.spec.rows,
            planned.spec.refill,
            planned.table_in,
            planned.table_out,
        ) else {
            return;
        };
        let state = &self.stages[stage];
        let next = state.slices.get(state.appended);
        let judged = next.map_or(state.cut, |slice| slice.rows.start);
        while let Some(end) = self.tables[parent].ends.get(self.tables[table].ends.len())
            && *end <= judged
        {
            let rows = self.tables[table].len();
            self.tables[table].ends.push(rows);
            self.grown.push_back(table);
        }
    }

    /// Whether a filter that has seen all rows kept too few; from then on the step can only end.
    pub(super) fn falls_short(&mut self, stage: usize) -> bool {
        let Some(refill) = self.refill.as_mut().filter(|refill| refill.filter == stage) else {
            return false;
        };
        let least = match refill.wanted.on_short {
            OnShort::Error => refill.wanted.groups,
            OnShort::Continue => 1,
        };
        refill.short = refill.kept < least;
        refill.short
    }

    /// What came of the waves, where a stage refills.
    pub(crate) fn wave_counts(&self) -> Option<WaveCounts> {
        self.refill.as_ref().map(|refill| WaveCounts {
            filter: refill.filter,
            waves: self.stages[refill.source].slices.len(),
            kept: refill.kept,
            surplus: refill.surplus,
        })
    }

    /// The error of a step that kept too few groups, with the `statistics` of the filter.
    pub(crate) fn no_signal(&self, statistics: impl FnOnce(usize) -> String) -> Option<RunError> {
        let refill = self.refill.as_ref().filter(|refill| refill.short)?;
        let planned = &self.schedule.plan.stages[refill.filter];
        let ids = planned.table_in.map_or(&[][..], |t| self.tables[t].ids());
        let group = |id: &u64| RowId(*id).group();
        Some(RunError::NoSignal {
            step: self.step,
            stage: planned.name.clone(),
            kept: refill.kept,
            judged: ids.chunk_by(|a, b| group(a) == group(b)).count(),
            waves: self.stages[refill.source].slices.len(),
            wanted: refill.wanted.groups,
            statistics: statistics(refill.filter),
        })
    }
}
