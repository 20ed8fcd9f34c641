//! [`Recorder`]: a tap that sends batches to a dedicated thread, which does all the work.
//!
//! Batches share their buffers, so sending one costs nothing. The queue is bounded: a recorder that cannot keep up
//! slows the run down instead of filling the memory. At the end of a step that is recorded in full the run waits until
//! the step is on disk, so at most one step's rows wait to be written.
//!
//! A thread that does not answer, because a rule or the disk hangs, is reported in `stall.json` like any other wait.
//! After ten minutes the recorder abandons it, and the run continues without its trace.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{
    Receiver, RecvTimeoutError, SendTimeoutError, Sender, TrySendError, bounded,
};
use verl_plan::schedule::groups::DeviceGroup;
use verl_plan::schedule::placement::Schedule;
use verl_rules::config::{TraceConfig, TraceWeights, bytes_of};
use verl_rules::format::{FORMAT, Side};
use verl_rules::{Anomaly, Fired, Rule};
use verl_run::dispatch::{current_dispatch, set_dispatch};
use verl_run::error::RunError;
use verl_run::metrics::StepMetrics;
use verl_run::space::Room;
use verl_run::start::seconds;
use verl_run::state::RunState;
use verl_run::tap::{Tap, TapPoint};
use verl_run::watch::{Wait, Watch};
use verl_words::batch::Batch;
use verl_words::panics::catch_panic;
use verl_words::resource::WeightsVersion;

use crate::files::{
    Conditions, Layout, ROW_GROUP_BYTES, StageInfo, StateRef, TraceError, TraceFormat, TraceWriter,
    write_json, write_state,
};
use crate::record::open_step::StateRefs;
use crate::record::recording::{Message, Recording, SPILL_BYTES, Shared};
use crate::record::step_data::{Part, StageAbout};
use crate::record::watched_rule::WatchedRule;

/// Memory that recording a step in full may use besides the run's own: rows that wait for their files, and the row
/// group being encoded (bytes).
pub const MEMORY_BUDGET: usize = SPILL_BYTES + ROW_GROUP_BYTES;

/// Capacity of the queue to the thread (messages).
const QUEUE: usize = 1024;
/// Longest wait for the thread; a disk may be slow.
const REPLY_TIMEOUT: Duration = Duration::from_secs(600);
/// Steps between two checks of the weight hashes.
const VERSIONS_EVERY: u64 = 50;

/// Records the data flow of a run in the run folder.
pub struct Recorder {
    /// The thread that runs the steps sends all messages, and the queue keeps their order. So the recorder's thread
    /// sees the parts of a step in the order of the events, after its `Begin` and before its `End` or `Failed`, and
    /// owns what it collects without a lock. The metrics of a step may come after the next `Begin`.
    to: Sender<Message>,
    thread: Mutex<Option<JoinHandle<()>>>,
    config: TraceConfig,
    layout: Layout,
    /// Whether some stage sets `debug`.
    debug_stages: bool,
    /// Size of the state of all models (bytes).
    state_bytes: u64,
    /// Bytes of steps in full on disk, rows and states. Both threads compare it with the budget before a write and add
    /// to it after, so it counts only complete files; two concurrent writes exceed the budget by at most one of them.
    used: Arc<AtomicU64>,
    /// Disk space besides that reserved for the models.
    room: Room,
    /// Reasons for left-out states that were reported.
    reported: Mutex<BTreeSet<&'static str>>,
    /// By model, the version whose state was written last, and its file name. An entry is added only once the file is
    /// complete, and state files are never removed, so a later step with the same version can refer to it.
    stored: Mutex<BTreeMap<String, StateRef>>,
    watches_weights: bool,
    /// Steps that the flight recorder wrote without their state.
    wanted: Arc<Mutex<Vec<u64>>>,
    /// What the rules found so far.
    fired: Arc<Mutex<Vec<Fired>>>,
    /// Reports waits for the thread.
    watch: Watch,
    /// The thread did not answer and was abandoned. Never reset, and nothing is sent afterwards: a thread that wakes up
    /// late has seen all messages up to some point and none after it, so what it writes has no gap.
    abandoned: AtomicBool,
    /// The current step.
    step: AtomicU64,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder")
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

impl Recorder {
    /// Starts a recorder for a run in `run_dir`, with the pipeline's rules besides the built-in ones; `None` if the
    /// settings request no recording.
    ///
    /// # Errors
    /// The folder or the thread cannot be created.
    pub fn start(run_dir: &Path, schedule: &Schedule) -> Result<Option<Arc<Recorder>>, TraceError> {
        Self::start_in(run_dir, schedule, &Room::of(run_dir, None))
    }

