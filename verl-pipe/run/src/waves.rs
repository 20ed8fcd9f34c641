//! Waves: when a source draws again, and which of the rows that a filter keeps are passed on.
//!
//! Whether to draw another wave is decided only after the filter has seen every group of every wave drawn so far, and
//! kept rows are admitted in declared order. So neither what is drawn nor what is passed on depends on timing.
//!
//! Invariants between calls:
//! - The source has at most one open wave: a wave is added only when all earlier ones are drawn and filtered.
//! - A filter's table grows in declared order: `appended` stops at the first slice that is not finished, whichever
//!   slice finishes first.
//! - `kept` never exceeds the wanted number of groups, and no row is admitted once `surplus` is above 0. With the order
//!   above, exactly the first wanted groups are passed on, however many groups the last wave kept.
//! - An entry of `ends` is final: all rows of that wave precede it in the table. So slices can be cut at it at once.

use verl_plan::Plan;
use verl_words::batch::RowId;
use verl_words::stage::{OnShort, Refill, RowRule};

use crate::error::RunError;
use crate::step::{CallId, Phase, StepState};

/// A filter that must keep a given number of groups, and its source.
#[derive(Debug)]
pub(super) struct RefillState {
    filter: usize,
    source: usize,
    wanted: Refill,
    /// Groups that were passed on.
    kept: usize,
    /// Groups that the filter kept beyond the wanted number.
    surplus: usize,
    /// Group of the most recent row that the filter kept.
    newest: Option<u64>,
    /// The last wave has ended and too few groups were kept.
    short: bool,
}

/// Results of the waves of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaveCounts {
    /// The stage that kept the groups.
    pub filter: usize,
    /// Number of waves that were drawn.
    pub waves: usize,
    /// Groups that were passed on.
    pub kept: usize,
    /// Groups that were kept beyond the wanted number.
    pub surplus: usize,
}

impl RefillState {
    /// The refilling filter of a plan; a plan has at most one.
    pub(super) fn of(plan: &Plan) -> Option<RefillState> {
        let filter = plan
            .stages()
            .iter()
            .position(|stage| stage.spec().refill.is_some())?;
        let planned = &plan.stages()[filter];
        let mut table = planned.table_in()?;
        while let Some(parent) = plan.tables()[table].parent {
            table = parent;
        }
        Some(RefillState {
            filter,
            source: plan.tables()[table].made_by,
            wanted: planned.spec().refill?,
            kept: 0,
            surplus: 0,
            newest: None,
            short: false,
        })
    }

    /// Whether the next row that the filter kept is passed on; `group` is the group of that row.
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
    /// The wave that a call draws; 0 for a stage that is not a source.
    pub(crate) fn wave(&self, (stage, slice): CallId) -> u64 {
        match self.schedule.plan().stages()[stage].spec().rows {
            RowRule::Source => slice as u64,
            _ => 0,
        }
    }

    /// Maximum number of waves that a source may draw.
    pub(super) fn max_waves(&self, source: usize) -> usize {
        let refill = self
            .refill
            .as_ref()
            .filter(|refill| refill.source == source);
        refill.map_or(1, |refill| refill.wanted.waves.max(1))
    }

    /// Marks the end of a wave after a call of the source: the rows so far are complete.
    pub(super) fn end_wave(&mut self, source: usize, table: usize) {
        let rows = self.tables[table].len();
        self.tables[table].ends.push(rows);
        if self.stages[source].slices.len() >= self.max_waves(source) {
            self.end_source(source);
        }
        self.grown.push_back(table);
    }

    /// Ends the source: it draws no further wave.
    fn end_source(&mut self, source: usize) {
        if let Some(table) = self.schedule.plan().stages()[source].table_out() {
            self.tables[table].total = Some(self.tables[table].len());
            self.grown.push_back(table);
        }
        self.stages[source].all_cut = true;
    }

