//! A bounded pool of threads for stages that use no model. A call that hangs is abandoned: its thread is replaced and
//! its later events are ignored.
//!
//! A job is a list of units (a row, a group, or an entire slice). Each unit is one call of the stage with its own
//! deadline, so a failure affects only that unit.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, unbounded};
use tracing::dispatcher::Dispatch;
use verl_words::batch::Batch;
use verl_words::stage::{Models, Stage};

use crate::channel::{CallEnv, CallFailure, CallReport, Event, Out, call_stage};
use crate::dispatch::{current_dispatch, set_dispatch};
use crate::spin_wait;

/// Hung threads that the pool replaces before it gives up.
pub(crate) const MAX_HUNG: usize = 256;

/// Result of one unit.
#[derive(Debug)]
pub(crate) struct UnitResult {
    pub batches: Vec<Batch>,
    pub report: CallReport,
}

/// Where and when a job ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    pub call: u64,
    /// Number of the pool's thread, counted from 0.
    pub thread: usize,
    /// Start of the first unit.
    pub began: Instant,
    /// End of the last unit that has ended.
    pub ended: Instant,
}

/// Progress of a job, shared by its thread and the runner.
#[derive(Default)]
pub(crate) struct Progress {
    /// When the current unit started; `None` if no unit is running.
    pub unit_since: Option<Instant>,
    /// Where and when it runs; `None` until its first unit starts.
    pub ran: Option<Ran>,
    /// Units that succeeded, in order.
    pub finished: Vec<UnitResult>,
    /// Why the unit after the finished ones failed, and after how many seconds.
    pub failure: Option<(CallFailure, f64)>,
    /// The stage, returned unless it panicked.
    pub stage: Option<Box<dyn Stage>>,
    /// The runner has abandoned the job.
    pub abandoned: bool,
}

/// A job's progress behind a lock.
#[derive(Default)]
pub(crate) struct Cell(Mutex<Progress>);

impl Cell {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Progress> {
        // Stages run outside the lock, so a panic cannot leave it half-written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Units of one slice for one stage.
pub(crate) struct HostJob {
    pub call: u64,
    pub name: Arc<str>,
    pub stage: Box<dyn Stage>,
    pub units: Vec<Batch>,
    /// Wave of a source's call, otherwise 0.
    pub wave: u64,
    /// Rows are sent to the runner immediately rather than when the unit has succeeded.
    pub stream: bool,
    pub env: Arc<CallEnv>,
    pub cell: Arc<Cell>,
}

/// The pool.
pub(crate) struct HostPool {
    jobs: Sender<HostJob>,
    inbox: Receiver<HostJob>,
    events: Sender<Event>,
    size: usize,
    alive: Arc<AtomicUsize>,
    /// A model is running and needs the cores more than threads that poll for work.
    model_works: Arc<AtomicBool>,
    /// The listener of the thread that started the run; it also receives the warnings of the pool's threads.
    listens: Option<Dispatch>,
    spawned: usize,
    hung: usize,
}

impl HostPool {
    /// A pool of `size` threads that send to `events`.
    pub(crate) fn start(size: usize, events: Sender<Event>) -> std::io::Result<HostPool> {
        let (jobs, inbox) = unbounded();
        let alive = Arc::new(AtomicUsize::new(0));
        let mut pool = HostPool {
            jobs,
            inbox,
            events,
            size: size.max(1),
            alive,
            model_works: Arc::default(),
            listens: current_dispatch(),
            spawned: 0,
            hung: 0,
        };
        for _ in 0..pool.size {
            pool.spawn()?;
        }
        Ok(pool)
    }

    fn spawn(&mut self) -> std::io::Result<()> {
        let (inbox, events, alive) = (self.inbox.clone(), self.events.clone(), self.alive.clone());
        let model_works = self.model_works.clone();
        let listens = self.listens.clone();
        let thread = self.spawned;
        self.spawned += 1;
        alive.fetch_add(1, Ordering::SeqCst);
        let spawned = std::thread::Builder::new()
            .name(format!("host-{}", self.spawned))
            .spawn(move || {
                let _guard = set_dispatch(listens.as_ref());
                serve(&inbox, &events, &model_works, thread);
                alive.fetch_sub(1, Ordering::SeqCst);
            });
        if spawned.is_err() {
            self.alive.fetch_sub(1, Ordering::SeqCst);
        }
        spawned.map(drop)
    }

    /// Sets whether a model is running.
    pub(crate) fn set_model_works(&self, works: bool) {
        self.model_works.store(works, Ordering::Relaxed);
    }

    /// Queues a job. The runner queues only a few more jobs than there are threads.
    pub(crate) fn submit(&self, job: HostJob) {
        // The pool owns a receiver, so the channel is open.
        let _ = self.jobs.send(job);
    }

    /// Number of threads that take jobs.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Number of threads that exist, including hung ones.
    pub(crate) fn num_alive(&self) -> usize {
        self.alive.load(Ordering::SeqCst)
    }

    /// Number of threads abandoned so far.
    pub(crate) fn num_hung(&self) -> usize {
        self.hung
    }

    /// Replaces the thread of a job that was abandoned while it ran.
    pub(crate) fn replace_hung(&mut self) -> std::io::Result<()> {
        self.hung += 1;
        self.spawn()
    }
}

fn serve(
    inbox: &Receiver<HostJob>,
    events: &Sender<Event>,
    model_works: &AtomicBool,
    thread: usize,
) {
    while let Some(job) = spin_wait::next(inbox, !model_works.load(Ordering::Relaxed)) {
        let call = job.call;
        let in_pool = work(job, events, thread);
        if !in_pool || events.send(Event::HostDone { call }).is_err() {
            return;
        }
    }
}

/// Runs the units of a job; returns false if the job was abandoned in the meantime and this thread has been replaced.
fn work(job: HostJob, events: &Sender<Event>, thread: usize) -> bool {
    let HostJob {
        call,
        name,
        mut stage,
        units,
        wave,
        stream,
        env,
        cell,
    } = job;
    let mut models = Models::new();
    for unit in units {
        {
            let mut progress = cell.lock();
            if progress.abandoned {
                // Abandoned before this unit started: the runner did not count this thread as hung.
                return true;
            }
            let now = Instant::now();
            progress.unit_since = Some(now);
            progress.ran.get_or_insert(Ran {
                call,
                thread,
                began: now,
                ended: now,
            });
        }
        let mut batches = Vec::new();
        let out = if stream {
            Out::Stream { call, events }
        } else {
            Out::Buffer(&mut batches)
        };
        let (report, result) =
            call_stage(stage.as_mut(), &name, unit, wave, &env, &mut models, out);
        let mut progress = cell.lock();
        if progress.abandoned {
            return false;
        }
        progress.unit_since = None;
        if let Some(ran) = &mut progress.ran {
            ran.ended = Instant::now();
        }
        match result {
            Ok(()) => progress.finished.push(UnitResult { batches, report }),
            Err(failure) => {
                if matches!(failure, CallFailure::Error(_)) {
                    progress.stage = Some(stage);
                }
                progress.failure = Some((failure, report.seconds));
                return true;
            }
        }
    }
    cell.lock().stage = Some(stage);
    true
}
