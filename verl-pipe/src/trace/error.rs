//! What can be wrong with a trace.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::trace::format::FORMAT;

/// Why a trace cannot be written or read. [`TraceError::code`] leads to a page in `docs/errors/`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A folder without a trace.
    #[error("`{}` holds no trace: {reason}; give the folder of a run that was started with `trace.stats` or `--debug`", .dir.display())]
    NoTrace {
        /// The run's folder.
        dir: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A trace that another version wrote in a format that this one does not know.
    #[error("`{}` is in trace format {found}, but this version reads format {FORMAT} only; use the version that `versions.json` of the run names", .path.display())]
    UnknownFormat {
        /// The file that tells the format.
        path: PathBuf,
        /// Format of the file; `unknown` where it tells none.
        found: String,
    },
    /// A file that is not what was written.
    #[error("`{}` is damaged: {reason}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// A file that is whole, but of another step, stage or run than the one in whose place it lies.
    #[error("`{}` is not what belongs there: it holds {found}, its place is that of {expected}", .path.display())]
    Misplaced {
        /// The file.
        path: PathBuf,
        /// What the file says that it is.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// A file that another writer compressed in a way that this build does not decode.
    #[error("`{}` is compressed with {codec}; the codecs that this build reads are none, Snappy, LZ4 and Gzip; write the file anew with one of them", .path.display())]
    UnknownCodec {
        /// The file.
        path: PathBuf,
        /// Name of the codec.
        codec: String,
    },
    /// A step that is not in the trace.
    #[error("step {step} is not in `{}`; it holds {known}", .dir.display())]
    NoStep {
        /// The trace folder.
        dir: PathBuf,
        /// The step.
        step: u64,
        /// Steps that are there, as text.
        known: String,
    },
    /// A stage that was not recorded in a step.
    #[error("stage `{stage}` is not in the trace of step {step}; recorded were {known}")]
    NoStage {
        /// The step.
        step: u64,
        /// The stage.
        stage: String,
        /// Stages that are there, as text.
        known: String,
    },
    /// The disk refused.
    #[error("cannot {action} `{}`: {reason}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        reason: String,
    },
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

    /// The disk refused to `action` the file at `path`.
    pub(crate) fn file(action: &'static str, path: &Path, reason: impl fmt::Display) -> Self {
        TraceError::File {
            action,
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    /// The file at `path` is not what was written.
    pub(crate) fn damaged(path: &Path, reason: impl fmt::Display) -> Self {
        TraceError::Damaged {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }
}
