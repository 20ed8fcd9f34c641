//! [`ProcessWorker`]: a worker that is a process on the same machine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use verl_declare::config::to_toml;
use verl_wire::child::Program;
use verl_wire::client::{Client, FromWorker};
use verl_wire::link::{LinkError, LinkSettings};
use verl_wire::message::{Message, MessageError};
use verl_wire::process::{Spawn, WorkerProcess};
use verl_wire::socket::Transport;
use verl_words::stage::CancelToken;

use crate::channel::{CallFailure, CallReport, Event, TICK};
use crate::error::RunError;
use crate::worker::hosted::TO_LOAD;
use crate::worker::message::{Answer, DeviceCall, Query};
use crate::worker::sent::{Cancel, ToRun, ToWorker};
use crate::worker::{
    DroppedSnapshots, PendingAnswer, QueryFailure, Worker, WorkerStart, unanswered,
};

/// How worker processes are started.
#[derive(Debug, Clone)]
pub struct ProcessOptions {
    /// The program, which must call [`enter`](crate::worker::enter) or [`run_worker`](crate::worker::run_worker) first.
    pub program: Program,
    /// Names of the device groups whose workers are processes; `None` means all.
    pub groups: Option<Vec<String>>,
    /// Further environment variables.
    pub variables: Vec<(String, String)>,
    /// How they are connected.
    pub transport: Transport,
    /// Deadlines and limits of the connections.
    pub settings: LinkSettings,
}

impl ProcessOptions {
    /// Starts `program` with default settings.
    pub fn new(program: Program) -> ProcessOptions {
        ProcessOptions {
            program,
            groups: None,
            variables: Vec::new(),
            transport: Transport::default(),
            settings: LinkSettings::default(),
        }
    }

    /// Whether the worker of a device group is a process.
    pub(crate) fn serves(&self, group: &str) -> bool {
        let groups = self.groups.as_ref();
        groups.is_none_or(|groups| groups.iter().any(|name| name == group))
    }
}

/// Longest wait for the exit status of a process whose connection ended.
const EXIT: Duration = Duration::from_secs(2);
/// How long a process may take to end by itself.
const GRACE: Duration = Duration::from_secs(2);

/// What waits for a worker process, and why it is lost.
#[derive(Default)]
struct Waiting {
    loading: Option<Sender<Result<(), RunError>>>,
    queries: BTreeMap<u64, Sender<Result<Answer, QueryFailure>>>,
    calls: BTreeSet<u64>,
    /// The call that can be cancelled; its token is that of the step.
    cancel: Option<(u64, CancelToken)>,
    lost: Option<String>,
}

/// State that the threads of a worker share.
struct Shared {
    name: String,
    waiting: Mutex<Waiting>,
    process: Mutex<WorkerProcess>,
    events: Sender<Event>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn error(&self, reason: impl Into<String>) -> RunError {
        RunError::Lost {
            worker: self.name.clone(),
            reason: reason.into(),
        }
    }

    /// Processes what the worker sends, on the thread that reads.
    fn receive(&self, from: FromWorker) {
        match from {
            FromWorker::Event { message, .. } => self.understand(message),
            FromWorker::Reply {
                result: Ok(message),
                ..
            } => self.understand(message),
            FromWorker::Reply {
                result: Err(error), ..
            } => self.lose(&error.to_string()),
            FromWorker::Lost(LinkError::Ended) => self.give_up("it was shut down".to_owned()),
            FromWorker::Lost(reason) => self.lose(&reason.to_string()),
        }
    }

    fn understand(&self, message: Message) {
        if let Err(error) = self.dispatch(message) {
            self.lose(&error.to_string());
        }
    }

    fn dispatch(&self, message: Message) -> Result<(), MessageError> {
        let (message, mut parts) = ToRun::received(message)?;
        match message {
            ToRun::Loaded(result) => {
                if let Some(loading) = locked(&self.waiting).loading.take() {
                    let _ = loading.send(result.map_err(|error| error.received(&self.name)));
                }
            }
            ToRun::Rows { call } => {
                let batch = parts.batch()?;
                // Waits while the engine does not keep up, which slows the worker down.
                let _ = self.events.send(Event::Rows { call, batch });
            }
            ToRun::Done {
                call,
                report,
                result,
            } => {
                let mut waiting = locked(&self.waiting);
                waiting.calls.remove(&call);
                waiting.cancel = waiting
                    .cancel
                    .take()
                    .filter(|(running, _)| *running != call);
                drop(waiting);
                let _ = self.events.send(Event::Done {
                    call,
                    report,
                    result,
                });
            }
            ToRun::Answer { query, answer } => {
                if let Some(asker) = locked(&self.waiting).queries.remove(&query) {
                    let _ = asker.send(answer.map_err(|failure| failure.received(&self.name)));
                }
            }
            ToRun::Forgotten => {}
        }
        Ok(())
    }

