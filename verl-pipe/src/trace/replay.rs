//! Replay: stages run again on what they were given, and what they emit is compared with what they emitted.
//!
//! A stage's result follows from its input, its parameters, the seed, the step, and the state of models and of the
//! stage itself when the step began. All of that is recorded, so each stage can be run alone, and the first stage whose
//! outputs are not reproduced is the one to look at: every stage is given its *recorded* input, so that a difference
//! in one does not spread to those behind it.
//!
//! A model that some stage of the step changes is brought to where the replayed stage found it: the state of the
//! step's start is restored, and the stages that changed it before are run first, on their recorded inputs.
//!
//! On the CPU the bits are equal. Where models run on another device, keys that a model computes are compared within
//! [`device_tolerance`]; what is computed on the host stays exact.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::batch::Batch;
use crate::diagnostic::{quoted, suggest};
use crate::field::{DType, Field};
use crate::resource::WeightsVersion;
use crate::run::again::CallPlace;
use crate::run::error::RunError;
use crate::run::runner::{Run, RunSnapshot};
use crate::schedule::placement::{Place, Schedule};
use crate::stage::{Access, Cadence};
use crate::trace::compare::{
    ComparedKey, Comparison, Difference, DifferenceKind, Pairing, Rows, Tolerance, compare_rows,
};
use crate::trace::recorded::{RecordedStage, RecordedStep, StepStart};
use crate::trace::text::{Align, Table, count};

/// Which stages of a step are run again.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ReplayScope {
    /// All that were recorded.
    #[default]
    Step,
    /// One.
    Stage(String),
    /// One and all after it in the order of the plan.
    From(String),
}

/// Why a step cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A name that is no stage's.
    #[error("there is no stage `{name}` in this pipeline; {help}")]
    UnknownStage {
        /// As given.
        name: String,
        /// The nearest name and the known ones.
        help: String,
    },
    /// A stage that runs between steps.
    #[error(
        "stage `{name}` runs between steps and is given no rows, so nothing of it is recorded; of step {step} these are: {recorded}"
    )]
    Observer {
        /// The stage.
        name: String,
        /// The step.
        step: u64,
        /// Stages that are recorded.
        recorded: String,
    },
    /// A stage of which the step holds nothing.
    #[error("stage `{name}` is not recorded in step {step}{why}; recorded are: {recorded}")]
    NotRecorded {
        /// The stage.
        name: String,
        /// The step.
        step: u64,
        /// For what it is needed, if not for itself.
        why: String,
        /// Stages that are recorded.
        recorded: String,
    },
    /// The weights that a stage worked with are not kept.
    #[error(
        "stage `{stage}` of step {step} works with `{model}`, which the run trains, and the state of `{model}` at the start of that step is not kept; record with full weights, or replay stages that do not use it"
    )]
    NoState {
        /// The stage.
        stage: String,
        /// The model.
        model: String,
        /// The step.
        step: u64,
    },
    /// The stage failed when it was run again.
    #[error("the replay stopped: {0}")]
    Run(#[from] RunError),
}

impl ReplayError {
    /// Code of the error; `docs/errors/<CODE>.md` says what happened and what to do.
    pub fn code(&self) -> &'static str {
        match self {
            ReplayError::UnknownStage { .. }
            | ReplayError::Observer { .. }
            | ReplayError::NotRecorded { .. } => "T012",
            ReplayError::NoState { .. } => "T013",
            ReplayError::Run(error) => error.code(),
        }
    }
}

/// What came of one stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplayedStage {
    /// Its name.
    pub stage: String,
    /// Its kind.
    pub kind: String,
    /// Rows that it was given; for a source rows that it made.
    pub rows: usize,
    /// Keys that were compared, with what was allowed.
    pub keys: Vec<(String, Tolerance)>,
    /// Models whose weights were compared, before the stage or, where it changes them, after it.
    pub weights: Vec<String>,
    /// The comparison; left is the trace, right the replay.
    pub compared: Comparison,
}

