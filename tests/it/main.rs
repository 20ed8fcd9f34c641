//! Complete runs through the façade: pipelines from files and from Rust, their output files, and their errors.

#![expect(
    clippy::disallowed_methods,
    reason = "tests compare with the standard library's functions within a tolerance"
)]

mod algorithms;
mod anomalies;
mod bad_input;
mod bench;
mod browser;
mod crates;
mod critic;
mod dapo;
mod debug;
mod debug_diff;
mod debug_replay;
mod debug_replay_changes;
mod devices;
mod distillation;
mod endings;
mod engine_names;
mod error_pages;
mod examples;
mod false_alarms;
mod groups;
mod ilql;
mod json_errors;
mod kit;
mod look;
mod memory;
mod on_policy;
mod other_processor;
mod pipelines;
mod plain_english;
mod planted;
mod preferences;
mod prelude;
mod processes;
mod replay;
mod replayed;
mod run_folder;
mod samples;
mod schemas;
mod settings_are_read;
mod source;
mod targets;
mod timeline;
mod trace;
mod trace_files;
mod trace_settings;
mod trl;
mod user_messages;
mod view;
mod view_clicks;
mod warmup;
