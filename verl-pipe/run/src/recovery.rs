//! Worker processes that are lost and started again.
//!
//! The engine keeps what a worker process needs to become what it was: its state at some earlier step, and the calls since
//! then that changed its state, with their inputs. A process that was killed, stopped or cut off, or whose call exceeded its
//! deadline, is started again with the next incarnation. It loads its models, gets the state, and runs these calls again;
//! their rows were taken before and are dropped. Then the call that was lost runs again, and of its rows those are dropped
//! that had already arrived. A call is a function of state, input and seed, so nothing changes but the time.
//!
//! A connection belongs to one incarnation, so nothing that an old process sends late is taken.
//!
//! Workers that are threads have none of this, and pay nothing for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::batch::Batch;
use verl_words::stage::{Access, CancelToken};

use crate::call_error::call_error;
use crate::channel::{CallEnv, CallFailure, Event, TICK};
use crate::error::RunError;
use crate::host_calls::describe_rows;
use crate::runner::{InFlight, Progress, Run};
use crate::worker::{
    Answer, DeviceCall, ProcessOptions, ProcessWorker, Query, SnapshotHandle, StoredStates,
    WorkerStart,
};

/// What the engine keeps to start worker processes again.
pub(super) struct Recovery {
    options: Option<ProcessOptions>,
    start: WorkerStart,
    /// By device group; `None` for a thread.
    groups: Vec<Option<GroupRecovery>>,
    /// How often a process was started again since this was last taken.
    pub(super) restarts: u64,
}

/// What the engine keeps for one worker process.
#[derive(Default)]
struct GroupRecovery {
    /// Number of the current process, from 1.
    incarnation: u64,
    /// States of models and stages at the last snapshot; `None`: as loaded.
    stored: Option<(StoredStates, StoredStates)>,
    /// Calls since then that may have changed a state, in order.
    log: Vec<LoggedCall>,
    /// Completed steps since then.
    steps: u64,
    /// Stages that have state.
    stateful: BTreeSet<usize>,
    /// Completed steps of the run when the process was last lost, and how often it was lost then.
    losses: (u64, u32),
}

/// A call that a new process runs again.
#[derive(Clone)]
struct LoggedCall {
    stage: usize,
    input: Batch,
    wave: u64,
    env: Arc<CallEnv>,
    /// Copies that it read, with the number of changes of their models before it.
    copies: Vec<(String, u64)>,
}

impl Recovery {
    pub(super) fn new(
        start: WorkerStart,
        options: Option<ProcessOptions>,
        is_process: &[bool],
    ) -> Recovery {
        let of_process = || GroupRecovery {
            incarnation: 1,
            ..GroupRecovery::default()
        };
        let groups = is_process
            .iter()
            .map(|is_process| is_process.then(of_process));
        Recovery {
            options,
            start,
            groups: groups.collect(),
            restarts: 0,
        }
    }

    /// The number of the process of a group; 0 for a thread.
    pub(super) fn incarnation(&self, group: usize) -> u64 {
        let group = self.groups.get(group).and_then(Option::as_ref);
        group.map_or(0, |group| group.incarnation)
    }

    fn of(&mut self, group: usize) -> Option<&mut GroupRecovery> {
        self.groups.get_mut(group)?.as_mut()
    }

    /// Whether a call of `stage` may change the state of a worker process.
    fn changes_state(&self, schedule: &Schedule, group: usize, stage: usize) -> bool {
        let group = self.groups.get(group).and_then(Option::as_ref);
        group.is_some_and(|group| updates(schedule, stage) || group.stateful.contains(&stage))
    }

    /// The groups whose worker is a process.
    fn processes(&self) -> Vec<usize> {
        let groups = self.groups.iter().enumerate();
        groups
            .filter_map(|(index, group)| group.as_ref().map(|_| index))
            .collect()
    }
}

/// Whether a call of `stage` updates a model.
fn updates(schedule: &Schedule, stage: usize) -> bool {
    let models = &schedule.plan().stages()[stage].spec().models;
    models.iter().any(|(_, access)| *access == Access::Update)
}

