//! Recording and replay: the tap on every edge, the trace in the run folder, replay, and the search for the first wrong
//! value.
//!
//! [`recorder`] is the tap that records: statistics of every edge ([`stats`]), steps in full, a flight recorder, and
//! [`rules`] that detect anomalies. [`mod@format`] defines the layout on disk, [`writer`] writes it, [`store`] reads
//! it.
//!
//! [`recorded`] is a step in memory, however it was recorded; [`replay`], [`first_bad`], [`diff`] and [`show`] work on
//! it, and [`traced_run`] builds it from a run folder. [`conditions`] are the conditions of a recording, [`changes`]
//! lists what has changed since, and [`stand_in`] replaces stages whose kind this build does not have.

pub mod altered;
mod cell;
pub mod changes;
pub mod columns;
pub mod compare;
pub mod conditions;
pub mod config;
pub mod describe;
pub mod diff;
mod diff_inputs;
mod diff_report;
pub mod diff_stats;
mod edges;
pub mod error;
pub mod first_bad;
pub(crate) mod first_changed;
pub mod format;
mod invariants;
pub(crate) mod look;
pub(crate) mod partial;
pub mod ratio;
pub mod recorded;
pub mod recorder;
mod recording;
pub mod replay;
mod row_groups;
pub mod rules;
pub mod show;
pub mod sketch;
mod stage_rows;
pub mod stand_in;
pub(crate) mod state;
pub mod stats;
pub(crate) mod stats_faults;
mod stats_read;
pub mod stats_table;
mod step_data;
mod step_stats;
pub mod stopped;
pub mod store;
pub mod tap;
pub(crate) mod text;
pub mod traced_run;
mod watched_rule;
pub mod writer;
