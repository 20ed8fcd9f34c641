//! Errors that can end a run.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use verl_plan::display::bytes;
use verl_rules::Anomaly;
use verl_words::batch::{BatchError, RowId};
use verl_words::data::DataError;
use verl_words::diagnostic::Diagnostic;
use verl_words::resource::ResourceError;
use verl_words::stage::{ConfigError, StageError};

use crate::guard::GuardError;
use crate::records::RowStatus;

/// Why a worker is lost, with the help on a line of its own after a reason of several lines.
fn with_help(reason: &str) -> String {
    match (reason.contains('\n'), reason.contains("\n  help: ")) {
        (false, _) => format!("{reason}; start the run again"),
        (true, false) => format!("{reason}\n  help: start the run again"),
        (true, true) => reason.to_owned(),
    }
}

/// A device that is out of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "{during}: `{device}` is out of memory{}\n  planned: {planned}\n  help: {help}",
    .asked.as_ref().map_or(String::new(), |asked| format!("; {asked} more were requested"))
)]
pub struct FullDevice {
    /// What was in progress: the step, the stage and its rows, or loading models.
    pub during: String,
    /// The device group.
    pub device: String,
    /// The requested size, such as `8.0 GiB`, if known.
    pub asked: Option<String>,
    /// Memory use of the device in this stage according to the plan, part by part.
    pub planned: String,
    /// Settings to change.
    pub help: String,
}

/// A reason why rows of a stage failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowReason {
    /// Outcome of the rows.
    pub status: RowStatus,
    /// Reason: the error, or the message and location of the panic.
    pub reason: String,
    /// Number of rows.
    pub rows: usize,
    /// The first of them.
    pub first: RowId,
}

impl fmt::Display for RowReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowReason {
            status,
            reason,
            rows,
            first,
        } = self;
        let word = status.word();
        let row = first.row() + 1;
        write!(
            f,
            "{rows} {word}: {reason} (first: sample {first}, row {row} of the data)"
        )
    }
}

/// Rows that failed in a stage of a step: too many to continue the step.
#[derive(Debug, Clone, PartialEq)]
pub struct FailedRows {
    /// The step.
    pub step: u64,
    /// The stage.
    pub stage: String,
    /// Number of rows that failed.
    pub failed: usize,
    /// Number of rows that the stage received.
    pub rows: usize,
    /// `run.max_failed_share`; `None` if all rows failed.
    pub limit: Option<f64>,
    /// Reasons, most frequent first.
    pub reasons: Vec<RowReason>,
    /// Number of further reasons.
    pub others: usize,
}

impl std::error::Error for FailedRows {}

impl fmt::Display for FailedRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedRows {
            step,
            stage,
            failed,
            rows,
            ..
        } = self;
        write!(f, "step {step}, stage `{stage}`: ")?;
        match self.limit {
            None if *rows == 1 => {
                write!(f, "its only row failed, so nothing is left to learn from")?
            }
            None => write!(
                f,
                "all {rows} rows failed, so nothing is left to learn from"
            )?,
            Some(limit) => write!(
                f,
                "{failed} of {rows} rows failed, more than the allowed share of {limit} (`run.max_failed_share`)"
            )?,
        }
        for reason in &self.reasons {
            write!(f, "\n  {reason}")?;
        }
        match self.others {
            0 => {}
            1 => write!(f, "\n  and 1 further reason")?,
            others => write!(f, "\n  and {others} further reasons")?,
        }
        write!(
            f,
            "\n  help: fix the first error; `row_errors.jsonl` of the run lists the rows"
        )
    }
}

/// A disk without enough space for what the run must save.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the disk of `{}` has {} free, but saving {models} at the end needs {}\n  help: free some space, use another disk \
     (`run.dir=…`), or save fewer models (`run.save`)",
    .dir.display(),
    bytes(*.free),
    bytes(*.needed)
)]
pub struct NoRoom {
    /// The run folder.
    pub dir: PathBuf,
    /// Free bytes.
    pub free: u64,
    /// Required bytes.
    pub needed: u64,
    /// Models to save, as text.
    pub models: String,
}

