//! The engine under fake stages: streaming, determinism, failures, guards, going back.

mod endings;
mod failures;
mod fakes;
mod guards;
mod out_of_memory;
mod refill;
mod refill_failures;
mod samples;
mod stall;
mod state;
mod streaming;
mod trace;
mod trainer;
