//! Typed dataflow pipelines: declare stages, check the graph, place it, run it, trace it.
//!
//! Four stations, four types: [`pipe::DataPipe`] (declared) → [`plan::Plan`] (checked) → `Schedule` (placed) →
//! `Run` (executed). This crate knows no stage, model or algorithm by name.

pub mod batch;
pub mod chain;
pub mod cli;
pub mod config;
pub mod conformance;
pub mod data;
pub mod diagnostic;
pub mod field;
pub mod keys;
pub mod pipe;
pub mod plan;
pub mod registry;
pub mod resource;
pub mod run;
pub mod schedule;
pub mod schema;
pub mod shape;
pub mod stage;
pub mod trace;
