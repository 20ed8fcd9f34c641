//! Placement and batch arithmetic; pure functions.

pub mod batching;
