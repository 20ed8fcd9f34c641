//! REINFORCE.

use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;

/// −A ℓ sg(w), w the rollout weights, 1 if there are none.
///
/// With w = π/π_sampler, computed from the current log-probs, this is the policy gradient for samples of another
/// policy. Reported: `ppo_kl`, mean of ℓ_old − ℓ, if there are old log-probs.
///
/// # Shapes
/// Log-probs, A, w and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// [`GpgLoss`](super::GpgLoss) is the same loss and reports nothing.
/// # Source
/// Williams 1992, "Simple statistical gradient-following algorithms", eq. 11; verl `bypass_mode`, `reinforce`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReinforceLoss;

impl TokenLoss for ReinforceLoss {
    fn id(&self) -> MetricId {
        MetricId::new("reinforce_loss")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Advantages]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let loss = (tokens.advantages(self.name())? * tokens.log_probs()).neg();
        let old = tokens.old_log_probs(self.name()).ok();
        let ppo_kl = old.map(|old| (MetricId::PPO_KL, old - tokens.log_probs()));
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: ppo_kl.into_iter().collect(),
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
    fn the_gradient_is_the_weighted_advantage() {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, ReinforceLoss);
        let mut batch = MiniBatch::new(vec![0, 1]);
        batch.advantages = Some(vec![1.0, -2.0]);
        batch.rollout_weights = Some(vec![0.5, 3.0]);
        for (old, reported) in [(None, None), (Some(vec![-1.0, -1.0]), Some(1.5))] {
            batch.old_log_probs = old;
            let prepared = objective.prepare(&batch).unwrap();
            let mut metrics = Vec::new();
            let (value, grad) = gradient(&[-2.0, -3.0], |l| {
                let partial = prepared.loss(&batch.whole(l, None)).unwrap();
                metrics = partial.read_metrics().unwrap();
                partial.loss
            });
            assert_eq!((value, grad), (1.0 - 18.0, vec![-0.5, 6.0]));
            let ppo_kl = metrics.iter().find(|m| m.id == MetricId::PPO_KL);
            assert_eq!(ppo_kl.map(|m| m.value()), reported);
        }
    }
}
