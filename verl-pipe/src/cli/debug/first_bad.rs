//! `pipe debug first-bad`: the first fault of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use clap::Args;
use serde_json::{Value, json};
use verl_declare::registry::Registry;
use verl_rules::Anomaly;
use verl_run::runner::Run;
use verl_trace::compare::Changes;
use verl_trace::files::{DamagedFile, ranges};
use verl_trace::replay::{
    CheckedStep, Fault, FirstBad, InspectError, ReplayError, Replayer, TracedRun, changed_setting,
    changes_since, check_step, damaged_fault, first_fault_of_stats, stopped_fault,
};
use verl_trace::text::{count, shell_word};

use super::{DIFFERS, Failure, RunArg, SAME, write, write_json, write_notes};

/// Arguments of `pipe debug first-bad`.
#[derive(Debug, Clone, Args)]
pub struct FirstBadArgs {
    /// The run.
    #[command(flatten)]
    pub run: RunArg,
    /// Only checks what was recorded, and runs no stage again: fast, but does not find wrong values that look valid.
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
    let trace = traced.trace();
    let recorded: BTreeSet<u64> = trace.steps().into_iter().collect();
    let (stats, damaged) = trace.stats_as_found(..);
    let mut inspection = Inspection {
        damaged: damaged.into_iter().chain(trace.damaged_steps()).collect(),
        ..Inspection::default()
    };
    let measured: BTreeSet<u64> = stats.iter().map(|row| row.step).collect();
    let steps: BTreeSet<u64> = recorded.union(&measured).copied().collect();
    let stopped = traced.stopped();
    if steps.is_empty() && inspection.damaged.is_empty() && stopped.is_none() {
        return Err(Failure::Nothing("no step is recorded"));
    }
    let changes = changes_since(&traced)?;
    if let (Some(change), Some(step)) = (changes.settings.first(), recorded.first()) {
        let bad = changed_setting(traced.schedule(), *step, change);
        report_fault(&bad, &lines(&changes), &traced, args, out)?;
        return Ok(DIFFERS);
    }
    let mut run = match args.no_replay || recorded.is_empty() {
        true => None,
        false => started(&traced, &mut inspection.notes),
    };
    let mut replayer = match &mut run {
        Some(run) => Some(Replayer::of_run(run, &traced)?),
        None => None,
    };
    if let Some(replayer) = &replayer {
        inspection.notes.extend(lines(replayer.changes()));
    }
    for step in &steps {
        let found = match recorded.contains(step) {
            true => inspect_step(&traced, *step, replayer.as_mut(), &mut inspection)?,
            false => None,
        };
        let found = found.or_else(|| match inspection.complete.contains(step) {
            true => None,
            false => first_fault_of_stats(traced.schedule(), *step, &stats),
        });
        let ended = || stopped.as_ref().filter(|anomaly| anomaly.step == *step);
        let found = found.or_else(|| Some(stopped_fault(traced.schedule(), ended()?, None)));
        if let Some(bad) = found {
            report_fault(&bad, &inspection.all_notes(None), &traced, args, out)?;
            return Ok(DIFFERS);
        }
    }
    if let Some(anomaly) = stopped {
        let bad = stopped_fault(traced.schedule(), &anomaly, None);
        report_fault(&bad, &inspection.all_notes(None), &traced, args, out)?;
        return Ok(DIFFERS);
    }
    // All readable data is correct, so report a damaged file.
    if let Some(file) = inspection.damaged.iter().min_by_key(|file| file.step) {
        let bad = damaged_fault(file);
        report_fault(&bad, &inspection.all_notes(Some(file)), &traced, args, out)?;
        return Ok(DIFFERS);
    }
    let mut notes = inspection.notes;
    notes.extend(inspection.skipped.notes());
    let unrecorded = steps.len() - recorded.len();
    if unrecorded > 0 {
        notes.push(format!(
            "there are only statistics for {}: every value is finite, and every input equals what was written",
            count(unrecorded as u64, "step")
        ));
    }
    let reported = Reported::of(&trace.anomalies());
    if args.json {
        let found = json!({
            "found": null, "recorded": recorded, "steps": steps, "stages_run_again": inspection.again, "notes": notes,
            "anomalies": reported.to_json(),
        });
        write_json(out, &found)?;
        return Ok(SAME);
    }
    write_notes(&notes, out)?;
    let how = match inspection.again {
        0 => "nothing was run again",
        _ => "the stages that were run again gave the same results",
    };
    let n = count(steps.len() as u64, "step");
    write(out, format_args!("nothing bad in {n}; {how}\n"))?;
    write(out, reported.lines(&args.run.dir))?;
    Ok(SAME)
}

/// What the rules reported during the run, by rule: how often, and the first step. These are problems of training, not
/// faults of the program that running a stage again can find.
struct Reported(BTreeMap<String, (u64, u64)>);

impl Reported {
    fn of(anomalies: &[Anomaly]) -> Reported {
        let mut rules: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for anomaly in anomalies {
            let entry = rules.entry(anomaly.rule.clone());
            let (times, first) = entry.or_insert((0, anomaly.step));
            *times += 1;
            *first = anomaly.step.min(*first);
        }
        Reported(rules)
    }

    fn to_json(&self) -> Value {
        let rules = self.0.iter().map(
            |(rule, (times, first))| json!({"rule": rule, "events": times, "first_step": first}),
        );
        rules.collect()
    }

