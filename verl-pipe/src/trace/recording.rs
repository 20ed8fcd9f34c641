//! What the recorder's thread does: statistics, rules, files. An error of the disk is told once and ends nothing.

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
use crate::trace::look::Look;
use crate::trace::rules::{
    Anomaly, EARLY_STEPS, Fired, HISTORY_STEPS, MetricsView, Rule, RuleBook, SeenBatch, Severity,
    StepView,
};
use crate::trace::stats_table::StatsWriter;
use crate::trace::step_data::{Part, Ring, StageAbout, StepData, StepFiles, StepHeader};
use crate::trace::step_stats::StepStats;
use crate::trace::writer::TraceWriter;

/// Bytes of rows that a step recorded in full may hold in memory before they move to its files.
pub(crate) const SPILL_BYTES: usize = 256 << 20;

/// What the thread is told.
pub(crate) enum Message {
    Begin {
        step: u64,
    },
    State {
        step: u64,
        state: StepState,
    },
    /// State at the start of a step that is on disk already.
    LateState {
        step: u64,
        state: StepState,
    },
    Part(Part),
    Gate {
        stage: usize,
        batch: Batch,
        told: Sender<Option<Box<Anomaly>>>,
    },
    End {
        step: u64,
        told: Option<Sender<()>>,
    },
    Failed {
        cancelled: bool,
        reason: String,
        told: Sender<()>,
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
#[derive(Debug, Default)]
pub(crate) struct StepState {
    pub models: BTreeMap<String, StateRef>,
    pub stages: BTreeMap<String, StateRef>,
}

/// The state of the recorder's thread.
pub(crate) struct Recording {
    /// Steps that were written without their state.
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
    data: StepData,
    files: StepFiles,
    ring: Ring,
    state: (u64, StepState),
    /// Rules on rows have looked at the current step.
    judged: bool,
    /// A rule fired in the current step.
    alarmed: bool,
    /// A rule on metrics asks to stop before the next update.
    stop: Option<Box<Anomaly>>,
    history: VecDeque<BTreeMap<String, f64>>,
    early: Vec<BTreeMap<String, f64>>,
    /// By stage, the setting that bounds its responses, and its value.
    limits: BTreeMap<String, (&'static str, usize)>,
    versions: Vec<(u64, BTreeMap<String, WeightsVersion>)>,
    /// Bytes of rows that a step recorded in full may hold in memory.
    spill_bytes: usize,
    /// Bytes of steps and states on disk.
    used: Arc<AtomicU64>,
    ring_writes: usize,
    /// Steps that are on disk with all their stages.
    whole: BTreeSet<u64>,
    told: BTreeSet<&'static str>,
    /// Stages that are to be recorded by name, and of which nothing has come yet.
    unseen: BTreeSet<usize>,
    /// A step began in which some stage is to be recorded.
    asked: bool,
}

/// What the recorder and the thread that records both look at.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared {
    /// Steps of the flight recorder whose state is not there.
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
        own_rules: Vec<Box<dyn Rule>>,
        on_cpu: bool,
    ) -> Result<Recording, TraceError> {
        let table = match config.stats {
            true => {
                let dir = writer.layout().stats();
                let table = StatsWriter::create(dir, config.part_steps)?;
                Some(table.in_room(writer.room().cloned()))
            }
            false => None,
        };
        // Steps that the run has not are told before it.
        let asked = config.captures_up_to(format.steps);
        let named =
            |about: &StageAbout| about.debug || asked && config.stages.contains(&about.name);
        let unseen = stages.iter().enumerate();
        let unseen = unseen.filter(|(_, about)| about.in_step && named(about));
        let limits: Vec<_> = stages
            .iter()
            .filter_map(|about| Some((about.name.clone(), about.longest?)))
            .collect();
        Ok(Recording {
            unseen: unseen.map(|(stage, _)| stage).collect(),
            asked: false,
            wanted,
            fired,
            rules: RuleBook::new(own_rules, &config.rules),
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
            state: (0, StepState::default()),
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
            told: BTreeSet::new(),
        })
    }

    /// Whether hashes of the weights are of use.
    pub(crate) fn watches_weights(&self) -> bool {
        self.config.stats && self.rules.has("weights_unchanged")
    }

    /// Works until it is told to end.
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
                    self.tell("a state", added);
                }
                Message::Part(part) => self.part(part),
                Message::Gate { stage, batch, told } => {
                    let stop = self.gate(stage, &batch);
                    let _ = told.send(stop);
                }
                Message::End { step, told } => {
                    self.end(step);
                    if let Some(told) = told {
                        let _ = told.send(());
                    }
                }
                Message::Failed {
                    cancelled,
                    reason,
                    told,
                } => {
                    self.failed(cancelled, &reason);
                    let _ = told.send(());
                }
                Message::Metrics { step, values } => self.metrics(step, values),
                Message::Versions { step, versions } => {
                    self.versions.push((step, versions));
                    let extra = self.versions.len().saturating_sub(2);
                    self.versions.drain(..extra);
                }
                Message::Sync(told) => {
                    let _ = told.send(());
                }
                Message::Close(told) => {
                    closed = Some(told);
                    break;
                }
            }
        }
        let written = self.table.as_mut().map_or(Ok(()), StatsWriter::part);
        self.tell("statistics", written);
        if let Some(unseen) = self.told_of_unseen() {
            tracing::warn!("{unseen}");
        }
        if let Some(told) = closed {
            let _ = told.send(());
        }
    }

    fn begin(&mut self, step: u64) {
        self.data = StepData::new(step);
        self.files = StepFiles::default();
        self.asked |= self.chosen(step).contains(&true);
        self.stats.clear();
        self.judged = false;
        self.alarmed = false;
        if self.state.0 != step {
            self.state = (step, StepState::default());
        }
    }

    /// Stages that were to be recorded, and of which there is nothing, with the reason.
    fn told_of_unseen(&self) -> Option<String> {
        let names = self
            .unseen
            .iter()
            .map(|stage| self.stages[*stage].name.as_str());
        let why = match self.asked {
            true => "no row came to it in the steps that were to be recorded in full",
            false => "the run ended before a step that was to be recorded in full",
        };
        (!self.unseen.is_empty()).then(|| {
            format!(
                "trace: nothing is recorded of {}, which `trace.stages` or `debug` names: {why}",
                quoted(names)
            )
        })
    }

    /// Whether a stage is recorded in full in a step that nothing went wrong in.
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
            self.unseen.remove(&part.stage);
        }
        if chosen || self.flies() {
            self.data.add(part);
            self.make_room();
        }
    }

    /// Whether the rows of a step in which a rule fires will be on disk.
    fn keeps_rows(&self, step: u64) -> bool {
        let room = self.ring_writes < self.config.ring_writes;
        self.flies() && room || self.chosen(step).contains(&true)
    }

    /// Whether the flight recorder is on.
    fn flies(&self) -> bool {
        self.table.is_some() && self.ring.max_steps > 0
    }

    /// Moves rows that no longer fit in memory to disk, or lets them go.
    fn make_room(&mut self) {
        let chosen = self.chosen(self.data.step);
        if chosen.contains(&true) {
            if self.data.bytes > self.spill_bytes {
                let spilt = self.spill(&chosen);
                self.data.dropped = true;
                self.data.forget();
                self.tell("a step", spilt);
            }
        } else if self.data.bytes > self.ring.max_bytes {
            self.data.forget();
            self.data.dropped = true;
            if self.told.insert("ring") {
                tracing::warn!(
                    "trace: step {} is larger than the flight recorder's {} MB (`trace.ring_mb`), which holds a part of it only",
                    self.data.step,
                    self.config.ring_mb
                );
            }
        }
    }

    fn spill(&mut self, chosen: &[bool]) -> Result<(), TraceError> {
        let header = header(&self.stages, &self.format, &self.state.1);
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

    /// Rules on rows look at the step so far; gives the first that stops.
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
        let look = Look {
            dir: self.writer.layout().run_dir(),
            step: self.data.step,
            stages: &self.stages,
            kept: keeps_rows,
        };
        let found = self.rules.before_update(&view, &|hit| look.command(hit));
        self.report(found)
    }

    /// Tells what rules found; gives the first that stops.
    fn report(&mut self, found: Vec<Anomaly>) -> Option<Box<Anomaly>> {
        self.alarmed |= !found.is_empty();
        let mut fired = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        *fired = self.rules.fired();
        drop(fired);
        for anomaly in &found {
            tracing::warn!("{anomaly:#}");
            let written = self.line(anomaly);
            self.tell("anomalies", written);
        }
        let stops = |anomaly: &Anomaly| anomaly.severity == Severity::Stop;
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
                // Nothing is updated in this step, so that there is nothing to stop.
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
        if self.flies() {
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
        self.tell("statistics", written);
    }

    fn failed(&mut self, cancelled: bool, reason: &str) {
        // A step that was cancelled is cut off anywhere, and half of its rows would look like a fault.
        if cancelled {
            return;
        }
        if self.table.is_some() {
            self.statistics(self.data.step);
        }
        tracing::debug!("the steps before the error are written: {reason}");
        self.write_ring(Reason::Failed);
        let chosen = match self.flies() {
            true => vec![true; self.stages.len()],
            false => self.chosen(self.data.step),
        };
        if chosen.contains(&true) {
            self.write(Reason::Failed, &chosen);
        }
    }

    fn metrics(&mut self, step: u64, values: BTreeMap<String, f64>) {
        let look = Look {
            dir: self.writer.layout().run_dir(),
            step,
            stages: &self.stages,
            kept: self.keeps_rows(step),
        };
        let view = MetricsView {
            step,
            metrics: &values,
            history: &self.history,
            early: &self.early,
            versions: &self.versions,
            on_cpu: self.on_cpu,
        };
        let found = self.rules.after_step(&view, &|hit| look.command(hit));
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
            if self.told.insert("ring_writes") {
                tracing::warn!(
                    "trace: the flight recorder was written {} times (`trace.ring_writes`); from here on anomalies are told, their steps are not kept",
                    self.ring_writes
                );
            }
            return;
        }
        self.ring_writes += 1;
        let steps = std::mem::take(&mut self.ring.steps);
        // Of the current step something may be on disk already.
        let current = std::mem::take(&mut self.data);
        let files = std::mem::take(&mut self.files);
        let state = std::mem::take(&mut self.state);
        for data in steps {
            self.data = data;
            if state.0 != self.data.step {
                self.state = (self.data.step, StepState::default());
            }
            if !self.whole.contains(&self.data.step) {
                self.write(reason, &vec![true; self.stages.len()]);
            }
        }
        self.data = current;
        self.files = files;
        self.state = state;
    }

    /// Writes the current step's rows and its manifest.
    fn write(&mut self, reason: Reason, chosen: &[bool]) {
        let (step, budget) = (self.data.step, bytes_of(self.config.budget_mb));
        let size = self.data.bytes as u64 + self.files.bytes_written();
        let used = self.used.load(Ordering::Relaxed);
        if used + size > budget {
            self.files = StepFiles::default();
            if self.told.insert("budget") {
                tracing::warn!(
                    "trace: step {step} is not recorded in full, and no later one that needs as much: it takes about {:.1} MB, and {:.1} MB of {} MB (`trace.budget_mb`) are used; statistics go on",
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
        self.tell("a step", written);
    }

    /// Writes the stages that `chosen` names. Those of the step that are on disk with all their rows stay as they are: in
    /// memory there may be less of them.
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
        if self.data.dropped && reason != Reason::Asked {
            notes.push(ROWS_MISSING.to_owned());
        }
        if !self.data.ended {
            notes.push("the step ended with an error; what came before it is here".to_owned());
        }
        let (mut models, mut stage_states) =
            (self.state.1.models.clone(), self.state.1.stages.clone());
        if let Some(before) = before {
            stages.extend(before.stages);
            let place = |name: &str| self.stages.iter().position(|about| about.name == name);
            stages.sort_by_key(|file| place(&file.stage));
            if models.is_empty() {
                (models, stage_states) = (before.models, before.stage_states);
            }
        }
        let stateless = models.is_empty();
        // The flight recorder may have them.
        let about = &self.stages;
        let is_there = |stage: &usize| stages.iter().any(|file| file.stage == about[*stage].name);
        self.unseen.retain(|stage| !is_there(stage));
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

    /// What a step that is on disk says about itself.
    fn manifest(&self, step: u64) -> Result<StepManifest, TraceError> {
        let path = self.writer.layout().manifest(step);
        let text = fs::read_to_string(&path).map_err(|e| TraceError::file("read", &path, e))?;
        parse(&path, &text)
    }

    /// Adds its state to a step that is on disk.
    fn add_state(&self, step: u64, state: StepState) -> Result<(), TraceError> {
        let manifest = self.manifest(step)?;
        self.writer.end_step(&StepManifest {
            models: state.models,
            stage_states: state.stages,
            ..manifest
        })
    }

    /// Tells an error of the disk, once for each sort of thing that it is about.
    fn tell(&mut self, about: &'static str, result: Result<(), TraceError>) {
        if let Err(error) = result
            && self.told.insert(about)
        {
            tracing::warn!(
                "trace: {about} could not be written ({}): {error}; the run goes on, and what the disk takes later is written again",
                error.code()
            );
        }
    }
}

fn header<'a>(stages: &'a [StageAbout], format: &TraceFormat, state: &StepState) -> StepHeader<'a> {
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
