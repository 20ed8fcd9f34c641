//! Finds the first fault in recorded steps.
//!
//! Stages are checked in the order of the plan, so the first stage with a fault has correct inputs, and the faults that
//! it caused come later. For each stage these conditions are checked in order:
//!
//! 1. its rows are those that the run recorded, by the hashes of the statistics (if the trace has them);
//! 2. its rows and keys are those that were written: every value of its input equals the writer's output;
//! 3. the guards and the meaning of the keys hold for inputs and outputs: types, lengths, nulls, finite numbers, mask
//!    kinds, signs of log-probs, no row lost;
//! 4. its models had the weights from the start of the step or from an earlier update;
//! 5. a replay on the recorded input reproduces the outputs.

mod altered;
mod changed_setting;
mod statistics;
mod stopped;

use std::fmt;

use serde::Serialize;
use verl_plan::schedule::placement::Schedule;
use verl_words::batch::RowId;
use verl_words::diagnostic::quoted;
use verl_words::stage::Cadence;

use crate::compare::{Difference, DifferenceKind, Violation, compare_inputs, first_violation};
use crate::files::{DamagedFile, RecordedStep};
use crate::replay::{ReplayError, ReplayReport, ReplayScope, ReplayedStage, Replayer};

pub use changed_setting::changed_setting;
pub use statistics::first_fault_of_stats;
pub use stopped::stopped_fault;

use altered::{altered_fault, located};

/// Kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A stage was given something other than what was written.
    Edge,
    /// A float is not finite.
    NonFinite,
    /// A value violates a guard or the meaning of its key.
    Invariant,
    /// A model had the wrong weights.
    Weights,
    /// A stage's replay emits something else.
    Replay,
    /// The settings are not those that the step was recorded with.
    Settings,
    /// A stage failed, in the step or in the replay, or a rule ended the run there, and everything before it is
    /// correct.
    Failed,
    /// Rows are not those that the run recorded: their file was changed afterwards.
    Altered,
    /// A file of the step is unusable.
    Damaged,
}

/// The first fault.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FirstBad {
    /// The step.
    pub step: u64,
    /// The stage.
    pub stage: String,
    /// Kind of the fault.
    pub fault: Fault,
    /// `input` or `output`: the side of the stage where it was found.
    pub side: &'static str,
    /// The key; for weights the model; empty if it is not about a key.
    pub key: String,
    /// Position among the stage's rows.
    pub row: Option<usize>,
    /// Identity of the row, as `epoch.row#sample`.
    pub sample: Option<String>,
    /// Position in the row's list.
    pub index: Option<usize>,
    /// What is wrong, as lines of text.
    pub what: String,
    /// Stages from the source to this one whose outputs it depends on; all of them are correct.
    pub through: Vec<String>,
    /// Stages that read the wrong values.
    pub reaches: Vec<String>,
}

/// The first fault of a recorded step, if there is one. Without a replayer outputs are not reproduced, so stages whose
/// outputs are wrong but valid are not found.
///
/// # Errors
/// The step cannot be replayed.
pub fn first_bad(
    schedule: &Schedule,
    recorded: &RecordedStep,
    replayer: Option<&mut Replayer<'_>>,
) -> Result<Option<FirstBad>, ReplayError> {
    Ok(check_step(schedule, recorded, replayer)?.bad)
}

/// The result of checking a step.
#[derive(Debug, Default)]
pub struct CheckedStep {
    /// The first wrong value, if there is one.
    pub bad: Option<FirstBad>,
    /// Stages that were run again.
    pub again: usize,
    /// Why other stages were not, one reason each.
    pub skipped: Vec<String>,
}

