//! The KL divergence from the reference policy as a term of the loss.

use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;
use crate::kl::KlEstimator;

/// Estimated KL(π‖π_ref) of each token. Add it with coefficient β.
///
/// Reported: `ref_kl`, its mean over tokens, regardless of the aggregation. Rollout weights do not affect it.
///
/// # Shapes
/// Log-probs, ℓ_ref and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// The term has its own aggregation and coefficient, as in verl. TRL adds it to a token's loss after the sampler's
/// ratio and has no clamps (`k3_unclamped`); without such a ratio the two agree. OpenRLHF clamps every estimator to
/// ±10; here and in verl only k3 is clamped.
/// # Source
/// Shao et al. 2024, arXiv:2402.03300, eq. 4, which uses k3.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlLoss {
    /// How the divergence is estimated.
    pub estimator: KlEstimator,
}

impl Default for KlLoss {
    fn default() -> KlLoss {
        KlLoss {
            estimator: KlEstimator::K3,
        }
    }
}

impl TokenLoss for KlLoss {
    fn id(&self) -> MetricId {
        MetricId::KL_LOSS
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::RefLogProbs]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let reference = tokens.ref_log_probs(self.name())?;
        let kl = self.estimator.tensor(tokens.log_probs(), reference);
        Ok(PerToken {
            metrics: vec![(MetricId::REF_KL, kl.clone())],
            loss: kl,
        })
    }
}
