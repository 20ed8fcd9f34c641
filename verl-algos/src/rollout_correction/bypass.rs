//! The policy losses of bypass mode.

use crate::error::AlgoError;
use crate::losses::{ClippedPolicyLoss, LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};

/// The policy loss that is minimised if the sampler's policy takes the place of the old one.
///
/// # Shapes
/// Log-probs, ℓ_roll, A and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// The same as verl: rejected tokens leave the loss in both forms. A batch without any action token is rejected, as by
/// [`RolloutCorrection::correct`](super::RolloutCorrection::correct); a batch whose tokens are all rejected has loss 0.
/// # Source
/// verl `compute_policy_loss_bypass_mode`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BypassLoss {
    /// PPO's clipped surrogate on π/π_roll. The ratio is the importance weight, so no other weight multiplies it.
    PpoClip(ClippedPolicyLoss),
    /// −A ℓ sg(w): no ratio; importance weights if requested.
    Reinforce,
}

impl BypassLoss {
    /// The loss of a token, for a mini-batch from
    /// [`RolloutCorrection::mini_batch`](super::RolloutCorrection::mini_batch).
    ///
    /// # Source
    /// verl `compute_policy_loss_bypass_mode`.
    pub fn policy_loss(&self) -> Box<dyn TokenLoss> {
        match *self {
            BypassLoss::PpoClip(loss) => Box::new(loss),
            BypassLoss::Reinforce => Box::new(Reinforce),
        }
    }

    /// Whether the importance weights multiply the loss.
    pub fn uses_weights(&self) -> bool {
        matches!(self, BypassLoss::Reinforce)
    }
}

/// −A ℓ times the rollout weights; reports `ppo_kl`, the mean of ℓ_old − ℓ.
#[derive(Debug)]
struct Reinforce;

impl TokenLoss for Reinforce {
    fn id(&self) -> MetricId {
        MetricId::new("pg_loss")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Advantages]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let loss = (tokens.advantages(self.name())? * tokens.log_probs()).neg();
        let kl = tokens.old_log_probs(self.name())? - tokens.log_probs();
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: vec![(MetricId::PPO_KL, kl)],
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

    /// Loss and gradient of a token with ℓ = ln ½, ℓ_roll = ln ¼, A = 3, weight 2.
    fn one(loss: BypassLoss) -> (f64, f64) {
        let mut batch = MiniBatch::new(vec![0]);
        batch.old_log_probs = Some(vec![0.25f64.ln()]);
        batch.advantages = Some(vec![3.0]);
        batch.rollout_weights = loss.uses_weights().then(|| vec![2.0]);
        let objective = Objective::new(Aggregation::TokenMean).with_boxed(1.0, loss.policy_loss());
        let prepared = objective.prepare(&batch).unwrap();
        let (value, grad) = gradient(&[0.5f64.ln()], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        (value, grad[0])
    }

    #[test]
    fn by_hand() {
        let (value, grad) = one(BypassLoss::Reinforce);
        assert!((value - 6.0 * 2f64.ln()).abs() < 1e-12, "{value}");
        assert_eq!(grad, -6.0);
        // The ratio is 2, clipped at 1.2.
        let (value, grad) = one(BypassLoss::PpoClip(ClippedPolicyLoss::default()));
        assert!((value + 3.6).abs() < 1e-12, "{value}");
        assert_eq!(grad, 0.0);
    }
}
