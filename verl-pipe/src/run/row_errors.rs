//! Rows of a step that failed in a stage of the host pool or were slow there: counted, told, and, where they are too
//! many, the error that ends the step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::Array;

use crate::batch::{Batch, BatchError, RowId};
use crate::run::channel::CallFailure;
use crate::run::error::{FailedRows, RowReason, RunError};
use crate::run::records::{RowErrorLine, RowStatus};
use crate::run::runner::{Progress, Run};
use crate::stage::{Cadence, StageError};

/// Rows of a stage and step that are listed one by one.
const LISTED: usize = 100;

/// Slow rows of a stage and step that are listed, the slowest.
const SLOWEST: usize = 5;

/// Reasons that are told apart in messages.
const REASONS: usize = 4;

/// Characters of a reason that are kept: a panic may tell a whole document.
const LONGEST_REASON: usize = 1000;

/// Why a unit of rows was given up.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    status: RowStatus,
    reason: Arc<str>,
    seconds: f64,
}

impl Fault {
    /// Of a call that failed after `seconds`.
    pub(super) fn of(failure: &CallFailure, seconds: f64) -> Fault {
        let (status, reason) = match failure {
            CallFailure::Panic(message) => (RowStatus::Panicked, message.clone()),
            CallFailure::Error(error) => (status_of(error), error.to_string()),
        };
        Fault {
            status,
            reason: shortened(reason),
            seconds,
        }
    }

    /// Of a call that was given up after `seconds`.
    pub(super) fn timed_out(seconds: f64, error: &RunError) -> Fault {
        let reason = match error {
            RunError::Deadline { deadline_s, .. } => {
                format!("no answer within the deadline of {deadline_s} s")
            }
            other => other.to_string(),
        };
        Fault {
            status: RowStatus::TimedOut,
            reason: shortened(reason),
            seconds,
        }
    }
}

fn status_of(error: &StageError) -> RowStatus {
    match error {
        StageError::Batch(BatchError::Rows { .. }) => RowStatus::WrongLength,
        StageError::Batch(BatchError::Missing { .. }) => RowStatus::MissingKey,
        _ => RowStatus::Failed,
    }
}

fn shortened(mut reason: String) -> Arc<str> {
    if let Some((end, _)) = reason.char_indices().nth(LONGEST_REASON) {
        reason.truncate(end);
        reason.push('…');
    }
    reason.into()
}

/// A row that was given up.
#[derive(Debug)]
struct Lost {
    id: RowId,
    fault: Fault,
}

/// What is known of the rows of one stage in a step.
#[derive(Debug, Default)]
struct StageRows {
    lost: Vec<Lost>,
    /// Seconds of each row's call.
    times: Vec<f32>,
    /// Rows that took more than half of their deadline, the slowest first.
    slow: Vec<(f64, RowId)>,
    /// The rows were found not to be too many.
    checked: bool,
    /// Rows for which the stage gave null in all that it writes.
    nulls: usize,
}

impl StageRows {
    /// Rows that were given up by reason, most frequent first, each with its first row.
    fn reasons(&self) -> Vec<RowReason> {
        let mut reasons: BTreeMap<(RowStatus, &str), (usize, RowId)> = BTreeMap::new();
        for Lost { id, fault } in &self.lost {
            let entry = reasons.entry((fault.status, fault.reason.as_ref()));
            let (rows, first) = entry.or_insert((0, *id));
            *rows += 1;
            *first = (*first).min(*id);
        }
        let mut reasons: Vec<RowReason> = reasons
            .into_iter()
            .map(|((status, reason), (rows, first))| RowReason {
                status,
                reason: reason.to_owned(),
                rows,
                first,
            })
            .collect();
        reasons.sort_by_key(|reason| (std::cmp::Reverse(reason.rows), reason.first));
        reasons
    }
}

/// What is known of the rows of a step, by stage.
#[derive(Debug, Default)]
pub(super) struct StepRows(BTreeMap<usize, StageRows>);

impl StepRows {
    /// A call of `unit` took so long and ended well.
    pub(super) fn took(&mut self, stage: usize, unit: &Batch, seconds: f64, deadline: Duration) {
        let rows = unit.num_rows().max(1);
        let of_row = seconds / rows as f64;
        let stage = self.0.entry(stage).or_default();
        stage.times.push(of_row as f32);
        if of_row <= deadline.as_secs_f64() / 2.0 {
            return;
        }
        if let Some(id) = unit.ids().first() {
            stage.slow.push((of_row, *id));
            stage.slow.sort_by(|a, b| b.0.total_cmp(&a.0));
            stage.slow.truncate(SLOWEST);
        }
    }

    /// A call gave `batch`, in which it writes the keys `written`.
    pub(super) fn gave<'a>(
        &mut self,
        stage: usize,
        batch: &Batch,
        written: impl Iterator<Item = &'a str>,
    ) {
        let mut columns = written.filter_map(|key| batch.column(key)).peekable();
        let rows = batch.num_rows();
        let is_empty = columns.peek().is_none() || rows == 0;
        if !is_empty && columns.all(|column| column.null_count() == rows) {
            self.0.entry(stage).or_default().nulls += rows;
        }
    }

    /// The rows of `unit` are given up.
    pub(super) fn gave_up(&mut self, stage: usize, unit: &Batch, fault: &Fault) {
        let stage = self.0.entry(stage).or_default();
        stage.times.push(fault.seconds as f32);
        stage.lost.extend(unit.ids().into_iter().map(|id| Lost {
            id,
            fault: fault.clone(),
        }));
    }

    /// Rows of a stage that were given up.
    pub(super) fn given_up(&self, stage: usize) -> usize {
        self.0.get(&stage).map_or(0, |rows| rows.lost.len())
    }

    /// Median and longest time of a row (seconds) of each stage whose rows were timed.
    pub(super) fn times(&self) -> impl Iterator<Item = (usize, [f64; 2])> {
        self.0.iter().filter_map(|(stage, rows)| {
            let mut times = rows.times.clone();
            times.sort_by(f32::total_cmp);
            let median = *times.get(times.len() / 2)?;
            Some((*stage, [f64::from(median), f64::from(*times.last()?)]))
        })
    }

    /// What became of a row, where it was given up by some stage: the stage, how, and why.
    pub(super) fn fate(&self, id: RowId) -> Option<(usize, RowStatus, &str)> {
        self.0.iter().find_map(|(stage, rows)| {
            let lost = rows.lost.iter().find(|lost| lost.id == id)?;
            Some((*stage, lost.fault.status, lost.fault.reason.as_ref()))
        })
    }
}

