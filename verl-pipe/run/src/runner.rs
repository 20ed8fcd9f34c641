//! [`Run`]: executes steps of a placed pipeline. One step: feed, drain, count.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use serde_json::Value;
use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::batch::Batch;
use verl_words::data::DataLoaderInterface;
use verl_words::stage::{Access, CancelToken, MetricRoles};

use crate::channel::{CallEnv, CallFailure, CallReport, Event};
use crate::error::RunError;
use crate::host_pool::{Cell, HostPool};
pub use crate::left_over::LeftOver;
use crate::metrics::{StepMetrics, TOKENS, memory_mb, now, number, reduce};
use crate::notice::WaitThresholds;
use crate::records::{
    GROUPS_KEPT, GROUPS_SURPLUS, MEMORY_MB, NO_SAMPLES, RESTARTS, ROW_ERRORS, ROW_S_MAX, ROW_S_P50,
    RowErrorLine, STAGE_S, STEP_S, SYNC_MB, SYNC_S, TOKENS_PER_S, WAVES, of_stage,
};
use crate::recovery::Recovery;
use crate::row_errors::StepRows;
use crate::samples::SampledRows;
use crate::span_log::SpanLog;
use crate::spans::{CallSpan, SpanOutcome};
use crate::spin_wait;
use crate::stall::StallReport;
use crate::start::HostStage;
pub use crate::start::RunOptions;
pub use crate::state::{RunSnapshot, RunState};
use crate::step::{CallId, StepState};
use crate::tap::TapPoint;
use crate::watch::Watch;
use crate::weight_sync::Copies;
use crate::worker::{DeviceCall, Worker};

