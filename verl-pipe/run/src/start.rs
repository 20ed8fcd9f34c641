//! Starts a schedule as a [`Run`]: opens data, loads models, starts stages and threads.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Sender, bounded, unbounded};
use verl_declare::sizes::WorkerKind;
use verl_plan::Plan;
use verl_plan::schedule::groups::DeviceGroup;
use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::panics::catch_panic;
use verl_words::stage::{Cadence, CancelToken, Cardinality, Models, RowRule, Stage};

use crate::channel::Event;
use crate::error::RunError;
use crate::host_pool::HostPool;
use crate::metrics::metric_roles;
use crate::notice::WaitThresholds;
use crate::recovery::Recovery;
use crate::runner::Run;
use crate::samples::SampledRows;
use crate::tap::{NoTap, Tap};
use crate::watch::Watch;
use crate::weight_sync::Copies;
use crate::worker::hosted::OpenData;
use crate::worker::{
    Loading, LoadingProcess, ProcessOptions, ProcessWorker, ThreadWorker, Worker, WorkerStart,
    start_stage,
};

/// Options of a run besides the schedule.
#[derive(Clone)]
pub struct RunOptions {
    /// Ends the run when asked to.
    pub cancel: CancelToken,
    /// Observes every edge.
    pub tap: Arc<dyn Tap>,
    /// Threads of the host pool; at least 2.
    pub host_threads: usize,
    /// Number of emitted batches that can queue between a device worker and the engine, and of slices that can queue
    /// for a host thread, before `emit` blocks.
    pub backlog: usize,
    /// Starts workers as processes rather than threads.
    pub processes: Option<ProcessOptions>,
    /// Folder where the run writes what it waits for when it stalls; see [`stall`](crate::stall).
    pub run_dir: Option<PathBuf>,
}

impl Default for RunOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        RunOptions {
            cancel: CancelToken::default(),
            tap: Arc::new(NoTap),
            host_threads: threads.max(2),
            backlog: 16,
            processes: None,
            run_dir: None,
        }
    }
}

/// A stage of the host pool between calls.
pub(super) struct HostStage {
    /// Never run; copied for concurrent calls. `None` for a stage that cannot be copied.
    pub(super) prototype: Option<Box<dyn Stage>>,
    /// Objects that no call is using.
    pub(super) free: Vec<Box<dyn Stage>>,
    /// The stage had state at the start, so a lost object cannot be recreated.
    pub(super) has_state: bool,
}

impl Run {
    /// Starts a placed pipeline: opens data, loads models on their workers, starts stages.
    ///
    /// # Errors
    /// When data, a model or a stage cannot be opened, loaded or started.
    pub fn start(schedule: Schedule, options: RunOptions) -> Result<Run, RunError> {
        let schedule = Arc::new(schedule);
        let plan = schedule.plan();
        let data = Arc::new(open_data(plan)?);
        let deadline = seconds(plan.pipe().run.stage_deadline_s);
        let (device_sender, device_events) = bounded(options.backlog.max(1));
        let (host_sender, host_events) = unbounded();
        let watch = Watch::start(options.run_dir.as_deref(), deadline);
        let start = WorkerStart {
            schedule: schedule.clone(),
            data: data.clone(),
            events: device_sender,
            deadline,
            reporter: watch.activity_reporter(),
        };
        let processes = process_options(&schedule, &options)?;
        let is_process: Vec<bool> = schedule
            .groups()
            .iter()
            .map(|group| is_process(group, &options))
            .collect();
        let workers = start_workers(&start, processes.as_ref(), &is_process)?;
        let recovery = Recovery::new(start, processes, &is_process);
        let pool = start_pool(&options, host_sender)?;
        let mut hosts = BTreeMap::new();
        for index in schedule.stages_at(Place::Host) {
            hosts.insert(index, HostStage::start(&schedule, index, &data)?);
        }
        let in_order = (0..plan.stages().len())
            .map(|index| {
                hosts
                    .get(&index)
                    .is_none_or(|host: &HostStage| host.prototype.is_none())
            })
            .collect();
        let copies = Copies::of(&schedule);
        let sampled = SampledRows::of(&schedule);
        let roles = metric_roles(schedule.plan());
        let mut run = Run {
            thresholds: WaitThresholds::new(deadline),
            watch,
            schedule,
            options,
            workers,
            pool,
            hosts,
            device_events,
            host_events,
            data,
            deadline,
            in_order,
            copies,
            recovery,
            stashed: VecDeque::new(),
            sampled,
            roles,
            left: BTreeMap::new(),
            row_errors: Vec::new(),
            failed_spans: Vec::new(),
            step: 0,
            next_call: 0,
        };
        run.begin_recovery()?;
        Ok(run)
    }
}

