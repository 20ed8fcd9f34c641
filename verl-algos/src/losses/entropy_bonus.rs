//! The entropy of the policy as a term of the loss.

use super::{LossInput, PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;

/// The entropy H of each token. Add it with coefficient −c to reward entropy.
///
/// Reported: `entropy`, its mean over tokens, whatever the aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EntropyBonus;

impl TokenLoss for EntropyBonus {
    fn name(&self) -> &'static str {
        "entropy_loss"
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Entropies]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let entropies = tokens.entropies(self.name())?;
        Ok(PerToken {
            metrics: vec![("entropy", entropies.clone())],
            loss: entropies,
        })
    }
}
