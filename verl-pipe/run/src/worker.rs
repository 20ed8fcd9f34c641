//! One thread per device group: owns the models there and runs the stages that use them, one call at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::batch::Batch;
use verl_words::data::DataLoaderInterface;
use verl_words::panics::catch_panic;
use verl_words::stage::{Models, Stage, StageError, StartContext};

use crate::call_error::out_of_memory;
use crate::channel::{CallEnv, Event, Out, call_stage};
use crate::dispatch::{current_dispatch, set_dispatch};
use crate::error::RunError;
use crate::spin_wait;

/// State owned by the worker's thread.
pub(crate) struct WorkerState {
    pub models: Models,
    pub stages: BTreeMap<usize, Box<dyn Stage>>,
}

/// A call of a stage on the worker.
pub(crate) struct DeviceCall {
    pub call: u64,
    pub stage: usize,
    pub input: Batch,
    /// Wave of a source's call, otherwise 0.
    pub wave: u64,
    pub env: Arc<CallEnv>,
}

enum Job {
    Call(DeviceCall),
    Ask(Box<dyn FnOnce(&mut WorkerState) + Send>),
}

/// The owner's side of a worker thread.
pub(crate) struct Worker {
    name: String,
    schedule: Arc<Schedule>,
    group: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// A call was abandoned and may still be running.
    pub abandoned: bool,
}

