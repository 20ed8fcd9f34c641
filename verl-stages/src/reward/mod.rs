//! Rewards: rules on text, and reward models.

pub mod model;
pub mod rule;