/// As [`first_bad`], with the stages that were run again or skipped.
pub fn check_step(
    schedule: &Schedule,
    recorded: &RecordedStep,
    replayer: Option<&mut Replayer<'_>>,
) -> Result<CheckedStep, ReplayError> {
    let only = |bad| CheckedStep {
        bad,
        ..CheckedStep::default()
    };
    let changed = settings(schedule, recorded);
    if changed.is_some() {
        return Ok(only(changed));
    }
    let stages = schedule.plan().stages().len();
    let seen = (0..stages)
        .find_map(|index| {
            let altered = altered_fault(schedule, recorded, index);
            Some((
                index,
                altered.or_else(|| inspect_stage(schedule, recorded, index))?,
            ))
        })
        .or_else(|| Some((stages, failed(schedule, recorded)?)));
    let Some(replayer) = replayer else {
        return Ok(only(seen.map(|(_, bad)| bad)));
    };
    let report = match replayer.replay_until(recorded, &ReplayScope::Step, true) {
        Ok(report) => report,
        // The fault in the recorded rows is known without the replay.
        Err(ReplayError::Run(_)) if seen.is_some() => return Ok(only(seen.map(|(_, bad)| bad))),
        Err(error) => return Err(error),
    };
    let bad = match (seen, replay_fault(schedule, recorded, &report)) {
        (Some((at, bad)), Some((index, _, difference))) if at == index => Some(match difference {
            Some(difference) => located(bad, difference),
            None => bad,
        }),
        (Some((at, bad)), Some((index, ..))) if at < index => Some(bad),
        // A stage that failed then fails now.
        (Some((_, bad)), Some((_, now, _)))
            if now.fault == Fault::Failed && bad.fault == Fault::Failed =>
        {
            Some(bad)
        }
        (_, Some((_, bad, _))) => Some(bad),
        (seen, None) => seen.map(|(_, bad)| bad),
    };
    Ok(CheckedStep {
        bad,
        again: report.stages.len(),
        skipped: report
            .skipped
            .into_iter()
            .map(|skipped| skipped.why)
            .collect(),
    })
}

/// The first stage that a replay does not reproduce, with its index and where it differs.
fn replay_fault<'r>(
    schedule: &Schedule,
    recorded: &RecordedStep,
    report: &'r ReplayReport,
) -> Option<(usize, FirstBad, Option<&'r Difference>)> {
    let is_bad = |stage: &&ReplayedStage| stage.failed.is_some() || stage.compared.first.is_some();
    let stage = report.stages.iter().find(is_bad)?;
    let mut stages = schedule.plan().stages().iter();
    let index = stages.position(|planned| planned.name() == stage.stage)?;
    let bad = match (&stage.failed, &stage.compared.first) {
        (None, Some(difference)) => {
            let exact = report.changes.repeats_model_bits();
            of_replay(schedule, recorded, index, difference, exact)
        }
        (error, _) => {
            let nothing = Difference::new(&stage.stage, "", DifferenceKind::Value);
            let error = error.as_deref().unwrap_or_default();
            let what = format!("its input is correct, but it fails when run again: {error}");
            found(
                schedule,
                recorded,
                index,
                Fault::Failed,
                "output",
                &nothing,
                what,
            )
        }
    };
    Some((index, bad, stage.compared.first.as_ref()))
}

/// The end of a step that failed: where a rule found the anomaly that ended the run, else in the last stage with an
/// input.
fn failed(schedule: &Schedule, recorded: &RecordedStep) -> Option<FirstBad> {
    if let Some(anomaly) = &recorded.stopped {
        return Some(stopped_fault(schedule, anomaly, Some(recorded)));
    }
    let error = recorded.error.as_ref()?;
    let given = |index: &usize| {
        let stage = recorded.stages.get(schedule.plan().stages()[*index].name());
        stage.is_some_and(|stage| !stage.inputs.is_empty())
    };
    let index = (0..schedule.plan().stages().len()).rev().find(given)?;
    let nothing = Difference::new("", "", DifferenceKind::Value);
    let what = format!("the step ended here: {error}");
    Some(found(
        schedule,
        recorded,
        index,
        Fault::Failed,
        "output",
        &nothing,
        what,
    ))
}

