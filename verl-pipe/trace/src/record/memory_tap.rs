//! [`MemoryTap`]: keeps recorded steps in memory, for tests and programs that need no files.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use verl_run::tap::{Tap, TapPoint};
use verl_words::batch::Batch;

use crate::files::{RecordedBatch, RecordedStage, RecordedStep};

/// A tap that keeps steps in memory.
///
/// ```
/// use std::sync::Arc;
/// use verl_pipe::run::runner::RunOptions;
/// use verl_pipe::trace::record::MemoryTap;
///
/// let tap = Arc::new(MemoryTap::default());
/// let options = RunOptions { tap: tap.clone(), ..RunOptions::default() };
/// // A run that is started with these options leaves its steps in the tap.
/// assert!(tap.step(1).is_none());
/// # drop(options);
/// ```
#[derive(Debug, Default)]
pub struct MemoryTap(Mutex<BTreeMap<u64, RecordedStep>>);

impl MemoryTap {
    fn steps(&self) -> MutexGuard<'_, BTreeMap<u64, RecordedStep>> {
        // No code that can panic runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step that has ended.
    pub fn step(&self, step: u64) -> Option<RecordedStep> {
        self.steps().get(&step).cloned()
    }

    fn keep(&self, point: TapPoint<'_>, batch: &Batch, outputs: bool) {
        let mut steps = self.steps();
        let step = steps.entry(point.step).or_default();
        step.step = point.step;
        let stage = step.stages.entry(point.stage.to_owned()).or_default();
        let list = if outputs {
            &mut stage.outputs
        } else {
            &mut stage.inputs
        };
        // Only a source has waves, and each of its slices is one.
        let wave = if point.rows.is_empty() {
            point.slice as u64
        } else {
            0
        };
        list.push(RecordedBatch {
            wave,
            slice: point.slice,
            batch: batch.clone(),
        });
    }
}

impl Tap for MemoryTap {
    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        self.keep(point, batch, false);
    }
    fn output(&self, point: TapPoint<'_>, batch: &Batch) {
        self.keep(point, batch, true);
    }
    fn step_end(&self, step: u64) {
        if let Some(step) = self.steps().get_mut(&step) {
            step.stages.values_mut().for_each(RecordedStage::sort);
        }
    }
}
