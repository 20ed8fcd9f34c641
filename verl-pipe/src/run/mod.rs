//! Running a placed pipeline: [`Run`](runner::Run) executes steps, [`Trainer`](trainer::Trainer) complete runs.
//!
//! The caller's thread owns the state of the step and dispatches slices. One worker thread per device group runs the
//! stages that use models; a bounded pool runs the others.

pub(crate) mod again;
mod call_error;
pub(crate) mod channel;
pub mod columns;
pub mod console;
pub(crate) mod convert;
mod deadlines;
pub(crate) mod dispatch;
mod ending;
pub mod error;
pub mod folder;
pub(crate) mod folder_lock;
pub mod guard;
mod host_calls;
mod host_pool;
pub mod interrupt;
mod left_over;
mod lines;
pub(crate) mod masks;
pub mod metrics;
pub(crate) mod notice;
mod observe;
mod outputs;
pub(crate) mod processor;
pub mod records;
mod replaced;
mod row_errors;
pub mod runner;
mod samples;
mod slices;
pub mod space;
mod spin_wait;
pub mod stall;
pub(crate) mod start;
pub mod state;
mod state_file;
mod step;
mod table;
pub mod timeline;
pub mod trainer;
pub mod warnings;
pub(crate) mod watch;
mod waves;
mod worker;

#[cfg(test)]
mod tests;