    /// As [`Recorder::start`]; writes only while there is `room` besides the space reserved for the models.
    pub fn start_in(
        run_dir: &Path,
        schedule: &Schedule,
        room: &Room,
    ) -> Result<Option<Arc<Recorder>>, TraceError> {
        let plan = schedule.plan();
        let config = plan.pipe().trace.clone();
        let stages = StageAbout::all(schedule);
        let debug_stages = stages.iter().any(|stage| stage.debug);
        if !config.stats && !plan.pipe().records_in_full() {
            return Ok(None);
        }
        let conditions = Conditions::of(schedule);
        let format = TraceFormat {
            format: FORMAT,
            verl: env!("CARGO_PKG_VERSION").to_owned(),
            pipeline: plan.pipe().name.clone(),
            plan_hash: conditions.plan_hash.clone(),
            seed: plan.context().seed,
            steps: plan.context().steps,
            stages: stages
                .iter()
                .map(|stage| StageInfo {
                    name: stage.name.clone(),
                    kind: stage.kind.clone(),
                })
                .collect(),
        };
        let writer = TraceWriter::create(run_dir, &format)?.with_room(room.clone());
        if plan.pipe().records_in_full() {
            room.warn_about_budget(config.budget_mb);
        }
        let layout = writer.layout().clone();
        write_json(&layout.conditions(), &conditions)?;
        let on_cpu = schedule.groups().iter().all(DeviceGroup::is_on_cpu);
        let models = plan.models().iter();
        let state_bytes = models
            .map(|model| model.info.weight_bytes + model.info.optimizer_bytes)
            .sum();
        let shared = Shared::default();
        let Shared {
            wanted,
            used,
            fired,
        } = shared.clone();
        let listens = current_dispatch();
        let deadline = seconds(plan.pipe().run.stage_deadline_s);
        let watch = Watch::start(Some(run_dir), deadline);
        let custom = plan.pipe().rules.iter().map(|rule| (rule.build)());
        let watched =
            |rule| Box::new(WatchedRule::new(rule, watch.activity_reporter())) as Box<dyn Rule>;
        let recording = Recording::new(
            shared,
            writer,
            stages,
            config.clone(),
            format,
            custom.map(watched).collect(),
            on_cpu,
        )?;
        let watches_weights = recording.watches_weights();
        let (to, inbox) = bounded(QUEUE);
        let thread = std::thread::Builder::new()
            .name("trace".to_owned())
            .spawn(move || {
                let _heard = set_dispatch(listens.as_ref());
                // A custom rule may panic.
                if let Err(message) = catch_panic(|| recording.serve(&inbox)) {
                    tracing::error!(
                        "trace: its thread panicked: {message}; the run continues without rules and without recording"
                    );
                    drop_requests(&inbox);
                }
            })
            .map_err(|e| TraceError::file("start a thread for", &layout.dir, e))?;
        Ok(Some(Arc::new(Recorder {
            to,
            thread: Mutex::new(Some(thread)),
            config,
            layout,
            debug_stages,
            state_bytes,
            used,
            room: room.clone(),
            reported: Mutex::default(),
            stored: Mutex::default(),
            watches_weights,
            wanted,
            fired,
            watch,
            abandoned: AtomicBool::new(false),
            step: AtomicU64::new(0),
        })))
    }

    /// Number of events of each rule so far.
    pub fn anomalies(&self) -> BTreeMap<String, u64> {
        let fired = self.fired().into_iter();
        fired.map(|fired| (fired.rule, fired.events)).collect()
    }