impl Run {
    /// Rows of the last step that failed in a stage or were slow there, whether the step ended well or not.
    pub fn row_errors(&self) -> &[RowErrorLine] {
        &self.row_errors
    }

    /// The error of a step that has lost too many rows in a stage that has ended.
    pub(super) fn check_rows(&self, progress: &mut Progress) -> Result<(), RunError> {
        let Progress {
            rows, state, env, ..
        } = progress;
        for (stage, of_stage) in &mut rows.0 {
            let (taken, done) = state.rows_taken(*stage);
            if of_stage.checked || of_stage.lost.is_empty() || !done {
                continue;
            }
            of_stage.checked = true;
            let failed = of_stage.lost.len();
            let limit = self.schedule.plan.pipe.run.max_failed_share;
            let all = failed >= taken;
            if !all && failed as f64 <= limit * taken as f64 {
                continue;
            }
            let mut reasons = of_stage.reasons();
            let others = reasons.len().saturating_sub(REASONS);
            reasons.truncate(REASONS);
            return Err(RunError::RowsFailed(Box::new(FailedRows {
                step: env.step,
                stage: self.name(*stage).to_owned(),
                failed,
                rows: taken,
                limit: (!all).then_some(limit),
                reasons,
                others,
            })));
        }
        Ok(())
    }

    /// Tells what was lost of the rows of a step, and keeps it for `row_errors.jsonl`.
    pub(super) fn tell_rows(&mut self, progress: &Progress, error: Option<&RunError>) {
        let step = progress.env.step;
        let mut lines = Vec::new();
        for (stage, rows) in &progress.rows.0 {
            let name = self.name(*stage).to_owned();
            list(step, &name, rows, &mut lines);
            let told = matches!(error, Some(RunError::RowsFailed(failed)) if failed.stage == name);
            let (taken, _) = progress.state.rows_taken(*stage);
            if rows.nulls > 0 && rows.nulls + rows.lost.len() == taken {
                tracing::warn!(
                    "step {step}, stage `{name}`: no row has a result: it gave null for {} of {taken}, and rows without one teach nothing",
                    rows.nulls
                );
            }
            if rows.lost.is_empty() || told {
                continue;
            }
            let reasons = rows.reasons();
            let first = reasons.first().map(ToString::to_string).unwrap_or_default();
            let others = match reasons.len() - 1 {
                0 => String::new(),
                1 => "; and for 1 other reason".to_owned(),
                n => format!("; and for {n} other reasons"),
            };
            let aside = match &self.options.run_dir {
                Some(_) => "; `row_errors.jsonl` lists them",
                None => "",
            };
            tracing::warn!(
                "step {step}, stage `{name}`: {} of {taken} rows failed and have no result: {first}{others}{aside}",
                rows.lost.len(),
            );
        }
        self.row_errors = lines;
    }

    /// Stages that update a model as part of a step.
    pub(super) fn updates_of_step(&self) -> impl Iterator<Item = usize> + '_ {
        let stages = self.schedule.plan.stages.iter().enumerate();
        stages
            .filter(|(index, stage)| stage.spec.cadence == Cadence::Step && self.updates(*index))
            .map(|(index, _)| index)
    }

    /// Tells updates to which no row came.
    pub(super) fn tell_idle_updates(&self, progress: &Progress) {
        for stage in self.updates_of_step() {
            if !progress.state.was_called(stage) {
                tracing::warn!(
                    "step {}, stage `{}`: no row came to it, so the step learnt nothing; a filter before it let none go on",
                    progress.env.step,
                    self.name(stage),
                );
            }
        }
    }
}

/// Adds the lines of a stage: rows that were given up in their order, then slow ones.
fn list(step: u64, stage: &str, rows: &StageRows, lines: &mut Vec<RowErrorLine>) {
    let line = |id: Option<RowId>, status, reason: &str, seconds, rows| RowErrorLine {
        step,
        stage: stage.to_owned(),
        sample: id.map(|id| id.to_string()),
        data_row: id.map(|id| id.row() + 1),
        status,
        reason: reason.to_owned(),
        seconds,
        rows,
    };
    let mut lost: Vec<&Lost> = rows.lost.iter().collect();
    lost.sort_by_key(|lost| lost.id);
    for Lost { id, fault } in lost.iter().take(LISTED) {
        let Fault {
            status,
            reason,
            seconds,
        } = fault;
        lines.push(line(Some(*id), *status, reason, Some(*seconds), 1));
    }
    if let Some(more) = lost.len().checked_sub(LISTED).filter(|more| *more > 0) {
        let reason = format!("{LISTED} rows of a stage and step are listed at most");
        lines.push(line(None, RowStatus::LeftOut, &reason, None, more));
    }
    for (seconds, id) in &rows.slow {
        let reason = "it took more than half of the stage's deadline";
        lines.push(line(Some(*id), RowStatus::Slow, reason, Some(*seconds), 1));
    }
}
