//! The work of the recorder's thread: statistics, rules, files. An I/O error is reported once and does not end the run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};

use crate::batch::Batch;
use crate::diagnostic::quoted;
use crate::resource::WeightsVersion;
use crate::trace::config::{TraceConfig, bytes_of};
use crate::trace::error::TraceError;
use crate::trace::format::{
    FORMAT, ROWS_MISSING, Reason, Side, StateRef, StepManifest, TraceFormat, parse,
};
use crate::trace::look::ShowCommand;
use crate::trace::rules::{
    Anomaly, EARLY_STEPS, Fired, HISTORY_STEPS, MetricsView, Rule, RuleBook, RuleSeverity,
    SeenBatch, StepView,
};
use crate::trace::stats_table::StatsWriter;
use crate::trace::step_data::{Part, Ring, StageAbout, StepData, StepFiles, StepHeader};
use crate::trace::step_stats::StepStats;
use crate::trace::writer::TraceWriter;

/// Bytes of rows that a step recorded in full may keep in memory before they are spilled to its files.
pub(crate) const SPILL_BYTES: usize = 256 << 20;

/// A message to the thread.
pub(crate) enum Message {
    Begin {
        step: u64,
    },
    State {
        step: u64,
        state: StateRefs,
    },
    /// State at the start of a step that is already on disk.
    LateState {
        step: u64,
        state: StateRefs,
    },
    Part(Part),
    Gate {
        stage: usize,
        batch: Batch,
        reply: Sender<Option<Box<Anomaly>>>,
    },
    End {
        step: u64,
        reply: Option<Sender<()>>,
    },
    Failed {
        cancelled: bool,
        reason: String,
        reply: Sender<()>,
    },
    Metrics {
        step: u64,
        values: BTreeMap<String, f64>,
    },
    Versions {
        step: u64,
        versions: BTreeMap<String, WeightsVersion>,
    },
    Sync(Sender<()>),
    Close(Sender<()>),
}

/// State at the start of a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct StateRefs {
    pub models: BTreeMap<String, StateRef>,
    pub stages: BTreeMap<String, StateRef>,
}

/// The state of the recorder's thread.
pub(crate) struct Recording {
    /// Steps that the flight recorder wrote without their state.
    wanted: Arc<Mutex<Vec<u64>>>,
    /// What the rules found so far.
    fired: Arc<Mutex<Vec<Fired>>>,
    writer: TraceWriter,
    stages: Vec<StageAbout>,
    config: TraceConfig,
    format: TraceFormat,
    on_cpu: bool,
    rules: RuleBook,
    stats: StepStats,
    table: Option<StatsWriter>,
    /// The current step. Stages in `data.on_disk` have finished files and are never written again. Between messages,
    /// rows of other stages are in `data.parts` or in `files`, never in both, so no row is written twice.
    /// `data.dropped` is set whenever rows have left `data.parts`, so missing rows are always known.
    data: StepData,
    /// Unfinished files of the current step. Dropping them removes them, so nothing of an unwritten step is left.
    files: StepFiles,
    /// Steps that have ended, the current one excluded.
    ring: Ring,
    /// The newest state at the start of a step, and the step. It comes before the step's `Begin`.
    state: (u64, StateRefs),
    /// Rules on rows have run on the current step; they run once a step, at its first gate or else at its end.
    judged: bool,
    /// A rule fired in the current step.
    alarmed: bool,
    /// The first anomaly that asks to stop and has not been passed on yet; the next gate returns it before its update.
    stop: Option<Box<Anomaly>>,
    history: VecDeque<BTreeMap<String, f64>>,
    early: Vec<BTreeMap<String, f64>>,
    /// By stage, the setting that bounds its responses, and its value.
    limits: BTreeMap<String, (&'static str, usize)>,
    versions: Vec<(u64, BTreeMap<String, WeightsVersion>)>,
    /// Bytes of rows that a step recorded in full may keep in memory.
    spill_bytes: usize,
    /// Bytes of steps and states on disk.
    used: Arc<AtomicU64>,
    ring_writes: usize,
    /// Steps that are on disk with all their stages.
    whole: BTreeSet<u64>,
    /// Problems that were reported.
    reported: BTreeSet<&'static str>,
    /// Stages to record by name that have received no rows yet.
    unrecorded: BTreeSet<usize>,
    /// A step with a stage to record in full has begun.
    asked: bool,
}

/// What the recorder and its thread share.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared {
    /// Steps that the flight recorder wrote without their state.
    pub wanted: Arc<Mutex<Vec<u64>>>,
    /// Bytes of steps in full on disk, rows and states.
    pub used: Arc<AtomicU64>,
    /// What the rules found so far.
    pub fired: Arc<Mutex<Vec<Fired>>>,
}

