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
//! ```compile_fail,E0308
//! use verl_pipe::{pipe::DataPipe, plan::Plannable, run::runner::RunOptions};
//! let plan = DataPipe::new("unplaced").plan().unwrap();
//! let run = verl_pipe::run::runner::Run::start(plan, RunOptions::default());
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

pub mod cli;
pub mod schema;

pub use verl_declare::{chain, chainable, part, pipe, registry, sizes};
pub use verl_plan::schedule;
pub use verl_view as view;
pub use verl_wire as wire;
pub use verl_words::{batch, conformance, data, diagnostic, field, keys, resource, shape, stage};

/// Pipeline files: read and written.
pub mod config {
    pub use verl_declare::config::{Synonym, to_toml};
    pub use verl_plan::read::{parse_pipeline, read_pipeline};
}

/// Checked pipelines: [`Plannable::plan`](plan::Plannable::plan) makes a [`Plan`](plan::Plan).
pub mod plan {
    pub use verl_plan::{Edge, Plan, Plannable, PlannedModel, PlannedStage, Table};
    pub use verl_plan::{graph, look, memory};
}

/// Running a pipeline: [`Run`](run::runner::Run) executes the steps, [`Trainer`](run::trainer::Trainer) a complete run.
pub mod run {
    pub use verl_run::{
        error, guard, interrupt, metrics, records, runner, space, spans, stall, state, worker,
    };
    pub use verl_train::{columns, console, folder, timeline, timeline_file, trainer, warnings};
}

/// The trace of a run: what is recorded, its files, replay and comparison.
pub mod trace {
    pub use verl_trace::{compare, config, files, format, record, replay, rules, show, stats, tap};
}
