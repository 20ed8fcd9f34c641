//! What runs beside a run and records it: a tap that computes statistics, runs the rules and writes the files, and a tap
//! that keeps steps in memory. Knows neither replay nor comparison.

mod flight_recorder;
mod memory_tap;
mod open_step;
mod recorder;
mod recording;
mod reported;
mod rule_runner;
mod show_command;
mod step_archive;
mod step_data;
mod step_stats;
mod watched_rule;

pub use memory_tap::MemoryTap;
pub use recorder::{MEMORY_BUDGET, Recorder};