/// An unusable file, as a fault.
pub fn damaged_fault(file: &DamagedFile) -> FirstBad {
    FirstBad {
        step: file.step,
        stage: file.stage.clone().unwrap_or_default(),
        fault: Fault::Damaged,
        side: "output",
        key: String::new(),
        row: None,
        sample: None,
        index: None,
        what: file.error.to_string(),
        through: Vec::new(),
        reaches: Vec::new(),
    }
}

/// Compares the seed and the settings of stages with the recorded ones.
fn settings(schedule: &Schedule, recorded: &RecordedStep) -> Option<FirstBad> {
    let plan = schedule.plan();
    let bad = |stage: &str, key: &str, what: String| FirstBad {
        step: recorded.step,
        stage: stage.to_owned(),
        fault: Fault::Settings,
        side: "input",
        key: key.to_owned(),
        row: None,
        sample: None,
        index: None,
        what,
        through: Vec::new(),
        reaches: Vec::new(),
    };
    if let Some(seed) = recorded.seed.filter(|seed| *seed != plan.context().seed) {
        let first = plan.stages().first().map_or("", |stage| stage.name());
        let now = plan.context().seed;
        let what =
            format!("the step was recorded with seed {seed}, but the configuration says {now}");
        return Some(bad(first, "seed", what));
    }
    plan.stages().iter().find_map(|planned| {
        let then = recorded.stages.get(planned.name())?.parameters.as_ref()?;
        let mut declared = plan.pipe().stages.iter();
        let now = &declared.find(|decl| decl.name == planned.name())?.config;
        let (then, now) = (then.as_object()?, now.as_object()?);
        let changed = then
            .iter()
            .find(|(name, value)| now.get(*name) != Some(value))?;
        let none = serde_json::Value::Null;
        let what = format!(
            "it was {} when recorded, but the configuration says {}",
            changed.1,
            now.get(changed.0).unwrap_or(&none)
        );
        Some(bad(planned.name(), changed.0, what))
    })
}

/// What is wrong with a stage's recorded rows.
fn inspect_stage(schedule: &Schedule, recorded: &RecordedStep, index: usize) -> Option<FirstBad> {
    let planned = &schedule.plan().stages()[index];
    if planned.spec().cadence != Cadence::Step {
        return None;
    }
    let stage = recorded.stages.get(planned.name())?;
    let edge = compare_inputs(schedule, recorded, index)
        .into_iter()
        .find_map(|edges| Some((edges.writer, edges.compared.first?)));
    if let Some((writer, difference)) = edge {
        let writer = schedule.plan().stages()[writer].name();
        let what = format!(
            "the stage was not given what `{writer}` wrote\n{}",
            difference.explain("given", "written")
        );
        return Some(found(
            schedule,
            recorded,
            index,
            Fault::Edge,
            "input",
            &difference,
            what,
        ));
    }
    let Violation {
        output,
        key,
        row,
        sample,
        index: at,
        what,
        non_finite,
    } = first_violation(schedule, index, stage)?;
    let difference = Difference {
        row,
        sample,
        index: at,
        ..Difference::new(planned.name(), &key, DifferenceKind::Value)
    };
    let fault = match non_finite {
        true => Fault::NonFinite,
        false => Fault::Invariant,
    };
    let side = if output { "output" } else { "input" };
    Some(found(
        schedule,
        recorded,
        index,
        fault,
        side,
        &difference,
        what,
    ))
}

fn of_replay(
    schedule: &Schedule,
    recorded: &RecordedStep,
    index: usize,
    difference: &Difference,
    exact: bool,
) -> FirstBad {
    let (fault, what) = match difference.kind {
        DifferenceKind::Weights => (Fault::Weights, "the model had the wrong weights"),
        _ => (
            Fault::Replay,
            "its input is correct, but it emits something else when run again",
        ),
    };
    let rounding = match exact {
        true => "",
        false => {
            "; it was recorded on another machine, device or type, whose rounding can cause this: run it again there to check"
        }
    };
    let sides = difference.explain("recorded", "replayed");
    let what = format!("{what}{rounding}\n{sides}");
    found(schedule, recorded, index, fault, "output", difference, what)
}

