//! Errors of reading and writing a trace.

use std::fmt;
use std::path::{Path, PathBuf};

use verl_rules::format::FORMAT;
use verl_run::atomic_file::AtomicFileError;

/// Why a trace cannot be written or read. [`TraceError::code`] leads to a page in `docs/errors/`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A folder without a trace.
    #[error("`{}` contains no trace: {reason}; use the folder of a run that was started with `trace.stats` or `--debug`", .dir.display())]
    NoTrace {
        /// The run folder.
        dir: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A trace in a format that this version does not support.
    #[error("`{}` has trace format {found}, but this version reads only format {FORMAT}; use the version recorded in `versions.json` of the run", .path.display())]
    UnknownFormat {
        /// The file with the format number.
        path: PathBuf,
        /// Format of the file; `unknown` if it has no number.
        found: String,
    },
    /// A file with damaged content.
    #[error("`{}` is damaged: {reason}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// An intact file of another step, stage or run than its path says.
    #[error("`{}` is misplaced: it contains {found}, but its path is that of {expected}", .path.display())]
    Misplaced {
        /// The file.
        path: PathBuf,
        /// What the file is, by its own metadata.
        found: String,
        /// What belongs at this path.
        expected: String,
    },
    /// A file that another writer compressed with a codec that this build does not support.
    #[error("`{}` is compressed with {codec}, which this build does not support; rewrite the file with Snappy, LZ4 or Gzip, or uncompressed", .path.display())]
    UnknownCodec {
        /// The file.
        path: PathBuf,
        /// Name of the codec.
        codec: String,
    },
    /// A step that is not in the trace.
    #[error("step {step} is not in `{}`; it contains {known}", .dir.display())]
    NoStep {
        /// The trace folder.
        dir: PathBuf,
        /// The step.
        step: u64,
        /// Steps in the trace, as text.
        known: String,
    },
    /// A stage that was not recorded in a step.
    #[error("stage `{stage}` is not in the trace of step {step}; recorded stages: {known}")]
    NoStage {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// Recorded stages, as text.
        known: String,
    },
    /// An I/O error.
    #[error("cannot {action} `{}`: {reason}", .path.display())]
    File {
        /// The operation that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason that the system gave.
        reason: String,
    },
}

impl From<AtomicFileError> for TraceError {
    fn from(error: AtomicFileError) -> TraceError {
        TraceError::file(error.operation, &error.path, error.source)
    }
}

impl TraceError {
    /// Code of the error; `docs/errors/<CODE>.md` says what happened and what to do.
    pub fn code(&self) -> &'static str {
        match self {
            TraceError::NoTrace { .. } => "T001",
            TraceError::UnknownFormat { .. } | TraceError::UnknownCodec { .. } => "T002",
            TraceError::Damaged { .. } | TraceError::Misplaced { .. } => "T003",
            TraceError::NoStep { .. } | TraceError::NoStage { .. } => "T004",
            TraceError::File { .. } => "T005",
        }
    }

    /// An I/O error: `action` failed for the file at `path`.
    pub fn file(action: &'static str, path: &Path, reason: impl fmt::Display) -> Self {
        TraceError::File {
            action,
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    /// The file at `path` is damaged.
    pub fn damaged(path: &Path, reason: impl fmt::Display) -> Self {
        TraceError::Damaged {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }
}
