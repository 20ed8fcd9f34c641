//! Typed dataflow pipelines: declare stages, check the graph, place it, run it, trace it.
//!
//! Four stations, four types: [`pipe::DataPipe`] (declared) → [`plan::Plan`] (checked) → `Schedule` (placed) →
//! `Run` (executed). This crate knows no stage, model or algorithm by name.
//!
//! # What the compiler refuses
//! A pipeline that was not checked cannot be scheduled:
//! ```compile_fail,E0599
//! let pipe = verl_pipe::pipe::DataPipe::new("unchecked");
//! let schedule = pipe.schedule();
//! ```
//! A plan that was not scheduled cannot run:
//! ```compile_fail,E0599
//! use verl_pipe::{pipe::DataPipe, run::runner::RunOptions};
//! let plan = DataPipe::new("unplaced").plan().unwrap();
//! let run = plan.start(RunOptions::default());
//! ```
//! A plan cannot be made or changed by hand:
//! ```compile_fail,E0451
//! use verl_pipe::{pipe::DataPipe, plan::Plan};
//! let checked = DataPipe::new("checked").plan().unwrap();
//! let changed = Plan { warnings: Vec::new(), ..checked };
//! ```
//! A key fixes the type of its column for writing
//! ```compile_fail,E0277
//! use verl_pipe::{batch::Batch, keys::REWARDS};
//! Batch::with_rows(&[]).put(&REWARDS, vec!["good", "bad"]).unwrap();
//! ```
//! and for reading.
//! ```compile_fail,E0308
//! use verl_pipe::{batch::Batch, keys::RESPONSES};
//! let batch = Batch::with_rows(&[]);
//! let row: &[f32] = batch.get(&RESPONSES).unwrap().row(0);
//! ```
//! The operator `>>` joins only stages:
//! ```compile_fail,E0277
//! use verl_pipe::{chain::stage_fn, keys::PROMPTS, stage::StageSpec};
//! let reader = stage_fn(StageSpec::new().reads(PROMPTS), |batch, ctx| ctx.emit(batch));
//! let chain = reader.named("reader") >> PROMPTS;
//! ```

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

pub(crate) mod atomic_file;
pub mod batch;
pub mod chain;
pub mod cli;
pub mod config;
pub mod conformance;
pub mod data;
pub mod diagnostic;
pub mod field;
pub mod keys;
pub mod part;
pub mod pipe;
pub mod plan;
pub mod registry;
pub mod resource;
pub mod run;
pub mod schedule;
pub mod schema;
pub mod shape;
pub mod stage;
pub mod trace;
pub mod view;
