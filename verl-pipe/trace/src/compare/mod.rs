//! Differences between recorded rows, between two runs, and between the conditions of two runs. Knows no replay.

mod cell;
pub mod changes;
mod diff;
mod diff_inputs;
mod diff_report;
mod diff_stats;
mod difference;
mod edges;
mod invariants;
mod rows;

pub(crate) use cell::Cell;
pub use changes::{Change, ChangedData, Changes, Unclaimed, changed, shown};
pub use diff::{KeyDiff, Parting, RunDiff, StageDiff, StepDiff, diff_settings, diff_step};
pub use diff_inputs::{Cause, InputsDiff};
pub use diff_stats::{StatsDiff, StatsStep, diff_stats};
pub use difference::{Comparison, Difference, DifferenceKind, Tolerance};
pub(crate) use edges::compare_inputs;
pub(crate) use invariants::{Violation, first_violation};
pub(crate) use rows::{ComparedKey, Pairing, Rows, compare_rows, rows_of};
