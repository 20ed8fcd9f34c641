//! PPO's clipped surrogate, with clip-higher and the dual clip.

use burn::tensor::Tensor;

use super::{MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::{AlgoError, check_setting};
use crate::functions::exp;

/// Bound of the log-ratio before `exp`; e^20 is finite in f32, and outside there is no gradient.
pub(crate) const LOG_RATIO_BOUND: f64 = 20.0;

/// max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)); if A < 0, at most −c A. Times the rollout weights, if any.
///
/// r = e^d, d = clip(ℓ − ℓ_old, ±20). Reported: `pg_clipfrac`, the share of tokens for which the clipped term is larger
/// (a tie is not clipped); `pg_clipfrac_lower`, the share with an active dual clip; `ppo_kl`, mean of −d.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// The clamp of d is verl's; TRL and the papers have none.
/// # Source
/// Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; clip-higher: Yu
/// et al. 2025 (DAPO), arXiv:2503.14476.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClippedPolicyLoss {
    /// ε_low, in [0, 1].
    pub clip_low: f64,
    /// ε_high, at least `0`; DAPO: 0.28.
    pub clip_high: f64,
    /// c > 1, the bound of the ratio for A < 0; `None` for no dual clip.
    pub dual_clip: Option<f64>,
}

impl Default for ClippedPolicyLoss {
    /// ε = 0.2 on both sides, c = 3, as in verl.
    fn default() -> ClippedPolicyLoss {
        ClippedPolicyLoss {
            clip_low: 0.2,
            clip_high: 0.2,
            dual_clip: Some(3.0),
        }
    }
}

impl TokenLoss for ClippedPolicyLoss {
    fn id(&self) -> MetricId {
        MetricId::new("pg_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_clip(self.clip_low, self.clip_high)?;
        match self.dual_clip {
            Some(c) => check_setting("dual_clip", c, c > 1.0, "it must be above 1"),
            None => Ok(()),
        }
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let advantages = tokens.advantages(self.name())?;
        let d = log_ratio(tokens, self.name())?;
        let ratio = exp(d.clone());
        let bounded = ratio
            .clone()
            .clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let clipped = clipped_surrogate(ratio, bounded, advantages.clone());
        let mut loss = clipped.loss;
        let mut lower = loss.zeros_like();
        if let Some(c) = self.dual_clip {
            let bound = advantages.clone() * -c;
            let acts = advantages
                .lower_scalar(0.0)
                .bool_and(bound.clone().lower(loss.clone()));
            loss = loss.mask_where(acts.clone(), bound);
            lower = lower.mask_fill(acts, 1.0);
        }
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: vec![
                (MetricId::PG_CLIPFRAC, clipped.clipped),
                (MetricId::PG_CLIPFRAC_LOWER, lower),
                (MetricId::PPO_KL, -d),
            ],
        })
    }
}

/// Rejects bounds of a ratio that are out of order.
pub(crate) fn check_clip(low: f64, high: f64) -> Result<(), AlgoError> {
    let rule = "it must lie in [0, 1]";
    check_setting("clip_low", low, (0.0..=1.0).contains(&low), rule)?;
    let valid = high >= 0.0 && high.is_finite();
    check_setting(
        "clip_high",
        high,
        valid,
        "it must be a finite number of at least 0",
    )
}

