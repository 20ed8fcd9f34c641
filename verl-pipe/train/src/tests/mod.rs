//! Tests of the engine with fake stages: streaming, determinism, failures, guards, snapshots.

mod endings;
mod failures;
mod fakes;
mod finish;
mod groups;
mod guards;
mod out_of_memory;
mod refill;
mod refill_failures;
mod room;
mod row_errors;
mod samples;
mod stall;
mod state;
mod streaming;
mod timeline;
mod trace;
pub(super) mod trainer;
