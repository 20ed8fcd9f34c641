//! Replay: stages run again on what they were given, and what they emit is compared with what they emitted.
//!
//! A stage's result follows from its input, its parameters, the seed, the step, and the state of models and of the
//! stage itself when the step began. All of that is recorded, so each stage can be run alone, and the first stage whose
//! outputs are not reproduced is the one to look at: every stage is given its *recorded* input, so that a difference
//! in one does not spread to those behind it. For the same reason a stage that cannot be run again, or that fails, costs
//! itself alone: those behind it have its recorded outputs.
//!
//! A model that some stage of the step changes is brought to where the replayed stage found it: the state of the
//! step's start is restored, and the stages that changed it before are run first, on their recorded inputs.
//!
//! On a CPU the bits are equal, also on another processor where the recording names kernels that add in the same order.
//! Where models run on another device, or the machine differs in what decides bits, floats are compared within
//! [`device_tolerance`]; [`Changes`] says which.

mod chosen;
mod compared;
mod error;
mod failed;
mod report;
mod since;
mod weights;

use std::collections::{BTreeMap, BTreeSet};

use crate::batch::Batch;
use crate::run::again::CallPlace;
use crate::run::error::RunError;
use crate::run::runner::{Run, RunSnapshot, RunState};
use crate::schedule::placement::Schedule;
use crate::trace::changes::Changes;
use crate::trace::recorded::{RecordedStep, StepStart};
use crate::trace::store::TraceDir;
use crate::trace::traced_run::{LookError, TracedRun};

pub use chosen::ReplayScope;
pub(crate) use chosen::find_stage;
pub use compared::device_tolerance;
pub use error::ReplayError;
pub use report::{ReplayReport, ReplayedStage, SkippedStage};

use chosen::{Choice, Known, changed_models, choose};
use compared::{Around, Versions, compare_stage, compare_weights};
use failed::{Lost, failed_stage, is_of_stage};
use report::notes_of;
use since::{add_data, changes_of};
pub(crate) use since::{changes_since, told_of_data};
use weights::{Sources, state_after};

/// Replays steps of one run; holds it for as long.
pub struct Replayer<'a> {
    run: &'a mut Run,
    /// State of models and stages before anything ran.
    initial: RunSnapshot,
    /// The trace that steps come from, for weights that a step does not hold itself.
    trace: Option<TraceDir>,
    changes: Changes,
}

