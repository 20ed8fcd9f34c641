//! Declared pipelines: the builder, the operator form, pipeline files, and the registry of kinds.
//!
//! This crate only records declarations. It does not know how they are checked, placed or run. The crate `verl-pipe` re-exports
//! these modules under the same names.

pub mod chain;
pub mod config;
pub mod part;
pub mod pipe;
pub mod registry;
pub mod sizes;
