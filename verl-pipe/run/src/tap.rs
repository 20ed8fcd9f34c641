//! [`Tap`]: observes every stage's inputs and outputs. It only borrows them, so it cannot alter the data flow.

use std::ops::Range;
use std::sync::Arc;

use verl_rules::Anomaly;
use verl_words::batch::Batch;

use crate::error::RunError;

/// Which call of which stage a batch belongs to.
#[derive(Debug, Clone, Copy)]
pub struct TapPoint<'a> {
    /// Step of the run.
    pub step: u64,
    /// Name of the stage.
    pub stage: &'a str,
    /// Position of the stage in the order of execution.
    pub index: usize,
    /// Wave of the step that a source's call draws; 0 for any other stage.
    pub wave: u64,
    /// Number of the stage's slice in this step; slices are numbered in the order of their rows.
    pub slice: usize,
    /// The slice's range in the stage's input rows.
    pub rows: &'a Range<usize>,
}

/// Observes every batch that enters or leaves a stage. The thread that runs the step makes the calls, in the order of
/// the events; slices of one stage may come in any order.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use verl_pipe::batch::Batch;
/// use verl_pipe::trace::tap::{Tap, TapPoint};
///
/// #[derive(Default)]
/// struct CountRows(AtomicUsize);
/// impl Tap for CountRows {
///     fn output(&self, _point: TapPoint<'_>, batch: &Batch) {
///         self.0.fetch_add(batch.num_rows(), Ordering::Relaxed);
///     }
/// }
/// ```
pub trait Tap: Send + Sync {
    /// A step begins.
    fn step_begin(&self, _step: u64) {}
    /// A stage is about to be called with `batch`; the keys have the stage's own names.
    fn input(&self, _point: TapPoint<'_>, _batch: &Batch) {}
    /// A stage emitted `batch` and the guards accepted it; the keys have the stage's own names.
    fn output(&self, _point: TapPoint<'_>, _batch: &Batch) {}
    /// A stage emitted `batch` and the guards refused it; the step ends.
    fn refused(&self, _point: TapPoint<'_>, _batch: &Batch, _reason: &str) {}
    /// A stage is about to update a model with `batch`, which was passed to [`Tap::input`] before.
    ///
    /// # Errors
    /// The anomaly that forbids the update; the step ends before it.
    fn gate(&self, _point: TapPoint<'_>, _batch: &Batch) -> Result<(), Box<Anomaly>> {
        Ok(())
    }
    /// All calls of the step have succeeded.
    fn step_end(&self, _step: u64) {}
    /// The step ended with an error.
    fn step_failed(&self, _step: u64, _error: &RunError) {}
}

/// Ignores everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTap;

impl Tap for NoTap {}

/// Calls two taps in order.
pub struct Both(pub Arc<dyn Tap>, pub Arc<dyn Tap>);

impl Tap for Both {
    fn step_begin(&self, step: u64) {
        self.0.step_begin(step);
        self.1.step_begin(step);
    }
    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        self.0.input(point, batch);
        self.1.input(point, batch);
    }
    fn output(&self, point: TapPoint<'_>, batch: &Batch) {
        self.0.output(point, batch);
        self.1.output(point, batch);
    }
    fn refused(&self, point: TapPoint<'_>, batch: &Batch, reason: &str) {
        self.0.refused(point, batch, reason);
        self.1.refused(point, batch, reason);
    }
    fn gate(&self, point: TapPoint<'_>, batch: &Batch) -> Result<(), Box<Anomaly>> {
        self.0.gate(point, batch)?;
        self.1.gate(point, batch)
    }
    fn step_end(&self, step: u64) {
        self.0.step_end(step);
        self.1.step_end(step);
    }
    fn step_failed(&self, step: u64, error: &RunError) {
        self.0.step_failed(step, error);
        self.1.step_failed(step, error);
    }
}