impl<'a> Replayer<'a> {
    /// A replayer on a run that has been started and has not run a step: its state is that of the first step. Its
    /// steps were recorded on this machine.
    ///
    /// # Errors
    /// When the state cannot be read.
    pub fn new(run: &'a mut Run) -> Result<Replayer<'a>, RunError> {
        let initial = run.snapshot()?;
        Ok(Replayer {
            run,
            initial,
            trace: None,
            changes: Changes::default(),
        })
    }

    /// As [`Replayer::new`], for steps of a run's folder: it knows under what they were recorded, and finds weights in
    /// other steps of the trace.
    ///
    /// # Errors
    /// When the state cannot be read, or what the trace tells of the recording is damaged.
    pub fn of_run(run: &'a mut Run, traced: &TracedRun) -> Result<Replayer<'a>, LookError> {
        let mut changes = changes_since(traced)?;
        add_data(&mut changes, traced.dir(), run.data());
        Ok(Replayer {
            trace: Some(traced.trace().clone()),
            changes,
            ..Replayer::new(run)?
        })
    }

    /// What is replayed.
    pub fn schedule(&self) -> &Schedule {
        self.run.schedule()
    }

    /// What is not as it was when the run was recorded.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Runs the stages of `scope` again and compares. Stages that cannot be run are left out and named.
    ///
    /// # Errors
    /// [`ReplayError`]: a stage that is not there; a single stage that cannot be run; a run that cannot be used.
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
        let changes = changes_of(&self.changes, self.schedule(), recorded);
        let trace = self.trace.as_ref();
        let sources = Sources::of_step(self.schedule(), recorded, &self.initial, trace);
        let remembering: BTreeSet<String> = self.initial.stages.keys().cloned().collect();
        let choice = choose(
            &Known {
                schedule: self.schedule(),
                recorded,
                changes: &changes,
                stateless: &sources.stateless,
                remembering: &remembering,
            },
            scope,
        )?;
        let mut report = ReplayReport {
            step: recorded.step,
            device: self.schedule().groups[0].name.clone(),
            changes,
            stages: Vec::new(),
            skipped: Vec::new(),
            notes: notes_of(self.schedule(), recorded, scope),
        };
        for (index, error) in &choice.skipped {
            self.skip(*index, error.to_string(), &mut report);
        }
        if choice.order.is_empty() {
            return Ok(report);
        }
        let notes = sources.notes_of(self.schedule(), &choice.order);
        report.notes.extend(notes);
        let after = self.weights_after(recorded, &choice)?;
        self.restore(recorded, sources)?;
        self.run_again(recorded, &choice, &after, stop, &mut report)?;
        Ok(report)
    }

    /// Runs what was chosen, in the order of the plan.
    fn run_again(
        &mut self,
        recorded: &RecordedStep,
        choice: &Choice,
        after: &Versions,
        stop: bool,
        report: &mut ReplayReport,
    ) -> Result<(), ReplayError> {
        let mut versions = self.run.versions()?;
        let mut lost = Lost::default();
        for &index in &choice.order {
            if let Some(why) = lost.keeps(self.schedule(), index) {
                if choice.wanted.contains(&index) {
                    self.skip(index, why, report);
                }
                continue;
            }
            let before = versions.clone();
            let again = match self.call_again(index, recorded) {
                Ok(again) => again,
                Err(error) if is_of_stage(&error) => {
                    lost.add(self.schedule(), index, &error);
                    if let Some(why) = self.drawn_elsewhere(index, report) {
                        self.skip(index, why, report);
                        continue;
                    }
                    let failed = failed_stage(self.schedule(), index, recorded, &error);
                    report.stages.push(failed);
                    if stop {
                        break;
                    }
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let changes = changed_models(&self.schedule().plan.stages[index])
                .next()
                .is_some();
            if changes {
                versions = self.run.versions()?;
            }
            if !choice.wanted.contains(&index) {
                continue;
            }
            let schedule = self.schedule();
            let stage = &recorded.stages[&schedule.plan.stages[index].name];
            let mut replayed = compare_stage(schedule, index, &report.changes, stage, &again);
            if replayed.compared.differences > 0
                && let Some(why) = self.drawn_elsewhere(index, report)
            {
                self.skip(index, why, report);
                continue;
            }
            let around = Around {
                before: &before,
                after: changes.then_some((after, &versions)),
            };
            let notes = compare_weights(
                schedule,
                index,
                &report.changes,
                recorded,
                &around,
                &mut replayed,
            );
            report.notes.extend(notes);
            let differs = replayed.compared.differences > 0;
            report.stages.push(replayed);
            if stop && differs {
                break;
            }
        }
        Ok(())
    }

    /// Why a stage that gives something else, or fails, is not to blame.
    fn drawn_elsewhere(&self, index: usize, report: &ReplayReport) -> Option<String> {
        let plan = &self.schedule().plan;
        report.changes.other_data(plan, &plan.stages[index])
    }

    fn skip(&self, index: usize, why: String, report: &mut ReplayReport) {
        report.skipped.push(SkippedStage {
            stage: self.schedule().plan.stages[index].name.clone(),
            why,
        });
    }

    /// Versions of the models after the step. Where the trace does not tell a hash and the next step holds the
    /// weights, they are loaded for their hash.
    fn weights_after(
        &mut self,
        recorded: &RecordedStep,
        choice: &Choice,
    ) -> Result<Versions, ReplayError> {
        let mut after = recorded.weights_after.clone();
        let Some(trace) = &self.trace else {
            return Ok(after);
        };
        let stages = &self.run.schedule().plan.stages;
        let wanted = choice.wanted.iter();
        let models = wanted.flat_map(|index| changed_models(&stages[*index]));
        let state = state_after(recorded, models, trace);
        if !state.models.is_empty() {
            self.run.recall(&state)?;
            let versions = self.run.versions()?.into_iter();
            after.extend(versions.filter(|(model, _)| state.models.contains_key(model)));
        }
        Ok(after)
    }

    /// Models and stages as they were when the step began.
    fn restore(&mut self, recorded: &RecordedStep, sources: Sources) -> Result<(), ReplayError> {
        self.run.restore(&self.initial)?;
        match &recorded.state {
            Some(StepStart::Snapshot(snapshot)) => self.run.restore(snapshot)?,
            Some(StepStart::Stored(state)) => self.run.recall(state)?,
            None => {}
        }
        if !sources.elsewhere.is_empty() {
            let mut state = RunState {
                step: recorded.step.saturating_sub(1),
                models: sources.elsewhere,
                stages: BTreeMap::new(),
            };
            state.models.retain(|_, (_, stored)| stored.is_some());
            self.run.recall(&state)?;
        }
        Ok(())
    }

    /// Runs a stage on each of its recorded inputs, in order.
    fn call_again(
        &mut self,
        index: usize,
        recorded: &RecordedStep,
    ) -> Result<Vec<Batch>, RunError> {
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
