//! The plain policy gradient.

use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;

/// −A ℓ. Times the rollout weights. No ratio, so no old log-probs are needed.
///
/// # Shapes
/// Log-probs, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// verl reports zeros for the shares and the KL that this loss does not have; here nothing is reported. A log-prob of
/// an observation that is not finite makes verl's gradient NaN.
/// # Source
/// Chu et al. 2025, arXiv:2504.02546; Williams 1992 (REINFORCE).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpgLoss;

impl TokenLoss for GpgLoss {
    fn id(&self) -> MetricId {
        MetricId::new("gpg_loss")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Advantages]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let loss = (tokens.advantages(self.name())? * tokens.log_probs()).neg();
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: Vec::new(),
        })
    }
}