    /// Whether [`Recorder::state`] expects the state of models and stages before `step`, and whether in full or by
    /// version.
    pub fn wants_state(&self, step: u64) -> Option<TraceWeights> {
        let captured = self.config.captures_step(step) || self.debug_stages;
        let small = self.state_bytes <= bytes_of(self.config.weights_limit_mb);
        let all_stages = self.config.captures_step(step) && self.config.stages.is_empty();
        let by_size = match all_stages && small {
            true => TraceWeights::Full,
            false => TraceWeights::Hash,
        };
        captured.then(|| self.config.weights.unwrap_or(by_size))
    }

    /// Versions of models whose state is on disk already.
    pub fn stored_versions(&self) -> BTreeMap<String, WeightsVersion> {
        let stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = stored.iter().map(|(n, r)| (n.clone(), r.version.clone()));
        versions.collect()
    }

    /// Records the state at the start of `step`.
    pub fn state(&self, step: u64, state: RunState) {
        let state = self.references(state);
        self.send(Message::State { step, state });
    }

    /// Number of snapshots to keep for the flight recorder; 0 if the models are too large for it.
    pub fn num_snapshots(&self) -> usize {
        // The steps of the ring, the current one, and one more: the snapshot of a step may be requested one step late.
        let steps = self.config.ring_steps as u64 + 2;
        let fits = self.state_bytes.saturating_mul(steps) <= bytes_of(self.config.ring_mb);
        let has_ring = self.config.stats && self.config.ring_steps > 0;
        let kept = has_ring && fits && self.config.weights != Some(TraceWeights::Hash);
        usize::from(kept) * steps as usize
    }

    /// Steps that the flight recorder wrote without their state since the last call.
    pub fn wanted_states(&self) -> Vec<u64> {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *wanted)
    }

    /// Records the state at the start of a step that is already on disk.
    pub fn late_state(&self, step: u64, state: RunState) {
        let state = self.references(state);
        self.send(Message::LateState { step, state });
    }