impl Run {
    /// Records which stages of worker processes have state.
    pub(super) fn begin_recovery(&mut self) -> Result<(), RunError> {
        for group in self.recovery.processes() {
            self.find_stateful(group)?;
        }
        Ok(())
    }

    /// Takes a snapshot that the worker keeps until the handle is dropped.
    fn find_stateful(&mut self, group: usize) -> Result<SnapshotHandle, RunError> {
        let handle = SnapshotHandle::new(self.workers[group].dropped().clone());
        let query = Query::Snapshot {
            id: handle.id,
            quick: true,
        };
        let answer = self.workers[group].ask(query, self.deadline)?;
        let Answer::Snapshot { stages, .. } = answer else {
            return Err(self.unexpected(group));
        };
        let all = self.schedule.plan().stages().iter().enumerate();
        let found = all.filter(|(_, stage)| stages.contains_key(stage.name()));
        let found: Vec<usize> = found.map(|(index, _)| index).collect();
        if let Some(recovery) = self.recovery.of(group) {
            recovery.stateful.extend(found);
        }
        Ok(handle)
    }

    /// After a call that succeeded: logs it if its worker is a process and it may have changed a state.
    pub(super) fn log_call(&mut self, stage: usize, input: &Batch, wave: u64, env: &Arc<CallEnv>) {
        let Place::Group(group) = self.schedule.places()[stage] else {
            return;
        };
        if !self.recovery.changes_state(&self.schedule, group, stage) {
            return;
        }
        let copies = self.copies.read_by(&self.schedule, stage);
        if let Some(recovery) = self.recovery.of(group) {
            recovery.log.push(LoggedCall {
                stage,
                input: input.clone(),
                wave,
                env: env.clone(),
                copies,
            });
        }
    }

    /// After a completed step: takes a snapshot of each worker process for which one is due. If that fails, the calls since
    /// the last one are kept.
    pub(super) fn keep_recovery_points(&mut self) {
        let every = self.schedule.plan().pipe().run.worker_snapshot_steps.max(1);
        for group in self.recovery.processes() {
            let Some(recovery) = self.recovery.of(group) else {
                continue;
            };
            recovery.steps += 1;
            if recovery.steps < every || recovery.log.is_empty() {
                continue;
            }
            recovery.steps = 0;
            if let Err(error) = self.keep_recovery_point(group) {
                tracing::warn!(
                    "no snapshot of the worker of `{}`, so a new process would repeat more calls: {error}",
                    self.schedule.groups()[group].name
                );
            }
        }
    }

    /// Makes the current state of all worker processes the one that new processes get.
    ///
    /// # Errors
    /// If a state cannot be read.
    pub(super) fn rebase_recovery(&mut self) -> Result<(), RunError> {
        for group in self.recovery.processes() {
            self.keep_recovery_point(group)?;
        }
        Ok(())
    }

    fn keep_recovery_point(&mut self, group: usize) -> Result<(), RunError> {
        let handle = self.find_stateful(group)?;
        let query = Query::Store {
            id: handle.id,
            known: BTreeMap::new(),
            trained_only: true,
        };
        let answer = self.workers[group].ask(query, self.deadline)?;
        let Answer::Stored { models, stages } = answer else {
            return Err(self.unexpected(group));
        };
        let trained = self.schedule.plan().models().iter();
        let mut trained = trained.filter(|model| !model.updaters.is_empty());
        let is_missing =
            |name: &String| matches!(models.get(name), Some((_, state)) if state.is_none());
        if let Some((stage, _)) = stages.iter().find(|(_, (_, state))| state.is_none()) {
            return Err(crate::worker::hosted::failed(
                "stage",
                stage,
                "store",
                "its kind does not implement `store`",
            ));
        }
        if let Some(model) = trained.find(|model| is_missing(&model.name)) {
            return Err(crate::worker::hosted::failed(
                "model",
                &model.name,
                "store",
                "its kind does not implement `store`",
            ));
        }
        if let Some(recovery) = self.recovery.of(group) {
            recovery.stored = Some((models, stages));
            recovery.log.clear();
            recovery.steps = 0;
        }
        Ok(())
    }

