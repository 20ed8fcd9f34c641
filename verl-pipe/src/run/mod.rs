//! Running a placed pipeline: [`Run`](runner::Run) executes steps, [`Trainer`](trainer::Trainer) whole runs.
//!
//! One thread (the caller's) holds the state of the step and hands out slices; a worker thread a device group runs
//! the stages that use models; a bounded pool runs the others.

mod channel;
pub mod console;
mod convert;
mod deadlines;
pub mod error;
pub mod folder;
pub mod guard;
mod host_calls;
mod host_pool;
pub mod interrupt;
pub mod metrics;
mod observe;
mod outputs;
mod patience;
pub mod runner;
mod slices;
mod start;
mod state;
mod step;
mod table;
pub mod trainer;
mod waves;
mod worker;

#[cfg(test)]
mod tests;