    /// Writes the states that are not on disk; returns references to all of them.
    fn references(&self, state: RunState) -> StateRefs {
        let mut references = StateRefs::default();
        let mut on_disk = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, (version, stored)) in state.models {
            let reference = match (&stored, on_disk.get(&name)) {
                (Some(stored), _) => self.write(&version, stored),
                (None, Some(known)) if known.version == version => known.clone(),
                (None, _) => StateRef {
                    version,
                    state: None,
                },
            };
            if reference.state.is_some() {
                on_disk.insert(name.clone(), reference.clone());
            }
            references.models.insert(name, reference);
        }
        for (name, (version, stored)) in state.stages {
            let reference = match &stored {
                Some(stored) => self.write(&version, stored),
                None => StateRef {
                    version,
                    state: None,
                },
            };
            references.stages.insert(name, reference);
        }
        references
    }

    /// Writes a state if it fits in the budget.
    fn write(
        &self,
        version: &WeightsVersion,
        stored: &verl_words::resource::StoredState,
    ) -> StateRef {
        let size = stored.tensors.len() as u64;
        let used = self.used.load(Ordering::Relaxed);
        if used + size > bytes_of(self.config.budget_mb) {
            if self.is_first_report("room") {
                tracing::warn!(
                    "trace: from now on steps are recorded without the state that replay needs: it takes {:.1} MB, and {:.1} MB of {} MB (`trace.budget_mb`) are used",
                    size as f64 / f64::from(1 << 20),
                    used as f64 / f64::from(1 << 20),
                    self.config.budget_mb
                );
            }
            return StateRef {
                version: version.clone(),
                state: None,
            };
        }
        let room = self.room.ensure_free_beside_lines(size);
        let room = room.map_err(|e| TraceError::file("write", &self.layout.dir, e));
        let state = match room.and_then(|()| write_state(&self.layout, stored)) {
            Ok((name, bytes)) => {
                self.used.fetch_add(bytes, Ordering::Relaxed);
                Some(name)
            }
            Err(error) => {
                if self.is_first_report("disk") {
                    tracing::warn!(
                        "trace: cannot write a state that replay needs ({}): {error}; the run continues and keeps trying to write later states",
                        error.code()
                    );
                }
                None
            }
        };
        StateRef {
            version: version.clone(),
            state,
        }
    }

    /// Whether this reason to leave out a state is reported for the first time.
    fn is_first_report(&self, reason: &'static str) -> bool {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        reported.insert(reason)
    }

    /// Whether [`Recorder::versions`] expects the versions of the models after `step`.
    pub fn wants_versions(&self, step: u64) -> bool {
        self.watches_weights && step.is_multiple_of(VERSIONS_EVERY)
    }

    /// Records the versions of the models after `step`.
    pub fn versions(&self, step: u64, versions: BTreeMap<String, WeightsVersion>) {
        self.send(Message::Versions { step, versions });
    }

    /// Records the metrics of a step that has ended.
    pub fn metrics(&self, metrics: &StepMetrics) {
        if self.config.stats {
            self.send(Message::Metrics {
                step: metrics.step,
                values: metrics.values.clone(),
                roles: metrics.roles.clone(),
            });
        }
    }

    /// The rules that fired so far, in the messages that the thread has processed.
    pub fn fired(&self) -> Vec<Fired> {
        let fired = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        fired.clone()
    }

    /// Waits until everything sent so far is processed.
    pub fn sync(&self) {
        self.send_and_wait("its remaining work", Message::Sync);
    }

    /// Ends the thread once everything is written.
    pub fn close(&self) {
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(thread) = thread else { return };
        // A thread that hangs cannot be waited for; it ends with the process.
        if self
            .send_and_wait("its last files", Message::Close)
            .is_some()
        {
            let _ = thread.join();
        }
    }

    /// Sends a message. A thread that has ended has logged why; the run continues without it.
    fn send(&self, message: Message) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        let Err(TrySendError::Full(message)) = self.to.try_send(message) else {
            return;
        };
        let _waiting = self.watch.begin(self.wait("room for more rows"));
        let sent = self.to.send_timeout(message, REPLY_TIMEOUT);
        if let Err(SendTimeoutError::Timeout(_)) = sent {
            self.abandon();
        }
    }

    /// A wait for `what` from the thread.
    fn wait(&self, what: &str) -> Wait {
        Wait {
            step: self.step.load(Ordering::Relaxed),
            who: "trace".to_owned(),
            pending: what.to_owned(),
            on: "the thread of the trace".to_owned(),
            deadline: REPLY_TIMEOUT,
        }
    }

    fn abandon(&self) {
        if !self.abandoned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "trace: its thread did not answer within {} s, so a rule or the disk hangs; the run continues without rules and without recording",
                REPLY_TIMEOUT.as_secs()
            );
        }
    }

    fn part(&self, point: TapPoint<'_>, side: Side, batch: &Batch, refused: Option<String>) {
        self.send(Message::Part(Part {
            stage: point.index,
            side,
            wave: point.wave,
            slice: point.slice,
            rows: point.rows.clone(),
            batch: batch.clone(),
            refused,
        }));
    }

    fn send_and_wait<T>(
        &self,
        what: &str,
        message: impl FnOnce(Sender<T>) -> Message,
    ) -> Option<T> {
        let (reply, answer) = bounded(1);
        self.send(message(reply));
        if self.abandoned.load(Ordering::Relaxed) {
            return None;
        }
        let _waiting = self.watch.begin(self.wait(what));
        match answer.recv_timeout(REPLY_TIMEOUT) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                self.abandon();
                None
            }
        }
    }
}

/// Drops the messages to a thread that no longer records, those in the queue and later ones, until the recorder is
/// closed. A queue keeps its messages when its receiver is dropped, and whoever sent a request would wait for the reply
/// until the deadline.
fn drop_requests(inbox: &Receiver<Message>) {
    while let Ok(message) = inbox.recv() {
        if matches!(message, Message::Close(_)) {
            break;
        }
    }
}