    /// Once the filter has seen all waves so far, ends the source or lets it draw another wave. Returns true if the
    /// source ended, which makes the total number of rows known.
    pub(super) fn decide_wave(&mut self) -> bool {
        let Some(refill) = &self.refill else {
            return false;
        };
        let source = refill.source;
        if self.stages[source].all_cut || !self.has_seen_all(refill) {
            return false;
        }
        if refill.kept >= refill.wanted.groups {
            self.end_source(source);
            self.finish_stage_if_done(source);
            return true;
        }
        self.push_slice(source, 0..0);
        self.try_ready(source, self.stages[source].slices.len() - 1);
        false
    }

    /// Whether the filter has seen every row of the waves drawn so far.
    fn has_seen_all(&self, refill: &RefillState) -> bool {
        let (source, filter) = (&self.stages[refill.source], &self.stages[refill.filter]);
        let Some(table) = self.schedule.plan().stages()[refill.filter].table_in() else {
            return false;
        };
        let table = &self.tables[table];
        source.finished == source.slices.len()
            && table.ends.len() == source.slices.len()
            && filter.cut == table.len()
            && filter.finished == filter.slices.len()
    }

    /// Appends the rows that a filter kept to its table, slice by slice in declared order.
    pub(super) fn append_kept(&mut self, stage: usize, table: usize) {
        let parent = self.schedule.plan().stages()[stage]
            .table_in()
            .unwrap_or(table);
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
            self.forward_ends(stage);
        }
        let end = self.tables[table].len();
        self.grown.push_back(table);
        if end > first {
            self.wake_readers(stage, std::slice::from_ref(&(first..end)));
        }
    }

    /// Forwards the ends of waves to the table of a plain filter once all rows before them have been filtered. The
    /// table of a refilling filter has no wave ends: the rows it passes on form a single list.
    pub(super) fn forward_ends(&mut self, stage: usize) {
        let planned = &self.schedule.plan().stages()[stage];
        let (RowRule::Filter, None, Some(parent), Some(table)) = (
            planned.spec().rows,
            planned.spec().refill,
            planned.table_in(),
            planned.table_out(),
        ) else {
            return;
        };
        let state = &self.stages[stage];
        let next = state.slices.get(state.appended);
        let filtered = next.map_or(state.cut, |slice| slice.rows.start);
        while let Some(end) = self.tables[parent].ends.get(self.tables[table].ends.len())
            && *end <= filtered
        {
            let rows = self.tables[table].len();
            self.tables[table].ends.push(rows);
            self.grown.push_back(table);
        }
    }

    /// Checks whether a filter that has seen all rows kept too few groups; if so, the step can only fail.
    pub(super) fn check_shortfall(&mut self, stage: usize) -> bool {
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

    /// Results of the waves, if a stage refills.
    pub(crate) fn wave_counts(&self) -> Option<WaveCounts> {
        self.refill.as_ref().map(|refill| WaveCounts {
            filter: refill.filter,
            waves: self.stages[refill.source].slices.len(),
            kept: refill.kept,
            surplus: refill.surplus,
        })
    }

    /// The error for a step that kept too few groups, with the `statistics` of the filter.
    pub(crate) fn no_signal(&self, statistics: impl FnOnce(usize) -> String) -> Option<RunError> {
        let refill = self.refill.as_ref().filter(|refill| refill.short)?;
        let planned = &self.schedule.plan().stages()[refill.filter];
        let ids = planned.table_in().map_or(&[][..], |t| self.tables[t].ids());
        let group = |id: &u64| RowId(*id).group();
        Some(RunError::NoSignal {
            step: self.step,
            stage: planned.name().to_owned(),
            kept: refill.kept,
            judged: ids.chunk_by(|a, b| group(a) == group(b)).count(),
            waves: self.stages[refill.source].slices.len(),
            wanted: refill.wanted.groups,
            statistics: statistics(refill.filter),
        })
    }
}
