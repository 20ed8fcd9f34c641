//! Why something cannot be replayed.

use verl_run::error::RunError;

/// Why a step, or a stage of it, cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// An unknown stage name.
    #[error("there is no stage `{name}` in this pipeline; {help}")]
    UnknownStage {
        /// As given.
        name: String,
        /// The nearest name and the known ones.
        help: String,
    },
    /// A stage that runs between steps.
    #[error(
        "stage `{name}` runs between steps and receives no rows, so it is not recorded; recorded stages of step {step}: {recorded}"
    )]
    Observer {
        /// The stage.
        name: String,
        /// The step.
        step: u64,
        /// Stages that are recorded.
        recorded: String,
    },
    /// A stage that is not recorded in the step.
    #[error("stage `{name}` is not recorded in step {step}; recorded stages: {recorded}")]
    NotRecorded {
        /// The stage.
        name: String,
        /// The step.
        step: u64,
        /// Stages that are recorded.
        recorded: String,
    },
    /// A stage whose input is missing or incomplete in the trace.
    #[error("the input of stage `{stage}` is incomplete: {missing}")]
    NoInput {
        /// The stage.
        stage: String,
        /// The step.
        step: u64,
        /// What is missing.
        missing: String,
    },
    /// A stage that declares that it cannot be called again.
    #[error("stage `{stage}` cannot be called again: {why}")]
    OnceOnly {
        /// The stage.
        stage: String,
        /// The reason that it declares.
        why: String,
    },
    /// A stage whose kind has changed.
    #[error("stage `{stage}` had kind `{recorded}` when recorded, but has kind `{now}` now")]
    OtherKind {
        /// The stage.
        stage: String,
        /// The recorded kind.
        recorded: String,
        /// The current kind.
        now: String,
    },
    /// The weights that a stage used are not stored.
    #[error(
        "stage `{stage}` uses `{model}`, which the run trains, but the state of `{model}` at the start of the step is not stored{searched}; record with `trace.weights=full` and a sufficient `trace.budget_mb`, or replay stages that do not use it"
    )]
    NoState {
        /// The stage.
        stage: String,
        /// The model.
        model: String,
        /// The step.
        step: u64,
        /// Where weights with the same hash were searched.
        searched: String,
    },
    /// The state that a stage carries from step to step is not stored.
    #[error(
        "stage `{stage}` carries state from step to step, but its state at the start of the step is not stored; record with `trace.weights=full` and a sufficient `trace.budget_mb`"
    )]
    NoMemory {
        /// The stage.
        stage: String,
        /// The step.
        step: u64,
    },
    /// A stage that uses a model after a stage that was not run again.
    #[error("stage `{stage}` uses `{model}` as left by `{changer}`, but {why}")]
    AfterSkipped {
        /// The stage.
        stage: String,
        /// The model.
        model: String,
        /// The stage that changes it.
        changer: String,
        /// Why that stage is not run again.
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
            | ReplayError::AfterSkipped { .. } => "T014",
            ReplayError::Run(error) => error.code(),
        }
    }

    /// Whether the request cannot succeed for any step of the run.
    pub fn is_wrong_use(&self) -> bool {
        matches!(self, ReplayError::UnknownStage { .. })
    }
}
