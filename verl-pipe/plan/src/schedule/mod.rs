//! Placement and batch arithmetic, as pure functions.

pub mod batching;
pub mod groups;
pub mod placement;
pub mod wiring;
