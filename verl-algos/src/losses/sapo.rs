//! Soft adaptive policy optimisation: a smooth gate in place of the clip.

use super::clipped_policy::log_ratio;
use super::{MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::aggregate::Aggregation;
use crate::error::{AlgoError, check_setting};
use crate::functions::{exp, tanh};

/// −A (4/τ) σ(τ(r − 1)), τ = τ_pos where A > 0, else τ_neg. Times the rollout weights.
///
/// On policy the gate has slope 1, so the gradient is PPO's; it fades as r moves away from 1, faster for larger τ. The
/// aggregation is always `seq-mean-token-mean`. Reported: `ppo_kl`, mean of −d.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// TRL does not clamp d; at ±20 the gate has closed, so that no number differs. verl uses the same aggregation.
/// # Source
/// Gao et al. 2025, arXiv:2511.20347; d clamped to ±20 as in verl, where the gate has closed. TRL's `sapo` is the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SapoLoss {
    /// τ_pos > 0.
    pub tau_pos: f64,
    /// τ_neg > 0; larger than τ_pos, because a step away from a token spreads over the entire vocabulary.
    pub tau_neg: f64,
}

impl Default for SapoLoss {
    fn default() -> SapoLoss {
        SapoLoss {
            tau_pos: 1.0,
            tau_neg: 1.05,
        }
    }
}

impl TokenLoss for SapoLoss {
    fn id(&self) -> MetricId {
        MetricId::new("sapo_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        for (setting, tau) in [("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)] {
            let valid = tau > 0.0 && tau.is_finite();
            check_setting(setting, tau, valid, "it must be positive")?;
        }
        Ok(())
    }

    fn aggregation(&self, _declared: Aggregation) -> Aggregation {
        Aggregation::SeqMeanTokenMean
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let advantages = tokens.advantages(self.name())?;
        let d = log_ratio(tokens, self.name())?;
        let good = advantages.clone().greater_scalar(0.0);
        let tau = (advantages.zeros_like() + self.tau_neg).mask_fill(good, self.tau_pos);
        // σ(x) = (1 + tanh(x/2))/2: no exponential that overflows, and in the dtype of x.
        let half = (exp(d.clone()) - 1.0) * tau.clone() * 0.5;
        let gate = (tanh(half) + 1.0) * 2.0 / tau;
        Ok(PerToken {
            loss: tokens.times_rollout_weights((gate * advantages).neg()),
            metrics: vec![(MetricId::PPO_KL, -d)],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::MiniBatch;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    #[track_caller]
    fn check(ratio: f64, advantage: f64, value: f64) -> f64 {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, SapoLoss::default());
        let mut batch = MiniBatch::new(vec![0]);
        batch.old_log_probs = Some(vec![-1.0]);
        batch.advantages = Some(vec![advantage]);
        let prepared = objective.prepare(&batch).unwrap();
        let (loss, grad) = gradient(&[ratio.ln() - 1.0], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert!((loss - value).abs() < 1e-6, "{loss}");
        grad[0]
    }

    #[test]
    fn by_hand() {
        check(1.5, 1.0, -2.489837);
        check(1.5, -1.0, 2.393585);
        check(0.5, 1.0, -1.510163);
        check(0.5, -1.0, 1.415938);
    }

    #[test]
    fn the_gate_has_slope_one_on_policy_and_closes() {
        assert!((check(1.0, 1.0, -2.0) + 1.0).abs() < 1e-9);
        assert_eq!(check(1e9, 1.0, -4.0), 0.0);
        assert_eq!(check(1e300, -1.0, 4.0 / 1.05), 0.0);
    }

    #[test]
    fn rejects_temperatures_that_are_not_positive() {
        for tau in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let plain = SapoLoss::default();
            assert!(
                SapoLoss {
                    tau_pos: tau,
                    ..plain
                }
                .check()
                .is_err()
            );
            assert!(
                SapoLoss {
                    tau_neg: tau,
                    ..plain
                }
                .check()
                .is_err()
            );
        }
    }
}