impl Recording {
    pub(crate) fn new(
        Shared {
            wanted,
            used,
            fired,
        }: Shared,
        writer: TraceWriter,
        stages: Vec<StageAbout>,
        config: TraceConfig,
        format: TraceFormat,
        custom_rules: Vec<Box<dyn Rule>>,
        on_cpu: bool,
    ) -> Result<Recording, TraceError> {
        let table = match config.stats {
            true => {
                let dir = writer.layout().stats();
                let table = StatsWriter::create(dir, config.part_steps)?;
                Some(table.with_room(writer.room().cloned()))
            }
            false => None,
        };
        // Steps beyond the end of the run were reported before it started.
        let asked = config.captures_up_to(format.steps);
        let named =
            |about: &StageAbout| about.debug || asked && config.stages.contains(&about.name);
        let unrecorded = stages.iter().enumerate();
        let unrecorded = unrecorded.filter(|(_, about)| about.in_step && named(about));
        let limits: Vec<_> = stages
            .iter()
            .filter_map(|about| Some((about.name.clone(), about.longest?)))
            .collect();
        Ok(Recording {
            unrecorded: unrecorded.map(|(stage, _)| stage).collect(),
            asked: false,
            wanted,
            fired,
            rules: RuleBook::new(custom_rules, &config.rules),
            ring: Ring {
                max_steps: config.ring_steps,
                max_bytes: usize::try_from(bytes_of(config.ring_mb)).unwrap_or(usize::MAX),
                ..Ring::default()
            },
            writer,
            stages,
            config,
            format,
            on_cpu,
            stats: StepStats::default(),
            table,
            data: StepData::default(),
            files: StepFiles::default(),
            state: (0, StateRefs::default()),
            judged: false,
            alarmed: false,
            stop: None,
            history: VecDeque::new(),
            early: Vec::new(),
            limits: limits.into_iter().collect(),
            versions: Vec::new(),
            spill_bytes: SPILL_BYTES,
            used,
            ring_writes: 0,
            whole: BTreeSet::new(),
            reported: BTreeSet::new(),
        })
    }

    /// Whether a rule uses hashes of the weights.
    pub(crate) fn watches_weights(&self) -> bool {
        self.config.stats && self.rules.has("weights_unchanged")
    }

    /// Processes messages until `Close`, or until the recorder is gone.
    pub(crate) fn serve(mut self, inbox: &Receiver<Message>) {
        let mut closed = None;
        while let Ok(message) = inbox.recv() {
            match message {
                Message::Begin { step } => self.begin(step),
                Message::State { step, state } => {
                    self.state = (step, state);
                }
                Message::LateState { step, state } => {
                    let added = self.add_state(step, state);
                    self.report_error("a state", added);
                }
                Message::Part(part) => self.part(part),
                Message::Gate {
                    stage,
                    batch,
                    reply,
                } => {
                    let stop = self.gate(stage, &batch);
                    let _ = reply.send(stop);
                }
                Message::End { step, reply } => {
                    self.end(step);
                    if let Some(reply) = reply {
                        let _ = reply.send(());
                    }
                }
                Message::Failed {
                    cancelled,
                    reason,
                    reply,
                } => {
                    self.failed(cancelled, &reason);
                    let _ = reply.send(());
                }
                Message::Metrics { step, values } => self.metrics(step, values),
                Message::Versions { step, versions } => {
                    self.versions.push((step, versions));
                    let extra = self.versions.len().saturating_sub(2);
                    self.versions.drain(..extra);
                }
                Message::Sync(reply) => {
                    let _ = reply.send(());
                }
                Message::Close(reply) => {
                    closed = Some(reply);
                    break;
                }
            }
        }
        let written = self.table.as_mut().map_or(Ok(()), StatsWriter::part);
        self.report_error("statistics", written);
        if let Some(warning) = self.unrecorded_warning() {
            tracing::warn!("{warning}");
        }
        if let Some(reply) = closed {
            let _ = reply.send(());
        }
    }

    fn begin(&mut self, step: u64) {
        self.data = StepData::new(step);
        self.files = StepFiles::default();
        self.asked |= self.chosen(step).contains(&true);
        self.stats.clear();
        self.judged = false;
        self.alarmed = false;
    }

