//! The clipped surrogate in TRL's form, for tokens or entire rows.

use super::clip_shares::{clip_share_reduction, clip_shares};
use super::clipped_policy::{check_clip, clipped_surrogate};
use super::{MetricId, PerToken, PreparedTokens, RatioLevel, Reduction, TokenLoss};
use crate::aggregate::Aggregation;
use crate::error::{AlgoError, check_setting};

/// −min(min(r, δ) A, clip(r, 1 − ε_low, 1 + ε_high) A), r of each token or of its row. Times the rollout weights.
///
/// With the aggregations of the table at [`POLICY_LOSSES`](super::POLICY_LOSSES) these are TRL's `grpo`, `bnpo`,
/// `dapo`, `dr_grpo` and `luspo`, and with the product of a row's ratios the loss of its RLOO. There should be one
/// advantage per row if there is one ratio per row.
///
/// Reported: `clip_ratio_low_mean`, the share with A < 0 and r below its bound; `clip_ratio_high_mean`, with A > 0 and
/// min(r, δ) above it; `clip_ratio_region_mean`, either; `clip_ratio_low_min` and `clip_ratio_high_max`, the extremes
/// over rows. Shares are of tokens, or of rows if the ratio is of rows.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// From [`ClippedPolicyLoss`](super::ClippedPolicyLoss): d is not clamped before `exp`, and δ caps the ratio for either
/// sign of A, whereas the dual clip bounds the loss for A < 0. From [`GspoLoss`](super::GspoLoss): the row's ratio
/// itself is differentiated.
/// From TRL's RLOO: a row without action tokens, whose ratio there is 1, adds nothing; the gradient is the same.
/// # Source
/// TRL `GRPOTrainer`, `RLOOTrainer`; δ: Prime Intellect 2025 (INTELLECT-2), arXiv:2505.07291; LUSPO: arXiv:2602.05261.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrlGrpoLoss {
    /// ε_low, in [0, 1].
    pub clip_low: f64,
    /// ε_high, at least 0.
    pub clip_high: f64,
    /// δ, an absolute cap of the unclipped ratio, usually above 1 + ε_high; `None` for none.
    pub delta: Option<f64>,
    /// The level of the ratio.
    pub level: RatioLevel,
}

impl Default for TrlGrpoLoss {
    /// ε = 0.2 on both sides, no δ, a ratio per token.
    fn default() -> TrlGrpoLoss {
        TrlGrpoLoss {
            clip_low: 0.2,
            clip_high: 0.2,
            delta: None,
            level: RatioLevel::Token,
        }
    }
}

impl TrlGrpoLoss {
    /// GSPO as in TRL: the geometric mean of a row's ratios, with the paper's bounds.
    pub fn gspo() -> TrlGrpoLoss {
        TrlGrpoLoss {
            clip_low: 3e-4,
            clip_high: 4e-4,
            delta: None,
            level: RatioLevel::Sequence,
        }
    }

    /// The loss of TRL's RLOO: one ratio for the entire response.
    pub fn rloo() -> TrlGrpoLoss {
        TrlGrpoLoss {
            level: RatioLevel::SequenceProduct,
            ..TrlGrpoLoss::default()
        }
    }
}

impl TokenLoss for TrlGrpoLoss {
    fn id(&self) -> MetricId {
        MetricId::new("trl_grpo_loss")
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_clip(self.clip_low, self.clip_high)?;
        match self.delta {
            Some(delta) => {
                let valid = delta > 0.0 && delta.is_finite();
                check_setting("delta", delta, valid, "it must be a positive ratio")
            }
            None => Ok(()),
        }
    }

    /// The product of ratios already depends on the row's length, so a row counts once, regardless of `declared`.
    fn aggregation(&self, declared: Aggregation) -> Aggregation {
        match self.level {
            RatioLevel::Token | RatioLevel::Sequence => declared,
            RatioLevel::SequenceProduct => Aggregation::SeqMeanTokenMean,
        }
    }

