//! `pipe debug first-bad`: the first thing that went wrong in a run.

use std::collections::BTreeSet;
use std::io::Write;

use clap::Args;
use serde_json::json;

use super::{DIFFERS, Failure, RunArg, write, write_json};
use crate::registry::Registry;
use crate::trace::first_bad::{FirstBad, first_bad as first_bad_of};
use crate::trace::replay::{ReplayError, Replayer};
use crate::trace::stats_faults::first_fault_of_stats;
use crate::trace::text::count;
use crate::trace::traced_run::TracedRun;

/// Arguments of `pipe debug first-bad`.
#[derive(Debug, Clone, Args)]
pub struct FirstBadArgs {
    /// The run.
    #[command(flatten)]
    pub run: RunArg,
    /// Only looks at what was recorded, and runs nothing again: quick, and blind to a stage that computed something
    /// wrong in a sound form.
    #[arg(long)]
    pub no_replay: bool,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

pub(super) fn first_bad(
    args: &FirstBadArgs,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let traced = TracedRun::open(&args.run.dir, registry)?;
    let recorded: BTreeSet<u64> = traced.trace().steps().into_iter().collect();
    let stats = traced.trace().stats(..)?;
    let measured: BTreeSet<u64> = stats.iter().map(|row| row.step).collect();
    let steps: BTreeSet<u64> = recorded.union(&measured).copied().collect();
    if steps.is_empty() {
        return Err(Failure::Nothing("no step is recorded"));
    }
    let mut run = match args.no_replay || recorded.is_empty() {
        true => None,
        false => Some(traced.start()?),
    };
    let mut replayer = run.as_mut().map(Replayer::new).transpose()?;
    let mut notes = Vec::new();
    for step in &steps {
        let found = match recorded.contains(step) {
            true => look_at(&traced, *step, replayer.as_mut(), &mut notes)?,
            false => first_fault_of_stats(traced.schedule(), *step, &stats),
        };
        if let Some(bad) = found {
            tell(&bad, &notes, args, out)?;
            return Ok(DIFFERS);
        }
    }
    let lone = steps.len() - recorded.len();
    if lone > 0 {
        notes.push(format!(
            "of {} there are statistics only: every value is finite, every input is as it was written",
            count(lone as u64, "step")
        ));
    }
    if args.json {
        let found = json!({"found": null, "recorded": recorded, "steps": steps, "notes": notes});
        write_json(out, &found)?;
        return Ok(0);
    }
    write_notes(&notes, out)?;
    let how = match replayer.is_some() {
        true => "what was run again gave the same",
        false => "nothing was run again",
    };
    let n = count(steps.len() as u64, "step");
    write(out, format_args!("nothing bad in {n}; {how}\n"))?;
    Ok(0)
}

/// The first fault of a step that was recorded in full; a step that cannot be run again is looked at as it lies there.
fn look_at(
    traced: &TracedRun,
    step: u64,
    replayer: Option<&mut Replayer<'_>>,
    notes: &mut Vec<String>,
) -> Result<Option<FirstBad>, Failure> {
    let schedule = traced.schedule();
    let Some(replayer) = replayer else {
        return Ok(first_bad_of(schedule, &traced.step(step)?, None)?);
    };
    let recorded = traced.step_with_state(step)?;
    match first_bad_of(schedule, &recorded, Some(replayer)) {
        Err(error @ (ReplayError::NoState { .. } | ReplayError::NotRecorded { .. })) => {
            notes.push(format!("step {step} was not run again: {error}"));
            Ok(first_bad_of(schedule, &recorded, None)?)
        }
        found => Ok(found?),
    }
}

fn tell(
    bad: &FirstBad,
    notes: &[String],
    args: &FirstBadArgs,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    if args.json {
        return write_json(out, &json!({"found": bad, "notes": notes}));
    }
    write_notes(notes, out)?;
    write(out, bad)?;
    let sample = bad.sample.as_ref();
    let sample = sample.map_or_else(String::new, |id| format!(" --sample {id}"));
    write(
        out,
        format_args!(
            "  look at it: pipe debug trace --run {} --step {} --stage {}{sample}\n",
            args.run.dir.display(),
            bad.step,
            bad.stage
        ),
    )
}

fn write_notes(notes: &[String], out: &mut dyn Write) -> Result<(), Failure> {
    notes
        .iter()
        .try_for_each(|note| write(out, format_args!("note: {note}\n")))
}