/// d = clip(ℓ − ℓ_old, ±20), `[M]`.
pub(crate) fn log_ratio(
    tokens: &PreparedTokens<'_>,
    algorithm: &'static str,
) -> Result<Tensor<1>, AlgoError> {
    let d = tokens.log_probs() - tokens.old_log_probs(algorithm)?;
    Ok(d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
}

/// PPO's surrogate of each token, and 1 where the clipped term is larger.
pub(crate) struct Clipped {
    pub loss: Tensor<1>,
    pub clipped: Tensor<1>,
}

/// max(−A r, −A r_bounded).
pub(crate) fn clipped_surrogate(
    ratio: Tensor<1>,
    bounded: Tensor<1>,
    advantages: Tensor<1>,
) -> Clipped {
    let plain = (ratio * advantages.clone()).neg();
    let bounded = (bounded * advantages).neg();
    let larger = bounded.clone().greater(plain.clone());
    Clipped {
        clipped: plain.zeros_like().mask_fill(larger.clone(), 1.0),
        loss: plain.mask_where(larger, bounded),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::batch::MiniBatch;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    /// Loss and gradient of one token with this log-ratio and advantage.
    fn one(loss: ClippedPolicyLoss, d: f64, advantage: f64) -> (f64, f64) {
        let objective = Objective::new(Aggregation::TokenMean).with(1.0, loss);
        let mut batch = MiniBatch::new(vec![0]);
        batch.old_log_probs = Some(vec![-30.0]);
        batch.advantages = Some(vec![advantage]);
        let prepared = objective.prepare(&batch).unwrap();
        let (value, grad) = gradient(&[-30.0 + d], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        (value, grad[0])
    }

    #[track_caller]
    fn check(loss: ClippedPolicyLoss, ratio: f64, advantage: f64, expected: (f64, f64)) {
        let (value, grad) = one(loss, ratio.ln(), advantage);
        assert!((value - expected.0).abs() < 1e-9, "value {value}");
        assert!((grad - expected.1).abs() < 1e-9, "gradient {grad}");
    }

    #[test]
    fn by_hand() {
        let plain = ClippedPolicyLoss::default();
        check(plain, 1.5, 1.0, (-1.2, 0.0));
        check(plain, 1.5, -1.0, (1.5, 1.5));
        check(plain, 0.5, 1.0, (-0.5, -0.5));
        check(plain, 0.5, -1.0, (0.8, 0.0));
        check(plain, 5.0, -1.0, (3.0, 0.0));
        check(plain, 5.0, 1.0, (-1.2, 0.0));
        let higher = ClippedPolicyLoss {
            clip_high: 0.28,
            ..plain
        };
        check(higher, 1.5, 1.0, (-1.28, 0.0));
        let single = ClippedPolicyLoss {
            dual_clip: None,
            ..plain
        };
        check(single, 5.0, -1.0, (5.0, 5.0));
    }

    #[test]
    fn the_ratio_is_capped_and_has_no_gradient_there() {
        let single = ClippedPolicyLoss {
            dual_clip: None,
            ..ClippedPolicyLoss::default()
        };
        assert_eq!(one(single, 25.0, -1.0), (20f64.exp(), 0.0));
        assert_eq!(one(ClippedPolicyLoss::default(), 25.0, -1.0), (3.0, 0.0));
    }

    #[test]
    fn rejects_settings_out_of_range() {
        let plain = ClippedPolicyLoss::default();
        for c in [1.0, f64::NAN] {
            let loss = ClippedPolicyLoss {
                dual_clip: Some(c),
                ..plain
            };
            assert!(loss.check().is_err());
        }
        for clip_low in [-0.1, 1.1, f64::NAN] {
            assert!(ClippedPolicyLoss { clip_low, ..plain }.check().is_err());
        }
    }

    #[test]
    fn rejects_missing_inputs_and_cut_rows() {
        let objective =
            Objective::new(Aggregation::TokenMean).with(1.0, ClippedPolicyLoss::default());
        let mut batch = MiniBatch::new(vec![0, 0]);
        let log_probs = crate::tensor::test::constant(&[-1.0, -1.0]);
        let whole = batch.whole(log_probs.clone(), None);
        let error = objective.prepare(&batch).unwrap().loss(&whole).unwrap_err();
        assert!(error.to_string().contains("advantages"), "{error}");
        batch.old_log_probs = Some(vec![-1.0, -1.0]);
        batch.advantages = Some(vec![1.0, 1.0]);
        let prepared = objective.prepare(&batch).unwrap();
        let mut cut = whole.clone();
        cut.tokens = vec![0];
        cut.log_probs = log_probs.slice(0..1);
        let error = prepared.loss(&cut).unwrap_err();
        assert!(matches!(error, AlgoError::CutRow { row: 0, .. }), "{error}");
        batch.advantages = Some(vec![1.0, f64::NAN]);
        assert!(objective.prepare(&batch).is_err());
    }
}
