//! Whole runs through the façade: pipelines of files and of Rust, what they leave behind, and what they refuse.

mod algorithms;
mod bad_input;
mod critic;
mod dapo;
mod debug;
mod devices;
mod distillation;
mod endings;
mod error_pages;
mod examples;
mod false_alarms;
mod ilql;
mod kit;
mod on_policy;
mod pipelines;
mod planted;
mod preferences;
mod replay;
mod replayed;
mod run_folder;
mod samples;
mod schemas;
mod settings_are_read;
mod source;
mod trace;
mod trl;