    /// Lines after the verdict; empty if nothing was reported.
    fn lines(&self, dir: &Path) -> String {
        let all: u64 = self.0.values().map(|(times, _)| times).sum();
        if all == 0 {
            return String::new();
        }
        let what = match all {
            1 => "1 anomaly".to_owned(),
            n => format!("{n} anomalies"),
        };
        let mut text = format!("but the run's rules reported {what} in training:\n");
        for (rule, (times, first)) in &self.0 {
            let times = match times {
                1 => format!("in step {first}"),
                n => format!("{n} times, first in step {first}"),
            };
            text += &format!("  {rule}: {times}\n");
        }
        let dir = shell_word(&dir.display().to_string());
        text + &format!("  look at them: pipe debug view --run {dir}\n")
    }
}

/// The results of the search besides the first fault.
#[derive(Default)]
struct Inspection {
    notes: Vec<String>,
    /// Files that cannot be used.
    damaged: Vec<DamagedFile>,
    /// Steps with only readable rows.
    complete: BTreeSet<u64>,
    /// Number of stages that were run again, over all steps.
    again: usize,
    /// Stages that were not run again.
    skipped: Skipped,
}

impl Inspection {
    /// All results as notes, except for the file that is reported as the fault.
    fn all_notes(&self, reported: Option<&DamagedFile>) -> Vec<String> {
        let damaged = self.damaged.iter().filter(|file| Some(*file) != reported);
        let damaged = damaged.map(|file| format!("not checked: {file}"));
        let notes = self.notes.iter().cloned().chain(self.skipped.notes());
        damaged.chain(notes).collect()
    }
}

/// The run to replay in. If it cannot be started, adds a note, since most faults are found without it.
fn started(traced: &TracedRun, notes: &mut Vec<String>) -> Option<Run> {
    match traced.start() {
        Ok(run) => Some(run),
        Err(gone @ InspectError::Gone(_)) => {
            notes.push(gone.to_string());
            None
        }
        Err(error) => {
            notes.push(format!("nothing was run again: {error}"));
            None
        }
    }
}

/// The first fault of a step that was recorded in full; a step that cannot be run again is checked as recorded.
fn inspect_step(
    traced: &TracedRun,
    step: u64,
    replayer: Option<&mut Replayer<'_>>,
    inspection: &mut Inspection,
) -> Result<Option<FirstBad>, Failure> {
    let schedule = traced.schedule();
    let mut recorded = match traced.step(step) {
        Ok(recorded) => recorded,
        Err(InspectError::Trace(error)) => {
            inspection.damaged.push(DamagedFile {
                step,
                stage: None,
                error,
            });
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    match recorded.damaged.is_empty() {
        true => drop(inspection.complete.insert(step)),
        false => inspection.damaged.extend(recorded.damaged.iter().cloned()),
    }
    let Some(replayer) = replayer else {
        return Ok(check_step(schedule, &recorded, None)?.bad);
    };
    match traced.state_before(step) {
        Ok(state) => recorded.state = Some(state),
        Err(error) => {
            inspection
                .notes
                .push(format!("step {step} was not run again: {error}"));
            inspection.damaged.push(DamagedFile {
                step,
                stage: None,
                error,
            });
            return Ok(check_step(schedule, &recorded, None)?.bad);
        }
    }
    match check_step(schedule, &recorded, Some(replayer)) {
        Err(error @ (ReplayError::NoState { .. } | ReplayError::NotRecorded { .. })) => {
            inspection
                .notes
                .push(format!("step {step} was not run again: {error}"));
            Ok(check_step(schedule, &recorded, None)?.bad)
        }
        checked => {
            let CheckedStep {
                bad,
                again,
                skipped,
            } = checked?;
            inspection.again += again;
            inspection.skipped.add(step, skipped);
            Ok(bad)
        }
    }
}

/// The changes since the run, one note per line.
fn lines(changes: &Changes) -> Vec<String> {
    changes.to_string().lines().map(str::to_owned).collect()
}

/// Stages that were not run again, each reason once with its steps.
#[derive(Default)]
struct Skipped(Vec<(String, Vec<u64>)>);

impl Skipped {
    fn add(&mut self, step: u64, reasons: Vec<String>) {
        for reason in reasons {
            match self.0.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, steps)) => steps.push(step),
                None => self.0.push((reason, vec![step])),
            }
        }
    }

    fn notes(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(reason, steps)| {
            let word = if steps.len() == 1 { "step" } else { "steps" };
            let steps = ranges(steps.iter().copied());
            format!("not run again in {word} {steps}: {reason}")
        })
    }
}

fn report_fault(
    bad: &FirstBad,
    notes: &[String],
    traced: &TracedRun,
    args: &FirstBadArgs,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    if args.json {
        return write_json(out, &json!({"found": bad, "notes": notes}));
    }
    write_notes(notes, out)?;
    write(out, bad)?;
    if bad.fault == Fault::Damaged {
        return Ok(());
    }
    // A rule on metrics names a group of metrics, which is not a stage.
    let stages = traced.schedule().plan().stages();
    let stage = match stages.iter().any(|stage| stage.name() == bad.stage) {
        true => format!(" --stage {}", bad.stage),
        false => String::new(),
    };
    let sample = bad.sample.as_ref().filter(|_| !stage.is_empty());
    let sample = sample.map_or_else(String::new, |id| format!(" --sample {id}"));
    write(
        out,
        format_args!(
            "  look at it: pipe debug trace --run {} --step {}{stage}{sample}\n",
            args.run.dir.display(),
            bad.step,
        ),
    )
}
