//! A step that is recorded in full: its rows, its unfinished files and its state.

use std::collections::BTreeMap;

use crate::files::StateRef;
use crate::record::step_data::{StepData, StepFiles};

/// State at the start of a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct StateRefs {
    pub models: BTreeMap<String, StateRef>,
    pub stages: BTreeMap<String, StateRef>,
}

/// A step while it is recorded or written.
///
/// Between calls: stages in `data.on_disk` have finished files and are never written again. Rows of other stages are in
/// `data.parts` or in `files`, never in both, so no row is written twice. `data.dropped` is set whenever rows have left
/// `data.parts`, so missing rows are always known.
/// `data.lost` is set if some of them are nowhere, because a write failed.
#[derive(Default)]
pub(crate) struct OpenStep {
    pub data: StepData,
    /// Unfinished files. Dropping them removes them, so nothing of an unwritten step is left.
    pub files: StepFiles,
    /// The newest state at the start of a step, and the step. It comes before the step begins; used only for that step.
    pub state: (u64, StateRefs),
}

impl OpenStep {
    /// A step that has ended. `state` is the newest state, which may be that of another step.
    pub(crate) fn of(data: StepData, state: (u64, StateRefs)) -> OpenStep {
        OpenStep {
            state,
            data,
            files: StepFiles::default(),
        }
    }

    /// The state at the start of this step; empty if it is not known.
    pub(crate) fn step_state(&self) -> StateRefs {
        match self.state.0 == self.data.step {
            true => self.state.1.clone(),
            false => StateRefs::default(),
        }
    }

    /// Replaces the step by a new one.
    pub(crate) fn begin(&mut self, step: u64) {
        self.data = StepData::new(step);
        self.files = StepFiles::default();
    }
}