/// Opens the data sets of a plan that are not open yet.
pub(crate) fn open_data(plan: &Plan) -> Result<OpenData, RunError> {
    let mut data = OpenData::new();
    for decl in &plan.pipe().data {
        if let Some(opened) = plan.opened().get(&decl.name) {
            data.insert(decl.name.clone(), opened.clone());
            continue;
        }
        let opened = (decl.open)(plan.context());
        let opened = opened.map_err(|source| RunError::Data {
            name: decl.name.clone(),
            source: Box::new(source),
        })?;
        data.insert(decl.name.clone(), opened);
    }
    Ok(data)
}

/// Whether the worker of a group is a process.
fn is_process(group: &DeviceGroup, options: &RunOptions) -> bool {
    let processes = options.processes.as_ref();
    group.worker == WorkerKind::Process
        || processes.is_some_and(|processes| processes.serves(&group.name))
}

/// How worker processes are started; `None` if there are none.
fn process_options(
    schedule: &Schedule,
    options: &RunOptions,
) -> Result<Option<ProcessOptions>, RunError> {
    let mut groups = schedule.groups().iter();
    let Some(first) = groups.find(|group| is_process(group, options)) else {
        return Ok(None);
    };
    if options.processes.is_some() {
        return Ok(options.processes.clone());
    }
    let program = verl_wire::child::program().ok_or_else(|| RunError::Lost {
        worker: first.name.clone(),
        reason: "this program cannot start itself as a worker process\n  help: call `verl::worker_main(verl::registry)` first in `main`, or set `worker = \"thread\"`".to_owned(),
    })?;
    let mut processes = ProcessOptions::new(program.clone());
    let silence = seconds(schedule.plan().pipe().run.worker_deadline_s);
    processes.settings.heartbeat = processes.settings.heartbeat.min(silence / 4);
    processes.settings.deadline = silence;
    Ok(Some(processes))
}

/// Starts the workers of all groups, which load their models at the same time.
fn start_workers(
    start: &WorkerStart,
    processes: Option<&ProcessOptions>,
    is_process: &[bool],
) -> Result<Vec<Box<dyn Worker>>, RunError> {
    let groups = is_process.iter().enumerate();
    let loading: Vec<_> = groups
        .map(
            |(group, is_process)| match processes.filter(|_| *is_process) {
                Some(options) => {
                    ProcessWorker::begin(start, options, group, 1).map(AnyLoading::Process)
                }
                None => ThreadWorker::begin(start, group).map(AnyLoading::Thread),
            },
        )
        .collect();
    let workers = loading.into_iter().map(|loading| match loading? {
        AnyLoading::Thread(loading) => {
            let worker = loading.loaded(start.deadline)?;
            Ok(Box::new(worker) as Box<dyn Worker>)
        }
        AnyLoading::Process(loading) => {
            let worker = loading.loaded(start.deadline)?;
            Ok(Box::new(worker) as Box<dyn Worker>)
        }
    });
    workers.collect()
}

/// A worker that is loading.
enum AnyLoading {
    Thread(Loading),
    Process(LoadingProcess),
}

/// Converts seconds of a configuration to a duration; values out of range become a year.
pub fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::from_secs(365 * 86_400))
}

fn start_pool(options: &RunOptions, events: Sender<Event>) -> Result<HostPool, RunError> {
    HostPool::start(options.host_threads.max(2), events).map_err(no_thread)
}

pub(super) fn no_thread(error: std::io::Error) -> RunError {
    RunError::Lost {
        worker: "host pool".to_owned(),
        reason: format!("cannot start a thread: {error}"),
    }
}

impl HostStage {
    pub(super) fn start(
        schedule: &Schedule,
        index: usize,
        data: &OpenData,
    ) -> Result<HostStage, RunError> {
        let mut stage = start_stage(schedule, index, data, &mut Models::new())?;
        let has_state = stage.snapshot().is_ok_and(|state| state.is_some());
        let spec = schedule.plan().stages()[index].spec();
        let concurrent = matches!(spec.cardinality, Cardinality::Row | Cardinality::Group)
            && matches!(
                spec.rows,
                RowRule::Same | RowRule::Expand(_) | RowRule::Filter | RowRule::Sink
            )
            && spec.cadence == Cadence::Step;
        let copy = concurrent.then(|| stage.duplicate()).flatten();
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

    /// An object to run, if one is available.
    pub(super) fn take(&mut self) -> Option<Box<dyn Stage>> {
        self.free.pop().or_else(|| {
            let prototype = self.prototype.as_ref()?;
            catch_panic(|| prototype.duplicate()).ok()?
        })
    }

    pub(super) fn can_take(&self) -> bool {
        self.prototype.is_some() || !self.free.is_empty()
    }

    pub(super) fn idle(&mut self) -> Option<&mut Box<dyn Stage>> {
        self.prototype.as_mut().or_else(|| self.free.first_mut())
    }
}