/// A fault in stage `index`, at the location of `difference`.
pub(crate) fn found(
    schedule: &Schedule,
    recorded: &RecordedStep,
    index: usize,
    fault: Fault,
    side: &'static str,
    difference: &Difference,
    what: String,
) -> FirstBad {
    FirstBad {
        step: recorded.step,
        stage: schedule.plan().stages()[index].name().to_owned(),
        fault,
        side,
        key: difference.key.clone(),
        row: difference.row,
        sample: difference.sample.map(|id: RowId| id.to_string()),
        index: difference.index,
        what,
        through: through(schedule, index),
        reaches: reaches(schedule, index, side, &difference.key),
    }
}

/// Stages upstream of stage `index`, in the order of the plan.
pub(crate) fn through(schedule: &Schedule, index: usize) -> Vec<String> {
    let stages = schedule.plan().stages();
    let mut wanted = vec![false; stages.len()];
    mark(schedule, index, &mut wanted);
    let chosen = (0..index).filter(|at| wanted[*at]);
    chosen.map(|at| stages[at].name().to_owned()).collect()
}

fn mark(schedule: &Schedule, index: usize, wanted: &mut [bool]) {
    for edge in schedule.plan().stages()[index].inputs() {
        if !std::mem::replace(&mut wanted[edge.writer], true) {
            mark(schedule, edge.writer, wanted);
        }
    }
}

/// Stages that read the key; for weights and inputs, those that read any key of the stage.
pub(crate) fn reaches(schedule: &Schedule, index: usize, side: &str, key: &str) -> Vec<String> {
    let stages = schedule.plan().stages();
    let planned = &stages[index];
    let written = planned.spec().writes.iter().any(|field| field.name == key);
    let name = planned.key(key);
    let reads = |edge: &verl_plan::Edge| {
        edge.writer == index && (side == "input" || !written || edge.key == name)
    };
    let readers = stages
        .iter()
        .filter(|stage| stage.inputs().iter().any(reads));
    readers.map(|stage| stage.name().to_owned()).collect()
}

impl FirstBad {
    /// Where it is, on one line.
    pub fn place(&self) -> String {
        let what = match self.fault {
            Fault::Weights => "weights of",
            Fault::Settings => "setting",
            _ if self.side == "input" => "input key",
            _ => "output key",
        };
        if self.fault == Fault::Damaged && self.stage.is_empty() {
            return format!("step {}, a file of the step", self.step);
        }
        if self.fault == Fault::Damaged {
            return format!("step {}, the file of stage `{}`", self.step, self.stage);
        }
        if self.fault == Fault::Failed && self.key.is_empty() {
            return format!("step {}, stage `{}`", self.step, self.stage);
        }
        let mut place = format!(
            "step {}, stage `{}`, {what} `{}`",
            self.step, self.stage, self.key
        );
        if let Some(sample) = &self.sample {
            place += &format!(", sample {sample}");
        }
        if let Some(row) = self.row {
            place += &format!(" (row {row})");
        }
        if let Some(index) = self.index {
            place += &format!(", index {index}");
        }
        place
    }
}

impl fmt::Display for FirstBad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.place())?;
        writeln!(f, "  {}", self.what.replace('\n', "\n  "))?;
        if !self.through.is_empty() {
            let before: Vec<&str> = self.through.iter().map(String::as_str).collect();
            writeln!(f, "  correct before it: {}", quoted(before))?;
        }
        if !self.reaches.is_empty() {
            let after: Vec<&str> = self.reaches.iter().map(String::as_str).collect();
            writeln!(f, "  read after it by: {}", quoted(after))?;
        }
        Ok(())
    }
}