    /// Starts every lost worker process again, after `error`.
    ///
    /// # Errors
    /// `error` if none is lost; the last error if one was lost too often in this step.
    pub(super) fn revive_any(&mut self, error: RunError) -> Result<(), RunError> {
        let lost = self.recovery.processes().into_iter();
        let lost: Vec<usize> = lost
            .filter(|group| self.workers[*group].is_lost())
            .collect();
        let Some((first, others)) = lost.split_first() else {
            return Err(error);
        };
        self.revive(*first, error)?;
        for group in others {
            let reason = "its process was lost as well".to_owned();
            let worker = self.schedule.groups()[*group].name.clone();
            self.revive(*group, RunError::Lost { worker, reason })?;
        }
        Ok(())
    }

    /// Starts the lost worker process of `group` again, after `error`.
    ///
    /// # Errors
    /// `error` if the worker is a thread, or is not lost; the last error if it was lost too often in this step.
    pub(super) fn revive(&mut self, group: usize, error: RunError) -> Result<(), RunError> {
        let mut error = error;
        let retries = self.schedule.plan().pipe().run.worker_retries;
        loop {
            let done = self.step;
            let is_lost = self.workers[group].is_lost();
            let Some(recovery) = self.recovery.of(group).filter(|_| is_lost) else {
                return Err(error);
            };
            if recovery.losses.0 != done {
                recovery.losses = (done, 0);
            }
            recovery.losses.1 += 1;
            let losses = recovery.losses.1;
            if losses > retries {
                return Err(error.after_retries(retries));
            }
            let cause = error.without_help();
            tracing::warn!(
                "{cause}; starting its process again ({losses} of {retries} in this step)"
            );
            match self.restart(group) {
                Ok(()) => return Ok(()),
                Err(again @ RunError::Lost { .. }) => error = again,
                Err(other) => return Err(other),
            }
        }
    }

    /// Starts the next process of `group`, with the state of the one before.
    fn restart(&mut self, group: usize) -> Result<(), RunError> {
        let lost = || RunError::Lost {
            worker: self.schedule.groups()[group].name.clone(),
            reason: "it cannot be started again".to_owned(),
        };
        let options = self.recovery.options.clone().ok_or_else(lost)?;
        let incarnation = self.recovery.incarnation(group) + 1;
        self.recovery.restarts += 1;
        let (stored, log) = match self.recovery.of(group) {
            Some(recovery) => {
                recovery.incarnation = incarnation;
                (recovery.stored.clone(), recovery.log.clone())
            }
            None => (None, Vec::new()),
        };
        let start = &self.recovery.start;
        // Two processes might not fit on the device.
        self.workers[group].abandon();
        let loading = ProcessWorker::begin(start, &options, group, incarnation)?;
        let worker = loading.loaded(self.deadline)?;
        self.workers[group] = Box::new(worker);
        self.copies.stale_in(group);
        let restored = self.restore_process(group, stored, &log);
        if restored.is_err() {
            // Nothing may use a state that was restored in part.
            self.workers[group].abandon();
        }
        restored
    }

    fn restore_process(
        &mut self,
        group: usize,
        stored: Option<(StoredStates, StoredStates)>,
        log: &[LoggedCall],
    ) -> Result<(), RunError> {
        if let Some((models, stages)) = stored {
            let recall = Query::Recall { models, stages };
            self.workers[group].ask(recall, self.deadline)?;
        }
        log.iter().try_for_each(|call| self.repeat(group, call))
    }

    /// Whether `flight` ended in a process that another has replaced, which must still run the call.
    pub(super) fn is_superseded(&self, flight: &InFlight) -> bool {
        let Place::Group(group) = self.schedule.places()[flight.id.0] else {
            return false;
        };
        flight.incarnation < self.recovery.incarnation(group)
            && self
                .recovery
                .changes_state(&self.schedule, group, flight.id.0)
    }