    /// The warning about stages that were to be recorded and received no rows, with the reason.
    fn unrecorded_warning(&self) -> Option<String> {
        let names = self
            .unrecorded
            .iter()
            .map(|stage| self.stages[*stage].name.as_str());
        let why = match self.asked {
            true => "no rows arrived in the steps to record in full",
            false => "the run ended before a step to record in full",
        };
        (!self.unrecorded.is_empty()).then(|| {
            format!(
                "trace: nothing is recorded for {}, selected by `trace.stages` or `debug`: {why}",
                quoted(names)
            )
        })
    }

    /// Whether the settings record a stage in full in this step.
    fn is_chosen(&self, step: u64, stage: usize) -> bool {
        let about = &self.stages[stage];
        let by_step = self.config.captures_step(step) && self.config.captures_stage(&about.name);
        about.debug || by_step
    }

    fn chosen(&self, step: u64) -> Vec<bool> {
        let stages = 0..self.stages.len();
        stages.map(|stage| self.is_chosen(step, stage)).collect()
    }

    fn part(&mut self, mut part: Part) {
        if part.side == Side::Output && part.refused.is_none() {
            part.batch = self.stages[part.stage].written(&part.batch);
        }
        if self.table.is_some() && part.refused.is_none() {
            self.stats.add(&part);
        }
        let chosen = self.is_chosen(self.data.step, part.stage);
        if chosen {
            self.unrecorded.remove(&part.stage);
        }
        if chosen || self.has_flight_recorder() {
            self.data.add(part);
            self.make_room();
        }
    }

    /// Whether the rows of a step in which a rule fires will be on disk.
    fn keeps_rows(&self, step: u64) -> bool {
        let room = self.ring_writes < self.config.ring_writes;
        self.has_flight_recorder() && room || self.chosen(step).contains(&true)
    }

    /// Whether the flight recorder is on.
    fn has_flight_recorder(&self) -> bool {
        self.table.is_some() && self.ring.max_steps > 0
    }

    /// Moves rows that no longer fit in memory to disk, or drops them.
    fn make_room(&mut self) {
        let chosen = self.chosen(self.data.step);
        if chosen.contains(&true) {
            if self.data.bytes > self.spill_bytes {
                let spilt = self.spill(&chosen);
                self.data.dropped = true;
                self.data.lost |= spilt.is_err();
                self.data.forget();
                self.report_error("a step", spilt);
            }
        } else if self.data.bytes > self.ring.max_bytes {
            self.data.forget();
            self.data.dropped = true;
            if self.reported.insert("ring") {
                tracing::warn!(
                    "trace: step {} is larger than the {} MB of the flight recorder (`trace.ring_mb`), which keeps only a part of it",
                    self.data.step,
                    self.config.ring_mb
                );
            }
        }
    }

    fn spill(&mut self, chosen: &[bool]) -> Result<(), TraceError> {
        let state = self.step_state();
        let header = header(&self.stages, &self.format, &state);
        let chosen = |stage: usize| chosen[stage];
        self.writer.take_room(self.data.bytes as u64)?;
        self.files.spill(&self.writer, &header, &self.data, &chosen)
    }

    fn gate(&mut self, stage: usize, batch: &Batch) -> Option<Box<Anomaly>> {
        if let Some(stop) = self.stop.take() {
            return Some(stop);
        }
        if self.judged {
            return None;
        }
        self.judge(Some((stage, batch)))
    }

    /// Runs the rules on rows on the step so far; returns the first anomaly that asks to stop.
    fn judge(&mut self, update: Option<(usize, &Batch)>) -> Option<Box<Anomaly>> {
        self.judged = true;
        let keeps_rows = self.keeps_rows(self.data.step);
        let (rows, distances) = self.stats.rows(self.data.step, &self.stages, true);
        let batches: Vec<SeenBatch<'_>> = self
            .data
            .parts
            .iter()
            .map(|part| SeenBatch {
                stage: &self.stages[part.stage].name,
                side: part.side,
                batch: &part.batch,
            })
            .collect();
        let update = update.map(|(stage, batch)| SeenBatch {
            stage: &self.stages[stage].name,
            side: Side::Input,
            batch,
        });
        let view = StepView {
            step: self.data.step,
            stats: &rows,
            batches: &batches,
            update,
            distances: &distances,
            limits: &self.limits,
        };
        let command = ShowCommand {
            dir: self.writer.layout().run_dir(),
            step: self.data.step,
            stages: &self.stages,
            rows_recorded: keeps_rows,
        };
        let found = self.rules.before_update(&view, &|hit| command.for_hit(hit));
        self.report(found)
    }

