//! What a step waits for: all pending edges, reported when a step makes no progress and when a deadline has passed.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use verl_plan::schedule::placement::Place;

use crate::atomic_file::AtomicFile;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::host_calls::describe_rows;
use crate::metrics::now;
use crate::runner::{InFlight, Progress, Run};
use crate::step::{Phase, StepState};

/// Name of the file in the run folder.
pub const STALL_FILE: &str = "stall.json";

/// An edge whose rows have not arrived.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PendingEdge {
    /// The stage that is working or waiting.
    pub stage: String,
    /// Awaited keys, by their names in the pipeline.
    pub keys: Vec<String>,
    /// Awaited rows, as text.
    pub samples: String,
    /// Duration of the wait so far (seconds).
    pub waited_s: f64,
    /// Deadline (seconds); null if the stage is not running.
    pub deadline_s: Option<f64>,
    /// What it waits on: the host pool, a device group, or the stage that writes the keys.
    pub on: String,
}

/// What a step waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StallReport {
    /// Step of the run.
    pub step: u64,
    /// When this was written (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// Time since the last event (seconds).
    pub quiet_s: f64,
    /// The error that ended the step; null while the step is in progress.
    pub error: Option<String>,
    /// Calls that are running.
    pub running: Vec<PendingEdge>,
    /// Stages that wait for rows, with the first waiting slice of each.
    pub waiting: Vec<PendingEdge>,
}

impl StallReport {
    /// Reads the file that a run wrote; `None` if there is none.
    ///
    /// # Errors
    /// If the file cannot be read or has a different format.
    pub fn read(run_dir: &Path) -> std::io::Result<Option<StallReport>> {
        match std::fs::read(run_dir.join(STALL_FILE)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the file; warns if that fails.
    pub(super) fn save(&self, run_dir: &Path) {
        if let Err(error) = self.write(run_dir) {
            let path = run_dir.join(STALL_FILE);
            tracing::warn!("cannot write `{}`: {error}", path.display());
        }
    }

    fn write(&self, run_dir: &Path) -> std::io::Result<()> {
        let content = serde_json::to_vec_pretty(self)?;
        let file = AtomicFile::with(&run_dir.join(STALL_FILE), &content);
        file.and_then(AtomicFile::replace)
            .map_err(|error| error.source)
    }
}

/// Removes the file: the wait is over.
pub(super) fn remove_stall(run_dir: &Path) {
    // A file that cannot be removed is recognisable by its timestamp.
    let _ = std::fs::remove_file(run_dir.join(STALL_FILE));
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "step {}: no progress for {:.1} s",
            self.step, self.quiet_s
        )?;
        for edge in &self.running {
            let deadline = edge
                .deadline_s
                .map_or_else(String::new, |s| format!(" of {s:.1} s"));
            writeln!(
                f,
                "  `{}` has been running on {} for {:.1} s{deadline}; pending: {} of {}",
                edge.stage,
                edge.on,
                edge.waited_s,
                keys(edge),
                edge.samples
            )?;
        }
        for edge in &self.waiting {
            match edge.keys.is_empty() {
                true => writeln!(f, "  `{}` waits for {}", edge.stage, edge.on)?,
                false => writeln!(
                    f,
                    "  `{}` waits for {} of {}, on {}",
                    edge.stage,
                    keys(edge),
                    edge.samples,
                    edge.on
                )?,
            }
        }
        if let Some(error) = &self.error {
            writeln!(f, "  the step ended: {error}")?;
        }
        Ok(())
    }
}

fn keys(edge: &PendingEdge) -> String {
    match edge.keys.is_empty() {
        true => "its end".to_owned(),
        false => edge.keys.join(", "),
    }
}

impl StepState {
    /// Stages that wait for rows: the first waiting slice of each.
    fn waiting_edges(&self, quiet_s: f64) -> Vec<PendingEdge> {
        let stages = self.stages.iter().enumerate().filter(|(_, s)| !s.done);
        stages
            .filter_map(|(stage, state)| self.waiting_edge(stage, state, quiet_s))
            .collect()
    }

    fn waiting_edge(
        &self,
        stage: usize,
        state: &crate::step::StageState,
        quiet_s: f64,
    ) -> Option<PendingEdge> {
        let plan = self.schedule.plan();
        let planned = &plan.stages()[stage];
        let edge = |keys, samples: String, on: String| PendingEdge {
            stage: planned.name().to_owned(),
            keys,
            samples,
            waited_s: quiet_s,
            deadline_s: None,
            on,
        };
        let unfinished = |index: &&usize| !self.stages[**index].done;
        if let Some(before) = planned.after().iter().find(unfinished) {
            let on = format!("the end of `{}`", plan.stages()[*before].name());
            return Some(edge(Vec::new(), "all rows".to_owned(), on));
        }
        let waiting = |slice: &crate::step::Slice| slice.phase == Phase::Waiting;
        let Some(slice) = state.slices.iter().position(waiting) else {
            let table = planned.table_in().filter(|_| !state.all_cut)?;
            let maker = plan.stages()[plan.tables()[table].made_by].name();
            let rows = "rows that are not known yet".to_owned();
            return Some(edge(Vec::new(), rows, format!("further rows of `{maker}`")));
        };
        let (at, row) = self.first_missing(stage, slice)?;
        let wires = &self.schedule.wiring().stages[stage];
        let inputs = wires.inputs.iter().filter(|input| input.source == at);
        let rows = &state.slices[slice].rows;
        let id = planned
            .table_in()
            .and_then(|table| self.tables[table].ids().get(row));
        let first = id.map_or_else(String::new, |id| {
            format!(
                ", first missing: {}",
                verl_words::batch::RowId(*id).in_words()
            )
        });
        let on = format!("`{}`", plan.stages()[wires.sources[at].writer].name());
        Some(edge(
            inputs.map(|input| input.key.clone()).collect(),
            format!("rows {}..{}{first}", rows.start, rows.end),
            on,
        ))
    }
}

