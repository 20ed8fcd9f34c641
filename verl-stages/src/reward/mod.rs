//! Rewards: rules on text, and reward models.

pub mod math;
pub mod model;
pub mod number;
pub mod rule;
