//! The trace of a run: what is recorded beside it, the files in the run folder, and what is done with them later.
//!
//! | room | what it is | what it must not know |
//! |---|---|---|
//! | [`stats`] | the statistics of a key on one side of a stage: one row per step | rules and files |
//! | [`rules`] | the anomaly rules: what is checked in every step, and what is reported | files and the recorder |
//! | [`files`] | the `trace` folder of a run: the format, what writes it and what reads it | who calls it: no recorder, no replay |
//! | [`record`] | what runs beside a run: taps that compute statistics, run the rules and write the files | replay and comparison |
//! | [`compare`] | differences between recorded rows, between two runs, and between two sets of conditions | how a stage is run again |
//! | [`replay`] | runs recorded steps again, and searches for the first wrong value | how a result is shown |
//! | [`show`] | a recorded step for display, as tables and as text | how a step is recorded and run again |
//!
//! [`stats`], [`rules`], [`config`] and [`mod@format`] are those of the crate `verl-rules`, and [`tap`] is that of `verl-run`.
//! [`tap`] is how a run shows its batches, [`config`] is what a pipeline file says about the trace, [`mod@format`] is what
//! all parts share, and `text` formats text for terminals.

pub mod compare;
pub mod files;
pub mod record;
pub mod replay;
pub mod show;
pub mod text;

pub use verl_rules::{self as rules, config, format, stats};
pub use verl_run::tap;