/// A running pipeline: models loaded, data opened, stages started.
pub struct Run {
    pub(super) schedule: Arc<Schedule>,
    pub(super) options: RunOptions,
    /// One worker a device group.
    pub(super) workers: Vec<Box<dyn Worker>>,
    pub(super) pool: HostPool,
    pub(super) hosts: BTreeMap<usize, HostStage>,
    pub(super) device_events: Receiver<Event>,
    pub(super) host_events: Receiver<Event>,
    pub(super) data: Arc<BTreeMap<String, Arc<dyn DataLoaderInterface>>>,
    pub(super) deadline: Duration,
    /// When a step reports that it is waiting.
    pub(super) thresholds: WaitThresholds,
    /// Reports all other waits.
    pub(super) watch: Watch,
    pub(super) in_order: Vec<bool>,
    /// Copies of models in other groups.
    pub(super) copies: Copies,
    /// What is needed to start worker processes again.
    pub(super) recovery: Recovery,
    /// Events that arrived while a call was repeated.
    pub(super) stashed: VecDeque<Event>,
    pub(super) sampled: SampledRows,
    /// Roles of the metrics that steps record.
    pub(super) roles: MetricRoles,
    pub(super) left: BTreeMap<String, LeftOver>,
    /// Rows of the last step that failed or were slow.
    pub(super) row_errors: Vec<RowErrorLine>,
    /// Calls of the last step, if it failed.
    pub(super) failed_spans: Vec<CallSpan>,
    pub(super) step: u64,
    pub(super) next_call: u64,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("schedule", &self.schedule)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

/// How long calls that were asked to end may take before they are abandoned.
pub(super) const GRACE: Duration = Duration::from_secs(10);

/// A call that was dispatched to a thread.
pub(super) struct InFlight {
    pub(super) id: CallId,
    pub(super) since: Instant,
    pub(super) input: Batch,
    /// Host calls only.
    pub(super) host: Option<HostFlight>,
    /// Number of the worker process that runs it; 0 for threads.
    pub(super) incarnation: u64,
    /// Rows that have arrived from the worker process.
    pub(super) emitted: Vec<u64>,
    /// Rows that arrived from earlier processes; they are dropped when they arrive again.
    pub(super) before: HashSet<u64>,
}

impl InFlight {
    /// The rows of `batch` that have not arrived before; `None` if there are none.
    fn new_rows(&mut self, batch: &Batch) -> Option<Batch> {
        if self.incarnation == 0 {
            return Some(batch.clone());
        }
        let ids = batch.ids().into_iter().enumerate();
        let new: Vec<usize> = ids
            .filter_map(|(row, id)| (!self.before.contains(&id.0)).then_some(row))
            .collect();
        self.emitted.extend(batch.ids().iter().map(|id| id.0));
        match new.len() {
            0 => None,
            count if count == batch.num_rows() => Some(batch.clone()),
            _ => batch.take(&new).ok(),
        }
    }
}

pub(super) struct HostFlight {
    pub(super) units: Vec<Batch>,
    /// Row of the slice at which the first unit starts.
    pub(super) first_row: usize,
    pub(super) cell: Arc<Cell>,
}

/// What calls reported, with their position in the declared order: stage, slice, first row.
pub(super) type Reports = Vec<((usize, usize, usize), CallReport)>;

/// What has happened in a step so far.
pub(super) struct Progress {
    pub(super) state: StepState,
    pub(super) env: Arc<CallEnv>,
    pub(super) in_flight: HashMap<u64, InFlight>,
    /// Whether the worker of each group runs a call.
    pub(super) busy: Vec<bool>,
    pub(super) host_running: usize,
    pub(super) reports: Reports,
    /// Where and when calls ran.
    pub(super) spans: SpanLog,
    /// When the last event arrived.
    pub(super) last_event: Instant,
    /// What the step waits for has been reported since then.
    pub(super) reported: bool,
    /// What the step was waiting for when a call exceeded its deadline.
    pub(super) late: Option<StallReport>,
    /// Rows that were lost, and how long rows took.
    pub(super) rows: StepRows,
    /// Optimiser steps of each model before the step's first update; `None` until then.
    pub(super) steps_before: Option<BTreeMap<String, u64>>,
    /// Stages with a model whose call panicked.
    pub(super) panicked: Vec<usize>,
}

impl Progress {
    /// Whether a worker runs a call.
    fn any_busy(&self) -> bool {
        self.busy.contains(&true)
    }
}

/// Result of a step: metrics, and samples that stages reported.
#[derive(Debug, Clone, Default)]
pub struct StepOutput {
    /// Metrics.
    pub metrics: StepMetrics,
    /// Samples that stages reported, in declared order, followed by `samples_per_step` rows of the step.
    pub samples: Vec<Value>,
    /// Calls as they ran, in the order of their start.
    pub spans: Vec<CallSpan>,
}

impl Run {
    /// The schedule that this run executes.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Opened data sets by name.
    pub fn data(&self) -> &BTreeMap<String, Arc<dyn DataLoaderInterface>> {
        &self.data
    }

    /// Number of completed steps.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// Threads of the host pool that exist, including hung ones.
    pub fn num_host_threads(&self) -> usize {
        self.pool.num_alive()
    }

    /// Runs the next step.
    ///
    /// Once a stage of the step has started to update a model, a cancelled run ends after the step rather than within
    /// it, so that no step is half applied.
    ///
    /// # Errors
    /// The error that ended the step. [`Run::left_over`] lists the models that contain a part of the step.
    pub fn step(&mut self) -> Result<StepOutput, RunError> {
        self.step_at(self.step + 1)
    }

    /// Runs step `step` (counted from 1), regardless of what ran before; the next step is `step + 1`.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn step_at(&mut self, step: u64) -> Result<StepOutput, RunError> {
        let start = Instant::now();
        self.row_errors.clear();
        self.failed_spans.clear();
        self.options.tap.step_begin(step);
        let span = tracing::debug_span!("step", step);
        let _entered = span.enter();
        let mut progress = Progress {
            state: StepState::new(self.schedule.clone(), step, self.in_order.clone())?,
            env: self.env(step),
            in_flight: HashMap::new(),
            busy: vec![false; self.workers.len()],
            host_running: 0,
            reports: Vec::new(),
            spans: SpanLog::new(start),
            last_event: start,
            reported: false,
            late: None,
            rows: StepRows::default(),
            steps_before: None,
            panicked: Vec::new(),
        };
        let result = self.drive(&mut progress);
        if let Err(error) = result {
            self.report_stall(&mut progress, &error);
            progress.env.cancel.cancel();
            self.drain(&mut progress);
            self.failed_spans = progress.spans.finish(&self.schedule);
            self.options.tap.step_failed(step, &error);
            self.note_left_over(&progress);
            self.report_rows(&progress, Some(&error));
            return Err(error);
        }
        self.options.tap.step_end(step);
        self.step = step;
        self.keep_recovery_points();
        self.report_rows(&progress, None);
        self.report_idle_updates(&progress);
        let rows = self.sample_rows(&progress);
        let mut output = self.count(progress, step, start);
        output.samples.extend(rows);
        Ok(output)
    }

