//! [`ThreadWorker`]: a worker that is a thread of this process.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use verl_plan::schedule::placement::Schedule;

use crate::channel::{Event, Out};
use crate::dispatch::{current_dispatch, set_dispatch};
use crate::error::RunError;
use crate::spin_wait;
use crate::watch::ActivityReporter;
use crate::worker::hosted::{Hosted, OpenData, TO_LOAD};
use crate::worker::message::{Answer, DeviceCall, Query};
use crate::worker::{DroppedSnapshots, PendingAnswer, QueryFailure, Worker, unanswered};

/// A message to the thread.
enum Job {
    Call(DeviceCall),
    Ask(Query, Sender<Result<Answer, QueryFailure>>),
    /// Drops snapshots.
    Forget(Vec<u64>),
}

/// What a worker needs to start.
pub(crate) struct WorkerStart {
    pub schedule: Arc<Schedule>,
    pub data: Arc<OpenData>,
    /// Where events go.
    pub events: Sender<Event>,
    /// Longest time that loading may take.
    pub deadline: Duration,
    /// Reports whose state the worker is reading.
    pub reporter: ActivityReporter,
}

/// A worker thread as the engine sees it.
pub(crate) struct ThreadWorker {
    name: String,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// A call or a query was abandoned and may still be running.
    abandoned: bool,
    dropped: Arc<DroppedSnapshots>,
}

impl ThreadWorker {
    /// Starts the thread of group `group`, which loads its models and starts its stages.
    pub(crate) fn begin(start: &WorkerStart, group: usize) -> Result<Loading, RunError> {
        let name = start.schedule.groups()[group].name.clone();
        let (jobs, inbox) = unbounded();
        let (ready, started) = bounded(1);
        let (schedule, data) = (start.schedule.clone(), start.data.clone());
        let (events, reporter) = (start.events.clone(), start.reporter.clone());
        let listens = current_dispatch();
        let thread = std::thread::Builder::new()
            .name(format!("worker-{name}"))
            .spawn(move || {
                // The listener of the thread that starts the run also receives the warnings of this one.
                let _guard = set_dispatch(listens.as_ref());
                match Hosted::load(schedule, group, &data, reporter) {
                    Ok(hosted) => {
                        let _ = ready.send(Ok(()));
                        serve(hosted, &inbox, &events);
                    }
                    Err(error) => {
                        let _ = ready.send(Err(error));
                    }
                }
            });
        let thread = thread.map_err(|e| RunError::Lost {
            worker: name.clone(),
            reason: e.to_string(),
        })?;
        let worker = ThreadWorker {
            name,
            jobs: Some(jobs),
            thread: Some(thread),
            abandoned: false,
            dropped: Arc::default(),
        };
        Ok(Loading { worker, started })
    }

    fn submit(&self, job: Job) -> Result<(), RunError> {
        let lost = |reason: &str| RunError::Lost {
            worker: self.name.clone(),
            reason: reason.to_owned(),
        };
        if self.abandoned {
            return Err(lost("an abandoned call may still be running on its thread"));
        }
        let jobs = self.jobs.as_ref().ok_or_else(|| lost("it was shut down"))?;
        let dropped = self.dropped.take();
        if !dropped.is_empty() {
            let _ = jobs.send(Job::Forget(dropped));
        }
        jobs.send(job).map_err(|_| lost("its thread has ended"))
    }
}

/// A worker thread that is loading.
pub(crate) struct Loading {
    worker: ThreadWorker,
    started: Receiver<Result<(), RunError>>,
}

impl Loading {
    /// Waits until models are loaded and stages started.
    pub(crate) fn loaded(mut self, deadline: Duration) -> Result<ThreadWorker, RunError> {
        match self.started.recv_timeout(deadline) {
            Ok(Ok(())) => Ok(self.worker),
            Ok(Err(error)) => Err(error),
            Err(error) => {
                self.worker.abandoned = true;
                Err(unanswered(&self.worker.name, TO_LOAD, error, deadline))
            }
        }
    }
}

impl Worker for ThreadWorker {
    fn name(&self) -> &str {
        &self.name
    }

    fn call(&mut self, call: DeviceCall) -> Result<(), RunError> {
        self.submit(Job::Call(call))
    }

    fn send(&mut self, query: Query) -> Result<PendingAnswer, RunError> {
        let what = query.what();
        let (reply, answer) = bounded(1);
        self.submit(Job::Ask(query, reply))?;
        Ok(PendingAnswer { what, answer })
    }

    fn abandon(&mut self) {
        self.abandoned = true;
    }

    fn is_lost(&self) -> bool {
        false
    }

    fn dropped(&self) -> &Arc<DroppedSnapshots> {
        &self.dropped
    }
}

impl Drop for ThreadWorker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take().filter(|_| !self.abandoned) {
            let _ = thread.join();
        }
    }
}

fn serve(mut hosted: Hosted, inbox: &Receiver<Job>, events: &Sender<Event>) {
    while let Some(job) = spin_wait::next(inbox, true) {
        match job {
            Job::Forget(ids) => hosted.forget(&ids),
            Job::Ask(query, reply) => {
                let _ = reply.send(hosted.answer(query));
            }
            Job::Call(call) => {
                let number = call.call;
                let out = Out::Stream {
                    call: number,
                    events,
                };
                let Some((report, result)) = hosted.call(call, out) else {
                    return;
                };
                let done = Event::Done {
                    call: number,
                    report,
                    result,
                };
                if events.send(done).is_err() {
                    return;
                }
            }
        }
    }
}