    /// Reports what rules found; returns the first anomaly that asks to stop.
    fn report(&mut self, found: Vec<Anomaly>) -> Option<Box<Anomaly>> {
        self.alarmed |= !found.is_empty();
        let mut fired = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        *fired = self.rules.fired();
        drop(fired);
        for anomaly in &found {
            tracing::warn!("{anomaly:#}");
            let written = self.line(anomaly);
            self.report_error("anomalies", written);
        }
        let stops = |anomaly: &Anomaly| anomaly.severity == RuleSeverity::Stop;
        found.into_iter().find(stops).map(Box::new)
    }

    fn line(&self, anomaly: &Anomaly) -> Result<(), TraceError> {
        let path = self.writer.layout().anomalies();
        let line =
            serde_json::to_string(anomaly).map_err(|e| TraceError::file("write", &path, e))?;
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
            .map_err(|e| TraceError::file("write", &path, e))
    }

    fn end(&mut self, step: u64) {
        if self.table.is_some() {
            if !self.judged {
                // This step updates nothing, so there is nothing to stop before the next one.
                let stop = self.judge(None);
                self.stop = self.stop.take().or(stop);
            }
            self.statistics(step);
        }
        self.data.ended = true;
        let chosen = self.chosen(step);
        if chosen.contains(&true) {
            self.write(Reason::Asked, &chosen);
        }
        let data = std::mem::take(&mut self.data);
        if self.has_flight_recorder() {
            self.ring.push(data);
        }
        if self.alarmed {
            self.write_ring(Reason::Anomaly);
        }
    }

    fn statistics(&mut self, step: u64) {
        let (rows, _) = self.stats.rows(step, &self.stages, false);
        let written = self
            .table
            .as_mut()
            .map_or(Ok(()), |table| table.step(step, &rows));
        self.report_error("statistics", written);
    }

    fn failed(&mut self, cancelled: bool, reason: &str) {
        // A cancelled step is cut off at an arbitrary point, and missing rows would look like an error.
        if cancelled {
            return;
        }
        if self.table.is_some() {
            self.statistics(self.data.step);
        }
        tracing::debug!("writing the steps before the error: {reason}");
        self.write_ring(Reason::Failed);
        let chosen = match self.has_flight_recorder() {
            true => vec![true; self.stages.len()],
            false => self.chosen(self.data.step),
        };
        if chosen.contains(&true) {
            self.write(Reason::Failed, &chosen);
        }
    }

    fn metrics(&mut self, step: u64, values: BTreeMap<String, f64>) {
        let command = ShowCommand {
            dir: self.writer.layout().run_dir(),
            step,
            stages: &self.stages,
            rows_recorded: self.keeps_rows(step),
        };
        let view = MetricsView {
            step,
            metrics: &values,
            history: &self.history,
            early: &self.early,
            versions: &self.versions,
            on_cpu: self.on_cpu,
        };
        let found = self.rules.after_step(&view, &|hit| command.for_hit(hit));
        if self.early.len() < EARLY_STEPS {
            self.early.push(values.clone());
        }
        self.history.push_back(values);
        if self.history.len() > HISTORY_STEPS {
            self.history.pop_front();
        }
        let any = !found.is_empty();
        let stop = self.report(found);
        self.stop = self.stop.take().or(stop);
        if any {
            self.write_ring(Reason::Anomaly);
        }
    }

    /// Writes the steps of the ring that are not on disk.
    fn write_ring(&mut self, reason: Reason) {
        if self.ring_writes >= self.config.ring_writes && reason == Reason::Anomaly {
            if self.reported.insert("ring_writes") {
                tracing::warn!(
                    "trace: the flight recorder was written {} times (`trace.ring_writes`); from now on anomalies are reported, but their steps are not recorded",
                    self.ring_writes
                );
            }
            return;
        }
        self.ring_writes += 1;
        let steps = std::mem::take(&mut self.ring.steps);
        // Part of the current step may be on disk already. `write` works on `data` and `files`, so these are set aside
        // and put back; nothing between returns early.
        let current = std::mem::take(&mut self.data);
        let files = std::mem::take(&mut self.files);
        for data in steps {
            self.data = data;
            if !self.whole.contains(&self.data.step) {
                self.write(reason, &vec![true; self.stages.len()]);
            }
        }
        self.data = current;
        self.files = files;
    }

    /// The state at the start of the step in `data`; empty if it is not known.
    fn step_state(&self) -> StateRefs {
        match self.state.0 == self.data.step {
            true => self.state.1.clone(),
            false => StateRefs::default(),
        }
    }

