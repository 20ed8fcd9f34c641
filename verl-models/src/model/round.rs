//! Rounds of micro-batches: what a model with replicas computes at the same time.
//!
//! The gradients of a round are added in the order of its micro-batches, so an optimiser step has the same bits whatever the
//! length of its rounds.

use super::{ModelError, ScoreRow};

/// The rows of each micro-batch of a round.
pub type Round<'a> = [Vec<ScoreRow<'a>>];

/// Whether a token is trained on, by micro-batch of the round, row of the micro-batch and token of the response.
pub type SelectInRound<'a> = dyn Fn(usize, usize, usize) -> bool + Sync + 'a;

/// The error of a round, and the micro-batch in which it occurred. The micro-batches before it are part of the gradients; the
/// optimiser step must not be taken.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct RoundError {
    /// Position of the micro-batch in the round.
    pub micro: usize,
    /// What happened.
    pub error: ModelError,
}

/// Computes a round one micro-batch after another; returns the losses.
pub(super) fn one_by_one(
    micros: usize,
    mut accumulate: impl FnMut(usize) -> Result<f64, ModelError>,
) -> Result<Vec<f64>, RoundError> {
    let each = 0..micros;
    each.map(|micro| accumulate(micro).map_err(|error| RoundError { micro, error }))
        .collect()
}