    /// Runs a call again whose rows were taken before. Events of other calls are kept for later.
    fn repeat(&mut self, group: usize, call: &LoggedCall) -> Result<(), RunError> {
        let name = self.schedule.groups()[group].name.clone();
        let lost = |reason: String| RunError::Lost {
            worker: name.clone(),
            reason,
        };
        if call.copies != self.copies.read_by(&self.schedule, call.stage) {
            return Err(lost(format!(
                "its state cannot be restored, since `{}` read weights that have changed since; set `run.worker_snapshot_steps` to 1",
                self.name(call.stage)
            )));
        }
        self.sync_copies_once(call.stage)?;
        let number = self.new_call();
        let env = CallEnv {
            cancel: CancelToken::default(),
            ..*call.env
        };
        let step = env.step;
        self.workers[group].call(DeviceCall {
            call: number,
            stage: call.stage,
            input: call.input.clone(),
            wave: call.wave,
            env: Arc::new(env),
        })?;
        let since = Instant::now();
        while since.elapsed() < self.deadline {
            match self.device_events.recv_timeout(TICK) {
                Ok(Event::Done {
                    call: c, result, ..
                }) if c == number => {
                    let rows = describe_rows(&call.input);
                    let failed =
                        |failure| call_error(&self.schedule, step, call.stage, rows, failure);
                    return result.map_err(failed);
                }
                Ok(event) if event.call() == number => {}
                Ok(other) => self.stashed.push_back(other),
                Err(_) => {}
            }
        }
        self.workers[group].abandon();
        Err(lost(format!(
            "a repeated call of `{}` did not end within {:.1} s",
            self.name(call.stage),
            self.deadline.as_secs_f64()
        )))
    }

    /// Whether the worker of `stage` is a process, and the step is not being cancelled.
    pub(super) fn recovers(&self, progress: &Progress, stage: usize) -> bool {
        let is_process = match self.schedule.places()[stage] {
            Place::Group(group) => self.recovery.incarnation(group) > 0,
            Place::Host => false,
        };
        // A cancelled run still completes a step that has begun to update a model.
        let ends = self.options.cancel.is_cancelled() && progress.steps_before.is_none();
        is_process && !progress.env.cancel.is_cancelled() && !ends
    }

    /// Runs the call of `flight` again, whose worker process is lost because of `failure`.
    ///
    /// # Errors
    /// The last error, if the process was lost too often in this step.
    pub(super) fn recover_call(
        &mut self,
        progress: &mut Progress,
        flight: InFlight,
        failure: CallFailure,
    ) -> Result<(), RunError> {
        let (stage, step) = (flight.id.0, progress.env.step);
        let Place::Group(group) = self.schedule.places()[stage] else {
            return Err(self.failed(progress, flight.id, &flight.input, failure));
        };
        // The rows that still have to be made.
        let rows = describe_rows(&flight.input);
        let mut failed = call_error(&self.schedule, step, stage, rows, failure);
        // If not, it was replaced before its end was seen.
        let mut revives =
            flight.incarnation == self.recovery.incarnation(group) || self.workers[group].is_lost();
        let mut flight = flight;
        let emitted = std::mem::take(&mut flight.emitted);
        flight.before.extend(emitted);
        loop {
            if revives {
                let since = Instant::now();
                self.revive_any(failed)?;
                // The calls of other groups were not watched meanwhile.
                for other in progress.in_flight.values_mut() {
                    if other.host.is_none() {
                        other.since += since.elapsed();
                    }
                }
            }
            match self.call_again_in_step(progress, group, &flight) {
                Err(error @ RunError::Lost { .. }) => failed = error,
                done => return done,
            }
            revives = true;
        }
    }

    fn call_again_in_step(
        &mut self,
        progress: &mut Progress,
        group: usize,
        flight: &InFlight,
    ) -> Result<(), RunError> {
        let stage = flight.id.0;
        self.sync_copies_once(stage)?;
        let call = self.new_call();
        self.workers[group].call(DeviceCall {
            call,
            stage,
            input: flight.input.clone(),
            wave: progress.state.wave(flight.id),
            env: progress.env.clone(),
        })?;
        let again = InFlight {
            id: flight.id,
            since: Instant::now(),
            input: flight.input.clone(),
            host: None,
            incarnation: self.recovery.incarnation(group),
            emitted: Vec::new(),
            before: flight.before.clone(),
        };
        progress.in_flight.insert(call, again);
        Ok(())
    }
}
