//! [`Run`]: executes steps of a placed pipeline. One step: feed, drain, count.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use serde_json::Value;

use crate::batch::Batch;
use crate::data::DataLoaderInterface;
use crate::resource::Snapshot;
use crate::run::channel::{CallEnv, CallFailure, CallReport, Event, TICK};
use crate::run::error::RunError;
use crate::run::host_pool::{Cell, HostJob, HostPool, MAX_HUNG};
use crate::run::metrics::{StepMetrics, TOKENS, memory_mb, now, reduce};
use crate::run::step::{CallId, StepState};
use crate::run::worker::{DeviceCall, Worker, start_stage};
use crate::schedule::placement::{Place, Schedule};
use crate::stage::{Cadence, CancelToken, Cardinality, Models, RowRule, Stage, StageError};
use crate::trace::tap::{NoTap, Tap, TapPoint};

/// How long calls that were asked to end may take before they are given up.
const GRACE: Duration = Duration::from_secs(10);

/// What a run is started with besides the schedule.
#[derive(Clone)]
pub struct RunOptions {
    /// Ends the run when asked to.
    pub cancel: CancelToken,
    /// Sees every edge.
    pub tap: Arc<dyn Tap>,
    /// Threads of the host pool; at least 2.
    pub host_threads: usize,
    /// Emitted batches that may wait between a device worker and the engine, and slices that may wait for a host
    /// thread, before `emit` blocks.
    pub backlog: usize,
}

impl Default for RunOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        RunOptions {
            cancel: CancelToken::default(),
            tap: Arc::new(NoTap),
            host_threads: threads.max(2),
            backlog: 16,
        }
    }
}

/// State of all models and stages between two steps.
#[derive(Debug, Clone)]
pub struct RunSnapshot {
    /// Steps that were done.
    pub step: u64,
    /// Models by name.
    pub models: BTreeMap<String, Snapshot>,
    /// Stages by name, those that have state.
    pub stages: BTreeMap<String, Snapshot>,
}

/// A stage of the host pool between calls.
pub(super) struct HostStage {
    /// Never run; copied for each call that runs side by side. `None` for a stage that cannot be copied.
    prototype: Option<Box<dyn Stage>>,
    /// Objects that no call uses now.
    free: Vec<Box<dyn Stage>>,
    /// The stage offered state at the start, so that an object that is lost cannot be made again.
    has_state: bool,
}

/// A running pipeline: models loaded, data opened, stages started.
pub struct Run {
    schedule: Arc<Schedule>,
    options: RunOptions,
    pub(super) worker: Worker,
    pool: HostPool,
    pub(super) hosts: BTreeMap<usize, HostStage>,
    device_events: Receiver<Event>,
    host_events: Receiver<Event>,
    data: Arc<BTreeMap<String, Arc<dyn DataLoaderInterface>>>,
    pub(super) deadline: Duration,
    in_order: Vec<bool>,
    pub(super) step: u64,
    next_call: u64,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("schedule", &self.schedule)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl Schedule {
    /// Opens data, loads models on their workers, starts stages.
    ///
    /// # Errors
    /// When data, a model or a stage cannot be opened, loaded or started.
    pub fn start(self, options: RunOptions) -> Result<Run, RunError> {
        let schedule = Arc::new(self);
        let plan = &schedule.plan;
        let mut data: BTreeMap<String, Arc<dyn DataLoaderInterface>> = BTreeMap::new();
        for decl in &plan.pipe.data {
            let opened = (decl.open)(&plan.context);
            let opened = opened.map_err(|source| RunError::Data {
                name: decl.name.clone(),
                source,
            })?;
            data.insert(decl.name.clone(), opened);
        }
        let data = Arc::new(data);
        let deadline = seconds(plan.pipe.run.stage_deadline_s);
        let (device_sender, device_events) = bounded(options.backlog.max(1));
        let (host_sender, host_events) = unbounded();
        let worker = Worker::start(schedule.clone(), 0, data.clone(), device_sender, deadline)?;
        let pool = start_pool(&options, host_sender)?;
        let mut hosts = BTreeMap::new();
        for index in schedule.stages_at(Place::Host) {
            hosts.insert(index, HostStage::start(&schedule, index, &data)?);
        }
        let in_order = (0..plan.stages.len())
            .map(|index| {
                hosts
                    .get(&index)
                    .is_none_or(|host: &HostStage| host.prototype.is_none())
            })
            .collect();
        Ok(Run {
            schedule,
            options,
            worker,
            pool,
            hosts,
            device_events,
            host_events,
            data,
            deadline,
            in_order,
            step: 0,
            next_call: 0,
        })
    }
}

/// A duration from seconds of a configuration, whatever they are.
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::from_secs(365 * 86_400))
}

