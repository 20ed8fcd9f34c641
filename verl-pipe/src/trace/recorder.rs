//! [`Recorder`]: a tap that hands batches to a thread of its own, which does all the work.
//!
//! Batches share their buffers, so handing one over costs nothing. The queue is bounded: a recorder that cannot keep up
//! slows the run down instead of filling the memory. At the end of a step that is recorded in full the run waits until
//! the step is on disk, so at most one step's rows are held for writing.
//!
//! A thread that does not answer, because a rule or the disk hangs, is told in `stall.json` like any other wait, and given
//! up in the end: the run goes on without its trace.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, SendTimeoutError, Sender, TrySendError, bounded};

use crate::batch::Batch;
use crate::resource::WeightsVersion;
use crate::run::channel::caught;
use crate::run::error::RunError;
use crate::run::metrics::StepMetrics;
use crate::run::space::Room;
use crate::run::start::seconds;
use crate::run::state::RunState;
use crate::run::warnings::{heard, heard_by};
use crate::run::watch::{Wait, Watch};
use crate::schedule::placement::Schedule;
use crate::trace::conditions::Conditions;
use crate::trace::config::{TraceConfig, TraceWeights, bytes_of};
use crate::trace::error::TraceError;
use crate::trace::format::{FORMAT, Layout, Side, StageInfo, StateRef, TraceFormat};
use crate::trace::partial::write_json;
use crate::trace::recording::{Message, Recording, SPILL_BYTES, Shared, StepState};
use crate::trace::rules::{Anomaly, Fired, Rule};
use crate::trace::state::write_state;
use crate::trace::step_data::{Part, StageAbout};
use crate::trace::tap::{Tap, TapPoint};
use crate::trace::told_rule::ToldRule;
use crate::trace::writer::{ROW_GROUP_BYTES, TraceWriter};

/// Bytes that recording a step in full may take besides what the run itself holds: rows that wait for their files, and
/// the row group that is encoded.
pub const MEMORY_BUDGET: usize = SPILL_BYTES + ROW_GROUP_BYTES;

/// Batches that may wait for the thread.
const QUEUE: usize = 1024;
/// Longest wait for the thread; a disk may be slow.
const PATIENCE: Duration = Duration::from_secs(600);
/// Steps between two looks at the hashes of the weights.
const VERSIONS_EVERY: u64 = 50;

/// Records what flows through a run into its folder.
pub struct Recorder {
    to: Sender<Message>,
    thread: Mutex<Option<JoinHandle<()>>>,
    config: TraceConfig,
    layout: Layout,
    /// A stage with a `debug` of its own.
    debug_stages: bool,
    /// Bytes that the state of all models takes.
    state_bytes: u64,
    /// Bytes of steps in full on disk, rows and states.
    used: Arc<AtomicU64>,
    /// Room on the disk beside the models.
    room: Room,
    /// Why states were left out, as far as it was told.
    told: Mutex<BTreeSet<&'static str>>,
    /// Versions whose state is on disk, and under which name.
    kept: Mutex<BTreeMap<String, StateRef>>,
    watches_weights: bool,
    /// Steps that the flight recorder wrote without their state.
    wanted: Arc<Mutex<Vec<u64>>>,
    /// What the rules found so far.
    fired: Arc<Mutex<Vec<Fired>>>,
    /// Tells waits for the thread.
    watch: Watch,
    /// The thread did not answer and was given up.
    lost: AtomicBool,
    /// The step that runs.
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
    /// A recorder for a run in `run_dir`, with the pipeline's rules beside the built-in ones; `None` where the settings ask
    /// for nothing.
    ///
    /// # Errors
    /// A folder or thread that cannot be made.
    pub fn start(run_dir: &Path, schedule: &Schedule) -> Result<Option<Arc<Recorder>>, TraceError> {
        Self::start_in(run_dir, schedule, &Room::of(run_dir, None))
    }