impl Tap for Recorder {
    fn step_begin(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        self.send(Message::Begin { step });
    }

    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        self.part(point, Side::Input, batch, None);
    }

    fn output(&self, point: TapPoint<'_>, batch: &Batch) {
        self.part(point, Side::Output, batch, None);
    }

    fn refused(&self, point: TapPoint<'_>, batch: &Batch, reason: &str) {
        self.part(point, Side::Output, batch, Some(reason.to_owned()));
    }

    fn gate(&self, point: TapPoint<'_>, batch: &Batch) -> Result<(), Box<Anomaly>> {
        if !self.config.stats {
            return Ok(());
        }
        let (stage, batch) = (point.index, batch.clone());
        let gate = |reply| Message::Gate {
            stage,
            batch,
            reply,
        };
        let answer = self.send_and_wait("its findings", gate);
        answer.flatten().map_or(Ok(()), Err)
    }

    fn step_end(&self, step: u64) {
        if self.config.captures_step(step) || self.debug_stages {
            // Waiting bounds the memory: the rows of the next step come only after those of this one are written.
            self.send_and_wait("its rows on disk", |reply| Message::End {
                step,
                reply: Some(reply),
            });
        } else {
            self.send(Message::End { step, reply: None });
        }
    }

    fn step_failed(&self, _step: u64, error: &RunError) {
        let cancelled = matches!(error, RunError::Cancelled { .. });
        let reason = error.to_string();
        self.send_and_wait("its rows on disk", |reply| Message::Failed {
            cancelled,
            reason,
            reply,
        });
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use verl_declare::pipe::DataPipe;
    use verl_plan::Plannable;
    use verl_words::resource::StoredState;

    use super::*;

    #[test]
    fn a_state_beyond_the_budget_is_left_out() {
        let temp = tempfile::tempdir().expect("a folder");
        let pipe = DataPipe::new("p").trace(TraceConfig {
            every: Some(1),
            budget_mb: 1,
            ..TraceConfig::default()
        });
        let schedule = pipe.plan().expect("a plan").schedule().expect("places");
        let recorder = Recorder::start(temp.path(), &schedule).expect("starts");
        let recorder = recorder.expect("records");
        let version = WeightsVersion {
            step: 0,
            hash: "ab".to_owned(),
        };
        let write = |byte: u8| {
            let state = StoredState {
                tensors: vec![byte; 9],
                ..StoredState::default()
            };
            recorder.write(&version, &state).state
        };
        assert!(write(1).is_some());
        recorder.used.store(1 << 20, Ordering::Relaxed);
        assert_eq!(write(2), None);
    }

    #[test]
    fn requests_in_the_queue_of_a_thread_that_panics_are_answered() {
        struct Broken(crossbeam_channel::Receiver<()>);
        impl Rule for Broken {
            fn name(&self) -> &str {
                "broken"
            }
            fn severity(&self) -> verl_rules::RuleSeverity {
                verl_rules::RuleSeverity::Warn
            }
            fn limit(&self) -> f64 {
                0.0
            }
            fn advice(&self) -> &str {
                "fix it"
            }
            fn after_step(
                &mut self,
                _: &verl_rules::MetricsView<'_>,
                _: f64,
            ) -> Vec<verl_rules::Hit> {
                let _ = self.0.recv();
                panic!("a rule without a unit")
            }
        }
        let temp = tempfile::tempdir().expect("a folder");
        let (queued, is_queued) = bounded(1);
        let pipe = DataPipe::new("p").rule(move || Broken(is_queued.clone()));
        let schedule = pipe.plan().expect("a plan").schedule().expect("places");
        let recorder = Recorder::start(temp.path(), &schedule).expect("starts");
        let recorder = recorder.expect("records");
        recorder.step_begin(1);
        recorder.metrics(&StepMetrics {
            step: 1,
            ..StepMetrics::default()
        });
        let (reply, answer) = bounded(1);
        recorder.send(Message::Sync(reply));
        queued.send(()).expect("the rule waits");
        assert_eq!(answer.recv(), Err(crossbeam_channel::RecvError));
        recorder.sync();
        assert!(!recorder.abandoned.load(Ordering::Relaxed));
    }
}
