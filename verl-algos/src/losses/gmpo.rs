//! Geometric-mean policy optimisation.

use super::clip_shares::{clip_share_reduction, clip_shares};
use super::{MetricId, PerToken, PreparedTokens, Reduction, TokenLoss};
use crate::aggregate::Aggregation;
use crate::error::{AlgoError, check_setting};
use crate::functions::{exp, log};
use crate::tensor::ones_where;

/// Keeps the logarithm of a rollout weight of 0 finite.
const WEIGHT_EPSILON: f64 = 1e-10;

/// For each row −mean(A) e^{mean e}; the mean over rows. Times the geometric mean of the row's rollout weights.
///
/// e is d, clipped on the side towards which A pushes: min(d, ε_high) for A > 0, max(d, −ε_low) for A < 0. The bounds
/// apply to the log-ratio. Every token of a row has the row's loss, and the aggregation is always
/// `seq-mean-token-mean`. Reported: `pg_clipfrac`, the share with A > 0 and d outside either bound, `pg_clipfrac_lower`
/// the same for A < 0; TRL's one-sided `clip_ratio_low_mean` (A < 0, d < −ε_low), `clip_ratio_high_mean` (A > 0, d >
/// ε_high), `clip_ratio_region_mean` (either), `clip_ratio_low_min` and `clip_ratio_high_max` (over rows); `ppo_kl`,
/// mean of −d.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// verl ignores declared counts and counts rows without action tokens, so that its gradient depends on the division;
/// TRL adds −A for such a row. Here they add nothing, but are counted if the number of sequences is declared. TRL
/// multiplies log-ratios by the rollout weights instead.
/// # Source
/// Zhao et al. 2025, arXiv:2507.20673; verl `geo_mean`, TRL `GMPOTrainer`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GmpoLoss {
    /// ε_low, nats, at least 0.
    pub clip_low: f64,
    /// ε_high, nats, at least 0.
    pub clip_high: f64,
}

impl Default for GmpoLoss {
    /// The paper's e^{±0.4}.
    fn default() -> GmpoLoss {
        GmpoLoss {
            clip_low: 0.4,
            clip_high: 0.4,
        }
    }
}

impl TokenLoss for GmpoLoss {
    fn id(&self) -> MetricId {
        MetricId::new("gmpo_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        let rule = "it must be a finite number of nats, at least 0";
        let valid = |bound: f64| bound >= 0.0 && bound.is_finite();
        check_setting("clip_low", self.clip_low, valid(self.clip_low), rule)?;
        check_setting("clip_high", self.clip_high, valid(self.clip_high), rule)
    }

    fn aggregation(&self, _declared: Aggregation) -> Aggregation {
        Aggregation::SeqMeanTokenMean
    }

    fn reduction(&self, metric: MetricId) -> Reduction {
        clip_share_reduction(metric, Reduction::TokenMean)
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let advantages = tokens.advantages(self.name())?;
        let d = tokens.log_probs() - tokens.old_log_probs(self.name())?;
        let good = advantages.clone().greater_scalar(0.0);
        let bad = advantages.clone().lower_scalar(0.0);
        let above = d.clone().greater_scalar(self.clip_high);
        let below = d.clone().lower_scalar(-self.clip_low);
        let outside = above.clone().bool_or(below.clone());
        let (too_high, too_low) = (good.clone().bool_and(above), bad.clone().bool_and(below));
        let exponent = d
            .clone()
            .mask_fill(too_high.clone(), self.clip_high)
            .mask_fill(too_low.clone(), -self.clip_low)
            .mask_fill(advantages.clone().equal_scalar(0.0), 0.0);
        let mut loss =
            (exp(tokens.row_means(exponent)) * tokens.row_means(advantages.clone())).neg();
        if let Some(weights) = tokens.rollout_weights() {
            loss = loss * exp(tokens.row_means(log(weights + WEIGHT_EPSILON)));
        }
        let mut metrics = clip_shares(too_low, too_high, &advantages);
        let share = |side| ones_where(outside.clone().bool_and(side), &advantages);
        metrics.push((MetricId::PG_CLIPFRAC, share(good)));
        metrics.push((MetricId::PG_CLIPFRAC_LOWER, share(bad)));
        metrics.push((MetricId::PPO_KL, -d));
        Ok(PerToken { loss, metrics })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::MiniBatch;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    /// One row with d = .5, −.5, .1.
    #[track_caller]
    fn check(advantage: f64, weights: Option<Vec<f64>>, value: f64, grad: [f64; 3]) {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, GmpoLoss::default());
        let mut batch = MiniBatch::new(vec![0; 3]);
        batch.old_log_probs = Some(vec![-1.0; 3]);
        batch.advantages = Some(vec![advantage; 3]);
        batch.rollout_weights = weights;
        let prepared = objective.prepare(&batch).unwrap();
        let (got, grads) = gradient(&[-0.5, -1.5, -0.9], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert!((got - value).abs() < 1e-6, "{got}");
        for (g, e) in grads.iter().zip(grad) {
            assert!((g - e).abs() < 1e-6, "{grads:?}");
        }
    }

    #[test]
    fn by_hand() {
        // e = .4, −.5, .1 and .5, −.4, .1: means 0 and 0.2/3.
        check(1.0, None, -1.0, [0.0, -1.0 / 3.0, -1.0 / 3.0]);
        let ratio = 1.068939;
        check(-1.0, None, ratio, [ratio / 3.0, 0.0, ratio / 3.0]);
        // The geometric mean of 1, 2 and 4 is 2.
        let weights = Some(vec![1.0, 2.0, 4.0]);
        check(1.0, weights, -2.0, [0.0, -2.0 / 3.0, -2.0 / 3.0]);
        check(0.0, None, 0.0, [0.0; 3]);
    }

    #[test]
    fn rejects_bounds_below_zero() {
        let plain = GmpoLoss::default();
        for bound in [-0.1, f64::NAN] {
            let clip_low = bound;
            assert!(GmpoLoss { clip_low, ..plain }.check().is_err());
            let clip_high = bound;
            assert!(GmpoLoss { clip_high, ..plain }.check().is_err());
        }
    }
}
