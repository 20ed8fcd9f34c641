//! KL-Cov: a KL penalty on the tokens that make the entropy collapse.

use super::covariance::{check_share, covariances, selected_count};
use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::batch::{MiniBatch, require};
use crate::error::{AlgoError, check_setting};
use crate::functions::exp;

/// −A r, plus coef·|d| on the max(1, ⌊ratio·N⌋) tokens whose (A − Ā)(ℓ − ℓ̄) is largest. Times the rollout weights.
///
/// The tokens are selected among all N of the mini-batch (of this rank) by [`MiniBatch::current_log_probs`], which this
/// loss needs; among equals those with the smaller ℓ are selected. Reported: `ppo_kl`, here the mean of |d|.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// verl selects among the tokens of a micro-batch, so that the update depends on its size. Its configuration has 0.1
/// for the coefficient and its documentation 1; the default here is 1.
/// # Source
/// Cui et al. 2025, arXiv:2505.22617.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlCovLoss {
    /// Share of tokens that are selected, in (0, 1].
    pub ratio: f64,
    /// Coefficient of |d| on the selected tokens, at least 0.
    pub kl_coef: f64,
}

impl Default for KlCovLoss {
    fn default() -> KlCovLoss {
        KlCovLoss {
            ratio: 0.0002,
            kl_coef: 1.0,
        }
    }
}

impl TokenLoss for KlCovLoss {
    fn id(&self) -> MetricId {
        MetricId::new("kl_cov_loss")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[
            LossInput::Advantages,
            LossInput::OldLogProbs,
            LossInput::CurrentLogProbs,
        ]
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_share("ratio", self.ratio)?;
        let valid = self.kl_coef >= 0.0 && self.kl_coef.is_finite();
        let rule = "it must be a finite number of at least 0";
        check_setting("cov_kl_coef", self.kl_coef, valid, rule)
    }

    /// 1 on the selected tokens.
    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        let covariances = covariances(batch, self.name())?;
        let now = require(self.name(), "current_log_probs", &batch.current_log_probs)?;
        let mut order: Vec<usize> = (0..covariances.len()).collect();
        order.sort_by(|&a, &b| {
            let larger = covariances[b].total_cmp(&covariances[a]);
            larger.then(now[a].total_cmp(&now[b]))
        });
        let mut marks = vec![0.0; covariances.len()];
        let count = selected_count(self.ratio, covariances.len());
        for token in order.into_iter().take(count) {
            marks[token] = 1.0;
        }
        Ok(marks)
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let d = tokens.log_probs() - tokens.old_log_probs(self.name())?;
        let distance = d.clone().abs();
        let plain = (exp(d) * tokens.advantages(self.name())?).neg();
        let selected = tokens.marks(self.name())?.greater_scalar(0.0);
        let penalised = plain.clone() + distance.clone() * self.kl_coef;
        let loss = plain.mask_where(selected, penalised);
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: vec![(MetricId::PPO_KL, distance)],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    #[test]
    fn the_largest_covariances_get_the_kl_penalty() {
        let loss = KlCovLoss {
            ratio: 0.5,
            kl_coef: 0.1,
        };
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, loss);
        let mut batch = MiniBatch::new(vec![0, 0, 1, 1]);
        // Means 0 and −1.75: covariances 0.75, −0.75, 1.875, −0.375.
        batch.advantages = Some(vec![1.0, -1.0, -1.5, 1.5]);
        let now = vec![-1.0, -1.0, -3.0, -2.0];
        batch.current_log_probs = Some(now.clone());
        let mut old = now.clone();
        old[2] += 1.0;
        batch.old_log_probs = Some(old);
        let prepared = objective.prepare(&batch).unwrap();
        let (value, grad) = gradient(&now, |l| prepared.loss(&batch.whole(l, None)).unwrap().loss);
        // Only the first and third are selected; the first has not moved, the third has d = −1.
        let third = 1.5 * (-1f64).exp();
        let expected = [-1.0, 1.0, third - 0.1, -1.5];
        assert!((value - (-1.0 + 1.0 + third + 0.1 - 1.5)).abs() < 1e-12);
        for (g, e) in grad.iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{grad:?}");
        }
    }

    #[test]
    fn the_less_likely_of_equal_covariances_is_selected() {
        // The covariances of two tokens are always equal.
        let mut batch = MiniBatch::new(vec![0, 1]);
        for (advantages, now, marks) in [
            ([1.0, -1.0], [-1.0, -2.0], [0.0, 1.0]),
            ([-1.0, 1.0], [-2.0, -1.0], [1.0, 0.0]),
        ] {
            batch.advantages = Some(advantages.to_vec());
            batch.current_log_probs = Some(now.to_vec());
            assert_eq!(KlCovLoss::default().prepare(&batch).unwrap(), marks);
        }
    }

    #[test]
    fn rejects_settings_out_of_range() {
        let plain = KlCovLoss::default();
        assert!(
            KlCovLoss {
                ratio: 0.0,
                ..plain
            }
            .check()
            .is_err()
        );
        let kl_coef = -1.0;
        assert!(KlCovLoss { kl_coef, ..plain }.check().is_err());
    }
}