fn start_pool(options: &RunOptions, events: Sender<Event>) -> Result<HostPool, RunError> {
    HostPool::start(options.host_threads.max(2), events).map_err(no_thread)
}

fn no_thread(error: std::io::Error) -> RunError {
    RunError::Lost {
        worker: "host pool".to_owned(),
        reason: format!("no thread can be started: {error}"),
    }
}

impl HostStage {
    fn start(
        schedule: &Schedule,
        index: usize,
        data: &BTreeMap<String, Arc<dyn DataLoaderInterface>>,
    ) -> Result<HostStage, RunError> {
        let mut stage = start_stage(schedule, index, data, &mut Models::new())?;
        let has_state = stage.snapshot().is_ok_and(|state| state.is_some());
        let spec = &schedule.plan.stages[index].spec;
        let side_by_side = matches!(spec.cardinality, Cardinality::Row | Cardinality::Group)
            && matches!(
                spec.rows,
                RowRule::Same | RowRule::Expand(_) | RowRule::Filter | RowRule::Sink
            )
            && spec.cadence == Cadence::Step;
        let copy = side_by_side.then(|| stage.duplicate()).flatten();
        Ok(match copy {
            Some(copy) => HostStage {
                prototype: Some(stage),
                free: vec![copy],
                has_state,
            },
            None => HostStage {
                prototype: None,
                free: vec![stage],
                has_state,
            },
        })
    }

    /// An object to run, if one can be had now.
    fn take(&mut self) -> Option<Box<dyn Stage>> {
        self.free
            .pop()
            .or_else(|| self.prototype.as_ref()?.duplicate())
    }

    fn can_take(&self) -> bool {
        self.prototype.is_some() || !self.free.is_empty()
    }

    pub(super) fn resting(&mut self) -> Option<&mut Box<dyn Stage>> {
        self.prototype.as_mut().or_else(|| self.free.first_mut())
    }
}

/// A call that was handed to a thread.
struct InFlight {
    id: CallId,
    since: Instant,
    input: Batch,
    /// Host calls only.
    host: Option<HostFlight>,
}

struct HostFlight {
    units: Vec<Batch>,
    /// Row of the slice at which the first unit begins.
    first_row: usize,
    cell: Arc<Cell>,
}

/// What calls reported, with the place in the declared order: stage, slice, first row.
type Reports = Vec<((usize, usize, usize), CallReport)>;

/// What happened in a step so far.
struct Progress {
    state: StepState,
    env: Arc<CallEnv>,
    in_flight: HashMap<u64, InFlight>,
    device_busy: bool,
    host_running: usize,
    reports: Reports,
    /// Rows that were given null, by stage, with the first reason.
    row_errors: BTreeMap<usize, (usize, String)>,
}

/// Result of a step: metrics, and samples that stages gave away.
#[derive(Debug, Clone, Default)]
pub struct StepOutput {
    /// Metrics.
    pub metrics: StepMetrics,
    /// Samples in declared order.
    pub samples: Vec<Value>,
}

