//! What can end a run.

use std::fmt;
use std::path::PathBuf;

use crate::batch::{BatchError, RowId};
use crate::data::DataError;
use crate::diagnostic::Diagnostic;
use crate::plan::display::bytes;
use crate::resource::ResourceError;
use crate::run::guard::GuardError;
use crate::run::records::RowStatus;
use crate::stage::{ConfigError, StageError};
use crate::trace::error::TraceError;
use crate::trace::rules::Anomaly;

/// A device whose memory is used up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{during}: the memory of `{device}` is used up{}\n  planned: {planned}\n  help: {help}",
    .asked.as_ref().map_or(String::new(), |asked| format!("; {asked} more were asked for"))
)]
pub struct FullDevice {
    /// What was being done: the step, the stage and its rows, or the loading of models.
    pub during: String,
    /// The device group.
    pub device: String,
    /// What was asked for, such as `8.0 GiB`, where that is told.
    pub asked: Option<String>,
    /// What the plan has a device hold in this stage, part by part.
    pub planned: String,
    /// What to set otherwise.
    pub help: String,
}

/// A reason for which rows of a stage failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowReason {
    /// What became of the rows.
    pub status: RowStatus,
    /// Why: the error, or the text and place of the panic.
    pub reason: String,
    /// How many rows.
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
            "{rows} {word}: {reason} (first sample {first}, of row {row} of the data)"
        )
    }
}

/// Rows that failed in a stage of a step, too many for the step to go on.
#[derive(Debug, Clone, PartialEq)]
pub struct FailedRows {
    /// The step.
    pub step: u64,
    /// The stage.
    pub stage: String,
    /// Rows that failed.
    pub failed: usize,
    /// Rows that it was given.
    pub rows: usize,
    /// `run.max_failed_share`, where fewer than all failed.
    pub limit: Option<f64>,
    /// Reasons, the most frequent first.
    pub reasons: Vec<RowReason>,
    /// Further reasons.
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
                "{failed} of {rows} rows failed, more than the share of {limit} that may (`run.max_failed_share`)"
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
            "\n  help: mend what the first line names; `row_errors.jsonl` of the run lists the rows"
        )
    }
}

/// A disk that has no room for what the run must save.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the disk of `{}` has {} free, but saving {models} at the end takes {}\n  help: make room, choose another disk \
     (`run.dir=…`), or save fewer models (`run.save`)",
    .dir.display(),
    bytes(*.free),
    bytes(*.needed)
)]
pub struct NoRoom {
    /// The run folder.
    pub dir: PathBuf,
    /// Bytes that are free.
    pub free: u64,
    /// Bytes that are needed.
    pub needed: u64,
    /// Models that are to be saved, as text.
    pub models: String,
}

