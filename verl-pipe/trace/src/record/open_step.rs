//! A step that is recorded in full: its rows, its unfinished files and its state.

use std::collections::BTreeMap;

use crate::files::StateRef;
use crate::record::step_data::{StepData, StepFiles};

/// State at the start of a step.
#[derive(Debug, Default)]
pub(crate) struct StepState {
    pub models: BTreeMap<String, StateRef>,
    pub stages: BTreeMap<String, StateRef>,
}

/// A step while it is recorded or written.
///
/// Between calls: stages in `data.on_disk` have finished files and are never written again. Rows of other stages are in
/// `data.parts` or in `files`, never in both, so no row is written twice. `data.dropped` is set whenever rows have left
/// `data.parts`, so missing rows are always known.
#[derive(Default)]
pub(crate) struct OpenStep {
    pub data: StepData,
    /// Unfinished files. Dropping them removes them, so nothing of an unwritten step is left.
    pub files: StepFiles,
    /// The state at the start of a step, and the step. It comes before the step begins; used only for that step.
    pub state: (u64, StepState),
}

impl OpenStep {
    /// A step that has ended, without its state.
    pub(crate) fn of(data: StepData) -> OpenStep {
        OpenStep {
            state: (data.step, StepState::default()),
            data,
            files: StepFiles::default(),
        }
    }

    /// Replaces the step by a new one. Keeps the state if it is that of the new step.
    pub(crate) fn begin(&mut self, step: u64) {
        self.data = StepData::new(step);
        self.files = StepFiles::default();
        if self.state.0 != step {
            self.state = (step, StepState::default());
        }
    }
}
