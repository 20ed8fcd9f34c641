//! Whole runs through the façade: pipelines of files and of Rust, what they leave behind, and what they refuse.

mod algorithms;
mod bad_input;
mod critic;
mod dapo;
mod distillation;
mod examples;
mod ilql;
mod kit;
mod on_policy;
mod pipelines;
mod preferences;
mod replay;
mod run_folder;
mod schemas;
mod trl;