    pub(super) fn env(&self, step: u64) -> Arc<CallEnv> {
        Arc::new(CallEnv {
            step,
            steps: self.schedule.plan().context().steps,
            seed: self.schedule.plan().context().seed,
            cancel: CancelToken::default(),
            deadline: self.deadline,
        })
    }

    pub(super) fn drive(&mut self, progress: &mut Progress) -> Result<(), RunError> {
        while !progress.state.is_done() {
            if self.options.cancel.is_cancelled() && progress.steps_before.is_none() {
                return Err(RunError::Cancelled {
                    step: progress.env.step,
                });
            }
            self.check_rows(progress)?;
            let statistics = |stage| self.statistics(progress, stage);
            if let Some(error) = progress.state.no_signal(statistics) {
                return Err(error);
            }
            self.dispatch(progress)?;
            if progress.in_flight.is_empty() {
                if progress.state.is_done() {
                    break;
                }
                return Err(RunError::Stalled {
                    step: progress.env.step,
                    waits: progress.state.waits(),
                });
            }
            if let Some(event) = self.wait(progress) {
                self.note_event(progress, event.call());
                self.handle(progress, event)?;
            }
            self.check_deadlines(progress)?;
            self.report_if_quiet(progress);
        }
        self.check_rows(progress)
    }

    /// What a stage has recorded in the step so far, as text.
    fn statistics(&self, progress: &Progress, stage: usize) -> String {
        let own = progress
            .reports
            .iter()
            .filter(|(place, _)| place.0 == stage);
        let mut own: Vec<&(_, CallReport)> = own.collect();
        own.sort_by_key(|(place, _)| *place);
        let values = reduce(own.iter().flat_map(|(_, report)| &report.records));
        let texts = values
            .iter()
            .map(|(name, value)| format!("{name} {}", number(*value)));
        texts.collect::<Vec<_>>().join(", ")
    }

    /// Dispatches ready slices to the worker and the pool while they have capacity.
    pub(super) fn dispatch(&mut self, progress: &mut Progress) -> Result<(), RunError> {
        for group in 0..self.workers.len() {
            if progress.busy[group] {
                continue;
            }
            // Weights travel only from a home that is idle: its answer would wait for its call, and its rows for the runner.
            let ready = progress.state.ready(Place::Group(group)).iter();
            let mut ready = ready.filter(|id| self.can_sync(id.0, &progress.busy));
            if let Some(id) = ready.next().copied() {
                self.dispatch_device(progress, group, id)?;
            }
        }
        // More jobs than threads, so that no pool thread waits for this thread between two jobs.
        let limit = 2 * self.pool.size();
        while progress.host_running < limit {
            let ready = progress.state.ready(Place::Host);
            let Some(id) = ready
                .iter()
                .copied()
                .find(|id| self.hosts[&id.0].can_take())
            else {
                break;
            };
            let input = self.begin(progress, id)?;
            let units = self.units(id.0, &input);
            self.submit(progress, id, input, units, 0)?;
        }
        Ok(())
    }

    pub(super) fn begin(&mut self, progress: &mut Progress, id: CallId) -> Result<Batch, RunError> {
        let input = progress.state.input(id)?;
        progress.state.begin(id);
        let rows = progress.state.rows_of(id);
        let point = self.point(progress, id, &rows);
        self.options.tap.input(point, &input);
        if self.updates(id.0) {
            let gate = self.options.tap.gate(point, &input);
            gate.map_err(|anomaly| RunError::Anomaly { anomaly })?;
        }
        Ok(input)
    }