impl Run {
    /// The device groups, as text.
    pub(super) fn groups_name(&self) -> String {
        let names = self.schedule.groups().iter();
        let names: Vec<&str> = names.map(|group| group.name.as_str()).collect();
        let word = if names.len() == 1 { "group" } else { "groups" };
        format!("device {word} {}", names.join(", "))
    }

    /// Where a stage runs, as text.
    pub(super) fn place_name(&self, stage: usize) -> String {
        match self.schedule.places()[stage] {
            Place::Host => "the host pool".to_owned(),
            Place::Group(group) => {
                format!("device group {}", self.schedule.groups()[group].name)
            }
        }
    }

    /// What the step is waiting for now.
    pub(super) fn stall_report(&self, progress: &Progress) -> StallReport {
        let quiet_s = progress.last_event.elapsed().as_secs_f64();
        let mut flights: Vec<_> = progress.in_flight.iter().collect();
        flights.sort_by_key(|(call, _)| **call);
        let running = flights.into_iter().map(|(_, flight)| {
            let stage = flight.id.0;
            let planned = &self.schedule.plan().stages()[stage];
            let (unit, since) = match &flight.host {
                Some(host) => {
                    let cell = host.cell.lock();
                    (host.units.get(cell.finished.len()), cell.unit_since)
                }
                None => (None, Some(flight.since)),
            };
            let writes = planned.spec().writes.iter();
            PendingEdge {
                stage: planned.name().to_owned(),
                keys: writes
                    .map(|field| planned.key(&field.name).to_owned())
                    .collect(),
                samples: describe_rows(unit.unwrap_or(&flight.input)),
                waited_s: since.unwrap_or(flight.since).elapsed().as_secs_f64(),
                deadline_s: Some(
                    self.unit_deadline(flight)
                        .unwrap_or(self.deadline)
                        .as_secs_f64(),
                ),
                on: self.place_name(stage),
            }
        });
        StallReport {
            step: progress.env.step,
            timestamp: now(),
            quiet_s,
            error: None,
            running: running.collect(),
            waiting: progress.state.waiting_edges(quiet_s),
        }
    }

    /// Records an event of `call`: a reported wait is over.
    pub(super) fn note_event(&mut self, progress: &mut Progress, call: u64) {
        if let Some(flight) = progress.in_flight.get(&call) {
            let stage = self.schedule.plan().stages()[flight.id.0].name();
            self.thresholds.record(stage, quiet_time(progress, flight));
        }
        progress.last_event = Instant::now();
        if std::mem::take(&mut progress.reported)
            && let Some(dir) = &self.options.run_dir
        {
            remove_stall(dir);
        }
    }

    /// Reports once what the step waits for when no event has arrived for a long time, compared with earlier calls of
    /// the same stage.
    pub(super) fn report_if_quiet(&self, progress: &mut Progress) {
        let is_long = |flight: &InFlight| {
            let stage = self.schedule.plan().stages()[flight.id.0].name();
            quiet_time(progress, flight) >= self.thresholds.of(stage)
        };
        if progress.reported || !progress.in_flight.values().any(is_long) {
            return;
        }
        progress.reported = true;
        let report = self.stall_report(progress);
        tracing::warn!("{}", report.to_string().trim_end());
        self.save_stall(&report);
    }

    /// Reports what the step was waiting for when a deadline ended it.
    pub(super) fn report_stall(&self, progress: &mut Progress, error: &RunError) {
        let is_about_wait = matches!(
            error,
            RunError::Deadline { .. } | RunError::Stalled { .. } | RunError::TooManyHung { .. }
        );
        if is_about_wait {
            let late = progress.late.take();
            let report = StallReport {
                error: Some(error.to_string()),
                ..late.unwrap_or_else(|| self.stall_report(progress))
            };
            tracing::error!("{}", report.to_string().trim_end());
            self.save_stall(&report);
        }
    }

    fn save_stall(&self, report: &StallReport) {
        if let Some(dir) = &self.options.run_dir {
            report.save(dir);
        }
    }
}

/// How long no event has arrived while a call was running.
fn quiet_time(progress: &Progress, flight: &InFlight) -> Duration {
    progress.last_event.elapsed().min(flight.since.elapsed())
}
