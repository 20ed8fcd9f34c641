//! Pipelines without models: what a file gives, what is planned, what is refused.

mod build_errors;
mod config;
mod kit;
mod memory;
mod parts;
mod plan;
