//! The engine under fake stages: streaming, determinism, failures, guards, going back.

mod failures;
mod fakes;
mod guards;
mod refill;
mod refill_failures;
mod state;
mod streaming;
mod trainer;