    /// The worker is lost; adds what is known about its process.
    fn lose(&self, reason: &str) {
        if locked(&self.waiting).lost.is_none() {
            let reason = locked(&self.process).describe_loss(reason, EXIT);
            self.give_up(reason);
        }
    }

    /// Answers everyone who waits. Only the first reason counts. Runs on the reading thread, since it may have to wait for
    /// the engine.
    fn give_up(&self, reason: String) {
        let mut waiting = locked(&self.waiting);
        let lost = waiting.lost.get_or_insert(reason).clone();
        let Waiting {
            loading,
            queries,
            calls,
            ..
        } = std::mem::take(&mut *waiting);
        waiting.lost = Some(lost.clone());
        drop(waiting);
        if let Some(loading) = loading {
            let _ = loading.send(Err(self.error(lost.clone())));
        }
        for asker in queries.into_values() {
            let _ = asker.send(Err(QueryFailure::Panicked(self.error(lost.clone()))));
        }
        for call in calls {
            let _ = self.events.send(Event::Done {
                call,
                report: CallReport::default(),
                result: Err(CallFailure::Lost(lost.clone())),
            });
        }
    }
}

/// A worker process as the engine sees it.
pub(crate) struct ProcessWorker {
    shared: Arc<Shared>,
    client: Arc<Client>,
    next_query: u64,
    /// Longest wait for the process to take a message.
    deadline: Duration,
    abandoned: bool,
    dropped: Arc<DroppedSnapshots>,
}

impl ProcessWorker {
    /// Starts a process for group `group`, which builds the pipeline, loads its models and starts its stages. Each start for
    /// a group has another `incarnation`, counted from 1.
    pub(crate) fn begin(
        start: &WorkerStart,
        options: &ProcessOptions,
        group: usize,
        incarnation: u64,
    ) -> Result<LoadingProcess, RunError> {
        let pipe = start.schedule.plan().pipe();
        let pipeline = to_toml(pipe).map_err(|e| RunError::Config {
            reason: e.to_string(),
        })?;
        let name = start.schedule.groups()[group].name.clone();
        let lost = |reason: String| RunError::Lost {
            worker: name.clone(),
            reason,
        };
        let spawn = Spawn {
            program: options.program.clone(),
            variables: options.variables.clone(),
            run: format!("{} of process {}", pipe.name, std::process::id()),
            worker: name.clone(),
            incarnation,
            transport: options.transport,
            settings: options.settings.clone(),
            deadline: start.deadline,
            on_line: |worker, line| tracing::warn!("worker `{worker}`: {line}"),
        };
        let (process, connection) =
            WorkerProcess::spawn(&spawn).map_err(|e| lost(e.to_string()))?;
        let (ready, started) = bounded(1);
        let shared = Arc::new(Shared {
            name: name.clone(),
            waiting: Mutex::new(Waiting {
                loading: Some(ready),
                ..Waiting::default()
            }),
            process: Mutex::new(process),
            events: start.events.clone(),
        });
        // The reading thread must not keep the process alive.
        let of_reader: Weak<Shared> = Arc::downgrade(&shared);
        let client = Client::start(connection, &options.settings, move |from| {
            if let Some(shared) = of_reader.upgrade() {
                shared.receive(from);
            }
        });
        let worker = ProcessWorker {
            client: Arc::new(client.map_err(|e| lost(e.to_string()))?),
            shared,
            next_query: 0,
            deadline: start.deadline,
            abandoned: false,
            dropped: Arc::default(),
        };
        worker.watch_cancel()?;
        worker.submit(ToWorker::Load {
            pipeline,
            base: pipe.base.clone(),
            group,
        })?;
        Ok(LoadingProcess { worker, started })
    }

