//! A recorded step for people: the whole step as a table of stages, the rows of a stage, and one sample token by token.

mod rows;
mod sample;
mod step;
mod value;
mod view;

pub use rows::{ListedRow, RowList};
pub use sample::{RowValue, SampleView};
pub use step::{KeySummary, StageSummary, StepSummary, step_summary};
pub use view::{StepView, rows_of};

/// Columns of a terminal that a text may take.
const TEXT_WIDTH: usize = 88;
/// Columns of a token's text.
const TOKEN_WIDTH: usize = 16;
