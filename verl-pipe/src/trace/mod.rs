//! Seeing what flows, and running it again: the tap on every edge, the trace that a run leaves in its folder, replay,
//! and what tells the first wrong number.
//!
//! [`recorder`] is the tap that records: statistics of every edge ([`stats`]), steps in full, a flight recorder, and
//! [`rules`] that look for anomalies. [`mod@format`] says what lies where, [`writer`] writes it, [`store`] reads it back.
//!
//! [`recorded`] is a step in memory, whoever recorded it; [`replay`], [`first_bad`], [`diff`] and [`show`] work on that,
//! and [`traced_run`] makes it of a run's folder.

mod cell;
pub mod columns;
pub mod compare;
pub mod config;
pub mod describe;
pub mod diff;
pub mod diff_stats;
mod edges;
pub mod error;
pub mod first_bad;
pub mod format;
mod invariants;
pub mod ratio;
pub mod recorded;
pub mod recorder;
mod recording;
pub mod replay;
pub mod rules;
pub mod show;
pub mod sketch;
pub(crate) mod state;
pub mod stats;
pub(crate) mod stats_faults;
mod stats_table;
mod step_data;
mod step_stats;
pub mod store;
pub mod tap;
pub(crate) mod text;
pub mod traced_run;
pub mod writer;
