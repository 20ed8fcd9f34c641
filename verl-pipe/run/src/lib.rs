//! Running a placed pipeline: [`Run`](runner::Run) executes its steps.
//!
//! The caller's thread owns the state of the step and dispatches slices. One worker per device group, a thread or a
//! process, runs the stages that use models; a bounded pool runs the others.
//!
//! A run shows its batches to a [`Tap`](tap::Tap) and knows neither who records them nor the run folder.

pub mod again;
pub mod atomic_file;
mod call_error;
pub(crate) mod channel;
pub mod convert;
mod deadlines;
pub mod dispatch;
pub mod error;
pub mod guard;
mod host_calls;
mod host_pool;
pub mod interrupt;
mod left_over;
pub mod masks;
pub mod metrics;
pub(crate) mod notice;
mod observe;
mod outputs;
pub mod processor;
pub mod records;
mod recovery;
mod row_errors;
pub mod runner;
mod samples;
mod slices;
pub mod space;
mod span_log;
pub mod spans;
mod spin_wait;
pub mod stall;
pub mod start;
pub mod state;
mod step;
mod table;
pub mod tap;
pub mod watch;
mod waves;
mod weight_sync;
pub mod worker;