    /// Starts the thread that passes on the cancel token of the running call.
    fn watch_cancel(&self) -> Result<(), RunError> {
        let (shared, client) = (Arc::downgrade(&self.shared), Arc::downgrade(&self.client));
        let deadline = self.deadline;
        let watch = move || {
            while let (Some(shared), Some(client)) = (shared.upgrade(), client.upgrade()) {
                let is_cancelled = |(_, token): &mut (u64, CancelToken)| token.is_cancelled();
                let cancelled = locked(&shared.waiting).cancel.take_if(is_cancelled);
                if let Some((call, _)) = cancelled
                    && let Ok(signal) = Message::new(&Cancel { call })
                {
                    let _ = client.signal(&signal, deadline);
                }
                drop((shared, client));
                std::thread::sleep(TICK);
            }
        };
        let thread = std::thread::Builder::new().name("worker-cancel".to_owned());
        thread
            .spawn(watch)
            .map_err(|e| self.shared.error(e.to_string()))?;
        Ok(())
    }

    fn check(&self) -> Result<(), RunError> {
        match &locked(&self.shared.waiting).lost {
            Some(reason) => Err(self.shared.error(reason.clone())),
            None if self.abandoned => Err(self
                .shared
                .error("an abandoned call may still be running in its process")),
            None => Ok(()),
        }
    }

    fn submit(&self, request: ToWorker) -> Result<(), RunError> {
        let message = request.message();
        self.submit_message(&message.map_err(|e| self.shared.error(e.to_string()))?)
    }

    fn submit_message(&self, message: &Message) -> Result<(), RunError> {
        let dropped = self.dropped.take();
        if !dropped.is_empty() {
            self.submit(ToWorker::Forget(dropped))?;
        }
        let sent = self.client.begin(message, self.deadline);
        let Err(error) = sent else {
            return Ok(());
        };
        let since = Instant::now();
        // The reading thread finds out how the process ended.
        while error == LinkError::Closed && since.elapsed() < EXIT {
            self.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        if !matches!(error, LinkError::Unsendable(_)) {
            // The reading thread may find out later.
            let mut waiting = locked(&self.shared.waiting);
            waiting.lost.get_or_insert_with(|| error.to_string());
        }
        Err(self.shared.error(error.to_string()))
    }
}

/// A worker process that is loading.
pub(crate) struct LoadingProcess {
    worker: ProcessWorker,
    started: Receiver<Result<(), RunError>>,
}

impl LoadingProcess {
    /// Waits until models are loaded and stages started.
    pub(crate) fn loaded(mut self, deadline: Duration) -> Result<ProcessWorker, RunError> {
        match self.started.recv_timeout(deadline) {
            Ok(Ok(())) => Ok(self.worker),
            Ok(Err(error)) => Err(error),
            Err(error) => {
                self.worker.abandon();
                Err(unanswered(self.worker.name(), TO_LOAD, error, deadline))
            }
        }
    }
}

impl Worker for ProcessWorker {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn call(&mut self, call: DeviceCall) -> Result<(), RunError> {
        self.check()?;
        let number = call.call;
        let request = ToWorker::Call {
            call: number,
            stage: call.stage,
            wave: call.wave,
            env: call.env.as_ref().into(),
        };
        let message = request.message().and_then(|mut message| {
            message.push_batch(&call.input)?;
            Ok(message)
        });
        let message = message.map_err(|e| self.shared.error(e.to_string()))?;
        let mut waiting = locked(&self.shared.waiting);
        waiting.calls.insert(number);
        waiting.cancel = Some((number, call.env.cancel.clone()));
        drop(waiting);
        let sent = self.submit_message(&message);
        if sent.is_err() {
            locked(&self.shared.waiting).calls.remove(&number);
        }
        sent
    }

    fn send(&mut self, query: Query) -> Result<PendingAnswer, RunError> {
        self.check()?;
        let what = query.what();
        let (reply, answer) = bounded(1);
        self.next_query += 1;
        locked(&self.shared.waiting)
            .queries
            .insert(self.next_query, reply);
        self.submit(ToWorker::Ask {
            query: self.next_query,
            asked: query,
        })?;
        Ok(PendingAnswer { what, answer })
    }

    fn abandon(&mut self) {
        self.abandoned = true;
        self.client.end();
        locked(&self.shared.process).end(Duration::ZERO);
    }

    fn is_lost(&self) -> bool {
        self.abandoned
            || locked(&self.shared.waiting).lost.is_some()
            || self.client.lost().is_some()
    }

    fn dropped(&self) -> &Arc<DroppedSnapshots> {
        &self.dropped
    }
}

impl Drop for ProcessWorker {
    fn drop(&mut self) {
        // Whoever waits is answered before the process ends.
        self.client.end();
        locked(&self.shared.process).end(GRACE);
    }
}
