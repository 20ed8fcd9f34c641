//! `pipe debug replay`: recorded stages run again, compared bit by bit.

use std::io::Write;

use clap::Args;

use super::{DIFFERS, Failure, RunArg, write, write_json};
use crate::registry::Registry;
use crate::trace::replay::{ReplayScope, Replayer};
use crate::trace::traced_run::TracedRun;

/// Arguments of `pipe debug replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// The run.
    #[command(flatten)]
    pub run: RunArg,
    /// Step to run again.
    #[arg(long)]
    pub step: u64,
    /// Only this stage.
    #[arg(long, conflicts_with = "from")]
    pub stage: Option<String>,
    /// This stage and all after it.
    #[arg(long)]
    pub from: Option<String>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

pub(super) fn replay(
    args: &ReplayArgs,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let traced = TracedRun::open(&args.run.dir, registry)?;
    let scope = match (&args.stage, &args.from) {
        (Some(stage), _) => ReplayScope::Stage(stage.clone()),
        (None, Some(from)) => ReplayScope::From(from.clone()),
        (None, None) => ReplayScope::Step,
    };
    replay_step(&traced, args.step, &scope, args.json, out)
}

pub(super) fn replay_step(
    traced: &TracedRun,
    step: u64,
    scope: &ReplayScope,
    json: bool,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let recorded = traced.step_with_state(step)?;
    let mut run = traced.start()?;
    let report = Replayer::new(&mut run)?.replay(&recorded, scope)?;
    match json {
        true => write_json(out, &report)?,
        false => write(out, &report)?,
    }
    Ok(if report.differences() == 0 {
        0
    } else {
        DIFFERS
    })
}
