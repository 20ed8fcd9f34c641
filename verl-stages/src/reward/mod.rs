//! Rewards: rules on text.

pub mod rule;
