//! Why something cannot be replayed.

use crate::run::error::RunError;

/// Why a step, or a stage of it, cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A name that is no stage's.
    #[error("there is no stage `{name}` in this pipeline; {help}")]
    UnknownStage {
        /// As given.
        name: String,
        /// The nearest name and the known ones.
        help: String,
    },
    /// A stage that runs between steps.
    #[error(
        "stage `{name}` runs between steps and is given no rows, so nothing of it is recorded; of step {step} these are: {recorded}"
    )]
    Observer {
        /// The stage.
        name: String,
        /// The step.
        step: u64,
        /// Stages that are recorded.
        recorded: String,
    },
    /// A stage of which the step holds nothing.
    #[error("stage `{name}` is not recorded in step {step}; recorded are: {recorded}")]
    NotRecorded {
        /// The stage.
        name: String,
        /// The step.
        step: u64,
        /// Stages that are recorded.
        recorded: String,
    },
    /// A stage whose input is not, or not whole, in the trace.
    #[error("of the input of stage `{stage}` {missing}")]
    NoInput {
        /// The stage.
        stage: String,
        /// The step.
        step: u64,
        /// What is not there.
        missing: String,
    },
    /// A stage that says of itself that it is not called again.
    #[error("stage `{stage}` is not called again: {why}")]
    OnceOnly {
        /// The stage.
        stage: String,
        /// Its words.
        why: String,
    },
    /// A stage that was of another kind.
    #[error("stage `{stage}` was recorded as kind `{recorded}` and is of kind `{now}` now")]
    OtherKind {
        /// The stage.
        stage: String,
        /// The kind then.
        recorded: String,
        /// The kind now.
        now: String,
    },
    /// The weights that a stage worked with are not kept.
    #[error(
        "stage `{stage}` works with `{model}`, which the run trains, and the state of `{model}` at the start of the step is not kept{looked}; record with `trace.weights=full` and a `trace.budget_mb` that holds it, or replay stages that do not use it"
    )]
    NoState {
        /// The stage.
        stage: String,
        /// The model.
        model: String,
        /// The step.
        step: u64,
        /// Where weights of the same hash were looked for.
        looked: String,
    },
    /// What a stage remembers from step to step is not kept.
    #[error(
        "stage `{stage}` remembers something from step to step, and what that was at the start of the step is not kept; record with `trace.weights=full` and a `trace.budget_mb` that holds it"
    )]
    NoMemory {
        /// The stage.
        stage: String,
        /// The step.
        step: u64,
    },
    /// A stage that works with a model behind a stage that was not run again.
    #[error("stage `{stage}` works with `{model}` as `{changer}` left it, and {why}")]
    Behind {
        /// The stage.
        stage: String,
        /// The model.
        model: String,
        /// The stage that changes it.
        changer: String,
        /// Why that one is not run again.
        why: String,
    },
    /// The run cannot be used.
    #[error("the replay stopped: {0}")]
    Run(#[from] RunError),
}

impl ReplayError {
    /// Code of the error; `docs/errors/<CODE>.md` says what happened and what to do.
    pub fn code(&self) -> &'static str {
        match self {
            ReplayError::UnknownStage { .. }
            | ReplayError::Observer { .. }
            | ReplayError::NotRecorded { .. } => "T012",
            ReplayError::NoState { .. } | ReplayError::NoMemory { .. } => "T013",
            ReplayError::NoInput { .. }
            | ReplayError::OnceOnly { .. }
            | ReplayError::OtherKind { .. }
            | ReplayError::Behind { .. } => "T014",
            ReplayError::Run(error) => error.code(),
        }
    }

    /// Whether something was asked for that no step of the run could give.
    pub fn is_wrong_use(&self) -> bool {
        matches!(self, ReplayError::UnknownStage { .. })
    }
}
