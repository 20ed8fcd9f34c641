//! The work of the recorder's thread: statistics, rules, files. An I/O error is reported once and does not end the run.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use crossbeam_channel::{Receiver, Sender};
use verl_rules::config::TraceConfig;
use verl_rules::format::Side;
use verl_rules::{Anomaly, Fired, Rule, RuleBook};
use verl_words::batch::Batch;
use verl_words::resource::WeightsVersion;
use verl_words::stage::MetricRoles;

use crate::files::{Reason, StatsWriter, TraceError, TraceFormat, TraceWriter};
use crate::record::flight_recorder::FlightRecorder;
use crate::record::open_step::{OpenStep, StateRefs};
use crate::record::reported::Reported;
use crate::record::rule_runner::RuleRunner;
use crate::record::step_archive::StepArchive;
use crate::record::step_data::{Part, StageAbout};
use crate::record::step_stats::StepStats;

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
        roles: MetricRoles,
    },
    Versions {
        step: u64,
        versions: BTreeMap<String, WeightsVersion>,
    },
    Sync(Sender<()>),
    Close(Sender<()>),
}

/// The state of the recorder's thread.
///
/// Between messages: `stats` and `rules` are about the step in `step`, until the next one begins.
pub(crate) struct Recording {
    stages: Arc<[StageAbout]>,
    stats: StepStats,
    table: Option<StatsWriter>,
    rules: RuleRunner,
    /// The current step.
    step: OpenStep,
    flight_recorder: FlightRecorder,
    archive: StepArchive,
    /// Bytes of rows that a step recorded in full may keep in memory.
    spill_bytes: usize,
    reported: Reported,
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
        let stages: Arc<[StageAbout]> = stages.into();
        let layout = writer.layout().clone();
        let table = match config.stats {
            true => {
                let table = StatsWriter::create(layout.stats(), config.part_steps)?;
                Some(table.with_room(writer.room().cloned()))
            }
            false => None,
        };
        let book = RuleBook::new(custom_rules, &config.rules);
        Ok(Recording {
            stats: StepStats::default(),
            table,
            rules: RuleRunner::new(book, stages.clone(), layout, on_cpu, fired),
            step: OpenStep::default(),
            flight_recorder: FlightRecorder::new(&config),
            archive: StepArchive::new(writer, stages.clone(), config, format, used, wanted),
            stages,
            spill_bytes: SPILL_BYTES,
            reported: Reported::default(),
        })
    }

    /// Whether a rule uses hashes of the weights.
    pub(crate) fn watches_weights(&self) -> bool {
        self.table.is_some() && self.rules.has("weights_unchanged")
    }

    /// Processes messages until `Close`, or until the recorder is gone.
    pub(crate) fn serve(mut self, inbox: &Receiver<Message>) {
        let mut closed = None;
        while let Ok(message) = inbox.recv() {
            match message {
                Message::Begin { step } => self.begin(step),
                Message::State { step, state } => {
                    self.step.state = (step, state);
                }
                Message::LateState { step, state } => {
                    let added = self.archive.add_state(step, state);
                    self.reported.error("a state", added);
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
                Message::Metrics {
                    step,
                    values,
                    roles,
                } => self.metrics(step, values, &roles),
                Message::Versions { step, versions } => {
                    self.rules.add_versions(step, versions);
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
        self.reported.error("statistics", written);
        if let Some(warning) = self.archive.unrecorded_warning() {
            tracing::warn!("{warning}");
        }
        if let Some(reply) = closed {
            let _ = reply.send(());
        }
    }

    fn begin(&mut self, step: u64) {
        self.step.begin(step);
        self.archive.begin(step);
        self.stats.clear();
        self.rules.begin();
    }

    fn part(&mut self, mut part: Part) {
        if part.side == Side::Output && part.refused.is_none() {
            part.batch = self.stages[part.stage].written(&part.batch);
        }
        if self.table.is_some() && part.refused.is_none() {
            self.stats.add(&part);
        }
        let chosen = self.archive.is_chosen(self.step.data.step, part.stage);
        if chosen {
            self.archive.received(part.stage);
        }
        if chosen || self.flight_recorder.is_on() {
            self.step.data.add(part);
            self.make_room();
        }
    }

    /// Whether the rows of a step in which a rule fires will be on disk.
    fn keeps_rows(&self, step: u64) -> bool {
        self.flight_recorder.writes_anomalies() || self.archive.chosen(step).contains(&true)
    }

    /// Moves rows that no longer fit in memory to disk, or drops them.
    fn make_room(&mut self) {
        let chosen = self.archive.chosen(self.step.data.step);
        if chosen.contains(&true) {
            if self.step.data.bytes > self.spill_bytes {
                let spilt = self.archive.spill(&mut self.step, &chosen);
                self.step.data.dropped = true;
                self.step.data.lost |= spilt.is_err();
                self.step.data.forget();
                self.reported.error("a step", spilt);
            }
        } else if self.step.data.bytes > self.flight_recorder.ring.max_bytes {
            self.step.data.forget();
            self.step.data.dropped = true;
            let step = self.step.data.step;
            self.flight_recorder
                .report_too_large(step, &mut self.reported);
        }
    }

    fn gate(&mut self, stage: usize, batch: &Batch) -> Option<Box<Anomaly>> {
        if let Some(stop) = self.rules.take_stop() {
            return Some(stop);
        }
        if self.rules.rows_checked() {
            return None;
        }
        self.check_rows(Some((stage, batch)))
    }

    /// Runs the rules on rows on the step so far; returns the first anomaly that asks to stop.
    fn check_rows(&mut self, update: Option<(usize, &Batch)>) -> Option<Box<Anomaly>> {
        let data = &self.step.data;
        let keeps_rows = self.keeps_rows(data.step);
        let (rows, distances) = self.stats.rows(data.step, &self.stages, true);
        self.rules.check_rows(
            data,
            (&rows, &distances),
            update,
            keeps_rows,
            &mut self.reported,
        )
    }

    fn end(&mut self, step: u64) {
        if self.table.is_some() {
            if !self.rules.rows_checked() {
                // This step updates nothing, so there is nothing to stop before the next one.
                let stop = self.check_rows(None);
                self.rules.keep_stop(stop);
            }
            self.statistics(step);
        }
        self.step.data.ended = true;
        let chosen = self.archive.chosen(step);
        if chosen.contains(&true) {
            self.write(Reason::Asked, &chosen);
        }
        let data = std::mem::take(&mut self.step.data);
        if self.flight_recorder.is_on() {
            self.flight_recorder.ring.push(data);
        }
        if self.rules.has_fired() {
            self.write_ring(Reason::Anomaly);
        }
    }

    fn statistics(&mut self, step: u64) {
        let (rows, _) = self.stats.rows(step, &self.stages, false);
        let written = self
            .table
            .as_mut()
            .map_or(Ok(()), |table| table.step(step, &rows));
        self.reported.error("statistics", written);
    }

    fn failed(&mut self, cancelled: bool, reason: &str) {
        // A cancelled step is cut off at an arbitrary point, and missing rows would look like an error.
        if cancelled {
            return;
        }
        let step = self.step.data.step;
        if self.table.is_some() {
            self.statistics(step);
        }
        tracing::debug!("writing the steps before the error: {reason}");
        self.write_ring(Reason::Failed);
        let chosen = match self.flight_recorder.is_on() {
            true => vec![true; self.stages.len()],
            false => self.archive.chosen(step),
        };
        if chosen.contains(&true) {
            self.write(Reason::Failed, &chosen);
        }
    }

    fn metrics(&mut self, step: u64, values: BTreeMap<String, f64>, roles: &MetricRoles) {
        let keeps_rows = self.keeps_rows(step);
        let has_fired =
            self.rules
                .check_metrics(step, values, roles, keeps_rows, &mut self.reported);
        if has_fired {
            self.write_ring(Reason::Anomaly);
        }
    }

    /// Writes the steps of the ring that are not on disk.
    fn write_ring(&mut self, reason: Reason) {
        if !self.flight_recorder.begin_write(reason, &mut self.reported) {
            return;
        }
        let every_stage = vec![true; self.stages.len()];
        for data in std::mem::take(&mut self.flight_recorder.ring.steps) {
            if !self.archive.is_complete(data.step) {
                // Each step has files and a state of its own, so those of the current step stay as they are.
                let mut step = OpenStep::of(data, self.step.state.clone());
                self.archive
                    .write(&mut step, reason, &every_stage, &mut self.reported);
            }
        }
    }

    /// Writes the current step.
    fn write(&mut self, reason: Reason, chosen: &[bool]) {
        self.archive
            .write(&mut self.step, reason, chosen, &mut self.reported);
    }
}

#[cfg(test)]
#[path = "recording_tests.rs"]
mod tests;
