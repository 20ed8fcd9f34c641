//! The worker's side of a worker process: builds the pipeline of its run and serves one device group.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use verl_declare::config::to_toml;
use verl_declare::registry::Registry;
use verl_plan::Plannable;
use verl_plan::read::parse_pipeline;
use verl_plan::schedule::placement::Schedule;
use verl_wire::child::{self, Server, Start};
use verl_wire::link::LinkError;
use verl_wire::message::{Message, MessageError, Parts};
use verl_wire::serve::{Events, Serve};
use verl_words::batch::Batch;
use verl_words::diagnostic::Diagnostic;
use verl_words::stage::{CancelToken, StageError};

use crate::channel::{CallEnv, CallFailure, CallReport, Out, not_taken};
use crate::error::RunError;
use crate::interrupt::on_ctrl_c;
use crate::start::open_data;
use crate::watch::Watch;
use crate::worker::hosted::Hosted;
use crate::worker::message::DeviceCall;
use crate::worker::sent::{Cancel, SentEnv, SentFailure, ToRun, ToWorker};

/// Cancel tokens of calls that have not ended, by call.
type Tokens = Arc<Mutex<BTreeMap<u64, CancelToken>>>;

fn token(tokens: &Tokens, call: u64) -> CancelToken {
    let mut tokens = tokens.lock().unwrap_or_else(PoisonError::into_inner);
    tokens.entry(call).or_default().clone()
}

/// Serves and ends the process if a run started it as its worker; otherwise declares that this program can be started as a
/// worker, and returns. Pipelines are built from the kinds of `registry`.
pub fn enter(registry: impl FnOnce() -> Registry) {
    leave_interrupts_to_the_run();
    child::enter(WorkerServer(registry));
}

/// Serves as the worker that the environment describes, and returns the exit status of the process. Pipelines are built
/// from the kinds of `registry`.
pub fn run_worker(registry: impl FnOnce() -> Registry) -> i32 {
    leave_interrupts_to_the_run();
    child::run_worker(WorkerServer(registry))
}

/// A terminal sends Ctrl-C to the workers as well, but the run decides how it ends, and may still need them.
fn leave_interrupts_to_the_run() {
    if child::is_worker()
        && let Err(error) = on_ctrl_c(|| {})
    {
        tracing::warn!("Ctrl-C ends this worker before its run can end in good order: {error}");
    }
}

/// Serves a device group in a process that a run started as its worker; stages, models and data sets are those of the
/// registry that the function makes.
pub struct WorkerServer<F>(pub F);

impl<F: FnOnce() -> Registry> Server for WorkerServer<F> {
    type Serve = GroupServer;

    fn server(self, start: &Start) -> (GroupServer, Box<dyn FnMut(Message) + Send>) {
        let tokens = Tokens::default();
        let server = GroupServer {
            worker: start.worker.clone(),
            registry: (self.0)(),
            hosted: None,
            tokens: tokens.clone(),
        };
        let on_signal = move |message: Message| {
            if let Ok(Cancel { call }) = message.head() {
                token(&tokens, call).cancel();
            }
        };
        (server, Box::new(on_signal))
    }
}

/// The models and stages of a device group in a worker process.
pub struct GroupServer {
    worker: String,
    registry: Registry,
    hosted: Option<Hosted>,
    tokens: Tokens,
}

impl Serve for GroupServer {
    fn handle(&mut self, request: Message, events: &Events) -> Result<Message, MessageError> {
        let (request, parts) = ToWorker::received(request)?;
        let reply = match request {
            ToWorker::Load {
                pipeline,
                base,
                group,
            } => {
                let loaded = self.load(&pipeline, base, group);
                ToRun::Loaded(loaded.map_err(Into::into))
            }
            ToWorker::Call {
                call,
                stage,
                wave,
                env,
            } => self.call((call, stage, wave), env, parts, events)?,
            ToWorker::Ask { query, asked } => {
                let answer = match &mut self.hosted {
                    Some(hosted) => hosted.answer(asked).map_err(Into::into),
                    None => Err(SentFailure::Refused(self.not_loaded().into())),
                };
                ToRun::Answer { query, answer }
            }
            ToWorker::Forget(ids) => {
                if let Some(hosted) = &mut self.hosted {
                    hosted.forget(&ids);
                }
                ToRun::Forgotten
            }
        };
        reply.message()
    }
}

