//! The entropy of the policy as a term of the loss.

use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;

/// The entropy H = −Σ_v π(v) log π(v) of each token. Add it with coefficient −c to reward entropy.
///
/// Reported: `entropy`, its mean over tokens, regardless of the aggregation.
///
/// # Shapes
/// Entropies and the result: `[M]`, one per token of the micro-batch, nats.
/// # Differences
/// Entropies are those of the logits over the sampling temperature, as in TRL; OpenRLHF used temperature 1 until
/// September 2026. A logit of −∞ counts as p log p = 0, where verl and TRL return NaN.
/// # Source
/// Williams and Peng 1991, "Function optimization using connectionist reinforcement learning algorithms"; Mnih et al.
/// 2016, arXiv:1602.01783.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EntropyBonus;

impl TokenLoss for EntropyBonus {
    fn id(&self) -> MetricId {
        MetricId::ENTROPY_LOSS
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Entropies]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let entropies = tokens.entropies(self.name())?;
        Ok(PerToken {
            metrics: vec![(MetricId::ENTROPY, entropies.clone())],
            loss: entropies,
        })
    }
}
