//! Running a placed pipeline: [`Run`](runner::Run) executes steps, [`Trainer`](trainer::Trainer) whole runs.
//!
//! One thread (the caller's) holds the state of the step and hands out slices; a worker thread a device group runs
//! the stages that use models; a bounded pool runs the others.

pub(crate) mod again;
mod call_error;
mod channel;
pub mod console;
pub(crate) mod convert;
mod deadlines;
pub mod error;
pub mod folder;
pub mod guard;
pub(crate) mod held;
mod host_calls;
mod host_pool;
pub mod interrupt;
mod left_over;
pub mod metrics;
pub(crate) mod notice;
mod observe;
mod outputs;
mod patience;
pub mod records;
pub mod runner;
mod samples;
mod slices;
pub mod stall;
pub(crate) mod start;
pub mod state;
mod step;
mod table;
pub mod timeline;
pub mod trainer;
pub(crate) mod watch;
mod waves;
mod worker;

#[cfg(test)]
mod tests;