impl GroupServer {
    fn load(&mut self, pipeline: &str, base: PathBuf, group: usize) -> Result<(), RunError> {
        let schedule = self.rebuild(pipeline, base)?;
        let data = open_data(schedule.plan())?;
        // Nobody in this process waits, so nothing is reported.
        let reporter = Watch::start(None, Duration::ZERO).activity_reporter();
        self.hosted = Some(Hosted::load(Arc::new(schedule), group, &data, reporter)?);
        Ok(())
    }

    /// The schedule of the pipeline in `text`.
    fn rebuild(&self, text: &str, base: PathBuf) -> Result<Schedule, RunError> {
        let lost = |why: &str, findings: &[Diagnostic]| {
            let findings: String = findings
                .iter()
                .map(|finding| format!("\n{finding}"))
                .collect();
            RunError::Lost {
                worker: self.worker.clone(),
                reason: format!("its process cannot build the pipeline{why}{findings}"),
            }
        };
        let no_overrides: [&str; 0] = [];
        let mut pipe = parse_pipeline(
            text,
            "the pipeline of the run",
            &no_overrides,
            &self.registry,
        )
        .map_err(|findings| lost(ONLY_THERE, &findings))?;
        pipe.base = base;
        if to_toml(&pipe).ok().as_deref() != Some(text) {
            return Err(lost(ONLY_THERE, &[]));
        }
        let plan = pipe.plan().map_err(|findings| lost(":", &findings))?;
        plan.schedule().map_err(|findings| lost(":", &findings))
    }

    fn not_loaded(&self) -> RunError {
        RunError::Lost {
            worker: self.worker.clone(),
            reason: "it was asked before it loaded its models".to_owned(),
        }
    }

    fn call(
        &mut self,
        (call, stage, wave): (u64, usize, u64),
        env: SentEnv,
        mut parts: Parts,
        events: &Events,
    ) -> Result<ToRun, MessageError> {
        let input = parts.batch()?;
        let env = CallEnv {
            step: env.step,
            steps: env.steps,
            seed: env.seed,
            cancel: token(&self.tokens, call),
            deadline: env.deadline,
        };
        let deadline = env.deadline;
        let send = |batch: Batch| {
            let mut message = ToRun::Rows { call }.message().map_err(StageError::failed)?;
            message.push_batch(&batch).map_err(StageError::failed)?;
            events
                .send(&message, deadline)
                .map_err(|error| match error {
                    LinkError::Congested(_) => not_taken(deadline),
                    LinkError::Unsendable(_) => StageError::failed(error.to_string()),
                    _ => StageError::Cancelled,
                })
        };
        let device_call = DeviceCall {
            call,
            stage,
            input,
            wave,
            env: Arc::new(env),
        };
        let hosted = self.hosted.as_mut();
        let done = hosted.and_then(|hosted| hosted.call(device_call, Out::Remote(&send)));
        // Calls are numbered in order, so that earlier ones have ended.
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|other, _| *other > call);
        let (report, result) = done.unwrap_or_else(|| {
            let lost = CallFailure::Lost(format!("it does not have stage {stage}"));
            (CallReport::default(), Err(lost))
        });
        Ok(ToRun::Done {
            call,
            report,
            result,
        })
    }
}

/// Why a pipeline means something else in another process.
const ONLY_THERE: &str = ", because parts of it exist only in the process that declared it (closures, or kinds that the \
                          worker's program does not register):";