    /// Writes the current step's rows and its manifest.
    fn write(&mut self, reason: Reason, chosen: &[bool]) {
        let (step, budget) = (self.data.step, bytes_of(self.config.budget_mb));
        let size = self.data.bytes as u64 + self.files.bytes_written();
        let used = self.used.load(Ordering::Relaxed);
        if used + size > budget {
            self.files = StepFiles::default();
            if self.reported.insert("budget") {
                tracing::warn!(
                    "trace: step {step} is not recorded in full, nor is any later step of its size: it takes about {:.1} MB, and {:.1} MB of {} MB (`trace.budget_mb`) are used; statistics are still recorded",
                    size as f64 / f64::from(1 << 20),
                    used as f64 / f64::from(1 << 20),
                    self.config.budget_mb
                );
            }
            return;
        }
        let written = self.try_write(reason, chosen);
        if written.is_ok() && chosen.iter().all(|chosen| *chosen) {
            self.whole.insert(step);
        }
        self.report_error("a step", written);
    }

    /// Writes the stages in `chosen`. Stages of the step that are on disk with all their rows are left as they are,
    /// since memory may have fewer of their rows.
    ///
    /// The manifest is written last and lists only finished files, those of an earlier manifest of the step included.
    /// So a reader that finds a manifest finds all files that it lists, even if the process is killed in between.
    fn try_write(&mut self, reason: Reason, chosen: &[bool]) -> Result<(), TraceError> {
        let step = self.data.step;
        let before = match self.data.on_disk.is_empty() {
            true => None,
            false => Some(self.manifest(step)?),
        };
        let on_disk = &self.data.on_disk;
        let missing = chosen.iter().enumerate();
        let missing: Vec<bool> = missing
            .map(|(stage, chosen)| *chosen && !on_disk.contains(&stage))
            .collect();
        let spilt = self.spill(&missing);
        let files = std::mem::take(&mut self.files);
        spilt?;
        let mut stages = files.finish()?;
        let written = stages.iter().map(|file| file.bytes).sum::<u64>();
        self.used.fetch_add(written, Ordering::Relaxed);
        let mut notes = Vec::new();
        if self.data.lost || self.data.dropped && reason != Reason::Asked {
            notes.push(ROWS_MISSING.to_owned());
        }
        if !self.data.ended {
            notes.push(
                "the step ended with an error; only what came before it is recorded".to_owned(),
            );
        }
        let StateRefs {
            mut models,
            stages: mut stage_states,
        } = self.step_state();
        if let Some(before) = before {
            stages.extend(before.stages);
            let place = |name: &str| self.stages.iter().position(|about| about.name == name);
            stages.sort_by_key(|file| place(&file.stage));
            if models.is_empty() {
                (models, stage_states) = (before.models, before.stage_states);
            }
        }
        let stateless = models.is_empty();
        // The flight recorder may have written stages that were not chosen.
        let about = &self.stages;
        let is_written = |stage: &usize| stages.iter().any(|file| file.stage == about[*stage].name);
        self.unrecorded.retain(|stage| !is_written(stage));
        self.writer.end_step(&StepManifest {
            format: FORMAT,
            step,
            reason,
            ended: self.data.ended,
            stages,
            models,
            stage_states,
            notes,
        })?;
        let chosen = chosen.iter().enumerate().filter(|(_, chosen)| **chosen);
        self.data.on_disk.extend(chosen.map(|(stage, _)| stage));
        if reason != Reason::Asked && stateless {
            let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
            wanted.push(step);
        }
        Ok(())
    }

    /// The manifest of a step that is on disk.
    fn manifest(&self, step: u64) -> Result<StepManifest, TraceError> {
        let path = self.writer.layout().manifest(step);
        let text = fs::read_to_string(&path).map_err(|e| TraceError::file("read", &path, e))?;
        parse(&path, &text)
    }

    /// Adds its state to a step that is on disk.
    fn add_state(&self, step: u64, state: StateRefs) -> Result<(), TraceError> {
        let manifest = self.manifest(step)?;
        self.writer.end_step(&StepManifest {
            models: state.models,
            stage_states: state.stages,
            ..manifest
        })
    }

    /// Reports an I/O error, once for each kind of data.
    fn report_error(&mut self, about: &'static str, result: Result<(), TraceError>) {
        if let Err(error) = result
            && self.reported.insert(about)
        {
            tracing::warn!(
                "trace: cannot write {about} ({}): {error}; the run continues and keeps trying to write later data",
                error.code()
            );
        }
    }
}

fn header<'a>(stages: &'a [StageAbout], format: &TraceFormat, state: &StateRefs) -> StepHeader<'a> {
    StepHeader {
        stages,
        seed: format.seed,
        steps: format.steps,
        models: state
            .models
            .iter()
            .map(|(name, reference)| (name.clone(), reference.version.clone()))
            .collect(),
    }
}

#[cfg(test)]
#[path = "recording_tests.rs"]
mod tests;
