//! `pipe debug replay`: runs recorded stages again and compares them.

use std::io::Write;

use clap::Args;
use verl_declare::registry::Registry;
use verl_trace::replay::{InspectError, ReplayError, ReplayScope, Replayer, TracedRun};

use super::{DIFFERS, Failure, NOTHING, RunArg, SAME, write, write_json};

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
    if let ReplayScope::Stage(name) | ReplayScope::From(name) = scope
        && let Some(error) = recorded.damage_of(name)
    {
        return Err(error.clone().into());
    }
    let mut run = traced.start()?;
    let replayed = Replayer::of_run(&mut run, traced)?.replay(&recorded, scope);
    let mut report = replayed.map_err(|error| match &error {
        // The missing stage was recorded, but cannot be read.
        ReplayError::NotRecorded { name, .. } => match recorded.damage_of(name) {
            Some(damage) => InspectError::Trace(damage.clone()),
            None => error.into(),
        },
        _ => error.into(),
    })?;
    let damaged = recorded.damaged.iter();
    report
        .notes
        .extend(damaged.map(|file| format!("not replayed: {file}")));
    match json {
        true => write_json(out, &report)?,
        false => write(out, &report)?,
    }
    let differs = report.differences() > 0 || report.failures() > 0;
    Ok(match (report.has_result(), differs) {
        (false, _) => NOTHING,
        (true, true) => DIFFERS,
        (true, false) => SAME,
    })
}