/// What came of a replay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplayReport {
    /// The step.
    pub step: u64,
    /// Device group of the models.
    pub device: String,
    /// Stages in the order of the plan.
    pub stages: Vec<ReplayedStage>,
    /// What a reader should know besides.
    pub notes: Vec<String>,
}

impl ReplayReport {
    /// Differences of all stages.
    pub fn differences(&self) -> u64 {
        self.stages
            .iter()
            .map(|stage| stage.compared.differences)
            .sum()
    }

    /// The first difference in the order of the plan.
    pub fn first(&self) -> Option<&Difference> {
        self.stages
            .iter()
            .find_map(|stage| stage.compared.first.as_ref())
    }
}

/// How far a key that a model computes may lie from the recorded value where the device is not the CPU. Its kernels
/// may add up in another order from call to call, so that floats repeat to about their rounding; what is chosen from
/// them (tokens, masks, reasons) must be equal, and what is computed on the host is exact anyway.
///
/// | unit | allowed |
/// |---|---|
/// | nats, probability | 1e-3 |
/// | any other float | 1e-4 + 1e-4 · value |
/// | anything else | equal |
pub fn device_tolerance(field: &Field) -> Tolerance {
    let float = matches!(field.dtype, DType::F32 | DType::F64);
    match field.unit.as_ref() {
        _ if !float => Tolerance::EXACT,
        "nats" | "probability" => Tolerance {
            absolute: 1e-3,
            relative: 0.0,
        },
        _ => Tolerance {
            absolute: 1e-4,
            relative: 1e-4,
        },
    }
}

/// Replays steps of one run; holds it for as long.
pub struct Replayer<'a> {
    run: &'a mut Run,
    /// State of models and stages before anything ran.
    initial: RunSnapshot,
}