/// Why a run did not start or did not continue. [`RunError::code`] leads to a page in `docs/errors/`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The plan cannot be placed.
    #[error("the plan cannot be placed:\n{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Schedule(Vec<Diagnostic>),
    /// A data set cannot be opened.
    #[error("data set `{name}`: {source}")]
    Data {
        /// Its name in the pipeline.
        name: String,
        /// The cause.
        source: Box<DataError>,
    },
    /// A model cannot be loaded.
    #[error("model `{name}` cannot be loaded: {source}")]
    Load {
        /// Its name in the pipeline.
        name: String,
        /// The cause.
        source: ResourceError,
    },
    /// A stage cannot be built from its configuration.
    #[error("stage `{stage}`: {}", .errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Build {
        /// Its name.
        stage: String,
        /// All errors of the configuration.
        errors: Vec<ConfigError>,
    },
    /// A stage cannot start.
    #[error("stage `{stage}` cannot start: {source}")]
    Start {
        /// Its name.
        stage: String,
        /// The cause.
        source: Box<StageError>,
    },
    /// A call of a stage failed.
    #[error("step {step}, stage `{stage}`, {rows}: {source}")]
    Stage {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// The rows that it was processing.
        rows: String,
        /// The cause.
        source: Box<StageError>,
    },
    /// A call of a stage panicked.
    #[error("step {step}, stage `{stage}`, {rows}: it panicked: {message}")]
    Panic {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// The rows that it was processing.
        rows: String,
        /// The panic's message.
        message: String,
    },
    /// A call exceeded its deadline.
    #[error(
        "step {step}, stage `{stage}`, {rows}: no answer after {waited_s:.1} s (deadline {deadline_s} s); awaited: {awaited}"
    )]
    Deadline {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// The rows that it was processing.
        rows: String,
        /// Seconds since the call started.
        waited_s: f64,
        /// Deadline in seconds.
        deadline_s: f64,
        /// Keys that did not arrive.
        awaited: String,
    },
    /// Rows on an edge do not match their declaration.
    #[error("step {step}, {source}")]
    Guard {
        /// The step.
        step: u64,
        /// The cause.
        source: Box<GuardError>,
    },
    /// Rows could not be assembled; a bug in the engine.
    #[error("step {step}, input of stage `{stage}`: {source}")]
    Input {
        /// The step.
        step: u64,
        /// The reader.
        stage: String,
        /// The cause.
        source: Box<BatchError>,
    },
    /// Nothing runs, but some stages still wait; a bug in the engine.
    #[error("step {step}: nothing is running, but these stages still wait:\n{waits}")]
    Stalled {
        /// The step.
        step: u64,
        /// One line per waiting stage.
        waits: String,
    },
    /// A worker thread has ended, or is still running a call that was abandoned.
    #[error("the worker of `{worker}` is lost: {}", with_help(.reason))]
    Lost {
        /// The worker.
        worker: String,
        /// Why.
        reason: String,
    },
    /// More calls hang than the pool can replace.
    #[error(
        "{hung} calls of host stages hang, the most recent one in `{stage}`; their threads cannot be freed"
    )]
    TooManyHung {
        /// Number of hung calls.
        hung: usize,
        /// Stage of the most recent one.
        stage: String,
    },
    /// A filter kept too few of the groups that a step may draw.
    #[error(
        "step {step}, stage `{stage}`: {kept} of {judged} groups in {waves} {} had a signal, but {wanted} are required; \
         weights are unchanged since the previous step\n  recorded: {statistics}\n  help: draw more prompts per wave \
         (`batch.prompts`), let `{stage}` draw more waves, keep fewer groups or continue with fewer, sample more \
         responses per prompt, or use data that the model answers sometimes right and sometimes wrong",
        if *waves == 1 { "wave" } else { "waves" }
    )]
    NoSignal {
        /// The step.
        step: u64,
        /// The filter.
        stage: String,
        /// Groups with a signal.
        kept: usize,
        /// Groups that the filter judged.
        judged: usize,
        /// Waves that were drawn.
        waves: usize,
        /// Groups that are required.
        wanted: usize,
        /// Names and values that the filter recorded in the step.
        statistics: String,
    },
    /// A device is out of memory.
    #[error("{0}")]
    OutOfMemory(Box<FullDevice>),
    /// An anomaly rule whose severity is `stop` fired.
    #[error(
        "{anomaly}; the run stopped before the optimiser step, weights are unchanged since the previous step"
    )]
    Anomaly {
        /// What the rule found.
        anomaly: Box<Anomaly>,
    },
    /// The trace could not be started.
    #[error("the trace cannot be started: {source}")]
    Trace {
        /// Code of the error, with a page in `docs/errors`.
        code: &'static str,
        /// What the trace reports.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Too many rows of a step failed in a stage.
    #[error(transparent)]
    RowsFailed(Box<FailedRows>),
    /// The disk does not have enough space for what the run must save.
    #[error(transparent)]
    NoRoom(Box<NoRoom>),
    /// A step was requested after the run had ended.
    #[error(
        "the run ended after step {step} and cannot run further steps; create another trainer with its own run folder"
    )]
    Ended {
        /// Number of completed steps.
        step: u64,
    },
    /// The run was asked to end.
    #[error("the run was cancelled during step {step}")]
    Cancelled {
        /// The step that was interrupted.
        step: u64,
    },
    /// A snapshot or a model's file operation failed.
    #[error("cannot {action} {what} `{name}`: {source}")]
    State {
        /// `model` or `stage`.
        what: &'static str,
        /// Its name.
        name: String,
        /// `snapshot`, `restore`, `store`, `recall` or `save`.
        action: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The resolved configuration cannot be written as TOML.
    #[error("the configuration cannot be written as a file: {reason}")]
    Config {
        /// The cause.
        reason: String,
    },
    /// The run folder already exists.
    #[error(
        "the run folder `{}` already exists and is never overwritten; use another one (`run.dir=…`), or move or delete it",
        .path.display()
    )]
    FolderExists {
        /// The folder.
        path: PathBuf,
    },
    /// A file of the run folder could not be written.
    #[error("cannot {action} `{}`: {reason}; {saved}", .path.display())]
    File {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        reason: std::io::Error,
        /// What of the run is safe on disk.
        saved: String,
    },
}