    /// As [`Recorder::start`]; writes as long as there is `room` beside the models.
    pub(crate) fn start_in(
        run_dir: &Path,
        schedule: &Schedule,
        room: &Room,
    ) -> Result<Option<Arc<Recorder>>, TraceError> {
        let plan = &schedule.plan;
        let config = plan.pipe.trace.clone();
        let stages = StageAbout::all(schedule);
        let debug_stages = stages.iter().any(|stage| stage.debug);
        if !config.stats && !plan.pipe.records_in_full() {
            return Ok(None);
        }
        let conditions = Conditions::of(schedule);
        let format = TraceFormat {
            format: FORMAT,
            verl: env!("CARGO_PKG_VERSION").to_owned(),
            pipeline: plan.pipe.name.clone(),
            plan_hash: conditions.plan_hash.clone(),
            seed: plan.context.seed,
            steps: plan.context.steps,
            stages: stages
                .iter()
                .map(|stage| StageInfo {
                    name: stage.name.clone(),
                    kind: stage.kind.clone(),
                })
                .collect(),
        };
        let writer = TraceWriter::create(run_dir, &format)?.in_room(room.clone());
        if plan.pipe.records_in_full() {
            room.tell_budget(config.budget_mb);
        }
        let layout = writer.layout().clone();
        write_json(&layout.conditions(), &conditions)?;
        let on_cpu = schedule
            .groups
            .iter()
            .flat_map(|group| &group.devices)
            .all(|device| device == "cpu");
        let models = plan.models.iter();
        let state_bytes = models
            .map(|model| model.info.weight_bytes + model.info.optimizer_bytes)
            .sum();
        let shared = Shared::default();
        let Shared {
            wanted,
            used,
            fired,
        } = shared.clone();
        let listens = heard_by();
        let deadline = seconds(plan.pipe.run.stage_deadline_s);
        let watch = Watch::start(Some(run_dir), deadline);
        let own = plan.pipe.rules.iter().map(|rule| (rule.build)());
        let told = |rule| Box::new(ToldRule::new(rule, watch.teller())) as Box<dyn Rule>;
        let recording = Recording::new(
            shared,
            writer,
            stages,
            config.clone(),
            format,
            own.map(told).collect(),
            on_cpu,
        )?;
        let watches_weights = recording.watches_weights();
        let (to, inbox) = bounded(QUEUE);
        let thread = std::thread::Builder::new()
            .name("trace".to_owned())
            .spawn(move || {
                let _heard = heard(listens.as_ref());
                // A rule of one's own may panic.
                if let Err(message) = caught(|| recording.serve(&inbox)) {
                    tracing::error!(
                        "trace: its thread panicked: {message}; the run goes on, and from here on no rule looks and nothing is recorded"
                    );
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
            told: Mutex::default(),
            kept: Mutex::default(),
            watches_weights,
            wanted,
            fired,
            watch,
            lost: AtomicBool::new(false),
            step: AtomicU64::new(0),
        })))
    }

    /// How often each rule began to hold so far.
    pub(crate) fn anomalies(&self) -> BTreeMap<String, u64> {
        let fired = self.fired().into_iter();
        fired.map(|fired| (fired.rule, fired.events)).collect()
    }

    /// Whether the state of models and stages is to be told before `step`, and if so, whether in full or by version.
    pub(crate) fn wants_state(&self, step: u64) -> Option<TraceWeights> {
        let captured = self.config.captures_step(step) || self.debug_stages;
        let small = self.state_bytes <= bytes_of(self.config.weights_limit_mb);
        let whole = self.config.captures_step(step) && self.config.stages.is_empty();
        let by_size = match whole && small {
            true => TraceWeights::Full,
            false => TraceWeights::Hash,
        };
        captured.then(|| self.config.weights.unwrap_or(by_size))
    }

    /// Versions of models whose state is on disk already.
    pub(crate) fn kept_versions(&self) -> BTreeMap<String, WeightsVersion> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = kept.iter().map(|(n, r)| (n.clone(), r.version.clone()));
        versions.collect()
    }

    /// Takes the state at the start of `step`.
    pub(crate) fn state(&self, step: u64, state: RunState) {
        let state = self.references(state);
        self.send(Message::State { step, state });
    }

    /// Steps of which a snapshot is to be kept for the flight recorder; 0 where the models are too large for it.
    pub(crate) fn kept_snapshots(&self) -> usize {
        // The steps of the ring, the current one, and one more: a step may be asked for after the next one.
        let steps = self.config.ring_steps as u64 + 2;
        let fits = self.state_bytes.saturating_mul(steps) <= bytes_of(self.config.ring_mb);
        let flies = self.config.stats && self.config.ring_steps > 0;
        let kept = flies && fits && self.config.weights != Some(TraceWeights::Hash);
        usize::from(kept) * steps as usize
    }

    /// Steps that the flight recorder wrote since the last call and whose state is not there.
    pub(crate) fn wanted_states(&self) -> Vec<u64> {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *wanted)
    }

    /// Takes the state at the start of a step that is on disk already.
    pub(crate) fn late_state(&self, step: u64, state: RunState) {
        let state = self.references(state);
        self.send(Message::LateState { step, state });
    }

    /// Writes the states that are not on disk; gives where they all are.
    fn references(&self, state: RunState) -> StepState {
        let mut told = StepState::default();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, (version, stored)) in state.models {
            let reference = match (&stored, kept.get(&name)) {
                (Some(stored), _) => self.keep(&version, stored),
                (None, Some(kept)) if kept.version == version => kept.clone(),
                (None, _) => StateRef {
                    version,
                    state: None,
                },
            };
            if reference.state.is_some() {
                kept.insert(name.clone(), reference.clone());
            }
            told.models.insert(name, reference);
        }
        for (name, (version, stored)) in state.stages {
            let reference = match &stored {
                Some(stored) => self.keep(&version, stored),
                None => StateRef {
                    version,
                    state: None,
                },
            };
            told.stages.insert(name, reference);
        }
        told
    }

    /// Writes a state while the budget lasts.
    fn keep(&self, version: &WeightsVersion, stored: &crate::resource::StoredState) -> StateRef {
        let size = stored.tensors.len() as u64;
        let used = self.used.load(Ordering::Relaxed);
        if used + size > bytes_of(self.config.budget_mb) {
            if self.tells("room") {
                tracing::warn!(
                    "trace: steps are recorded without the state that a replay needs from here on: it takes {:.1} MB, and {:.1} MB of {} MB (`trace.budget_mb`) are used",
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
        let room = self.room.take_beside_lines(size);
        let room = room.map_err(|e| TraceError::file("write", &self.layout.dir, e));
        let state = match room.and_then(|()| write_state(&self.layout, stored)) {
            Ok((name, bytes)) => {
                self.used.fetch_add(bytes, Ordering::Relaxed);
                Some(name)
            }
            Err(error) => {
                if self.tells("disk") {
                    tracing::warn!(
                        "trace: a state that a replay needs could not be written ({}): {error}; the run goes on, and what the disk takes later is written again",
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

    /// Whether this reason to leave out a state is told for the first time.
    fn tells(&self, reason: &'static str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.insert(reason)
    }

    /// Whether the versions of the models are to be told after `step`.
    pub(crate) fn wants_versions(&self, step: u64) -> bool {
        self.watches_weights && step.is_multiple_of(VERSIONS_EVERY)
    }

    /// Takes the versions of the models after `step`.
    pub(crate) fn versions(&self, step: u64, versions: BTreeMap<String, WeightsVersion>) {
        self.send(Message::Versions { step, versions });
    }

    /// Takes the metrics of a step that has ended.
    pub(crate) fn metrics(&self, metrics: &StepMetrics) {
        if self.config.stats {
            self.send(Message::Metrics {
                step: metrics.step,
                values: metrics.values.clone(),
            });
        }
    }

    /// The rules that fired so far, as far as the thread has come.
    pub fn fired(&self) -> Vec<Fired> {
        let fired = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        fired.clone()
    }

    /// Waits until all that was handed over so far is done.
    pub(crate) fn sync(&self) {
        self.send_and_wait("what is left to do", Message::Sync);
    }

    /// Ends the thread once all is written.
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

    /// A thread that is gone has told why; the run goes on without it.
    fn send(&self, message: Message) {
        if self.lost.load(Ordering::Relaxed) {
            return;
        }
        let Err(TrySendError::Full(message)) = self.to.try_send(message) else {
            return;
        };
        let _waiting = self.watch.begin(self.wait("room for more rows"));
        let sent = self.to.send_timeout(message, PATIENCE);
        if let Err(SendTimeoutError::Timeout(_)) = sent {
            self.give_up();
        }
    }

    /// A wait for the thread, which owes `what`.
    fn wait(&self, what: &str) -> Wait {
        Wait {
            step: self.step.load(Ordering::Relaxed),
            who: "trace".to_owned(),
            owes: what.to_owned(),
            on: "the thread of the trace".to_owned(),
            deadline: PATIENCE,
        }
    }

    fn give_up(&self) {
        if !self.lost.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "trace: its thread did not answer within {} s, so a rule or the disk hangs; the run goes on, and from here on no rule looks and nothing is recorded",
                PATIENCE.as_secs()
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
        let (told, answer) = bounded(1);
        self.send(message(told));
        if self.lost.load(Ordering::Relaxed) {
            return None;
        }
        let _waiting = self.watch.begin(self.wait(what));
        match answer.recv_timeout(PATIENCE) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                self.give_up();
                None
            }
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
        let gate = |told| Message::Gate { stage, batch, told };
        let answer = self.send_and_wait("its findings", gate);
        answer.flatten().map_or(Ok(()), Err)
    }

    fn step_end(&self, step: u64) {
        if self.config.captures_step(step) || self.debug_stages {
            self.send_and_wait("its rows on disk", |told| Message::End {
                step,
                told: Some(told),
            });
        } else {
            self.send(Message::End { step, told: None });
        }
    }

    fn step_failed(&self, _step: u64, error: &RunError) {
        let cancelled = matches!(error, RunError::Cancelled { .. });
        let reason = error.to_string();
        self.send_and_wait("its rows on disk", |told| Message::Failed {
            cancelled,
            reason,
            told,
        });
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.close();
    }
}
