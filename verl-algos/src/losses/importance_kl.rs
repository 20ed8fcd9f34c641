//! The KL divergence from the reference, corrected for tokens that an older policy sampled.

use super::clipped_policy::log_ratio;
use super::{LossInput, MetricId, PerToken, PreparedTokens, RatioLevel, TokenLoss};
use crate::error::AlgoError;
use crate::kl::KlEstimator;

/// r · KL(π‖π_ref) of each token, r = π/π_old. Add it with coefficient β.
///
/// The estimators are unbiased for tokens of π, but the tokens were sampled from π_old, hence r, through which the
/// gradient flows too. Reported: `ref_kl`, its mean over tokens. Rollout weights do not affect it.
///
/// # Shapes
/// Log-probs, ℓ_old, ℓ_ref and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// d is clamped to ±20 before `exp`; TRL has no clamp.
/// # Source
/// DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556; TRL `use_bias_correction_kl`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImportanceKlLoss {
    /// How the divergence is estimated.
    pub estimator: KlEstimator,
    /// The level of the importance ratio.
    pub level: RatioLevel,
}

impl Default for ImportanceKlLoss {
    fn default() -> ImportanceKlLoss {
        ImportanceKlLoss {
            estimator: KlEstimator::K3,
            level: RatioLevel::Token,
        }
    }
}

impl TokenLoss for ImportanceKlLoss {
    fn id(&self) -> MetricId {
        MetricId::KL_LOSS
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::OldLogProbs, LossInput::RefLogProbs]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let reference = tokens.ref_log_probs(self.name())?;
        let kl = self.estimator.tensor(tokens.log_probs(), reference);
        let d = log_ratio(tokens, self.name())?;
        let corrected = kl * self.level.ratios(d, tokens);
        Ok(PerToken {
            metrics: vec![(MetricId::REF_KL, corrected.clone())],
            loss: corrected,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::batch::MiniBatch;
    use crate::kl::KlEstimatorName;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    #[test]
    fn the_gradient_flows_through_both_factors() {
        let loss = ImportanceKlLoss {
            estimator: KlEstimatorName::K1.into(),
            level: RatioLevel::Token,
        };
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, loss);
        let mut batch = MiniBatch::new(vec![0]);
        batch.old_log_probs = Some(vec![-1.0]);
        batch.ref_log_probs = Some(vec![-1.5]);
        let prepared = objective.prepare(&batch).unwrap();
        // r = 2, δ = ln 2 + 0.5: r δ, and its derivative r δ + r.
        let (value, grad) = gradient(&[2f64.ln() - 1.0], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        let expected = 2.0 * (2f64.ln() + 0.5);
        assert!((value - expected).abs() < 1e-12);
        assert!((grad[0] - expected - 2.0).abs() < 1e-12);
    }
}
