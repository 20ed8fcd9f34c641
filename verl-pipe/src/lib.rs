//! Typed dataflow pipelines: declare stages, check the graph, place it, run it, trace it.
//!
//! Four stations, four types: [`pipe::DataPipe`] (declared) → [`plan::Plan`] (checked) → `Schedule` (placed) →
//! `Run` (executed). This crate knows no stage, model or algorithm by name.
//!
//! # What the compiler refuses
//! What was not checked cannot be scheduled:
//! ```compile_fail,E0599
//! let pipe = verl_pipe::pipe::DataPipe::new("unchecked");
//! let schedule = pipe.schedule();
//! ```
//! what was not scheduled cannot run:
//! ```compile_fail,E0599
//! use verl_pipe::{pipe::DataPipe, run::runner::RunOptions};
//! let plan = DataPipe::new("unplaced").plan().unwrap();
//! let run = plan.start(RunOptions::default());
//! ```
//! a key knows the type of its column, when it is written
//! ```compile_fail,E0277
//! use verl_pipe::{batch::Batch, keys::REWARDS};
//! Batch::with_rows(&[]).put(&REWARDS, vec!["good", "bad"]).unwrap();
//! ```
//! and when it is read;
//! ```compile_fail,E0308
//! use verl_pipe::{batch::Batch, keys::RESPONSES};
//! let batch = Batch::with_rows(&[]);
//! let row: &[f32] = batch.get(&RESPONSES).unwrap().row(0);
//! ```
//! and the operator joins stages, nothing else:
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
