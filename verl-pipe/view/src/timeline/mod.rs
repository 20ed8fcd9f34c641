//! A step as it ran: each stage and call on the line of its group, as text and as a Chrome trace.
//!
//! [`RecordedTimeline`] reads `timeline.jsonl` of a run folder, [`StepChart`] prints a step, [`write_chrome`] writes
//! steps in a format that Perfetto and Chrome open.

mod blocks;
mod chart;
mod chrome;
mod idle;
mod intervals;
mod lanes;
mod read;
mod units;

pub use chart::StepChart;
pub use chrome::write_chrome;
pub use read::{RecordedTimeline, TimelineError};

#[cfg(test)]
mod tests;
