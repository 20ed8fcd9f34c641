//! What a step waits for: every pending edge, told while nothing moves and when a deadline has passed.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::run::error::RunError;
use crate::run::host_calls::describe_rows;
use crate::run::metrics::now;
use crate::run::runner::{InFlight, Progress, Run};
use crate::run::step::{Phase, StepState};
use crate::schedule::placement::Place;

/// Name of the file in the run folder.
pub const STALL_FILE: &str = "stall.json";

/// Something that has not come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PendingEdge {
    /// The stage that works, or that waits.
    pub stage: String,
    /// Keys that are awaited, by the pipeline's names.
    pub keys: Vec<String>,
    /// Rows that are awaited, in words.
    pub samples: String,
    /// For how long it has been so (seconds).
    pub waited_s: f64,
    /// How long it may take (seconds); null where it does not run.
    pub deadline_s: Option<f64>,
    /// Who has to act: the host pool, a device group, or the stage that writes the keys.
    pub on: String,
}

/// What a step waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StallReport {
    /// Step of the run.
    pub step: u64,
    /// When this was written (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// Time since something came last (seconds).
    pub quiet_s: f64,
    /// The error with which the step ended; null while it goes on.
    pub error: Option<String>,
    /// Calls that run.
    pub running: Vec<PendingEdge>,
    /// Stages that wait for rows, the first slice of each.
    pub waiting: Vec<PendingEdge>,
}

