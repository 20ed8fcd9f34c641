//! Divergence proximal policy optimisation: a trust region of probabilities, not of ratios.

use burn::tensor::{Bool, Tensor};

use super::clipped_policy::{check_clip, log_ratio};
use super::{MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::{AlgoError, check_setting};
use crate::functions::{exp, log};
use crate::tensor::ones_where;

/// Keeps the logarithm of 1 − π finite.
const PROBABILITY_EPSILON: f64 = 1e-8;

/// How far the policy may move at a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DppoDivergence {
    /// π − π_old: total variation between token and not-token.
    Tv,
    /// KL of (π_old, 1 − π_old) from (π, 1 − π).
    Kl,
}

/// −A sg(min(r, c)) ℓ on the tokens inside the trust region, 0 on the others. Times the rollout weights.
///
/// A token is inside if it has not moved too far *in the direction of its advantage*. TV: π − π_old ≤ ε_high if A > 0,
/// ≥ −ε_low otherwise. KL: divergence ≤ ε_high or π ≤ π_old if A > 0; ≤ ε_low or π ≥ π_old otherwise. Reported:
/// `pg_clipfrac`, the share outside; `pg_clipfrac_lower`, the share inside whose ratio exceeds c; `ppo_kl`.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// verl's default of c is the actor's 3; here it is 20, the value in verl's documentation.
/// # Source
/// arXiv:2602.04879; d clamped to ±20 as in verl.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DppoLoss {
    /// The bounded divergence.
    pub divergence: DppoDivergence,
    /// ε_low, in [0, 1].
    pub clip_low: f64,
    /// ε_high, at least 0.
    pub clip_high: f64,
    /// c, the largest ratio used as a weight.
    pub ratio_cap: f64,
}

impl DppoLoss {
    /// Total variation, ε = 0.15.
    pub fn tv() -> DppoLoss {
        DppoLoss {
            divergence: DppoDivergence::Tv,
            clip_low: 0.15,
            clip_high: 0.15,
            ratio_cap: 20.0,
        }
    }

    /// Binary KL, ε = 0.05 nats.
    pub fn kl() -> DppoLoss {
        DppoLoss {
            divergence: DppoDivergence::Kl,
            clip_low: 0.05,
            clip_high: 0.05,
            ratio_cap: 20.0,
        }
    }

    /// Tokens inside, `[M]`.
    fn inside(
        &self,
        log_probs: Tensor<1>,
        old_log_probs: Tensor<1>,
        advantages: Tensor<1>,
    ) -> Tensor<1, Bool> {
        let (now, old) = (exp(log_probs.clone()), exp(old_log_probs.clone()));
        let (rising, falling) = match self.divergence {
            DppoDivergence::Tv => {
                let change = now - old;
                (
                    change.clone().lower_equal_scalar(self.clip_high),
                    change.greater_equal_scalar(-self.clip_low),
                )
            }
            DppoDivergence::Kl => {
                let rest = |p: Tensor<1>| p.neg() + 1.0;
                let guarded = |p: Tensor<1>| rest(p) + PROBABILITY_EPSILON;
                let of_rest = log(guarded(old.clone()) / guarded(now.clone()));
                let kl = old.clone() * (old_log_probs - log_probs) + rest(old.clone()) * of_rest;
                let near = |bound: f64| kl.clone().lower_equal_scalar(bound);
                (
                    near(self.clip_high).bool_or(now.clone().lower_equal(old.clone())),
                    near(self.clip_low).bool_or(now.greater_equal(old)),
                )
            }
        };
        let good = advantages.greater_scalar(0.0);
        let bad = good.clone().bool_not();
        good.bool_and(rising).bool_or(bad.bool_and(falling))
    }
}

impl TokenLoss for DppoLoss {
    fn id(&self) -> MetricId {
        MetricId::new(match self.divergence {
            DppoDivergence::Tv => "dppo_tv_loss",
            DppoDivergence::Kl => "dppo_kl_loss",
        })
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_clip(self.clip_low, self.clip_high)?;
        let cap = self.ratio_cap;
        let valid = cap > 0.0 && cap.is_finite();
        check_setting("ratio_cap", cap, valid, "it must be a positive ratio")
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let advantages = tokens.advantages(self.name())?;
        let log_probs = tokens.log_probs();
        let d = log_ratio(tokens, self.name())?.detach();
        let ratio = exp(d.clone());
        let inside = self.inside(
            log_probs.clone().detach(),
            tokens.old_log_probs(self.name())?,
            advantages.clone(),
        );
        let outside = inside.clone().bool_not();
        let capped = ratio.clone().greater_scalar(self.ratio_cap);
        let weight = ratio.clamp_max(self.ratio_cap);
        let loss = (weight * advantages * log_probs).neg();
        let loss = loss.mask_fill(outside.clone(), 0.0);
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: vec![
                (MetricId::PG_CLIPFRAC, ones_where(outside, &d)),
                (
                    MetricId::PG_CLIPFRAC_LOWER,
                    ones_where(capped.bool_and(inside), &d),
                ),
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

    /// The gradient of a token whose probability changed from `old` to `now`.
    #[track_caller]
    fn check(loss: DppoLoss, old: f64, now: f64, advantage: f64, expected: f64) {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, loss);
        let mut batch = MiniBatch::new(vec![0]);
        batch.old_log_probs = Some(vec![old.ln()]);
        batch.advantages = Some(vec![advantage]);
        let prepared = objective.prepare(&batch).unwrap();
        let (_, grad) = gradient(&[now.ln()], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert!(
            (grad[0] - expected).abs() < 1e-9,
            "{old} to {now}: {grad:?}"
        );
    }

    #[test]
    fn total_variation_bounds_moves_along_the_advantage() {
        let tv = DppoLoss::tv();
        check(tv, 0.5, 0.6, 1.0, -1.2);
        check(tv, 0.5, 0.7, 1.0, 0.0);
        check(tv, 0.5, 0.3, 1.0, -0.6);
        check(tv, 0.5, 0.3, -1.0, 0.0);
        check(tv, 0.5, 0.7, -1.0, 1.4);
        // A large ratio of small probabilities is not a large step.
        check(tv, 0.001, 0.01, 1.0, -10.0);
        check(tv, 0.001, 0.1, 1.0, -20.0);
    }

    #[test]
    fn binary_kl_bounds_moves_along_the_advantage() {
        // KL of (.5, .5) from (.7, .3) is 0.0872, from (.6, .4) 0.0204.
        let kl = DppoLoss::kl();
        check(kl, 0.5, 0.6, 1.0, -1.2);
        check(kl, 0.5, 0.7, 1.0, 0.0);
        check(kl, 0.5, 0.3, 1.0, -0.6);
        check(kl, 0.5, 0.3, -1.0, 0.0);
        check(kl, 0.5, 0.7, -1.0, 1.4);
    }

    #[test]
    fn rejects_settings_out_of_range() {
        let ratio_cap = 0.0;
        assert!(
            DppoLoss {
                ratio_cap,
                ..DppoLoss::tv()
            }
            .check()
            .is_err()
        );
        let clip_low = -0.1;
        assert!(
            DppoLoss {
                clip_low,
                ..DppoLoss::kl()
            }
            .check()
            .is_err()
        );
    }
}