impl RunError {
    /// Code of the error; `docs/errors/<CODE>.md` explains what happened and what to do.
    ///
    /// ```
    /// use verl_pipe::run::error::RunError;
    ///
    /// assert_eq!(RunError::Cancelled { step: 3 }.code(), "R011");
    /// ```
    pub fn code(&self) -> &'static str {
        match self {
            RunError::Schedule(findings) => findings.first().map_or("S011", |first| first.code),
            RunError::Data { .. } => "R001",
            RunError::Load { .. } => "R002",
            RunError::Build { .. } | RunError::Start { .. } => "R003",
            RunError::Stage { .. } => "R004",
            RunError::Panic { .. } => "R005",
            RunError::Deadline { .. } => "R006",
            RunError::Guard { .. } => "R007",
            RunError::Input { .. } | RunError::Stalled { .. } => "R008",
            RunError::Lost { .. } => "R009",
            RunError::TooManyHung { .. } => "R010",
            RunError::Cancelled { .. } => "R011",
            RunError::State { .. } => "R012",
            RunError::FolderExists { .. } => "R013",
            RunError::File { .. } => "R014",
            RunError::Config { .. } => "R015",
            RunError::NoSignal { .. } => "R016",
            RunError::Anomaly { .. } => "R017",
            RunError::OutOfMemory(_) => "R018",
            RunError::RowsFailed(_) => "R019",
            RunError::NoRoom(_) => "R020",
            RunError::Ended { .. } => "R021",
            RunError::Trace { code, .. } => code,
        }
    }
}

impl RunError {
    /// Its text without what to do; the run does it.
    pub(crate) fn without_help(&self) -> String {
        match self {
            RunError::Lost { worker, reason } => {
                let reason = reason.split("\n  help: ").next().unwrap_or(reason);
                format!("the worker of `{worker}` is lost: {reason}")
            }
            other => other.to_string(),
        }
    }

    /// The error of a worker that was started again `retries` times in a step.
    pub(crate) fn after_retries(self, retries: u32) -> RunError {
        match self {
            RunError::Lost { worker, reason } if retries > 0 => RunError::Lost {
                worker,
                reason: format!(
                    "{reason}; it was started again {retries} times in this step (`run.worker_retries`)"
                ),
            },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_of_a_lost_worker_follows_what_its_process_printed() {
        let text = |reason: &str| {
            let worker = "cpu".to_owned();
            let reason = reason.to_owned();
            RunError::Lost { worker, reason }.to_string()
        };
        let start = "the worker of `cpu` is lost: ";
        assert_eq!(
            text("it ended"),
            format!("{start}it ended; start the run again")
        );
        let printed = "it ended\n  | out of file handles";
        let expected = format!("{start}{printed}\n  help: start the run again");
        assert_eq!(text(printed), expected);
        let helped = "it ended\n  help: raise the limit";
        assert_eq!(text(helped), format!("{start}{helped}"));
    }
}
