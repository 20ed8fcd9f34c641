//! Seeing what flows, and running it again: the tap on every edge, the trace that a run leaves in its folder, replay,
//! and what tells the first wrong number.
//!
//! [`recorder`] is the tap that records: statistics of every edge ([`stats`]), steps in full, a flight recorder, and
//! [`rules`] that look for anomalies. [`mod@format`] says what lies where, [`writer`] writes it, [`store`] reads it back.
//!
//! [`recorded`] is a step in memory, whoever recorded it; [`replay`], [`first_bad`], [`diff`] and [`show`] work on that,
//! and [`traced_run`] makes it of a run's folder. [`conditions`] are what a run was recorded under, [`changes`] what of that
//! is not so any more, and [`stand_in`] holds the places of stages that this build does not have.

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
mod told_rule;
pub mod traced_run;
pub mod writer;
