//! [`Tap`]: sees every stage's inputs and outputs. It borrows them and cannot alter what flows on.

use std::ops::Range;

use crate::batch::Batch;

/// Which call of which stage a batch belongs to.
#[derive(Debug, Clone, Copy)]
pub struct TapPoint<'a> {
    /// Step of the run.
    pub step: u64,
    /// Name of the stage.
    pub stage: &'a str,
    /// Which of the step's slices of this stage; slices are numbered in the order of their rows.
    pub slice: usize,
    /// First row and row after the last of the slice, in the stage's input rows.
    pub rows: &'a Range<usize>,
}

/// Sees every batch that enters or leaves a stage. Calls come from the thread that runs the step, in the order in
/// which things happen; slices of one stage may come in any order.
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
    /// A stage is about to be called with `batch`, in its own names of keys.
    fn input(&self, _point: TapPoint<'_>, _batch: &Batch) {}
    /// A stage emitted `batch`, in its own names of keys, and the guards let it pass.
    fn output(&self, _point: TapPoint<'_>, _batch: &Batch) {}
    /// All calls of the step have ended well.
    fn step_end(&self, _step: u64) {}
}

/// Looks at nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTap;

impl Tap for NoTap {}
