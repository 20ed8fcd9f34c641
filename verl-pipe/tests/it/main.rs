//! Pipelines without models: reading files, planning, and errors.

mod build_errors;
mod config;
mod kit;
mod memory;
mod parts;
mod plan;
