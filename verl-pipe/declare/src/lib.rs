//! Declared pipelines: the builder, the operator form, pipeline files, and the registry of kinds.
//!
//! A declaration is only recorded here. Nothing knows how it is checked, placed or run. The crate `verl-pipe` re-exports
//! these modules under the same names.

pub mod chain;
pub mod config;
pub mod part;
pub mod pipe;
pub mod registry;
pub mod sizes;