impl Run {
    /// What is run.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Opened data sets by name.
    pub fn data(&self) -> &BTreeMap<String, Arc<dyn DataLoaderInterface>> {
        &self.data
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// Threads of the host pool that exist, hung ones included.
    pub fn num_host_threads(&self) -> usize {
        self.pool.num_alive()
    }

    /// Runs the next step.
    ///
    /// # Errors
    /// What ended it. An error before the update's call leaves weights as they were.
    pub fn step(&mut self) -> Result<StepOutput, RunError> {
        self.step_at(self.step + 1)
    }

    /// Runs step `step` (counted from 1), whatever was run before; the next one is the one after.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn step_at(&mut self, step: u64) -> Result<StepOutput, RunError> {
        let start = Instant::now();
        let span = tracing::debug_span!("step", step);
        let _entered = span.enter();
        let mut progress = Progress {
            state: StepState::new(self.schedule.clone(), step, self.in_order.clone())?,
            env: self.env(step),
            in_flight: HashMap::new(),
            device_busy: false,
            host_running: 0,
            reports: Vec::new(),
            row_errors: BTreeMap::new(),
        };
        let result = self.drive(&mut progress);
        if let Err(error) = result {
            progress.env.cancel.cancel();
            self.drain(&mut progress);
            return Err(error);
        }
        self.options.tap.step_end(step);
        self.step = step;
        Ok(self.count(progress, step, start))
    }

    fn env(&self, step: u64) -> Arc<CallEnv> {
        Arc::new(CallEnv {
            step,
            steps: self.schedule.plan.context.steps,
            seed: self.schedule.plan.context.seed,
            cancel: CancelToken::default(),
            deadline: self.deadline,
        })
    }

    fn drive(&mut self, progress: &mut Progress) -> Result<(), RunError> {
        while !progress.state.is_done() {
            if self.options.cancel.is_cancelled() {
                return Err(RunError::Cancelled {
                    step: progress.env.step,
                });
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
                self.handle(progress, event)?;
            }
            self.check_deadlines(progress)?;
        }
        Ok(())
    }

