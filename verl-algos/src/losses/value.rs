//! The critic's loss.

use burn::tensor::Tensor;

use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::{AlgoError, check_setting};
use crate::tensor::ones_where;

/// ½ max((V − R)², (clip(V, V_old ± c) − R)²), of the critic's values V.
///
/// Micro-batches contain values ([`MicroBatch::of_values`](crate::MicroBatch::of_values)); the mini-batch needs
/// `returns`, and `old_values` if values are clipped. Rollout weights do not affect it. Reported: `vf_clipfrac`, the
/// share of tokens for which the clipped term is larger (a tie is not clipped).
///
/// # Shapes
/// V, V_old, R and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// The same as verl. OpenRLHF has the same, or ½ (V − R)² without a clip, as here without `clip`; TRL's PPO takes half
/// the masked mean of the maximum, regardless of the aggregation of the policy loss. A value of an observation that is
/// not finite makes verl's gradient NaN.
/// # Source
/// Schulman et al. 2017, arXiv:1707.06347, with the clip of OpenAI's implementation; verl `compute_value_loss`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueLoss {
    /// c > 0, how far a value may move from the old one; `None` for no clip.
    pub clip: Option<f64>,
}

impl Default for ValueLoss {
    fn default() -> ValueLoss {
        ValueLoss { clip: Some(0.5) }
    }
}

impl TokenLoss for ValueLoss {
    fn id(&self) -> MetricId {
        MetricId::new("vf_loss")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Values, LossInput::OldValues, LossInput::Returns]
    }

    fn check(&self) -> Result<(), AlgoError> {
        match self.clip {
            Some(clip) => {
                let valid = clip > 0.0 && clip.is_finite();
                check_setting("cliprange_value", clip, valid, "it must be positive")
            }
            None => Ok(()),
        }
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let returns = tokens.returns(self.name())?;
        let values = tokens.values(self.name())?;
        let plain = half_square(values.clone() - returns.clone());
        let Some(clip) = self.clip else {
            return Ok(PerToken {
                loss: plain,
                metrics: Vec::new(),
            });
        };
        let old = tokens.old_values(self.name())?;
        // A value inside the clip is kept to the last bit, so that rounding cannot make its term the larger one.
        let (low, high) = (old.clone() - clip, old + clip);
        let near = values
            .clone()
            .mask_where(values.clone().lower(low.clone()), low)
            .mask_where(values.greater(high.clone()), high);
        let bounded = half_square(near - returns);
        let larger = bounded.clone().greater(plain.clone());
        let clipped = ones_where(larger.clone(), &plain);
        Ok(PerToken {
            loss: plain.mask_where(larger, bounded),
            metrics: vec![(MetricId::VF_CLIPFRAC, clipped)],
        })
    }
}

fn half_square(error: Tensor<1>) -> Tensor<1> {
    error.clone() * error * 0.5
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::batch::{MicroBatch, MiniBatch};
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    #[track_caller]
    fn check(clip: Option<f64>, value: f64, expected: (f64, f64)) {
        let objective = Objective::new(Aggregation::TokenMean).with(1.0, ValueLoss { clip });
        let mut batch = MiniBatch::new(vec![0]);
        batch.old_values = Some(vec![0.0]);
        batch.returns = Some(vec![2.0]);
        let prepared = objective.prepare(&batch).unwrap();
        let (loss, grad) = gradient(&[value], |v| {
            let micro = MicroBatch::of_values(vec![0], v);
            prepared.loss(&micro).unwrap().loss
        });
        assert!((loss - expected.0).abs() < 1e-12, "{loss}");
        assert!((grad[0] - expected.1).abs() < 1e-12, "{grad:?}");
    }

    #[test]
    fn by_hand() {
        check(Some(0.5), 1.0, (1.125, 0.0));
        check(Some(0.5), 0.2, (1.62, -1.8));
        check(Some(0.5), -1.0, (4.5, -3.0));
        check(Some(0.5), 3.0, (1.125, 0.0));
        check(None, 3.0, (0.5, 1.0));
    }

    #[test]
    fn rejects_missing_inputs_and_settings_out_of_range() {
        let objective = Objective::new(Aggregation::TokenMean).with(1.0, ValueLoss::default());
        let mut batch = MiniBatch::new(vec![0]);
        batch.returns = Some(vec![1.0]);
        let values = crate::tensor::test::constant(&[0.5]);
        let micro = MicroBatch::of_values(vec![0], values);
        let error = objective.prepare(&batch).unwrap().loss(&micro).unwrap_err();
        assert!(error.to_string().contains("old_values"), "{error}");
        for clip in [0.0, -1.0, f64::NAN] {
            assert!(ValueLoss { clip: Some(clip) }.check().is_err());
        }
    }
}
