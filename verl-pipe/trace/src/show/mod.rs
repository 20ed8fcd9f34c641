//! A recorded step for display: the step as a table of stages, the rows of a stage, and one sample token by token.

mod rows;
mod sample;
mod step;
mod value;
mod view;

pub use rows::{ListedRow, RowList};
pub use sample::{RowValue, SampleView};
pub use step::{KeySummary, StageSummary, StepSummary, step_summary};
pub use view::ShownStep;

/// Width limit of a text (terminal columns).
const TEXT_WIDTH: usize = 88;
/// Width limit of a token's text (terminal columns).
const TOKEN_WIDTH: usize = 16;