    /// Hands ready slices to whoever is free.
    fn dispatch(&mut self, progress: &mut Progress) -> Result<(), RunError> {
        if !progress.device_busy
            && let Some(id) = progress.state.ready(Place::Group(0)).first().copied()
        {
            self.dispatch_device(progress, id)?;
        }
        // A few jobs more than threads, so that no thread waits for this one between two jobs.
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

    fn begin(&mut self, progress: &mut Progress, id: CallId) -> Result<Batch, RunError> {
        let input = progress.state.input(id)?;
        progress.state.begin(id);
        self.options.tap.input(
            self.point(progress, id, &progress.state.rows_of(id)),
            &input,
        );
        Ok(input)
    }

    fn point<'a>(
        &'a self,
        progress: &Progress,
        id: CallId,
        rows: &'a std::ops::Range<usize>,
    ) -> TapPoint<'a> {
        TapPoint {
            step: progress.env.step,
            stage: self.name(id.0),
            slice: id.1,
            rows,
        }
    }

    pub(super) fn name(&self, stage: usize) -> &str {
        &self.schedule.plan.stages[stage].name
    }

    fn new_call(&mut self) -> u64 {
        self.next_call += 1;
        self.next_call
    }

    fn dispatch_device(&mut self, progress: &mut Progress, id: CallId) -> Result<(), RunError> {
        let input = self.begin(progress, id)?;
        let call = self.new_call();
        self.worker.call(DeviceCall {
            call,
            stage: id.0,
            input: input.clone(),
            env: progress.env.clone(),
        })?;
        progress.device_busy = true;
        progress.in_flight.insert(
            call,
            InFlight {
                id,
                since: Instant::now(),
                input,
                host: None,
            },
        );
        Ok(())
    }

    /// The calls that a slice is cut into: rows or groups where each has a deadline of its own, else one.
    fn units(&self, stage: usize, input: &Batch) -> Vec<Batch> {
        let spec = &self.schedule.plan.stages[stage].spec;
        if spec.deadline.is_some() {
            self.atoms(stage, input)
        } else {
            vec![input.clone()]
        }
    }

    fn atoms(&self, stage: usize, input: &Batch) -> Vec<Batch> {
        match self.schedule.plan.stages[stage].spec.cardinality {
            Cardinality::Row if input.num_rows() > 1 => input.split(1),
            Cardinality::Group => input
                .group_ranges()
                .into_iter()
                .filter_map(|group| input.slice(group).ok())
                .collect(),
            _ => vec![input.clone()],
        }
    }

    fn submit(
        &mut self,
        progress: &mut Progress,
        id: CallId,
        input: Batch,
        units: Vec<Batch>,
        first_row: usize,
    ) -> Result<(), RunError> {
        let host = self.hosts.get_mut(&id.0).and_then(HostStage::take);
        let stage = host.ok_or_else(|| RunError::Lost {
            worker: format!("stage `{}`", self.name(id.0)),
            reason: "it refuses to be copied, though it could be before".to_owned(),
        })?;
        let call = self.new_call();
        let planned = &self.schedule.plan.stages[id.0];
        let cell = Arc::new(Cell::default());
        self.pool.submit(HostJob {
            call,
            name: planned.name.as_str().into(),
            stage,
            units: units.clone(),
            stream: matches!(planned.spec.rows, RowRule::Source | RowRule::Expand(_)),
            env: progress.env.clone(),
            cell: cell.clone(),
        });
        progress.host_running += 1;
        let host = Some(HostFlight {
            units,
            first_row,
            cell,
        });
        progress.in_flight.insert(
            call,
            InFlight {
                id,
                since: Instant::now(),
                input,
                host,
            },
        );
        Ok(())
    }

    /// The next event, or none when it is time to look around.
    fn wait(&self, progress: &Progress) -> Option<Event> {
        // Rows from a device stay in the bounded channel while many slices wait for host threads: that is what makes
        // `emit` block. Host calls need no device, so the backlog always shrinks.
        let behind = progress.state.ready(Place::Host).len() >= self.options.backlog
            && progress.host_running > 0;
        let timeout = self.next_look(progress);
        if behind {
            return self.host_events.recv_timeout(timeout).ok();
        }
        crossbeam_channel::select! {
            recv(self.host_events) -> event => event.ok(),
            recv(self.device_events) -> event => event.ok(),
            default(timeout) => None,
        }
    }

    /// Time until a deadline may pass or the cancel token is to be looked at.
    fn next_look(&self, progress: &Progress) -> Duration {
        let left = progress.in_flight.values().filter_map(|flight| {
            let host = flight.host.as_ref()?;
            let deadline = self.unit_deadline(flight)?;
            let since = host.cell.lock().unit_since.unwrap_or_else(Instant::now);
            Some(deadline.saturating_sub(since.elapsed()))
        });
        left.min()
            .unwrap_or(TICK)
            .clamp(Duration::from_millis(1), TICK)
    }

    /// Deadline of the unit that a host call works on, where the stage states one.
    fn unit_deadline(&self, flight: &InFlight) -> Option<Duration> {
        let deadline = self.schedule.plan.stages[flight.id.0].spec.deadline?;
        let host = flight.host.as_ref()?;
        let unit = host.units.get(host.cell.lock().finished.len())?;
        Some(deadline.saturating_mul(unit.num_rows().max(1) as u32))
    }

    fn handle(&mut self, progress: &mut Progress, event: Event) -> Result<(), RunError> {
        match event {
            Event::Rows { call, batch } => {
                let Some(flight) = progress.in_flight.get(&call) else {
                    return Ok(());
                };
                let (id, input) = (flight.id, flight.input.clone());
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
                progress.device_busy = false;
                progress
                    .reports
                    .push(((flight.id.0, flight.id.1, 0), report));
                match result {
                    Ok(()) => progress.state.finish(flight.id),
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

    fn take_rows(
        &self,
        progress: &mut Progress,
        id: CallId,
        input: &Batch,
        batch: &Batch,
    ) -> Result<(), RunError> {
        progress.state.emit(id, input, batch)?;
        self.options
            .tap
            .output(self.point(progress, id, &progress.state.rows_of(id)), batch);
        Ok(())
    }

    /// Takes what a host call achieved; what is left of it is handed out again, without the unit that failed.
    fn end_host_call(
        &mut self,
        progress: &mut Progress,
        flight: InFlight,
        hung: Option<RunError>,
    ) -> Result<(), RunError> {
        let InFlight {
            id,
            input,
            host:
                Some(HostFlight {
                    units,
                    mut first_row,
                    cell,
                }),
            ..
        } = flight
        else {
            return Ok(());
        };
        let (finished, failure, stage) = {
            let mut cell = cell.lock();
            (
                std::mem::take(&mut cell.finished),
                cell.failure.take(),
                cell.stage.take(),
            )
        };
        let lost_object = stage.is_none();
        self.give_back(id.0, stage)?;
        let mut rest = units.into_iter();
        for result in finished {
            let Some(unit) = rest.next() else { break };
            for batch in &result.batches {
                self.take_rows(progress, id, &unit, batch)?;
            }
            progress
                .reports
                .push(((id.0, id.1, first_row), result.report));
            first_row += unit.num_rows();
        }
        if failure.is_none() && hung.is_none() {
            return progress.state.finish(id);
        }
        let Some(unit) = rest.next() else {
            return progress.state.finish(id);
        };
        let error = match (failure, hung) {
            (Some(failure), _) => self.failed(progress, id, &unit, failure),
            (None, Some(hung)) => hung,
            (None, None) => return progress.state.finish(id),
        };
        let ends_step =
            matches!(error, RunError::Cancelled { .. }) || !self.schedule.forgives_rows(id.0);
        if ends_step || (lost_object && self.hosts[&id.0].has_state) {
            return Err(error);
        }
        let atoms = self.atoms(id.0, &unit);
        let mut left = if atoms.len() > 1 {
            atoms
        } else {
            self.forgive(progress, id, &unit, &error)?;
            first_row += unit.num_rows();
            Vec::new()
        };
        left.extend(rest);
        if left.is_empty() {
            progress.state.finish(id)
        } else {
            self.submit(progress, id, input, left, first_row)
        }
    }

    /// Puts a stage's object back; one that is gone is made again from the stage's configuration.
    fn give_back(&mut self, stage: usize, object: Option<Box<dyn Stage>>) -> Result<(), RunError> {
        let Some(host) = self.hosts.get_mut(&stage) else {
            return Ok(());
        };
        match object {
            Some(object) => host.free.push(object),
            None if host.prototype.is_none() => {
                let again = start_stage(&self.schedule, stage, &self.data, &mut Models::new())?;
                host.free.push(again);
            }
            None => {}
        }
        Ok(())
    }

    fn forgive(
        &mut self,
        progress: &mut Progress,
        id: CallId,
        unit: &Batch,
        error: &RunError,
    ) -> Result<(), RunError> {
        let entry = progress.row_errors.entry(id.0).or_insert_with(|| {
            tracing::warn!(stage = self.name(id.0), "rows are given up: {error}");
            (0, error.to_string())
        });
        entry.0 += unit.num_rows();
        progress.state.emit_null(id, unit)
    }

    fn failed(
        &self,
        progress: &Progress,
        id: CallId,
        input: &Batch,
        failure: CallFailure,
    ) -> RunError {
        let (step, stage, rows) = (
            progress.env.step,
            self.name(id.0).to_owned(),
            describe_rows(input),
        );
        match failure {
            CallFailure::Error(StageError::Cancelled) => RunError::Cancelled { step },
            CallFailure::Error(source) => RunError::Stage {
                step,
                stage,
                rows,
                source,
            },
            CallFailure::Panic(message) => RunError::Panic {
                step,
                stage,
                rows,
                message,
            },
        }
    }

    /// Gives up calls that take longer than they may.
    fn check_deadlines(&mut self, progress: &mut Progress) -> Result<(), RunError> {
        let late: Vec<u64> = progress
            .in_flight
            .iter()
            .filter(|(_, flight)| self.is_late(flight).is_some())
            .map(|(call, _)| *call)
            .collect();
        for call in late {
            let Some(flight) = progress.in_flight.remove(&call) else {
                continue;
            };
            let Some((waited, deadline)) = self.is_late(&flight) else {
                progress.in_flight.insert(call, flight);
                continue;
            };
            let error = self.deadline_error(progress, &flight, waited, deadline);
            let Some(host) = &flight.host else {
                self.worker.abandoned = true;
                return Err(error);
            };
            let runs = {
                let mut cell = host.cell.lock();
                // It may have ended since; then its event is on the way.
                let runs = cell.unit_since.is_some();
                cell.abandoned = runs;
                runs
            };
            if !runs {
                progress.in_flight.insert(call, flight);
                continue;
            }
            progress.host_running -= 1;
            self.replace_thread(flight.id.0)?;
            self.end_host_call(progress, flight, Some(error))?;
        }
        Ok(())
    }

    fn replace_thread(&mut self, stage: usize) -> Result<(), RunError> {
        self.pool.replace_hung().map_err(no_thread)?;
        if self.pool.num_hung() > MAX_HUNG {
            return Err(RunError::TooManyHung {
                hung: self.pool.num_hung(),
                stage: self.name(stage).to_owned(),
            });
        }
        Ok(())
    }

    /// How long the call takes and may take, if that is too long.
    fn is_late(&self, flight: &InFlight) -> Option<(Duration, Duration)> {
        let (since, deadline) = match &flight.host {
            Some(host) => {
                let since = host.cell.lock().unit_since?;
                (since, self.unit_deadline(flight).unwrap_or(self.deadline))
            }
            None => (flight.since, self.deadline),
        };
        let waited = since.elapsed();
        (waited > deadline).then_some((waited, deadline))
    }

    fn deadline_error(
        &self,
        progress: &Progress,
        flight: &InFlight,
        waited: Duration,
        deadline: Duration,
    ) -> RunError {
        let keys: Vec<&str> = self.schedule.wiring.stages[flight.id.0]
            .outputs
            .iter()
            .map(|out| out.local.as_str())
            .collect();
        let unit = flight
            .host
            .as_ref()
            .and_then(|host| host.units.get(host.cell.lock().finished.len()).cloned());
        RunError::Deadline {
            step: progress.env.step,
            stage: self.name(flight.id.0).to_owned(),
            rows: describe_rows(unit.as_ref().unwrap_or(&flight.input)),
            waited_s: waited.as_secs_f64(),
            deadline_s: deadline.as_secs_f64(),
            awaited: if keys.is_empty() {
                "its end".to_owned()
            } else {
                keys.join(", ")
            },
        }
    }

    /// After a failure: waits until calls have ended, so that nothing of this step runs on; gives up what does not end.
    fn drain(&mut self, progress: &mut Progress) {
        let until = Instant::now() + GRACE;
        while !progress.in_flight.is_empty() && Instant::now() < until {
            crossbeam_channel::select! {
                recv(self.host_events) -> event => self.discard(progress, event.ok()),
                recv(self.device_events) -> event => self.discard(progress, event.ok()),
                default(TICK) => {}
            }
            let late: Vec<u64> = progress
                .in_flight
                .iter()
                .filter(|(_, flight)| flight.host.is_some() && self.is_late(flight).is_some())
                .map(|(call, _)| *call)
                .collect();
            late.into_iter()
                .for_each(|call| self.give_up(progress, call));
        }
        let left: Vec<u64> = progress.in_flight.keys().copied().collect();
        left.into_iter()
            .for_each(|call| self.give_up(progress, call));
    }

    fn discard(&mut self, progress: &mut Progress, event: Option<Event>) {
        let (Some(Event::Done { call, .. }) | Some(Event::HostDone { call })) = event else {
            return;
        };
        if let Some(InFlight {
            id,
            host: Some(host),
            ..
        }) = progress.in_flight.remove(&call)
        {
            let stage = host.cell.lock().stage.take();
            self.restore_object(id.0, stage);
        }
    }

    fn give_up(&mut self, progress: &mut Progress, call: u64) {
        let Some(flight) = progress.in_flight.remove(&call) else {
            return;
        };
        let Some(host) = flight.host else {
            self.worker.abandoned = true;
            return;
        };
        let runs = {
            let mut cell = host.cell.lock();
            cell.abandoned = true;
            cell.unit_since.is_some()
        };
        if runs && let Err(error) = self.pool.replace_hung() {
            tracing::error!("a host thread that hangs cannot be replaced: {error}");
        }
        self.restore_object(flight.id.0, None);
    }

    fn restore_object(&mut self, stage: usize, object: Option<Box<dyn Stage>>) {
        if let Err(error) = self.give_back(stage, object) {
            tracing::error!("a stage that was lost cannot be made again: {error}");
        }
    }

    fn count(&self, mut progress: Progress, step: u64, start: Instant) -> StepOutput {
        progress.reports.sort_by_key(|(place, _)| *place);
        let epoch = progress.state.first_row().map_or(0, |id| id.epoch());
        let records = progress
            .reports
            .iter()
            .flat_map(|(_, report)| &report.records);
        let mut values = reduce(records);
        for ((stage, ..), report) in &progress.reports {
            *values
                .entry(format!("perf/stage/{}_s", self.name(*stage)))
                .or_default() += report.seconds;
        }
        for stage in (0..self.schedule.places.len()).filter(|s| self.schedule.forgives_rows(*s)) {
            let rows = progress.row_errors.get(&stage).map_or(0, |(rows, _)| *rows);
            values.insert(format!("{}/row_errors", self.name(stage)), rows as f64);
        }
        let step_s = start.elapsed().as_secs_f64();
        values.insert("perf/step_s".to_owned(), step_s);
        if let Some(tokens) = values.get(TOKENS).copied() {
            values.insert("perf/tokens_per_s".to_owned(), tokens / step_s.max(1e-9));
        }
        values.extend(memory_mb().map(|mb| ("perf/memory_mb".to_owned(), mb)));
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
            },
            samples,
        }
    }

    /// Whether some observer is due after step `step` (0: before the first).
    pub fn observes(&self, step: u64) -> bool {
        !self.observers(step).is_empty()
    }

    fn observers(&self, step: u64) -> Vec<usize> {
        let steps = self.schedule.plan.context.steps;
        let due = |cadence| match cadence {
            Cadence::Step => false,
            Cadence::Observer { every } => {
                step == 0 || step == steps || (every > 0 && step.is_multiple_of(every))
            }
        };
        let stages = self.schedule.plan.stages.iter().enumerate();
        stages
            .filter(|(_, stage)| due(stage.spec.cadence))
            .map(|(index, _)| index)
            .collect()
    }

    /// Runs the observers that are due after step `step` (0: before the first), one after the other.
    ///
    /// # Errors
    /// What ended one of them.
    pub fn observe(&mut self, step: u64) -> Result<StepOutput, RunError> {
        let start = Instant::now();
        let mut reports = Vec::new();
        for stage in self.observers(step) {
            reports.push(((stage, 0, 0), self.call_alone(stage, step)?));
        }
        let mut values = reduce(
            reports
                .iter()
                .flat_map(|(_, report): &(_, CallReport)| &report.records),
        );
        for ((stage, ..), report) in &reports {
            values.insert(
                format!("perf/stage/{}_s", self.name(*stage)),
                report.seconds,
            );
        }
        if !reports.is_empty() {
            values.insert("perf/observe_s".to_owned(), start.elapsed().as_secs_f64());
        }
        let samples = reports
            .into_iter()
            .flat_map(|(_, report)| report.samples)
            .collect();
        Ok(StepOutput {
            metrics: StepMetrics {
                step,
                epoch: 0,
                timestamp: now(),
                values,
            },
            samples,
        })
    }

    /// Runs one stage without rows, with nothing else running.
    fn call_alone(&mut self, stage: usize, step: u64) -> Result<CallReport, RunError> {
        let env = self.env(step);
        let call = self.new_call();
        let input = Batch::with_rows(&[]);
        let cell = Arc::new(Cell::default());
        match self.schedule.places[stage] {
            Place::Group(_) => {
                self.worker.call(DeviceCall {
                    call,
                    stage,
                    input: input.clone(),
                    env: env.clone(),
                })?;
            }
            Place::Host => {
                let object = self.hosts.get_mut(&stage).and_then(HostStage::take);
                let object = object.ok_or_else(|| RunError::Lost {
                    worker: format!("stage `{}`", self.name(stage)),
                    reason: "its object is gone".to_owned(),
                })?;
                self.pool.submit(HostJob {
                    call,
                    name: self.name(stage).into(),
                    stage: object,
                    units: vec![input.clone()],
                    stream: false,
                    env: env.clone(),
                    cell: cell.clone(),
                });
            }
        }
        self.await_alone(stage, call, &env, &cell)
    }

    fn await_alone(
        &mut self,
        stage: usize,
        call: u64,
        env: &CallEnv,
        cell: &Cell,
    ) -> Result<CallReport, RunError> {
        let since = Instant::now();
        let (step, name) = (env.step, self.name(stage).to_owned());
        let rows = || "without rows".to_owned();
        let mut cancelled_at = None;
        loop {
            let event = crossbeam_channel::select! {
                recv(self.host_events) -> event => event.ok(),
                recv(self.device_events) -> event => event.ok(),
                default(TICK) => None,
            };
            let ended = match event {
                Some(Event::Done {
                    call: c,
                    report,
                    result,
                }) if c == call => Some((Some(report), result.err(), Vec::new())),
                Some(Event::HostDone { call: c }) if c == call => {
                    let mut cell = cell.lock();
                    let result = cell.finished.pop();
                    let (failure, object) = (cell.failure.take(), cell.stage.take());
                    drop(cell);
                    self.give_back(stage, object)?;
                    let (report, batches) =
                        result.map_or((None, Vec::new()), |r| (Some(r.report), r.batches));
                    Some((report, failure, batches))
                }
                Some(Event::Rows { call: c, batch }) if c == call => {
                    env.cancel.cancel();
                    Some((None, None, vec![batch]))
                }
                _ => None,
            };
            if let Some((report, failure, batches)) = ended {
                if let Some(batch) = batches.first() {
                    let source = crate::run::guard::GuardError::NoOutput {
                        stage: name,
                        rows: batch.num_rows(),
                    };
                    return Err(RunError::Guard { step, source });
                }
                return match failure {
                    None => Ok(report.unwrap_or_default()),
                    Some(CallFailure::Error(StageError::Cancelled)) => {
                        Err(RunError::Cancelled { step })
                    }
                    Some(CallFailure::Error(source)) => Err(RunError::Stage {
                        step,
                        stage: name,
                        rows: rows(),
                        source,
                    }),
                    Some(CallFailure::Panic(message)) => Err(RunError::Panic {
                        step,
                        stage: name,
                        rows: rows(),
                        message,
                    }),
                };
            }
            if self.options.cancel.is_cancelled() && cancelled_at.is_none() {
                env.cancel.cancel();
                cancelled_at = Some(Instant::now());
            }
            let given_up = cancelled_at.is_some_and(|at: Instant| at.elapsed() > GRACE);
            if since.elapsed() > self.deadline || given_up {
                self.worker.abandoned |= self.schedule.places[stage] != Place::Host;
                if given_up {
                    return Err(RunError::Cancelled { step });
                }
                return Err(RunError::Deadline {
                    step,
                    stage: name,
                    rows: rows(),
                    waited_s: since.elapsed().as_secs_f64(),
                    deadline_s: self.deadline.as_secs_f64(),
                    awaited: "its end".to_owned(),
                });
            }
        }
    }
}

fn describe_rows(input: &Batch) -> String {
    let ids = input.ids();
    match (ids.first(), ids.last()) {
        (Some(first), Some(last)) if ids.len() > 1 => {
            format!("{} rows, samples {first} to {last}", ids.len())
        }
        (Some(first), _) => format!("sample {first}"),
        _ => "without rows".to_owned(),
    }
}
