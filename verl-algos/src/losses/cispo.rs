//! Clipped importance weights with an unclipped gradient.

use super::clipped_policy::{check_clip, log_ratio};
use super::{MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::{AlgoError, check_setting};
use crate::functions::exp;
use crate::tensor::ones_where;

/// −sg(clip(r, 1 − ε_low, 1 + ε_high)) A ℓ. Times the rollout weights.
///
/// No token loses its gradient; only its weight is bounded. Reported: `pg_clipfrac`, the share of tokens whose ratio
/// was clipped; `cispo_clip_ratio`, the share with A > 0 and a ratio above the upper bound; `ppo_kl`.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// TRL's upper bound is absolute and it has no lower bound: [`CispoLoss::with_cap`].
/// # Source
/// MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4; d clamped to ±20 as in verl.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CispoLoss {
    /// ε_low, in [0, 1].
    pub clip_low: f64,
    /// ε_high, at least 0; above −1 if there is no lower bound (ε_low = 1).
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

impl CispoLoss {
    /// −sg(min(r, cap)) A ℓ: no lower bound, and an upper bound that is not relative to 1. TRL's form, with a cap such
    /// as 5; any positive number is valid. A cap below 1 also reduces the weight of tokens on policy.
    pub fn with_cap(cap: f64) -> CispoLoss {
        CispoLoss {
            clip_low: 1.0,
            clip_high: cap - 1.0,
        }
    }
}

impl TokenLoss for CispoLoss {
    fn id(&self) -> MetricId {
        MetricId::new("cispo_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        if self.clip_low == 1.0 && self.clip_high < 0.0 {
            let rule = "the cap 1 + clip_high must be positive";
            return check_setting("clip_high", self.clip_high, self.clip_high > -1.0, rule);
        }
        check_clip(self.clip_low, self.clip_high)
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let d = log_ratio(tokens, self.name())?.detach();
        let ratio = exp(d.clone());
        let weight = ratio
            .clone()
            .clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let advantages = tokens.advantages(self.name())?;
        let above = ratio.clone().greater_scalar(1.0 + self.clip_high);
        let above = above.bool_and(advantages.clone().greater_scalar(0.0));
        let clipped = ratio.not_equal(weight.clone());
        let loss = (weight * advantages * tokens.log_probs()).neg();
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: vec![
                (MetricId::PG_CLIPFRAC, ones_where(clipped, &d)),
                (MetricId::new("cispo_clip_ratio"), ones_where(above, &d)),
                (MetricId::PPO_KL, -d),
            ],
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

    #[test]
    fn a_cap_has_no_lower_bound() {
        let loss = CispoLoss::with_cap(5.0);
        assert_eq!(loss.check(), Ok(()));
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, loss);
        let mut batch = MiniBatch::new(vec![0; 3]);
        batch.old_log_probs = Some(vec![-3.0; 3]);
        batch.advantages = Some(vec![1.0; 3]);
        let prepared = objective.prepare(&batch).unwrap();
        let (_, grad) = gradient(&[6.0f64, 4.0, 0.01].map(|r| r.ln() - 3.0), |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        for (g, expected) in grad.iter().zip([-5.0, -4.0, -0.01]) {
            assert!((g - expected).abs() < 1e-9, "{grad:?}");
        }
        // A cap below 1 also reduces the weight of tokens on policy.
        assert_eq!(CispoLoss::with_cap(0.5).check(), Ok(()));
        assert!(CispoLoss::with_cap(0.0).check().is_err());
        let negative = CispoLoss {
            clip_high: -0.5,
            ..CispoLoss::default()
        };
        assert!(negative.check().is_err());
    }
}
