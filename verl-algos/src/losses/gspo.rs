//! Group sequence policy optimisation.

use super::clipped_policy::{check_clip, clipped_surrogate};
use super::{MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;
use crate::functions::exp;

/// Bound of the log-ratio before `exp`, from above only, as in verl.
const LOG_RATIO_MAX: f64 = 10.0;

/// PPO's clip on the ratio of the entire row: log-ratio sg(S) + ℓ − sg(ℓ), S = Σ_t d / L. Times the rollout weights.
///
/// All tokens of a row share the value of the ratio, but each has its own gradient. Use it with
/// `seq-mean-token-mean`. Reports the same as [`ClippedPolicyLoss`](super::ClippedPolicyLoss); there is no dual clip.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch. There is one S per row.
/// # Differences
/// TRL differentiates the row's ratio itself; with one advantage per row the two agree, including the gradient.
/// # Source
/// Zheng et al. 2025, arXiv:2507.18071, section 4.3 (GSPO-token).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GspoLoss {
    /// ε_low, in [0, 1].
    pub clip_low: f64,
    /// ε_high, at least 0.
    pub clip_high: f64,
}

impl Default for GspoLoss {
    /// The paper's 3e-4 and 4e-4.
    fn default() -> GspoLoss {
        GspoLoss {
            clip_low: 3e-4,
            clip_high: 4e-4,
        }
    }
}

impl TokenLoss for GspoLoss {
    fn id(&self) -> MetricId {
        MetricId::new("gspo_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_clip(self.clip_low, self.clip_high)
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let log_probs = tokens.log_probs();
        let constant = log_probs.clone().detach();
        let d = constant.clone() - tokens.old_log_probs(self.name())?;
        let row = tokens.row_means(d.clone());
        let ratio = exp((row + (log_probs - constant)).clamp_max(LOG_RATIO_MAX));
        let advantages = tokens.advantages(self.name())?;
        let bounded = ratio
            .clone()
            .clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let clipped = clipped_surrogate(ratio, bounded, advantages);
        Ok(PerToken {
            loss: tokens.times_rollout_weights(clipped.loss),
            metrics: vec![
                (MetricId::PG_CLIPFRAC, clipped.clipped),
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

    #[track_caller]
    fn check(advantage: f64, value: f64, grad: f64) {
        let objective =
            Objective::new(Aggregation::SeqMeanTokenMean).with(1.0, GspoLoss::default());
        let mut batch = MiniBatch::new(vec![0; 3]);
        batch.old_log_probs = Some(vec![-1.0; 3]);
        batch.advantages = Some(vec![advantage; 3]);
        let prepared = objective.prepare(&batch).unwrap();
        let (loss, grads) = gradient(&[-0.9, -1.2, -0.7], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert!((loss - value).abs() < 1e-6, "{loss}");
        assert!(grads.iter().all(|g| (g - grad).abs() < 1e-6), "{grads:?}");
    }

    #[test]
    fn by_hand() {
        // d = [.1, -.2, .3]: the ratio is e^{.2/3}.
        check(1.0, -1.0004, 0.0);
        check(-1.0, 1.068939, 1.068939 / 3.0);
    }
}
