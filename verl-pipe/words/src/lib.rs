//! The vocabulary of pipelines: what an author of stages, models and data sets uses.
//!
//! Nothing here knows a pipeline: neither which stages exist nor how they are joined, checked or run. The crate
//! `verl-pipe` re-exports these modules under the same names.

pub mod batch;
pub mod conformance;
pub mod data;
pub mod diagnostic;
mod error_text;
pub mod field;
pub mod keys;
pub mod panics;
pub mod resource;
pub mod shape;
pub mod stage;
