//! Variational sequence-level soft policy optimisation.

use burn::tensor::Tensor;

use super::clipped_policy::{LOG_RATIO_BOUND, log_ratio};
use super::{MetricId, PerToken, PreparedTokens, Reduction, TokenLoss};
use crate::error::{AlgoError, check_setting};
use crate::functions::{exp, log};

/// ln of the smallest weight of a row, and of a token's rollout weight.
const LOG_WEIGHT_MIN: f64 = -18.420_680_743_952_367;
/// Mean of φ over rows.
const PHI: MetricId = MetricId::new("vespo_phi_seq_mean");

/// −φ A ℓ with φ = sg(e^{λ + k ln w − λ w}), w = e^{Σ d} of the row.
///
/// (k, λ) are those of A ≥ 0 or those of A < 0. φ is 1 on policy and falls smoothly to 0 on both sides as w moves away
/// from 1. Rollout weights are factors of w and do not multiply the loss; there must be one per *token*, so that their
/// product is the row's. d is clamped to ±20, ln w to [ln 1e-8, 20]. Reported: `vespo_phi_seq_mean`, the mean of φ over
/// rows, 1 for a row without action tokens; `ppo_kl`.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch. There is one φ per row for
/// each sign of A.
/// # Differences
/// verl has no such loss. This is TRL's, including its bounds of ln w and the sampler's ratio inside w.
/// # Source
/// Shen et al. 2026, arXiv:2602.10693; TRL `vespo`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VespoLoss {
    /// k where A ≥ 0, at least 0.
    pub k_pos: f64,
    /// λ > 0 where A ≥ 0.
    pub lambda_pos: f64,
    /// k where A < 0, at least 0.
    pub k_neg: f64,
    /// λ > 0 where A < 0.
    pub lambda_neg: f64,
}

impl Default for VespoLoss {
    fn default() -> VespoLoss {
        VespoLoss {
            k_pos: 2.0,
            lambda_pos: 3.0,
            k_neg: 3.0,
            lambda_neg: 2.0,
        }
    }
}

impl VespoLoss {
    /// φ at each token, `[M]`.
    fn phi(&self, log_weights: Tensor<1>, advantages: &Tensor<1>) -> Tensor<1> {
        let bad = advantages.clone().lower_scalar(0.0);
        let by_sign = |pos: f64, neg: f64| {
            let of_good = advantages.zeros_like() + pos;
            of_good.mask_fill(bad.clone(), neg)
        };
        let k = by_sign(self.k_pos, self.k_neg);
        let lambda = by_sign(self.lambda_pos, self.lambda_neg);
        let excess = exp(log_weights.clone()) - 1.0;
        exp(k * log_weights - lambda * excess)
    }
}

impl TokenLoss for VespoLoss {
    fn id(&self) -> MetricId {
        MetricId::new("vespo_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        for (setting, k) in [("k_pos", self.k_pos), ("k_neg", self.k_neg)] {
            let valid = k >= 0.0 && k.is_finite();
            check_setting(
                setting,
                k,
                valid,
                "it must be a finite number of at least 0",
            )?;
        }
        let lambdas = [
            ("lambda_pos", self.lambda_pos),
            ("lambda_neg", self.lambda_neg),
        ];
        for (setting, lambda) in lambdas {
            let valid = lambda > 0.0 && lambda.is_finite();
            check_setting(setting, lambda, valid, "it must be positive")?;
        }
        Ok(())
    }

    fn reduction(&self, metric: MetricId) -> Reduction {
        match metric {
            PHI => Reduction::RowMean { of_empty: 1.0 },
            _ => Reduction::TokenMean,
        }
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let advantages = tokens.advantages(self.name())?;
        let d = log_ratio(tokens, self.name())?.detach();
        let mut log_weights = d.clone();
        if let Some(weights) = tokens.rollout_weights() {
            log_weights = log_weights + log(weights).clamp(LOG_WEIGHT_MIN, LOG_RATIO_BOUND);
        }
        let log_weights = tokens.row_sums(log_weights);
        let phi = self.phi(
            log_weights.clamp(LOG_WEIGHT_MIN, LOG_RATIO_BOUND),
            &advantages,
        );
        Ok(PerToken {
            loss: (phi.clone() * advantages * tokens.log_probs()).neg(),
            metrics: vec![(PHI, phi), (MetricId::PPO_KL, -d)],
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

    /// φ of a row of two tokens with these ratios.
    fn phi(ratios: [f64; 2], advantage: f64, weights: Option<Vec<f64>>) -> f64 {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, VespoLoss::default());
        let mut batch = MiniBatch::new(vec![0, 0]);
        batch.old_log_probs = Some(vec![-1.0; 2]);
        batch.advantages = Some(vec![advantage; 2]);
        batch.rollout_weights = weights;
        let prepared = objective.prepare(&batch).unwrap();
        let (_, grad) = gradient(&ratios.map(|r| r.ln() - 1.0), |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert_eq!(grad[0], grad[1]);
        -grad[0] / advantage
    }

    #[track_caller]
    fn check(got: f64, expected: f64) {
        assert!((got - expected).abs() < 1e-9, "{got} against {expected}");
    }

    #[test]
    fn the_weight_is_that_of_the_entire_row() {
        check(phi([1.0, 1.0], 1.0, None), 1.0);
        // w = 2·0.75 = 1.5: e^{−λ/2} 1.5^k.
        check(phi([2.0, 0.75], 1.0, None), (-1.5f64).exp() * 2.25);
        check(phi([2.0, 0.75], -1.0, None), (-1f64).exp() * 3.375);
        // Rollout weights are factors of w.
        let weights = Some(vec![0.5, 3.0]);
        check(phi([1.0, 1.0], 1.0, weights), (-1.5f64).exp() * 2.25);
    }

    #[test]
    fn the_weight_vanishes_far_from_the_old_policy() {
        check(phi([1e-6, 1e-6], 1.0, None), 0.0);
        check(phi([1e6, 1e6], -1.0, None), 0.0);
        check(phi([1.0, 1.0], 1.0, Some(vec![0.0, 1.0])), 0.0);
    }

    #[test]
    fn rejects_settings_out_of_range() {
        let plain = VespoLoss::default();
        let lambda_pos = 0.0;
        assert!(
            VespoLoss {
                lambda_pos,
                ..plain
            }
            .check()
            .is_err()
        );
        let k_neg = -1.0;
        assert!(VespoLoss { k_neg, ..plain }.check().is_err());
    }
}
