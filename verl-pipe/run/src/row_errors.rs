//! Rows of a step that failed or were slow in a stage of the host pool: counting and reporting them, and the error that
//! ends the step if there are too many.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::Array;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, BatchError, RowId};
use verl_words::stage::{Cadence, StageError};

use crate::channel::CallFailure;
use crate::error::{FailedRows, RowReason, RunError};
use crate::records::{RowErrorLine, RowStatus};
use crate::runner::{Progress, Run};

/// Maximum number of failed rows of a stage and step that are listed individually.
const LISTED: usize = 100;

/// Maximum number of slow rows of a stage and step that are listed, slowest first.
const SLOWEST: usize = 5;

/// Maximum number of distinct reasons in a message.
const REASONS: usize = 4;

/// Maximum length of a reason (characters): a panic message can contain an entire document.
const LONGEST_REASON: usize = 1000;

/// Why a unit of rows was abandoned.
#[derive(Debug, Clone)]
pub(super) struct RowFailure {
    status: RowStatus,
    reason: Arc<str>,
    seconds: f64,
}

impl RowFailure {
    /// The failure of a call after `seconds`.
    pub(super) fn of(failure: &CallFailure, seconds: f64) -> RowFailure {
        let (status, reason) = match failure {
            CallFailure::Panic(message) => (RowStatus::Panicked, message.clone()),
            CallFailure::Lost(reason) => (RowStatus::Failed, reason.clone()),
            CallFailure::Error(error) => (status_of(error), error.to_string()),
        };
        RowFailure {
            status,
            reason: shortened(reason),
            seconds,
        }
    }

