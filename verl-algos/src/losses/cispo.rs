//! Clipped importance weights with an unclipped gradient.

use super::clipped_policy::{check_clip, log_ratio};
use super::{PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;

/// −sg(clip(r, 1 − ε_low, 1 + ε_high)) A ℓ. Times the rollout weights.
///
/// No token loses its gradient; only its weight is bounded. Reported: `pg_clipfrac`, the share of tokens whose ratio was
/// clipped; `ppo_kl`.
///
/// # Differences
/// TRL's ε_high is absolute (such as 5) and it has no lower bound.
/// # Source
/// MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4; d clamped to ±20 as in verl.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CispoLoss {
    /// ε_low, in [0, 1].
    pub clip_low: f64,
    /// ε_high, at least 0.
    pub clip_high: f64,
}

impl Default for CispoLoss {
    fn default() -> CispoLoss {
        CispoLoss {
            clip_low: 0.2,
            clip_high: 0.28,
        }
    }
}

impl TokenLoss for CispoLoss {
    fn name(&self) -> &'static str {
        "cispo_loss"
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_clip(self.clip_low, self.clip_high)
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let d = log_ratio(tokens, self.name())?.detach();
        let ratio = d.clone().exp();
        let weight = ratio
            .clone()
            .clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let clipped = ratio.not_equal(weight.clone());
        let clipped = d.zeros_like().mask_fill(clipped, 1.0);
        let loss = (weight * tokens.advantages(self.name())? * tokens.log_probs()).neg();
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: vec![("pg_clipfrac", clipped), ("ppo_kl", -d)],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::batch::MiniBatch;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    #[test]
    fn the_gradient_is_the_clipped_weight() {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, CispoLoss::default());
        let mut batch = MiniBatch::new(vec![0; 3]);
        batch.old_log_probs = Some(vec![-3.0; 3]);
        batch.advantages = Some(vec![1.0, 1.0, -1.0]);
        let prepared = objective.prepare(&batch).unwrap();
        let ratios = [1.5f64, 0.5, 1.1];
        let (_, grad) = gradient(&ratios.map(|r| r.ln() - 3.0), |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        for (g, expected) in grad.iter().zip([-1.28, -0.8, 1.1]) {
            assert!((g - expected).abs() < 1e-9, "{grad:?}");
        }
    }
}
