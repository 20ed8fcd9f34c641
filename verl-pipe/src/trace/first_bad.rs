//! The first thing that went wrong in recorded steps.
//!
//! Stages are looked at in the order of the plan, so whatever is found first has inputs that are in order: faults that
//! it caused lie behind it. Of each stage these are checked, one after the other:
//!
//! 1. its rows are those that the run recorded, by the hashes of the statistics (where a trace on disk has them);
//! 2. its rows and keys are those that were written: every value of its input equals the writer's output;
//! 3. the guards and the meaning of the keys hold of inputs and outputs: types, lengths, nulls, finite numbers, mask
//!    kinds, signs of log-probs, no row lost;
//! 4. its models had the weights that the step began with or that an update before it made;
//! 5. a replay on the recorded input reproduces the outputs.

use std::fmt;

use serde::Serialize;

use crate::batch::RowId;
use crate::diagnostic::quoted;
use crate::schedule::placement::Schedule;
use crate::stage::Cadence;
use crate::trace::altered::{altered_fault, located};
use crate::trace::compare::{Difference, DifferenceKind};
use crate::trace::edges::compare_inputs;
use crate::trace::invariants::{Broken, first_broken};
use crate::trace::recorded::RecordedStep;
use crate::trace::replay::ReplayError;
use crate::trace::replay::{ReplayReport, ReplayScope, ReplayedStage, Replayer};
use crate::trace::stopped::stopped_fault;
use crate::trace::store::DamagedFile;

/// What kind of fault it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A stage was given something else than was written.
    Edge,
    /// A float is not finite.
    NonFinite,
    /// A guard or the meaning of a key is broken.
    Invariant,
    /// A model had other weights than it should have.
    Weights,
    /// A stage's replay gives something else.
    Replay,
    /// The settings are not those that the step was recorded with.
    Settings,
    /// A stage failed, in the step or when it was run again, or a rule ended the run for it, and what came before is in
    /// order.
    Failed,
    /// Rows are not those that the run recorded: their file was changed afterwards.
    Altered,
    /// A file of the step cannot be used.
    Damaged,
}

/// The first thing that went wrong.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FirstBad {
    /// The step.
    pub step: u64,
    /// The stage.
    pub stage: String,
    /// Kind of the fault.
    pub fault: Fault,
    /// `input` or `output`: on which side of the stage it was seen.
    pub side: &'static str,
    /// The key; for weights the model, empty where no key is to blame.
    pub key: String,
    /// Position among the stage's rows.
    pub row: Option<usize>,
    /// Identity of the row, as `epoch.row#sample`.
    pub sample: Option<String>,
    /// Position in the row's list.
    pub index: Option<usize>,
    /// What is wrong, as lines of text.
    pub what: String,
    /// Stages from the source to this one that its key came through, all of them in order.
    pub through: Vec<String>,
    /// Stages that read what is wrong.
    pub reaches: Vec<String>,
}

/// The first fault of a recorded step, if there is one. Without a replayer outputs are not reproduced, and stages that
/// compute something wrong in a sound form are not found.
///
/// # Errors
/// What keeps the step from being replayed.
pub fn first_bad(
    schedule: &Schedule,
    recorded: &RecordedStep,
    replayer: Option<&mut Replayer<'_>>,
) -> Result<Option<FirstBad>, ReplayError> {
    Ok(look(schedule, recorded, replayer)?.bad)
}

/// What came of looking at a step.
#[derive(Debug, Default)]
pub(crate) struct Looked {
    pub bad: Option<FirstBad>,
    /// Stages that were run again.
    pub again: usize,
    /// Why stages were not, one each.
    pub skipped: Vec<String>,
}