impl<'a> Replayer<'a> {
    /// A replayer on a run that has been started and has not run a step: its state is that of the first step.
    ///
    /// # Errors
    /// When the state cannot be read.
    pub fn new(run: &'a mut Run) -> Result<Replayer<'a>, RunError> {
        let initial = run.snapshot()?;
        Ok(Replayer { run, initial })
    }

    /// What is replayed.
    pub fn schedule(&self) -> &Schedule {
        self.run.schedule()
    }

    /// Runs the stages of `scope` again and compares.
    ///
    /// # Errors
    /// [`ReplayError`]: what is missing, or what a stage failed with.
    pub fn replay(
        &mut self,
        recorded: &RecordedStep,
        scope: &ReplayScope,
    ) -> Result<ReplayReport, ReplayError> {
        self.replay_until(recorded, scope, false)
    }

    /// As [`Replayer::replay`], and ends behind the first stage with a difference where `stop` says so.
    pub(crate) fn replay_until(
        &mut self,
        recorded: &RecordedStep,
        scope: &ReplayScope,
        stop: bool,
    ) -> Result<ReplayReport, ReplayError> {
        let chosen = chosen(self.schedule(), recorded, scope)?;
        let order = with_changers(self.schedule(), recorded, &chosen)?;
        self.restore(recorded, &order)?;
        let mut report = ReplayReport {
            step: recorded.step,
            device: self.schedule().groups[0].name.clone(),
            stages: Vec::new(),
            notes: notes(self.schedule(), recorded, scope),
        };
        let mut versions = self.run.versions()?;
        for index in order {
            let planned = &self.schedule().plan.stages[index];
            let name = planned.name.clone();
            let changes = planned
                .spec
                .models
                .iter()
                .any(|(_, access)| *access == Access::Update);
            let before = versions.clone();
            let again = self.call_again(index, recorded)?;
            if changes {
                versions = self.run.versions()?;
            }
            if !chosen.contains(&index) {
                continue;
            }
            let stage = &recorded.stages[&name];
            let mut replayed = compare_stage(self.schedule(), index, stage, &again);
            let after = changes.then_some((&recorded.weights_after, &versions));
            compare_weights(
                self.schedule(),
                index,
                (&stage.weights, &before),
                after,
                &mut replayed,
            );
            let unknown = unknown_after(self.schedule(), index, recorded);
            report.notes.extend(unknown);
            let differs = replayed.compared.differences > 0;
            report.stages.push(replayed);
            if stop && differs {
                break;
            }
        }
        Ok(report)
    }

    /// Models and stages as they were when the step began.
    fn restore(&mut self, recorded: &RecordedStep, order: &[usize]) -> Result<(), ReplayError> {
        let plan = &self.schedule().plan;
        for index in order.iter().filter(|_| recorded.step > 1) {
            let missing = plan.stages[*index].spec.models.iter().find(|(name, _)| {
                let model = plan.models.iter().find(|model| model.name == *name);
                let trained = model.is_some_and(|model| !model.updaters.is_empty());
                let state = recorded.state.as_ref();
                trained && !state.is_some_and(|state| state.holds(name))
            });
            if let Some((model, _)) = missing {
                return Err(ReplayError::NoState {
                    stage: plan.stages[*index].name.clone(),
                    model: model.clone(),
                    step: recorded.step,
                });
            }
        }
        self.run.restore(&self.initial)?;
        match &recorded.state {
            Some(StepStart::Snapshot(snapshot)) => self.run.restore(snapshot)?,
            Some(StepStart::Stored(state)) => self.run.recall(state)?,
            None => {}
        }
        Ok(())
    }

    /// Runs a stage on each of its recorded inputs, in order.
    fn call_again(
        &mut self,
        index: usize,
        recorded: &RecordedStep,
    ) -> Result<Vec<Batch>, ReplayError> {
        let context = &self.schedule().plan.context;
        let place = CallPlace {
            step: recorded.step,
            steps: context.steps,
            seed: recorded.seed.unwrap_or(context.seed),
            wave: 0,
        };
        let name = self.schedule().plan.stages[index].name.clone();
        let mut emitted = Vec::new();
        for input in &recorded.stages[&name].inputs {
            let place = CallPlace {
                wave: input.wave,
                ..place
            };
            emitted.extend(self.run.call_again(index, place, &input.batch)?);
        }
        Ok(emitted)
    }
}

/// The recorded stages that `scope` means, in the order of the plan.
fn chosen(
    schedule: &Schedule,
    recorded: &RecordedStep,
    scope: &ReplayScope,
) -> Result<BTreeSet<usize>, ReplayError> {
    let stages = &schedule.plan.stages;
    let is_recorded = |index: &usize| recorded.stages.contains_key(&stages[*index].name);
    let find = |name: &str| find_stage(schedule, recorded, name);
    Ok(match scope {
        ReplayScope::Step => (0..stages.len()).filter(is_recorded).collect(),
        ReplayScope::Stage(name) => BTreeSet::from([find(name)?]),
        ReplayScope::From(name) => (find(name)?..stages.len()).filter(is_recorded).collect(),
    })
}

/// The stage `name`, which must be recorded.
///
/// # Errors
/// When there is no such stage, or nothing of it is recorded.
pub(crate) fn find_stage(
    schedule: &Schedule,
    recorded: &RecordedStep,
    name: &str,
) -> Result<usize, ReplayError> {
    let stages = &schedule.plan.stages;
    let names = || stages.iter().map(|stage| stage.name.as_str());
    let Some(index) = names().position(|other| other == name) else {
        return Err(ReplayError::UnknownStage {
            name: name.to_owned(),
            help: suggest(name, "stages", names()),
        });
    };
    if recorded.stages.contains_key(name) {
        return Ok(index);
    }
    let step = recorded.step;
    let name = name.to_owned();
    Err(match stages[index].spec.cadence {
        Cadence::Step => ReplayError::NotRecorded {
            name,
            step,
            why: String::new(),
            recorded: recorded_names(recorded),
        },
        Cadence::Observer { .. } => ReplayError::Observer {
            name,
            step,
            recorded: recorded_names(recorded),
        },
    })
}

fn recorded_names(recorded: &RecordedStep) -> String {
    match recorded.stages.is_empty() {
        true => "none".to_owned(),
        false => quoted(recorded.stages.keys().map(String::as_str)),
    }
}

/// `chosen`, and the stages that change a model before one of them works with it.
fn with_changers(
    schedule: &Schedule,
    recorded: &RecordedStep,
    chosen: &BTreeSet<usize>,
) -> Result<Vec<usize>, ReplayError> {
    let stages = &schedule.plan.stages;
    let mut order = chosen.clone();
    let mut models: BTreeSet<&str> = BTreeSet::new();
    let mut wanted_by = "";
    for index in (0..stages.len()).rev() {
        let own = &stages[index].spec.models;
        let changes = |(model, access): &(String, Access)| {
            *access == Access::Update && models.contains(model.as_str())
        };
        if !chosen.contains(&index) && !own.iter().any(changes) {
            continue;
        }
        if !recorded.stages.contains_key(&stages[index].name) {
            return Err(ReplayError::NotRecorded {
                name: stages[index].name.clone(),
                step: recorded.step,
                why: format!(", and it changes a model before `{wanted_by}` works with it"),
                recorded: recorded_names(recorded),
            });
        }
        if chosen.contains(&index) {
            wanted_by = &stages[index].name;
        }
        order.insert(index);
        models.extend(own.iter().map(|(model, _)| model.as_str()));
    }
    Ok(order.into_iter().collect())
}

fn notes(schedule: &Schedule, recorded: &RecordedStep, scope: &ReplayScope) -> Vec<String> {
    let mut notes = Vec::new();
    let plan = &schedule.plan;
    if let Some(seed) = recorded.seed.filter(|seed| *seed != plan.context.seed) {
        notes.push(format!(
            "the trace was recorded with seed {seed}, the configuration says {}; replayed with {seed}",
            plan.context.seed
        ));
    }
    for (name, stage) in &recorded.stages {
        let now = plan.pipe.stages.iter().find(|decl| decl.name == *name);
        if let (Some(then), Some(now)) = (&stage.parameters, now)
            && *then != now.config
        {
            notes.push(format!(
                "the configuration of `{name}` has changed since it was recorded"
            ));
        }
    }
    if *scope == ReplayScope::Step {
        let in_step = plan
            .stages
            .iter()
            .filter(|stage| stage.spec.cadence == Cadence::Step);
        let missing: Vec<&str> = in_step
            .map(|stage| stage.name.as_str())
            .filter(|name| !recorded.stages.contains_key(*name))
            .collect();
        if !missing.is_empty() {
            notes.push(format!("not recorded, and left out: {}", quoted(missing)));
        }
    }
    notes
}

/// How near a key of a stage must come.
pub(crate) fn tolerance(schedule: &Schedule, stage: usize, field: &Field) -> Tolerance {
    let on_cpu = match schedule.places[stage] {
        Place::Host => true,
        Place::Group(group) => schedule.groups[group].name == "cpu",
    };
    match on_cpu {
        true => Tolerance::EXACT,
        false => device_tolerance(field),
    }
}

fn compare_stage(
    schedule: &Schedule,
    index: usize,
    recorded: &RecordedStage,
    again: &[Batch],
) -> ReplayedStage {
    let planned = &schedule.plan.stages[index];
    let left = Rows::new(recorded.outputs.iter().map(|output| &output.batch));
    let right = Rows::new(again);
    let keys: Vec<(String, Tolerance)> = planned
        .spec
        .writes
        .iter()
        .map(|field| (field.name.to_string(), tolerance(schedule, index, field)))
        .collect();
    let compared: Vec<ComparedKey<'_>> = keys
        .iter()
        .map(|(key, tolerance)| ComparedKey {
            left: key,
            right: key,
            tolerance: *tolerance,
        })
        .collect();
    let input = recorded.input_ids();
    let order = left.ordered(&input);
    let order_again = right.ordered(&input);
    let pairing = Pairing {
        stage: &planned.name,
        order: &order,
        partner: &|id| id,
        absent_is_null: schedule.forgives_rows(index),
        both_ways: Some(&order_again),
    };
    ReplayedStage {
        stage: planned.name.clone(),
        kind: planned.kind.clone(),
        rows: if input.is_empty() {
            order.len()
        } else {
            input.len()
        },
        compared: compare_rows(&pairing, &compared, &left, &right),
        keys,
        weights: Vec::new(),
    }
}

/// That nothing tells which weights a stage made of a model: they are known from the step recorded behind it.
fn unknown_after(schedule: &Schedule, index: usize, recorded: &RecordedStep) -> Option<String> {
    let planned = &schedule.plan.stages[index];
    let mut models = planned.spec.models.iter();
    let (model, _) = models.find(|(model, access)| {
        *access == Access::Update && !recorded.weights_after.contains_key(model)
    })?;
    Some(format!(
        "the weights that `{}` made of `{model}` are not compared: step {} is not recorded",
        planned.name,
        recorded.step + 1
    ))
}

type Versions = BTreeMap<String, WeightsVersion>;

/// Compares versions of a stage's models: (recorded, now) before the stage, and after it where it changes them.
fn compare_weights(
    schedule: &Schedule,
    index: usize,
    before: (&Versions, &Versions),
    after: Option<(&Versions, &Versions)>,
    replayed: &mut ReplayedStage,
) {
    let planned = &schedule.plan.stages[index];
    let on_cpu = schedule.groups[0].name == "cpu";
    for (model, access) in &planned.spec.models {
        let changed_later = || {
            let later = &schedule.plan.stages[index + 1..];
            let changes = |(m, a): &(String, Access)| m == model && *a == Access::Update;
            later
                .iter()
                .any(|stage| stage.spec.models.iter().any(changes))
        };
        let after = after.filter(|_| *access == Access::Update && !changed_later());
        for (moment, sides) in [("before", Some(before)), ("after", after)] {
            let Some((recorded, now)) = sides else {
                continue;
            };
            let (Some(recorded), Some(now)) = (recorded.get(model), now.get(model)) else {
                continue;
            };
            // Where additions may come in another order, moved weights repeat to rounding, and a hash knows no "nearly".
            if recorded.hash.is_empty() || now.hash.is_empty() || (moment == "after" && !on_cpu) {
                continue;
            }
            if !replayed.weights.contains(model) {
                replayed.weights.push(model.clone());
            }
            if recorded != now {
                let difference = Difference::new(&planned.name, model, DifferenceKind::Weights)
                    .values(
                        format!("{recorded} {moment} the stage"),
                        format!("{now} {moment} the stage"),
                    );
                // What a stage was given comes before what it made of it.
                replayed.compared.differences += 1;
                if moment == "before" || replayed.compared.first.is_none() {
                    replayed.compared.first = Some(difference);
                }
            }
        }
    }
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "replay of step {} on {}", self.step, self.device)?;
        let mut table = Table::new(&[
            ("stage", Align::Left),
            ("rows", Align::Right),
            ("values", Align::Right),
            ("compared", Align::Left),
            ("result", Align::Left),
        ]);
        for stage in &self.stages {
            table.row([
                stage.stage.clone(),
                stage.rows.to_string(),
                stage.compared.values.to_string(),
                stage.what(),
                stage.result(),
            ]);
        }
        write!(f, "{table}")?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        let differences = self.differences();
        write!(f, "{}", count(differences, "difference"))?;
        if let Some(first) = self.first() {
            write!(
                f,
                "; the first: {}\n{}",
                first.place(),
                first.explain("recorded", "replayed")
            )?;
        }
        writeln!(f)
    }
}

impl ReplayedStage {
    fn what(&self) -> String {
        let mut parts: Vec<String> = Vec::new();
        if !self.keys.is_empty() {
            parts.push(count(self.keys.len() as u64, "key"));
        }
        parts.extend(
            self.weights
                .iter()
                .map(|model| format!("weights of {model}")),
        );
        match parts.is_empty() {
            true => "nothing: it emits no rows".to_owned(),
            false => parts.join(", "),
        }
    }

    fn result(&self) -> String {
        let exact = self.keys.iter().all(|(_, tolerance)| tolerance.is_exact());
        match self.compared.differences {
            0 if exact => "bit-equal".to_owned(),
            0 => format!(
                "within tolerance, largest distance {:e}",
                self.compared.largest
            ),
            n => count(n, "difference"),
        }
    }
}
