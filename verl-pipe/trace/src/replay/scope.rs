//! Which stages are run again: the requested stages, those that must run before them, and those that cannot run.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use verl_plan::PlannedStage;
use verl_plan::schedule::placement::Schedule;
use verl_words::batch::RowId;
use verl_words::diagnostic::{quoted, suggest};
use verl_words::stage::{Access, Cadence, RowRule};

use crate::compare::Changes;
use crate::files::{RecordedStage, RecordedStep, StepStart};
use crate::replay::error::ReplayError;
use crate::text::count;

/// The stages of a step to run again.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ReplayScope {
    /// All recorded stages.
    #[default]
    Step,
    /// One stage.
    Stage(String),
    /// One stage and all after it in the order of the plan.
    From(String),
}

/// The information for a choice.
pub(super) struct Known<'a> {
    pub schedule: &'a Schedule,
    pub recorded: &'a RecordedStep,
    pub changes: &'a Changes,
    /// Models that the run trains and whose state at the start of the step is not available, with where it was
    /// searched.
    pub stateless: &'a BTreeMap<String, String>,
    /// Stages that carry state from step to step.
    pub stateful: &'a BTreeSet<String>,
}

/// Stages of a step, by index in the plan.
#[derive(Default)]
pub(super) struct Choice {
    /// Requested stages that can be run.
    pub wanted: BTreeSet<usize>,
    /// `wanted`, and the stages that change a model before one of them uses it.
    pub order: BTreeSet<usize>,
    /// Requested stages that cannot be run.
    pub skipped: Vec<(usize, ReplayError)>,
}

/// Chooses the stages of `scope`.
///
/// # Errors
/// An unknown stage; for a single stage also why it cannot be run.
pub(super) fn choose(known: &Known<'_>, scope: &ReplayScope) -> Result<Choice, ReplayError> {
    let (schedule, recorded) = (known.schedule, known.recorded);
    let stages = schedule.plan().stages();
    let is_recorded = |index: &usize| recorded.stages.contains_key(stages[*index].name());
    let find = |name: &str| find_stage(schedule, recorded, name);
    let asked: BTreeSet<usize> = match scope {
        ReplayScope::Step => (0..stages.len()).filter(is_recorded).collect(),
        ReplayScope::Stage(name) => BTreeSet::from([find(name)?]),
        ReplayScope::From(name) => (find(name)?..stages.len()).filter(is_recorded).collect(),
    };
    let mut reasons = known.reasons();
    let mut choice = Choice::default();
    for index in asked {
        match reasons.remove(&index) {
            None => drop(choice.wanted.insert(index)),
            Some(error) if matches!(scope, ReplayScope::Stage(_)) => return Err(error),
            Some(error) => choice.skipped.push((index, error)),
        }
    }
    choice.order = with_changers(schedule, &choice.wanted);
    Ok(choice)
}

/// The index of the recorded stage `name`.
///
/// # Errors
/// There is no such stage, or it is not recorded.
pub fn find_stage(
    schedule: &Schedule,
    recorded: &RecordedStep,
    name: &str,
) -> Result<usize, ReplayError> {
    let stages = schedule.plan().stages();
    let names = || stages.iter().map(|stage| stage.name());
    let Some(index) = names().position(|other| other == name) else {
        return Err(ReplayError::UnknownStage {
            name: name.to_owned(),
            help: suggest(name, "stages", names()),
        });
    };
    if recorded.stages.contains_key(name) {
        return Ok(index);
    }
    Err(match stages[index].spec().cadence {
        Cadence::Step => not_recorded(name, recorded),
        Cadence::Observer { .. } => ReplayError::Observer {
            name: name.to_owned(),
            step: recorded.step,
            recorded: recorded_names(recorded),
        },
    })
}

fn not_recorded(name: &str, recorded: &RecordedStep) -> ReplayError {
    ReplayError::NotRecorded {
        name: name.to_owned(),
        step: recorded.step,
        recorded: recorded_names(recorded),
    }
}

fn recorded_names(recorded: &RecordedStep) -> String {
    match recorded.stages.is_empty() {
        true => "none".to_owned(),
        false => quoted(recorded.stages.keys().map(String::as_str)),
    }
}

/// The models that a stage changes.
pub(super) fn changed_models(stage: &PlannedStage) -> impl Iterator<Item = &String> {
    let models = stage.spec().models.iter();
    models.filter_map(|(model, access)| (*access == Access::Update).then_some(model))
}