/// As [`first_bad`], with what was run again for it.
pub(crate) fn look(
    schedule: &Schedule,
    recorded: &RecordedStep,
    replayer: Option<&mut Replayer<'_>>,
) -> Result<Looked, ReplayError> {
    let only = |bad| Looked {
        bad,
        ..Looked::default()
    };
    let changed = settings(schedule, recorded);
    if changed.is_some() {
        return Ok(only(changed));
    }
    let stages = schedule.plan.stages.len();
    let seen = (0..stages)
        .find_map(|index| {
            let altered = altered_fault(schedule, recorded, index);
            Some((
                index,
                altered.or_else(|| look_at(schedule, recorded, index))?,
            ))
        })
        .or_else(|| Some((stages, failed(schedule, recorded)?)));
    let Some(replayer) = replayer else {
        return Ok(only(seen.map(|(_, bad)| bad)));
    };
    let report = match replayer.replay_until(recorded, &ReplayScope::Step, true) {
        Ok(report) => report,
        // What the step left behind is what there is to say.
        Err(ReplayError::Run(_)) if seen.is_some() => return Ok(only(seen.map(|(_, bad)| bad))),
        Err(error) => return Err(error),
    };
    let bad = match (seen, again_bad(schedule, recorded, &report)) {
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
    Ok(Looked {
        bad,
        again: report.stages.len(),
        skipped: report
            .skipped
            .into_iter()
            .map(|skipped| skipped.why)
            .collect(),
    })
}

/// The first stage that a replay gives something else of, with its index and where it differs.
fn again_bad<'r>(
    schedule: &Schedule,
    recorded: &RecordedStep,
    report: &'r ReplayReport,
) -> Option<(usize, FirstBad, Option<&'r Difference>)> {
    let is_bad = |stage: &&ReplayedStage| stage.failed.is_some() || stage.compared.first.is_some();
    let stage = report.stages.iter().find(is_bad)?;
    let mut stages = schedule.plan.stages.iter();
    let index = stages.position(|planned| planned.name == stage.stage)?;
    let bad = match (&stage.failed, &stage.compared.first) {
        (None, Some(difference)) => {
            let exact = report.changes.repeats_model_bits();
            of_replay(schedule, recorded, index, difference, exact)
        }
        (error, _) => {
            let nothing = Difference::new(&stage.stage, "", DifferenceKind::Value);
            let error = error.as_deref().unwrap_or_default();
            let what = format!("what it was given is in order, but run again it fails: {error}");
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

/// The end of a step that failed: where a rule saw what it ended the run for, else in the last stage that was given
/// something.
fn failed(schedule: &Schedule, recorded: &RecordedStep) -> Option<FirstBad> {
    if let Some(anomaly) = &recorded.stopped {
        return Some(stopped_fault(schedule, anomaly, Some(recorded)));
    }
    let error = recorded.error.as_ref()?;
    let given = |index: &usize| {
        let stage = recorded.stages.get(&schedule.plan.stages[*index].name);
        stage.is_some_and(|stage| !stage.inputs.is_empty())
    };
    let index = (0..schedule.plan.stages.len()).rev().find(given)?;
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

/// A file that cannot be used, as a fault.
pub(crate) fn damaged_fault(file: &DamagedFile) -> FirstBad {
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

/// Settings of stages and the seed against those that were recorded.
fn settings(schedule: &Schedule, recorded: &RecordedStep) -> Option<FirstBad> {
    let plan = &schedule.plan;
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
    if let Some(seed) = recorded.seed.filter(|seed| *seed != plan.context.seed) {
        let first = plan.stages.first().map_or("", |stage| stage.name.as_str());
        let now = plan.context.seed;
        let what = format!("the step was recorded with seed {seed}, the configuration says {now}");
        return Some(bad(first, "seed", what));
    }
    plan.stages.iter().find_map(|planned| {
        let then = recorded.stages.get(&planned.name)?.parameters.as_ref()?;
        let mut declared = plan.pipe.stages.iter();
        let now = &declared.find(|decl| decl.name == planned.name)?.config;
        let (then, now) = (then.as_object()?, now.as_object()?);
        let changed = then
            .iter()
            .find(|(name, value)| now.get(*name) != Some(value))?;
        let none = serde_json::Value::Null;
        let what = format!(
            "it was recorded as {}, the configuration says {}",
            changed.1,
            now.get(changed.0).unwrap_or(&none)
        );
        Some(bad(&planned.name, changed.0, what))
    })
}

/// What is wrong with a stage's record as it lies there.
fn look_at(schedule: &Schedule, recorded: &RecordedStep, index: usize) -> Option<FirstBad> {
    let planned = &schedule.plan.stages[index];
    if planned.spec.cadence != Cadence::Step {
        return None;
    }
    let stage = recorded.stages.get(&planned.name)?;
    let edge = compare_inputs(schedule, recorded, index)
        .into_iter()
        .find_map(|edges| Some((edges.writer, edges.compared.first?)));
    if let Some((writer, difference)) = edge {
        let writer = &schedule.plan.stages[writer].name;
        let what = format!(
            "the stage was given something else than `{writer}` wrote\n{}",
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
    let Broken {
        output,
        key,
        row,
        sample,
        index: at,
        what,
        non_finite,
    } = first_broken(schedule, index, stage)?;
    let difference = Difference {
        row,
        sample,
        index: at,
        ..Difference::new(&planned.name, &key, DifferenceKind::Value)
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
        DifferenceKind::Weights => (
            Fault::Weights,
            "the model had other weights than it should have",
        ),
        _ => (
            Fault::Replay,
            "what it was given is in order, but run again it emits something else",
        ),
    };
    let rounding = match exact {
        true => "",
        false => {
            "; it was recorded on another machine, device or type, whose rounding can do that: run it again there to tell"
        }
    };
    let sides = difference.explain("recorded", "replayed");
    let what = format!("{what}{rounding}\n{sides}");
    found(schedule, recorded, index, fault, "output", difference, what)
}

/// A fault in stage `index`, at the place that `difference` names.
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
        stage: schedule.plan.stages[index].name.clone(),
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

/// Stages whose keys lead to stage `index`, in the order of the plan.
pub(crate) fn through(schedule: &Schedule, index: usize) -> Vec<String> {
    let stages = &schedule.plan.stages;
    let mut wanted = vec![false; stages.len()];
    mark(schedule, index, &mut wanted);
    let chosen = (0..index).filter(|at| wanted[*at]);
    chosen.map(|at| stages[at].name.clone()).collect()
}

fn mark(schedule: &Schedule, index: usize, wanted: &mut [bool]) {
    for edge in &schedule.plan.stages[index].inputs {
        if !std::mem::replace(&mut wanted[edge.writer], true) {
            mark(schedule, edge.writer, wanted);
        }
    }
}

/// Stages that read the key; for weights and inputs, those that read anything of the stage.
pub(crate) fn reaches(schedule: &Schedule, index: usize, side: &str, key: &str) -> Vec<String> {
    let stages = &schedule.plan.stages;
    let planned = &stages[index];
    let written = planned.spec.writes.iter().any(|field| field.name == key);
    let name = planned.key(key);
    let reads = |edge: &crate::plan::Edge| {
        edge.writer == index && (side == "input" || !written || edge.key == name)
    };
    let readers = stages.iter().filter(|stage| stage.inputs.iter().any(reads));
    readers.map(|stage| stage.name.clone()).collect()
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
            writeln!(f, "  in order before it: {}", quoted(before))?;
        }
        if !self.reaches.is_empty() {
            let behind: Vec<&str> = self.reaches.iter().map(String::as_str).collect();
            writeln!(f, "  read behind it by: {}", quoted(behind))?;
        }
        Ok(())
    }
}
