//! Tests of the planner, its execution and the sync of weights.

mod exchange;
mod formula;
mod kit;
mod properties;
mod sync;