impl Worker {
    /// Starts the thread of group `group`, loads its models and starts its stages there.
    pub(crate) fn start(
        schedule: Arc<Schedule>,
        group: usize,
        data: Arc<BTreeMap<String, Arc<dyn DataLoaderInterface>>>,
        events: Sender<Event>,
        deadline: Duration,
    ) -> Result<Worker, RunError> {
        let name = schedule.groups()[group].name.clone();
        let (jobs, inbox) = unbounded();
        let (ready, started) = bounded(1);
        let of_thread = schedule.clone();
        let listens = current_dispatch();
        let thread = std::thread::Builder::new()
            .name(format!("worker-{name}"))
            .spawn(move || {
                // The listener of the thread that starts the run also receives the warnings of this one.
                let _guard = set_dispatch(listens.as_ref());
                match loaded(&of_thread, group, &data) {
                    Ok(state) => {
                        let _ = ready.send(Ok(()));
                        serve(&of_thread, state, &inbox, &events);
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
        let mut worker = Worker {
            name,
            schedule,
            group,
            jobs: Some(jobs),
            thread: Some(thread),
            abandoned: false,
        };
        match started.recv_timeout(deadline) {
            Ok(Ok(())) => Ok(worker),
            Ok(Err(error)) => Err(error),
            Err(error) => Err(worker.lost(TO_LOAD, error, deadline)),
        }
    }

    /// Sends a call to the thread; its end arrives as an event.
    pub(crate) fn call(&self, call: DeviceCall) -> Result<(), RunError> {
        self.send(Job::Call(call))
    }

    /// Runs `work` on the thread and waits for its result; `what` completes "when asked …". A panic of `work` is an
    /// error, after which the thread is no longer used, since its state may be inconsistent.
    pub(crate) fn ask<T: Send + 'static>(
        &mut self,
        what: &str,
        deadline: Duration,
        work: impl FnOnce(&mut WorkerState) -> T + Send + 'static,
    ) -> Result<T, RunError> {
        let (reply, answer) = bounded(1);
        self.send(Job::Ask(Box::new(move |state| {
            let _ = reply.send(catch_panic(|| work(state)));
        })))?;
        match answer.recv_timeout(deadline) {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(message)) => {
                self.abandoned = true;
                Err(panicked(&self.schedule, self.group, what, &message))
            }
            Err(error) => Err(self.lost(what, error, deadline)),
        }
    }

    fn send(&self, job: Job) -> Result<(), RunError> {
        let lost = |reason: &str| RunError::Lost {
            worker: self.name.clone(),
            reason: reason.to_owned(),
        };
        if self.abandoned {
            return Err(lost("an abandoned call may still be running on its thread"));
        }
        let jobs = self.jobs.as_ref().ok_or_else(|| lost("it was shut down"))?;
        jobs.send(job).map_err(|_| lost("its thread has ended"))
    }

    fn lost(&mut self, what: &str, error: RecvTimeoutError, deadline: Duration) -> RunError {
        self.abandoned = true;
        let reason = match error {
            RecvTimeoutError::Timeout => {
                format!(
                    "no answer within {:.1} s when asked {what}",
                    deadline.as_secs_f64()
                )
            }
            RecvTimeoutError::Disconnected => format!("its thread panicked when asked {what}"),
        };
        RunError::Lost {
            worker: self.name.clone(),
            reason,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take().filter(|_| !self.abandoned) {
            let _ = thread.join();
        }
    }
}

/// The first request to the thread.
const TO_LOAD: &str = "to load models and start stages";

/// The error for a thread that panicked when asked `what`.
fn panicked(schedule: &Schedule, group: usize, what: &str, message: &str) -> RunError {
    let during = format!("when asked {what}");
    out_of_memory(schedule, group, None, during, message).unwrap_or_else(|| RunError::Lost {
        worker: schedule.groups()[group].name.clone(),
        reason: format!("its thread panicked when asked {what}: {message}"),
    })
}

/// [`load`], with panics and out-of-memory conditions as errors.
fn loaded(
    schedule: &Schedule,
    group: usize,
    data: &BTreeMap<String, Arc<dyn DataLoaderInterface>>,
) -> Result<WorkerState, RunError> {
    match catch_panic(|| load(schedule, group, data)) {
        Ok(Ok(state)) => Ok(state),
        Ok(Err(error)) => {
            let during = format!("when asked {TO_LOAD}");
            let full = out_of_memory(schedule, group, None, during, &error.to_string());
            Err(full.unwrap_or(error))
        }
        Err(message) => Err(panicked(schedule, group, TO_LOAD, &message)),
    }
}

fn load(
    schedule: &Schedule,
    group: usize,
    data: &BTreeMap<String, Arc<dyn DataLoaderInterface>>,
) -> Result<WorkerState, RunError> {
    let plan = schedule.plan();
    let device = &schedule.groups()[group].devices[0];
    let mut models = Models::new();
    for decl in &plan.pipe().models {
        let model = decl.factory.load(&decl.name, device, plan.context());
        let model = model.map_err(|source| RunError::Load {
            name: decl.name.clone(),
            source,
        })?;
        models.insert(decl.name.clone(), model);
    }
    let mut stages = BTreeMap::new();
    for index in schedule.stages_at(Place::Group(group)) {
        stages.insert(index, start_stage(schedule, index, data, &mut models)?);
    }
    Ok(WorkerState { models, stages })
}

/// Builds and starts stage `index`.
pub(crate) fn start_stage(
    schedule: &Schedule,
    index: usize,
    data: &BTreeMap<String, Arc<dyn DataLoaderInterface>>,
    models: &mut Models,
) -> Result<Box<dyn Stage>, RunError> {
    let planned = &schedule.plan().stages()[index];
    let stage = || planned.name().to_owned();
    let start = || {
        let mut made =
            planned
                .build(schedule.plan().context())
                .map_err(|errors| RunError::Build {
                    stage: stage(),
                    errors,
                })?;
        made.start(&mut StartContext { data, models })
            .map_err(|source| RunError::Start {
                stage: stage(),
                source: Box::new(source),
            })?;
        Ok(made)
    };
    // Stages of the host pool start on the caller's thread, where a panic would end the program.
    catch_panic(start).unwrap_or_else(|message| {
        Err(RunError::Start {
            stage: stage(),
            source: Box::new(StageError::failed(format!("it panicked: {message}"))),
        })
    })
}

fn serve(
    schedule: &Schedule,
    mut state: WorkerState,
    inbox: &Receiver<Job>,
    events: &Sender<Event>,
) {
    while let Some(job) = spin_wait::next(inbox, true) {
        match job {
            Job::Ask(work) => work(&mut state),
            Job::Call(DeviceCall {
                call,
                stage,
                input,
                wave,
                env,
            }) => {
                let WorkerState { models, stages } = &mut state;
                let Some(object) = stages.get_mut(&stage) else {
                    return;
                };
                let name = schedule.plan().stages()[stage].name();
                let out = Out::Stream { call, events };
                let (report, result) =
                    call_stage(object.as_mut(), name, input, wave, &env, models, out);
                if events
                    .send(Event::Done {
                        call,
                        report,
                        result,
                    })
                    .is_err()
                {
                    return;
                }
            }
        }
    }
}