    fn reduction(&self, metric: MetricId) -> Reduction {
        let mean = if self.level.is_of_rows() {
            Reduction::RowMean { of_empty: 0.0 }
        } else {
            Reduction::TokenMean
        };
        clip_share_reduction(metric, mean)
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let advantages = tokens.advantages(self.name())?;
        let d = tokens.log_probs() - tokens.old_log_probs(self.name())?;
        let mut ratio = self.level.ratios(d, tokens);
        let (low, high) = (1.0 - self.clip_low, 1.0 + self.clip_high);
        let bounded = ratio.clone().clamp(low, high);
        if let Some(delta) = self.delta {
            ratio = ratio.clamp_max(delta);
        }
        let below = ratio.clone().lower_scalar(low);
        let above = ratio.clone().greater_scalar(high);
        let shares = clip_shares(
            below.bool_and(advantages.clone().lower_scalar(0.0)),
            above.bool_and(advantages.clone().greater_scalar(0.0)),
            &advantages,
        );
        let clipped = clipped_surrogate(ratio, bounded, advantages);
        Ok(PerToken {
            loss: tokens.times_rollout_weights(clipped.loss),
            metrics: shares,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::MiniBatch;
    use crate::losses::{MetricSum, Objective};
    use crate::tensor::test::gradient;

    /// Loss, gradient and metrics of one row with these ratios.
    #[track_caller]
    fn check(
        loss: TrlGrpoLoss,
        ratios: &[f64],
        advantage: f64,
        expected: (f64, &[f64]),
    ) -> Vec<MetricSum> {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, loss);
        let mut batch = MiniBatch::new(vec![0; ratios.len()]);
        batch.old_log_probs = Some(vec![-1.0; ratios.len()]);
        batch.advantages = Some(vec![advantage; ratios.len()]);
        let prepared = objective.prepare(&batch).unwrap();
        let now: Vec<f64> = ratios.iter().map(|r| r.ln() - 1.0).collect();
        let mut metrics = Vec::new();
        let (value, grad) = gradient(&now, |l| {
            let partial = prepared.loss(&batch.whole(l, None)).unwrap();
            metrics = partial.read_metrics().unwrap();
            partial.loss
        });
        assert!((value - expected.0).abs() < 1e-9, "value {value}");
        for (g, e) in grad.iter().zip(expected.1) {
            assert!((g - e).abs() < 1e-9, "gradient {grad:?}");
        }
        metrics
    }

    fn metric(metrics: &[MetricSum], id: MetricId) -> f64 {
        MetricSum::find(metrics, id).expect("the metric")
    }

    #[test]
    fn delta_caps_the_ratio_whatever_the_sign() {
        let capped = TrlGrpoLoss {
            delta: Some(1.5),
            ..TrlGrpoLoss::default()
        };
        check(capped, &[4.0], -1.0, (1.5, &[0.0]));
        check(capped, &[1.4], -1.0, (1.4, &[1.4]));
        check(capped, &[4.0], 1.0, (-1.2, &[0.0]));
        let plain = TrlGrpoLoss::default();
        check(plain, &[4.0], -1.0, (4.0, &[4.0]));
    }

    #[test]
    fn shares_are_one_sided() {
        let metrics = check(
            TrlGrpoLoss::default(),
            &[1.5, 0.5, 1.0, 1.0],
            1.0,
            (-3.7, &[0.0, -0.5, -1.0, -1.0]),
        );
        assert_eq!(metric(&metrics, MetricId::CLIP_RATIO_HIGH_MEAN), 0.25);
        assert_eq!(metric(&metrics, MetricId::CLIP_RATIO_HIGH_MAX), 0.25);
        assert_eq!(metric(&metrics, MetricId::CLIP_RATIO_LOW_MEAN), 0.0);
        assert_eq!(metric(&metrics, MetricId::CLIP_RATIO_REGION_MEAN), 0.25);
    }

    #[test]
    fn the_ratio_of_a_row_is_a_mean_or_a_product() {
        let wide = TrlGrpoLoss {
            clip_high: 10.0,
            level: RatioLevel::Sequence,
            ..TrlGrpoLoss::default()
        };
        // √(2·0.5) = 1 of both tokens; their sum is −2, each moves both.
        check(wide, &[2.0, 0.5], 1.0, (-2.0, &[-1.0, -1.0]));
        let product = TrlGrpoLoss {
            level: RatioLevel::SequenceProduct,
            ..wide
        };
        // 2·1.5 = 3, once for the row although the objective declares token-sum.
        check(product, &[2.0, 1.5], 1.0, (-3.0, &[-3.0, -3.0]));
        let clipped = TrlGrpoLoss::rloo();
        let metrics = check(clipped, &[1.1, 1.2], 1.0, (-1.2, &[0.0, 0.0]));
        assert_eq!(metric(&metrics, MetricId::CLIP_RATIO_HIGH_MEAN), 1.0);
    }

    #[test]
    fn rejects_settings_out_of_range() {
        for delta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let loss = TrlGrpoLoss {
                delta: Some(delta),
                ..TrlGrpoLoss::default()
            };
            assert!(loss.check().is_err());
        }
    }
}