/// `wanted`, and the stages that change a model before one of them uses it.
fn with_changers(schedule: &Schedule, wanted: &BTreeSet<usize>) -> BTreeSet<usize> {
    let stages = schedule.plan().stages();
    let mut order = wanted.clone();
    let mut models: BTreeSet<&str> = BTreeSet::new();
    for index in (0..stages.len()).rev() {
        let changes = changed_models(&stages[index]).any(|model| models.contains(model.as_str()));
        if wanted.contains(&index) || changes {
            order.insert(index);
            models.extend(
                stages[index]
                    .spec()
                    .models
                    .iter()
                    .map(|(model, _)| model.as_str()),
            );
        }
    }
    order
}

impl Known<'_> {
    /// Stages of the step that cannot be run, and why: for a reason of their own, or because of a stage before them.
    fn reasons(&self) -> BTreeMap<usize, ReplayError> {
        let mut reasons: BTreeMap<usize, ReplayError> = BTreeMap::new();
        let mut lost: BTreeMap<&str, usize> = BTreeMap::new();
        let stages = self.schedule.plan().stages();
        for (index, stage) in stages.iter().enumerate() {
            if stage.spec().cadence != Cadence::Step {
                continue;
            }
            let own = self.own_reason(stage);
            let reason = own.or_else(|| {
                let models = &stage.spec().models;
                let changed_before = |(model, _): &(String, Access)| {
                    Some((model.clone(), *lost.get(model.as_str())?))
                };
                let (model, changer) = models.iter().find_map(changed_before)?;
                Some(ReplayError::AfterSkipped {
                    stage: stage.name().to_owned(),
                    model,
                    changer: stages[changer].name().to_owned(),
                    why: reasons[&changer].to_string(),
                })
            });
            if let Some(reason) = reason {
                lost.extend(changed_models(stage).map(|model| (model.as_str(), index)));
                reasons.insert(index, reason);
            }
        }
        reasons
    }

    fn own_reason(&self, planned: &PlannedStage) -> Option<ReplayError> {
        let (stage, step) = (planned.name().to_owned(), self.recorded.step);
        let Some(recorded) = self.recorded.stages.get(&stage) else {
            return Some(not_recorded(&stage, self.recorded));
        };
        if let Some(why) = &planned.spec().not_replayed {
            let why = why.clone();
            return Some(ReplayError::OnceOnly { stage, why });
        }
        if let Some(kind) = self.changes.kind_of(&stage) {
            return Some(ReplayError::OtherKind {
                recorded: kind.recorded.as_str().unwrap_or_default().to_owned(),
                now: planned.kind().to_owned(),
                stage,
            });
        }
        if let Some(missing) = missing_input(planned, recorded, self.recorded.error.is_some()) {
            return Some(ReplayError::NoInput {
                stage,
                step,
                missing,
            });
        }
        if step > 1 && self.stateful.contains(&stage) && !is_stored(self.recorded, &stage) {
            return Some(ReplayError::NoMemory { stage, step });
        }
        let mut models = planned.spec().models.iter();
        let (model, searched) =
            models.find_map(|(model, _)| self.stateless.get_key_value(model))?;
        Some(ReplayError::NoState {
            stage,
            model: model.clone(),
            step,
            searched: searched.clone(),
        })
    }
}

/// Whether the state of a stage at the start of the step is stored.
fn is_stored(recorded: &RecordedStep, stage: &str) -> bool {
    match &recorded.state {
        Some(StepStart::Snapshot(snapshot)) => snapshot.stages.contains_key(stage),
        Some(StepStart::Stored(state)) => {
            let stored = state.stages.get(stage);
            stored.is_some_and(|(_, stored)| stored.is_some())
        }
        None => false,
    }
}

/// What is missing in a stage's recorded input: all calls, or input rows of emitted rows.
fn missing_input(planned: &PlannedStage, recorded: &RecordedStage, failed: bool) -> Option<String> {
    if recorded.inputs.is_empty() {
        return Some("nothing is recorded".to_owned());
    }
    let of_input: fn(RowId) -> u64 = match planned.spec().rows {
        RowRule::Source | RowRule::Sink => return None,
        RowRule::Same | RowRule::Filter => |id| id.0,
        RowRule::Expand(_) => RowId::group,
    };
    // Rows without an input row may be the error that ended the step.
    if failed {
        return None;
    }
    let given: HashSet<u64> = recorded
        .input_ids()
        .into_iter()
        .map(|id| of_input(RowId(id)))
        .collect();
    let emitted = recorded
        .outputs
        .iter()
        .flat_map(|output| output.batch.ids());
    let foreign: HashSet<u64> = emitted
        .map(of_input)
        .filter(|id| !given.contains(id))
        .collect();
    (!foreign.is_empty()).then(|| format!("{} not recorded", are(foreign.len())))
}

fn are(rows: usize) -> String {
    let verb = if rows == 1 { "is" } else { "are" };
    format!("{} {verb}", count(rows as u64, "row"))
}
