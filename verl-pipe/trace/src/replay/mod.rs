//! Replay: runs stages again on their recorded inputs, and compares their outputs with the recorded ones.
//!
//! A stage's result is determined by its input, its parameters, the seed, the step, and the state of models and of the
//! stage itself when the step began. All of this is recorded, so each stage can be run on its own. Every stage gets its
//! *recorded* input, so a difference in one stage does not spread to later ones, and the first stage whose outputs are
//! not reproduced is the one to examine. For the same reason a stage that cannot be run again, or that fails, does not
//! affect later stages: they get its recorded outputs.
//!
//! A model that stages of the step change is put into the state in which the replayed stage found it: the state at the
//! start of the step is restored, and the stages that changed it before are run first, on their recorded inputs.
//!
//! On a CPU the bits are equal, even on another processor if the recording declares kernels that add in the same order.
//! If models run on another device, or the machine differs in a way that affects bits, floats are compared within
//! [`device_tolerance`]; [`Changes`] lists the differences.

mod changes_since;
mod comparison;
mod error;
mod failures;
mod first_bad;
mod report;
mod scope;
mod traced_run;
mod weights;

use std::collections::{BTreeMap, BTreeSet};

use verl_plan::schedule::placement::Schedule;
use verl_run::again::CallPlace;
use verl_run::error::RunError;
use verl_run::runner::{Run, RunSnapshot, RunState};
use verl_words::batch::Batch;

use crate::compare::Changes;
use crate::files::{RecordedStep, StepStart, TraceDir};

pub use changes_since::changes_since;
pub(crate) use changes_since::describe_changed_data;
pub use comparison::device_tolerance;
pub use error::ReplayError;
pub use first_bad::{
    CheckedStep, Fault, FirstBad, changed_setting, check_step, damaged_fault, first_bad,
    first_fault_of_stats, stopped_fault,
};
pub use report::{ReplayReport, ReplayedStage, SkippedStage};
pub use scope::{ReplayScope, find_stage};
pub use traced_run::{InspectError, TracedRun, check_run_folder, schedule_of};

use changes_since::{add_data, changes_of};
use comparison::{Around, Versions, compare_stage, compare_weights};
use failures::{Lost, failed_stage, is_of_stage};
use report::notes_of;
use scope::{Choice, Known, changed_models, choose};
use weights::{Sources, state_after};

/// Replays steps of one run, which it borrows.
pub struct Replayer<'a> {
    run: &'a mut Run,
    /// State of models and stages before anything ran.
    initial: RunSnapshot,
    /// The trace of the steps, for weights that a step does not store itself.
    trace: Option<TraceDir>,
    changes: Changes,
}

impl<'a> Replayer<'a> {
    /// A replayer on a run that has been started and has not run a step: its state is that of the first step. The
    /// replayed steps were recorded on this machine.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn new(run: &'a mut Run) -> Result<Replayer<'a>, RunError> {
        let initial = run.snapshot()?;
        Ok(Replayer {
            run,
            initial,
            trace: None,
            changes: Changes::default(),
        })
    }

    /// As [`Replayer::new`], for steps of a run folder: it knows their recorded conditions, and finds weights in other
    /// steps of the trace.
    ///
    /// # Errors
    /// The state cannot be read, or the recorded conditions are damaged.
    pub fn of_run(run: &'a mut Run, traced: &TracedRun) -> Result<Replayer<'a>, InspectError> {
        let mut changes = changes_since(traced)?;
        add_data(&mut changes, traced.dir(), run.data());
        Ok(Replayer {
            trace: Some(traced.trace().clone()),
            changes,
            ..Replayer::new(run)?
        })
    }

    /// The schedule that is replayed.
    pub fn schedule(&self) -> &Schedule {
        self.run.schedule()
    }

    /// What has changed since the run was recorded.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Runs the stages of `scope` again and compares their outputs. Stages that cannot be run are skipped and listed.
    ///
    /// # Errors
    /// [`ReplayError`]: an unknown stage; a single stage that cannot be run; a run that cannot be used.
    pub fn replay(
        &mut self,
        recorded: &RecordedStep,
        scope: &ReplayScope,
    ) -> Result<ReplayReport, ReplayError> {
        self.replay_until(recorded, scope, false)
    }

    /// As [`Replayer::replay`]; with `stop` it ends after the first stage with a difference.
    pub(crate) fn replay_until(
        &mut self,
        recorded: &RecordedStep,
        scope: &ReplayScope,
        stop: bool,
    ) -> Result<ReplayReport, ReplayError> {
        let changes = changes_of(&self.changes, self.schedule(), recorded);
        let trace = self.trace.as_ref();
        let sources = Sources::of_step(self.schedule(), recorded, &self.initial, trace);
        let stateful: BTreeSet<String> = self.initial.stages.keys().cloned().collect();
        let choice = choose(
            &Known {
                schedule: self.schedule(),
                recorded,
                changes: &changes,
                stateless: &sources.stateless,
                stateful: &stateful,
            },
            scope,
        )?;
        let mut report = ReplayReport {
            step: recorded.step,
            device: self.schedule().devices_text(),
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

    /// Runs the chosen stages in the order of the plan.
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
            if let Some(why) = lost.why_blocked(self.schedule(), index) {
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
                    if let Some(why) = self.changed_data_reason(index, report) {
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
            let changes = changed_models(&self.schedule().plan().stages()[index])
                .next()
                .is_some();
            if changes {
                versions = self.run.versions()?;
            }
            if !choice.wanted.contains(&index) {
                continue;
            }
            let schedule = self.schedule();
            let stage = &recorded.stages[schedule.plan().stages()[index].name()];
            let mut replayed = compare_stage(schedule, index, &report.changes, stage, &again);
            if replayed.compared.differences > 0
                && let Some(why) = self.changed_data_reason(index, report)
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

    /// Why a stage that emits something else, or fails, is not at fault: its data were changed.
    fn changed_data_reason(&self, index: usize, report: &ReplayReport) -> Option<String> {
        let plan = self.schedule().plan();
        report.changes.other_data(plan, &plan.stages()[index])
    }

    fn skip(&self, index: usize, why: String, report: &mut ReplayReport) {
        report.skipped.push(SkippedStage {
            stage: self.schedule().plan().stages()[index].name().to_owned(),
            why,
        });
    }

    /// Versions of the models after the step. If the trace has no hash but the next step stores the weights, they are
    /// loaded to compute it.
    fn weights_after(
        &mut self,
        recorded: &RecordedStep,
        choice: &Choice,
    ) -> Result<Versions, ReplayError> {
        let mut after = recorded.weights_after.clone();
        let Some(trace) = &self.trace else {
            return Ok(after);
        };
        let stages = self.run.schedule().plan().stages();
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

    /// Restores models and stages to the start of the step.
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
        let context = self.schedule().plan().context();
        let place = CallPlace {
            step: recorded.step,
            steps: context.steps,
            seed: recorded.seed.unwrap_or(context.seed),
            wave: 0,
        };
        let name = self.schedule().plan().stages()[index].name().to_owned();
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