    pub(super) fn point<'a>(
        &'a self,
        progress: &Progress,
        id: CallId,
        rows: &'a std::ops::Range<usize>,
    ) -> TapPoint<'a> {
        TapPoint {
            step: progress.env.step,
            stage: self.name(id.0),
            index: id.0,
            wave: progress.state.wave(id),
            slice: id.1,
            rows,
        }
    }

    pub(super) fn updates(&self, stage: usize) -> bool {
        let models = &self.schedule.plan().stages()[stage].spec().models;
        models.iter().any(|(_, access)| *access == Access::Update)
    }

    pub(super) fn name(&self, stage: usize) -> &str {
        self.schedule.plan().stages()[stage].name()
    }

    pub(super) fn new_call(&mut self) -> u64 {
        self.next_call += 1;
        self.next_call
    }

    pub(super) fn dispatch_device(
        &mut self,
        progress: &mut Progress,
        group: usize,
        id: CallId,
    ) -> Result<(), RunError> {
        self.note_update(progress, group, id.0)?;
        self.sync_copies_of(id.0)?;
        let input = self.begin(progress, id)?;
        let call = self.new_call();
        progress.busy[group] = true;
        self.pool.set_model_works(true);
        let flight = InFlight {
            id,
            since: Instant::now(),
            input: input.clone(),
            host: None,
            incarnation: self.recovery.incarnation(group),
            emitted: Vec::new(),
            before: HashSet::new(),
        };
        let called = self.workers[group].call(DeviceCall {
            call,
            stage: id.0,
            input,
            wave: progress.state.wave(id),
            env: progress.env.clone(),
        });
        match called {
            Ok(()) => {
                progress.in_flight.insert(call, flight);
                Ok(())
            }
            Err(RunError::Lost { reason, .. }) if self.recovers(progress, id.0) => {
                self.recover_call(progress, flight, CallFailure::Lost(reason))
            }
            Err(error) => Err(error),
        }
    }

    /// The next event, or `None` when deadlines and the cancel token are due for a check.
    pub(super) fn wait(&mut self, progress: &Progress) -> Option<Event> {
        if let Some(event) = self.stashed.pop_front() {
            return Some(event);
        }
        // While many slices wait for host threads, rows from a device stay in the bounded channel, which makes `emit`
        // block. Host calls need no device, so the backlog always shrinks.
        let behind = progress.state.ready(Place::Host).len() >= self.options.backlog
            && progress.host_running > 0;
        if !progress.any_busy()
            && let Some(event) = spin_wait::spin(|| {
                let host = self.host_events.try_recv().ok();
                host.or_else(|| self.device_events.try_recv().ok())
            })
        {
            return Some(event);
        }
        let timeout = self.next_check(progress);
        if behind {
            return self.host_events.recv_timeout(timeout).ok();
        }
        crossbeam_channel::select! {
            recv(self.host_events) -> event => event.ok(),
            recv(self.device_events) -> event => event.ok(),
            default(timeout) => None,
        }
    }

    pub(super) fn handle(&mut self, progress: &mut Progress, event: Event) -> Result<(), RunError> {
        match event {
            Event::Rows { call, batch } => {
                let Some(flight) = progress.in_flight.get_mut(&call) else {
                    return Ok(());
                };
                let (id, input) = (flight.id, flight.input.clone());
                let Some(batch) = flight.new_rows(&batch) else {
                    return Ok(());
                };
                progress.spans.emitted(id, batch.num_rows());
                self.take_rows(progress, id, &input, &batch)
            }
            Event::Done {
                call,
                report,
                result,
            } => {
                let Some(flight) = progress.in_flight.remove(&call) else {
                    return Ok(());
                };
                let outcome = SpanOutcome::of(&result);
                self.note_device_call(progress, call, &flight, &report, outcome);
                if let Err(CallFailure::Lost(reason)) = &result
                    && self.recovers(progress, flight.id.0)
                {
                    let lost = CallFailure::Lost(reason.clone());
                    return self.recover_call(progress, flight, lost);
                }
                if let Place::Group(group) = self.schedule.places()[flight.id.0] {
                    progress.busy[group] = false;
                }
                self.note_changed_weights(flight.id.0);
                self.pool.set_model_works(progress.any_busy());
                progress
                    .reports
                    .push(((flight.id.0, flight.id.1, 0), report));
                if matches!(result, Err(CallFailure::Panic(_))) {
                    progress.panicked.push(flight.id.0);
                }
                match result {
                    Ok(()) if self.is_superseded(&flight) => {
                        // The process that replaced it does not know this call.
                        let lost = "its process was replaced".to_owned();
                        progress.reports.pop();
                        self.recover_call(progress, flight, CallFailure::Lost(lost))
                    }
                    Ok(()) => {
                        let wave = progress.state.wave(flight.id);
                        self.log_call(flight.id.0, &flight.input, wave, &progress.env);
                        progress.state.finish(flight.id)
                    }
                    Err(failure) => Err(self.failed(progress, flight.id, &flight.input, failure)),
                }
            }
            Event::HostDone { call } => {
                let Some(flight) = progress.in_flight.remove(&call) else {
                    return Ok(());
                };
                progress.host_running -= 1;
                self.end_host_call(progress, flight, None)
            }
        }
    }

    pub(super) fn count(
        &mut self,
        mut progress: Progress,
        step: u64,
        start: Instant,
    ) -> StepOutput {
        progress.reports.sort_by_key(|(place, _)| *place);
        let epoch = progress.state.first_row().map_or(0, |id| id.epoch());
        let records = progress
            .reports
            .iter()
            .flat_map(|(_, report)| &report.records);
        let mut values = reduce(records);
        for ((stage, ..), report) in &progress.reports {
            *values
                .entry(of_stage(&STAGE_S, self.name(*stage)))
                .or_default() += report.seconds;
        }
        for stage in
            (0..self.schedule.places().len()).filter(|s| self.schedule.tolerates_row_errors(*s))
        {
            let rows = progress.rows.num_lost(stage);
            values.insert(of_stage(&ROW_ERRORS, self.name(stage)), rows as f64);
        }
        for (stage, times) in progress.rows.times() {
            let [median, longest] = times;
            values.insert(of_stage(&ROW_S_P50, self.name(stage)), median);
            values.insert(of_stage(&ROW_S_MAX, self.name(stage)), longest);
        }
        for stage in self.updates_of_step() {
            let idle = f64::from(u8::from(!progress.state.was_called(stage)));
            let name = of_stage(&NO_SAMPLES, self.name(stage));
            values.entry(name).or_insert(idle);
        }
        if let Some(counts) = progress.state.wave_counts() {
            let name = self.name(counts.filter);
            for (what, count) in [
                (&WAVES, counts.waves),
                (&GROUPS_KEPT, counts.kept),
                (&GROUPS_SURPLUS, counts.surplus),
            ] {
                values.insert(of_stage(what, name), count as f64);
            }
        }
        let restarts = std::mem::take(&mut self.recovery.restarts);
        if restarts > 0 {
            values.insert(RESTARTS.name.to_owned(), restarts as f64);
        }
        if self.copies.exist() {
            let cost = std::mem::take(&mut self.copies.cost);
            values.insert(SYNC_S.name.to_owned(), cost.seconds);
            values.insert(SYNC_MB.name.to_owned(), cost.bytes as f64 / 1e6);
        }
        let step_s = start.elapsed().as_secs_f64();
        values.insert(STEP_S.name.to_owned(), step_s);
        if let Some(tokens) = values.get(TOKENS).copied() {
            values.insert(TOKENS_PER_S.name.to_owned(), tokens / step_s.max(1e-9));
        }
        values.extend(memory_mb().map(|mb| (MEMORY_MB.name.to_owned(), mb)));
        let samples = progress
            .reports
            .into_iter()
            .flat_map(|(_, report)| report.samples)
            .collect();
        StepOutput {
            metrics: StepMetrics {
                step,
                epoch,
                timestamp: now(),
                values,
                roles: self.roles.clone(),
            },
            samples,
            spans: progress.spans.finish(&self.schedule),
        }
    }
}
