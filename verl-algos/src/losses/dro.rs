//! Direct reward optimisation: the policy gradient with a quadratic pull towards the old policy.

use super::{MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::{AlgoError, check_setting};

/// −(A ℓ − β d²/2), d = ℓ − ℓ_old. Times the rollout weights. No ratio, so nothing is clipped.
///
/// Reported: `ppo_kl`, mean of −d.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// d is not clamped, as in verl. A log-prob of an observation that is not finite makes verl's gradient NaN, though
/// not its loss; here observations are not included.
/// # Source
/// Richemond et al. 2024, arXiv:2405.19107; verl `compute_policy_loss_dro`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DroLoss {
    /// β > 0, the strength of the pull.
    pub beta: f64,
}

impl DroLoss {
    /// The loss with a declared β.
    ///
    /// # Errors
    /// No β: no value suits advantages of every scale.
    pub fn new(beta: Option<f64>) -> Result<DroLoss, AlgoError> {
        let beta = beta.ok_or(AlgoError::MissingSetting {
            algorithm: "dro",
            setting: "beta",
            reason: "declare the strength of the pull; the right value depends on the scale of the advantages",
        })?;
        Ok(DroLoss { beta })
    }
}

impl TokenLoss for DroLoss {
    fn id(&self) -> MetricId {
        MetricId::new("dro_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        let valid = self.beta > 0.0 && self.beta.is_finite();
        check_setting("beta", self.beta, valid, "it must be positive")
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let d = tokens.log_probs() - tokens.old_log_probs(self.name())?;
        let pull = d.clone() * d.clone() * (self.beta / 2.0);
        let gain = tokens.advantages(self.name())? * tokens.log_probs();
        Ok(PerToken {
            loss: tokens.times_rollout_weights(pull - gain),
            metrics: vec![(MetricId::PPO_KL, -d)],
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
    fn by_hand() {
        let loss = DroLoss::new(Some(0.5)).unwrap();
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, loss);
        let mut batch = MiniBatch::new(vec![0]);
        batch.old_log_probs = Some(vec![-1.0]);
        batch.advantages = Some(vec![2.0]);
        let prepared = objective.prepare(&batch).unwrap();
        // d = −2: 2·3 + 0.5·4/2, and −2 + 0.5·(−2).
        let (value, grad) = gradient(&[-3.0], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert_eq!((value, grad[0]), (7.0, -3.0));
    }

    #[test]
    fn rejects_a_beta_that_is_missing_or_not_positive() {
        let error = DroLoss::new(None).unwrap_err();
        assert!(error.to_string().contains("beta"), "{error}");
        for beta in [0.0, -1.0, f64::NAN] {
            assert!(DroLoss { beta }.check().is_err());
        }
    }
}
