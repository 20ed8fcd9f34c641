//! Work of a stage with a model, as far as it needs memory on the model's device.

use serde::Serialize;

/// What is done with a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkKind {
    /// Rows are continued token by token, with keys and values of all of them in memory.
    Sampling,
    /// Rows are evaluated without gradient, a few at a time.
    Scoring,
    /// Rows are evaluated with gradient, an entire micro-batch at a time.
    Training,
}

impl WorkKind {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            WorkKind::Sampling => "sampling",
            WorkKind::Scoring => "scoring",
            WorkKind::Training => "training",
        }
    }
}

/// Work of a stage with a model: how many rows are in memory at once, and what they are made of.
///
/// ```
/// use verl_pipe::keys::{PROMPTS, RESPONSES};
/// use verl_pipe::stage::{Access, ModelWork, StageSpec};
///
/// let work = ModelWork::training("actor", 8).of([PROMPTS.name(), RESPONSES.name()]);
/// let spec = StageSpec::new().uses("actor", Access::Update).works(work);
/// assert_eq!(spec.work[0].rows, 8);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelWork {
    /// The model's name.
    pub model: String,
    /// What is done.
    pub kind: WorkKind,
    /// Rows in memory at once.
    pub rows: usize,
    /// Keys, by the stage's own names, whose concatenated tokens make up a row.
    pub keys: Vec<String>,
    /// Maximum number of tokens of a row in addition to those of its keys.
    pub tokens: usize,
}

impl ModelWork {
    fn new(kind: WorkKind, model: impl Into<String>, rows: usize) -> Self {
        ModelWork {
            model: model.into(),
            kind,
            rows,
            keys: Vec::new(),
            tokens: 0,
        }
    }

    /// Samples `rows` responses at a time.
    pub fn sampling(model: impl Into<String>, rows: usize) -> Self {
        Self::new(WorkKind::Sampling, model, rows)
    }

    /// Evaluates rows without gradient; the model decides how many at a time.
    pub fn scoring(model: impl Into<String>) -> Self {
        Self::new(WorkKind::Scoring, model, 0)
    }

    /// Trains on micro-batches of `rows` rows.
    pub fn training(model: impl Into<String>, rows: usize) -> Self {
        Self::new(WorkKind::Training, model, rows)
    }

    /// Sets the keys that make up a row.
    pub fn of<'a>(mut self, keys: impl IntoIterator<Item = &'a str>) -> Self {
        self.keys.extend(keys.into_iter().map(str::to_owned));
        self
    }

    /// Sets the number of tokens of a row in addition to those of its keys.
    pub fn tokens(mut self, tokens: usize) -> Self {
        self.tokens = tokens;
        self
    }
}

/// How often a stage steps the optimiser of a model: once per mini-batch of its rows, in each pass. Determines the
/// number of optimiser steps of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptimizerPasses {
    /// The model's name.
    pub model: String,
    /// Passes over the rows of a step.
    pub passes: usize,
    /// Number of steps at the start of the run in which it does not train yet.
    pub idle_steps: u64,
}

/// A bound on the length of the rows of a key that a stage writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LengthBound {
    /// The key, by the stage's own name.
    pub key: String,
    /// What bounds it.
    pub limit: LengthLimit,
}

/// What bounds the rows of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LengthLimit {
    /// A setting of the stage.
    Setting {
        /// Its name.
        name: &'static str,
        /// Its value, in tokens; `None` if it is not set.
        tokens: Option<usize>,
    },
    /// The key is as long as the longest of these keys, which the stage reads.
    Keys(Vec<String>),
}