    /// A call that was abandoned after `seconds`.
    pub(super) fn timed_out(seconds: f64, error: &RunError) -> RowFailure {
        let reason = match error {
            RunError::Deadline { deadline_s, .. } => {
                format!("no answer within the deadline of {deadline_s} s")
            }
            other => other.to_string(),
        };
        RowFailure {
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

/// A row that has no result.
#[derive(Debug)]
struct LostRow {
    id: RowId,
    failure: RowFailure,
}

/// Failed and slow rows of one stage in a step.
#[derive(Debug, Default)]
struct StageRows {
    lost: Vec<LostRow>,
    /// Duration of each row's call (seconds).
    times: Vec<f32>,
    /// Rows that took more than half of their deadline, the slowest first.
    slow: Vec<(f64, RowId)>,
    /// The number of lost rows was checked against the limit.
    checked: bool,
    /// Rows for which the stage returned null in every key that it writes.
    nulls: usize,
}

impl StageRows {
    /// Lost rows by reason, most frequent first, each with its first row.
    fn reasons(&self) -> Vec<RowReason> {
        let mut reasons: BTreeMap<(RowStatus, &str), (usize, RowId)> = BTreeMap::new();
        for LostRow { id, failure } in &self.lost {
            let entry = reasons.entry((failure.status, failure.reason.as_ref()));
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

/// Failed and slow rows of a step, by stage.
#[derive(Debug, Default)]
pub(super) struct StepRows(BTreeMap<usize, StageRows>);

impl StepRows {
    /// Adds the duration of a call of `unit` that succeeded.
    pub(super) fn add_time(
        &mut self,
        stage: usize,
        unit: &Batch,
        seconds: f64,
        deadline: Duration,
    ) {
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

    /// Counts the rows of `batch` if all keys in `written` are null in every row.
    pub(super) fn count_nulls<'a>(
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

    /// Adds the rows of `unit`, which have no result.
    pub(super) fn add_lost(&mut self, stage: usize, unit: &Batch, failure: &RowFailure) {
        let stage = self.0.entry(stage).or_default();
        stage.times.push(failure.seconds as f32);
        stage.lost.extend(unit.ids().into_iter().map(|id| LostRow {
            id,
            failure: failure.clone(),
        }));
    }

    /// Number of rows of a stage that were lost.
    pub(super) fn num_lost(&self, stage: usize) -> usize {
        self.0.get(&stage).map_or(0, |rows| rows.lost.len())
    }

    /// Median and longest duration of a row (seconds), for each stage whose rows were timed.
    pub(super) fn times(&self) -> impl Iterator<Item = (usize, [f64; 2])> {
        self.0.iter().filter_map(|(stage, rows)| {
            let mut times = rows.times.clone();
            times.sort_by(f32::total_cmp);
            let median = *times.get(times.len() / 2)?;
            Some((*stage, [f64::from(median), f64::from(*times.last()?)]))
        })
    }

    /// If some stage lost the row: the stage, the outcome and the reason.
    pub(super) fn loss_of(&self, id: RowId) -> Option<(usize, RowStatus, &str)> {
        self.0.iter().find_map(|(stage, rows)| {
            let lost = rows.lost.iter().find(|lost| lost.id == id)?;
            Some((*stage, lost.failure.status, lost.failure.reason.as_ref()))
        })
    }
}

impl Run {
    /// Rows of the last step that failed or were slow in a stage, whether or not the step succeeded.
    pub fn row_errors(&self) -> &[RowErrorLine] {
        &self.row_errors
    }

    /// Checks that no stage that is done has lost too many rows.
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
            let limit = self.schedule.plan().pipe().run.max_failed_share;
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

    /// Warns about lost rows of a step, and stores them for `row_errors.jsonl`.
    pub(super) fn report_rows(&mut self, progress: &Progress, error: Option<&RunError>) {
        let step = progress.env.step;
        let mut lines = Vec::new();
        for (stage, rows) in &progress.rows.0 {
            let name = self.name(*stage).to_owned();
            list(step, &name, rows, &mut lines);
            let in_error =
                matches!(error, Some(RunError::RowsFailed(failed)) if failed.stage == name);
            let (taken, _) = progress.state.rows_taken(*stage);
            if rows.nulls > 0 && rows.nulls + rows.lost.len() == taken {
                tracing::warn!(
                    "step {step}, stage `{name}`: no row has a result: {} of {taken} are null, and rows without a result are not trained on",
                    rows.nulls
                );
            }
            if rows.lost.is_empty() || in_error {
                continue;
            }
            let reasons = rows.reasons();
            let first = reasons.first().map(ToString::to_string).unwrap_or_default();
            let others = match reasons.len() - 1 {
                0 => String::new(),
                1 => "; and 1 other reason".to_owned(),
                n => format!("; and {n} other reasons"),
            };
            let hint = match &self.options.run_dir {
                Some(_) => "; `row_errors.jsonl` lists them",
                None => "",
            };
            tracing::warn!(
                "step {step}, stage `{name}`: {} of {taken} rows failed and have no result: {first}{others}{hint}",
                rows.lost.len(),
            );
        }
        self.row_errors = lines;
    }

    /// Stages that update a model as part of a step.
    pub(super) fn updates_of_step(&self) -> impl Iterator<Item = usize> + '_ {
        let stages = self.schedule.plan().stages().iter().enumerate();
        stages
            .filter(|(index, stage)| stage.spec().cadence == Cadence::Step && self.updates(*index))
            .map(|(index, _)| index)
    }

    /// Warns about updates that received no row.
    pub(super) fn report_idle_updates(&self, progress: &Progress) {
        for stage in self.updates_of_step() {
            if !progress.state.was_called(stage) {
                tracing::warn!(
                    "step {}, stage `{}`: it received no rows, so the step did not train; an earlier filter dropped all of them",
                    progress.env.step,
                    self.name(stage),
                );
            }
        }
    }
}

/// Adds the lines of a stage: lost rows in order, then slow ones.
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
    let mut lost: Vec<&LostRow> = rows.lost.iter().collect();
    lost.sort_by_key(|lost| lost.id);
    for LostRow { id, failure } in lost.iter().take(LISTED) {
        let RowFailure {
            status,
            reason,
            seconds,
        } = failure;
        lines.push(line(Some(*id), *status, reason, Some(*seconds), 1));
    }
    if let Some(more) = lost.len().checked_sub(LISTED).filter(|more| *more > 0) {
        let reason = format!("at most {LISTED} rows of a stage and step are listed");
        lines.push(line(None, RowStatus::LeftOut, &reason, None, more));
    }
    for (seconds, id) in &rows.slow {
        let reason = "it took more than half of the stage's deadline";
        lines.push(line(Some(*id), RowStatus::Slow, reason, Some(*seconds), 1));
    }
}