/// Why a run did not start or did not go on. [`RunError::code`] leads to a page in `docs/errors/`.
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
        /// What is wrong.
        source: Box<DataError>,
    },
    /// A model cannot be loaded.
    #[error("model `{name}` cannot be loaded: {source}")]
    Load {
        /// Its name in the pipeline.
        name: String,
        /// What is wrong.
        source: ResourceError,
    },
    /// A stage cannot be made from its configuration.
    #[error("stage `{stage}`: {}", .errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Build {
        /// Its name.
        stage: String,
        /// All that is wrong.
        errors: Vec<ConfigError>,
    },
    /// A stage cannot start.
    #[error("stage `{stage}` cannot start: {source}")]
    Start {
        /// Its name.
        stage: String,
        /// What is wrong.
        source: Box<StageError>,
    },
    /// A call of a stage failed.
    #[error("step {step}, stage `{stage}`, {rows}: {source}")]
    Stage {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// Which rows it was working on.
        rows: String,
        /// What is wrong.
        source: Box<StageError>,
    },
    /// A call of a stage panicked.
    #[error("step {step}, stage `{stage}`, {rows}: it panicked: {message}")]
    Panic {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// Which rows it was working on.
        rows: String,
        /// The panic's message.
        message: String,
    },
    /// A call took longer than it may.
    #[error(
        "step {step}, stage `{stage}`, {rows}: no answer after {waited_s:.1} s (deadline {deadline_s} s); awaited: {awaited}"
    )]
    Deadline {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// Which rows it was working on.
        rows: String,
        /// Seconds since the call began.
        waited_s: f64,
        /// Seconds it may take.
        deadline_s: f64,
        /// Keys that did not come.
        awaited: String,
    },
    /// Rows on an edge are not what was declared.
    #[error("step {step}, {source}")]
    Guard {
        /// The step.
        step: u64,
        /// What is wrong.
        source: Box<GuardError>,
    },
    /// Rows could not be put together; a fault of the engine.
    #[error("step {step}, input of stage `{stage}`: {source}")]
    Input {
        /// The step.
        step: u64,
        /// The reader.
        stage: String,
        /// What is wrong.
        source: Box<BatchError>,
    },
    /// Nothing runs, and some stages still wait; a fault of the engine.
    #[error("step {step}: nothing runs, but these wait:\n{waits}")]
    Stalled {
        /// The step.
        step: u64,
        /// One line a waiting stage.
        waits: String,
    },
    /// A worker thread is gone, or holds on to a call that was given up.
    #[error("the worker of `{worker}` is lost: {reason}; start the run again")]
    Lost {
        /// Which worker.
        worker: String,
        /// Why.
        reason: String,
    },
    /// More calls hang than the pool may replace.
    #[error(
        "{hung} calls of host stages hang, the newest in `{stage}`; their threads cannot be freed"
    )]
    TooManyHung {
        /// Number of hung calls.
        hung: usize,
        /// Stage of the newest.
        stage: String,
    },
    /// A filter kept too few groups of all that may be drawn in a step.
    #[error(
        "step {step}, stage `{stage}`: {kept} of {judged} groups in {waves} {} had a signal, but {wanted} are asked \
         for; weights are as the step before left them\n  it recorded: {statistics}\n  help: draw more prompts a wave \
         (`batch.prompts`), let `{stage}` draw more waves, keep fewer groups or go on with fewer, sample more \
         responses to each prompt, or take data whose answers are now right and now wrong",
        if *waves == 1 { "wave" } else { "waves" }
    )]
    NoSignal {
        /// The step.
        step: u64,
        /// The filter.
        stage: String,
        /// Groups with a signal.
        kept: usize,
        /// Groups that were looked at.
        judged: usize,
        /// Waves that were drawn.
        waves: usize,
        /// Groups that were asked for.
        wanted: usize,
        /// What the filter recorded in the step: names and values.
        statistics: String,
    },
    /// The memory of a device is used up.
    #[error("{0}")]
    OutOfMemory(Box<FullDevice>),
    /// An anomaly rule whose severity is `stop` fired.
    #[error(
        "{anomaly}; the run stopped before the optimiser moved, weights are as the step before left them"
    )]
    Anomaly {
        /// What the rule found.
        anomaly: Box<Anomaly>,
    },
    /// The trace could not be begun.
    #[error("the trace cannot be begun: {0}")]
    Trace(#[from] TraceError),
    /// Too many rows of a step failed in a stage.
    #[error(transparent)]
    RowsFailed(Box<FailedRows>),
    /// The disk has no room for what the run must save.
    #[error(transparent)]
    NoRoom(Box<NoRoom>),
    /// A step was asked for after the run had ended.
    #[error(
        "the run has ended behind step {step} and takes no further step; make another trainer, with a folder of its own"
    )]
    Ended {
        /// Steps done.
        step: u64,
    },
    /// The run was asked to end.
    #[error("the run was cancelled during step {step}")]
    Cancelled {
        /// The step that did not end.
        step: u64,
    },
    /// A snapshot or a model's file operation failed.
    #[error("cannot {action} {what} `{name}`: {source}")]
    State {
        /// `model` or `stage`.
        what: &'static str,
        /// Its name.
        name: String,
        /// `snapshot`, `restore`, `save`.
        action: &'static str,
        /// What is wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The resolved configuration cannot be written as TOML.
    #[error("the configuration cannot be written as a file: {reason}")]
    Config {
        /// What is wrong.
        reason: String,
    },
    /// The run folder is there already.
    #[error(
        "the run folder `{}` exists already and is never overwritten; choose another one (`run.dir=…`), or move or delete it",
        .path.display()
    )]
    FolderExists {
        /// The folder.
        path: PathBuf,
    },
    /// A file of the run folder could not be written.
    #[error("cannot {action} `{}`: {reason}; {saved}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        reason: std::io::Error,
        /// What of the run is safe on disk.
        saved: String,
    },
}

impl RunError {
    /// Code of the error; `docs/errors/<CODE>.md` says what happened and what to do.
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
            RunError::Trace(error) => error.code(),
        }
    }
}