impl StallReport {
    /// Reads the file that a run wrote; `None` where it wrote none.
    ///
    /// # Errors
    /// When the file cannot be read or is not what a run writes.
    pub fn read(run_dir: &Path) -> std::io::Result<Option<StallReport>> {
        match std::fs::read(run_dir.join(STALL_FILE)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the file; a disk that refuses is told.
    pub(super) fn keep(&self, run_dir: &Path) {
        if let Err(error) = self.write(run_dir) {
            let path = run_dir.join(STALL_FILE);
            tracing::warn!("cannot write `{}`: {error}", path.display());
        }
    }

    fn write(&self, run_dir: &Path) -> std::io::Result<()> {
        let aside = run_dir.join(format!(".{STALL_FILE}.partial"));
        std::fs::write(&aside, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(&aside, run_dir.join(STALL_FILE))
    }
}

/// Removes the file: the wait is over.
pub(super) fn remove_stall(run_dir: &Path) {
    // A file that cannot be removed tells its time.
    let _ = std::fs::remove_file(run_dir.join(STALL_FILE));
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "step {}: nothing came for {:.1} s",
            self.step, self.quiet_s
        )?;
        for edge in &self.running {
            let deadline = edge
                .deadline_s
                .map_or_else(String::new, |s| format!(" of {s:.1} s"));
            writeln!(
                f,
                "  `{}` runs on {} for {:.1} s{deadline}; it owes {} of {}",
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
        state: &crate::run::step::StageState,
        quiet_s: f64,
    ) -> Option<PendingEdge> {
        let plan = &self.schedule.plan;
        let planned = &plan.stages[stage];
        let edge = |keys, samples: String, on: String| PendingEdge {
            stage: planned.name.clone(),
            keys,
            samples,
            waited_s: quiet_s,
            deadline_s: None,
            on,
        };
        let undone = |index: &&usize| !self.stages[**index].done;
        if let Some(before) = planned.after.iter().find(undone) {
            let on = format!("the end of `{}`", plan.stages[*before].name);
            return Some(edge(Vec::new(), "all rows".to_owned(), on));
        }
        let waiting = |slice: &crate::run::step::Slice| slice.phase == Phase::Waiting;
        let Some(slice) = state.slices.iter().position(waiting) else {
            let table = planned.table_in.filter(|_| !state.all_cut)?;
            let maker = &plan.stages[plan.tables[table].made_by].name;
            let rows = "rows that are not known yet".to_owned();
            return Some(edge(Vec::new(), rows, format!("further rows of `{maker}`")));
        };
        let (at, row) = self.first_missing(stage, slice)?;
        let wires = &self.schedule.wiring.stages[stage];
        let inputs = wires.inputs.iter().filter(|input| input.source == at);
        let rows = &state.slices[slice].rows;
        let id = planned
            .table_in
            .and_then(|table| self.tables[table].ids().get(row));
        let first = id.map_or_else(String::new, |id| {
            format!(
                ", the first that is missing: {}",
                crate::batch::RowId(*id).in_words()
            )
        });
        let on = format!("`{}`", plan.stages[wires.sources[at].writer].name);
        Some(edge(
            inputs.map(|input| input.key.clone()).collect(),
            format!("rows {}..{}{first}", rows.start, rows.end),
            on,
        ))
    }
}

impl Run {
    /// Where a stage runs.
    pub(super) fn place_words(&self, stage: usize) -> String {
        match self.schedule.places[stage] {
            Place::Host => "the host pool".to_owned(),
            Place::Group(_) => format!("device group {}", self.schedule.groups[0].name),
        }
    }

    /// What the step waits for now.
    pub(super) fn stall_report(&self, progress: &Progress) -> StallReport {
        let quiet_s = progress.last_event.elapsed().as_secs_f64();
        let mut flights: Vec<_> = progress.in_flight.iter().collect();
        flights.sort_by_key(|(call, _)| **call);
        let running = flights.into_iter().map(|(_, flight)| {
            let stage = flight.id.0;
            let planned = &self.schedule.plan.stages[stage];
            let (unit, since) = match &flight.host {
                Some(host) => {
                    let cell = host.cell.lock();
                    (host.units.get(cell.finished.len()), cell.unit_since)
                }
                None => (None, Some(flight.since)),
            };
            let writes = planned.spec.writes.iter();
            PendingEdge {
                stage: planned.name.clone(),
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
                on: self.place_words(stage),
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

    /// Something of `call` came: what was told of a wait is over.
    pub(super) fn moved(&mut self, progress: &mut Progress, call: u64) {
        if let Some(flight) = progress.in_flight.get(&call) {
            let stage = &self.schedule.plan.stages[flight.id.0].name;
            self.notices.ended(stage, quiet(progress, flight));
        }
        progress.last_event = Instant::now();
        if std::mem::take(&mut progress.told)
            && let Some(dir) = &self.options.run_dir
        {
            remove_stall(dir);
        }
    }

    /// Tells once what the step waits for when nothing has come for long, as calls of that stage go.
    pub(super) fn watch(&self, progress: &mut Progress) {
        let is_long = |flight: &InFlight| {
            let stage = &self.schedule.plan.stages[flight.id.0].name;
            quiet(progress, flight) >= self.notices.after(stage)
        };
        if progress.told || !progress.in_flight.values().any(is_long) {
            return;
        }
        progress.told = true;
        let report = self.stall_report(progress);
        tracing::warn!("{}", report.to_string().trim_end());
        self.keep_stall(&report);
    }

    /// Keeps what the step waited for when a deadline ended it.
    pub(super) fn tell_stall(&self, progress: &mut Progress, error: &RunError) {
        let of_a_wait = matches!(
            error,
            RunError::Deadline { .. } | RunError::Stalled { .. } | RunError::TooManyHung { .. }
        );
        if of_a_wait {
            let late = progress.late.take();
            let report = StallReport {
                error: Some(error.to_string()),
                ..late.unwrap_or_else(|| self.stall_report(progress))
            };
            tracing::error!("{}", report.to_string().trim_end());
            self.keep_stall(&report);
        }
    }

    fn keep_stall(&self, report: &StallReport) {
        if let Some(dir) = &self.options.run_dir {
            report.keep(dir);
        }
    }
}

/// How long nothing has come at all while a call ran.
fn quiet(progress: &Progress, flight: &InFlight) -> Duration {
    progress.last_event.elapsed().min(flight.since.elapsed())
}
