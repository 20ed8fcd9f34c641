//! Leaving out bad rows from which the policy has moved away.

use burn::tensor::{Bool, Tensor};

use super::{LossInput, PreparedTokens, TokenFilter};
use crate::error::{AlgoError, check_setting};

/// Keeps a token if A ≥ 0, or if its row's mean of ℓ_sampled − ℓ is at most the threshold.
///
/// ℓ_sampled are the sampler's own log-probs if the mini-batch has them, else the old ones. A row with a negative
/// advantage that has become unlikely teaches little and can break the policy; good rows are always kept.
///
/// # Shapes
/// A and log-probs `[N]`; one flag per token, `[N]`, the same within a row if there is one A per row.
/// # Differences
/// None known: as in TRL, tokens that are left out stay in the denominators.
/// # Source
/// DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 9; TRL `off_policy_mask_threshold`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OffPolicyRows {
    /// Largest mean log-ratio that is kept, nats per token.
    pub threshold: f64,
}

impl Default for OffPolicyRows {
    fn default() -> OffPolicyRows {
        OffPolicyRows { threshold: 0.5 }
    }
}

impl TokenFilter for OffPolicyRows {
    fn name(&self) -> &'static str {
        "off_policy_rows"
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Advantages, LossInput::OldLogProbs]
    }

    fn check(&self) -> Result<(), AlgoError> {
        let valid = self.threshold.is_finite();
        check_setting("threshold", self.threshold, valid, "it must be finite")
    }

    fn keeps(&self, tokens: &PreparedTokens<'_>) -> Result<Tensor<1, Bool>, AlgoError> {
        let sampled = match tokens.rollout_log_probs() {
            Some(log_probs) => log_probs,
            None => tokens.old_log_probs(self.name())?,
        };
        let drift = tokens.row_means(sampled - tokens.log_probs().detach());
        let good = tokens.advantages(self.name())?.greater_equal_scalar(0.0);
        Ok(good.bool_or(drift.lower_equal_scalar(self.threshold)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::batch::MiniBatch;
    use crate::losses::{GpgLoss, Objective};
    use crate::tensor::test::gradient;

    #[test]
    fn a_bad_row_that_became_unlikely_is_left_out() {
        let filter = Box::new(OffPolicyRows { threshold: 0.4 });
        let objective =
            Objective::new(Aggregation::TokenSum).with_filters(1.0, GpgLoss, vec![filter]);
        let mut batch = MiniBatch::new(vec![0, 0, 1, 1, 2, 2]);
        batch.advantages = Some(vec![-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]);
        batch.old_log_probs = Some(vec![-1.0; 6]);
        let now = [-2.0, -1.0, -2.0, -1.0, -1.2, -1.0];
        let loss = |batch: &MiniBatch| {
            let prepared = objective.prepare(batch).unwrap();
            gradient(&now, |l| prepared.loss(&batch.whole(l, None)).unwrap().loss)
        };
        assert_eq!(loss(&batch).1, [0.0, 0.0, -1.0, -1.0, 1.0, 1.0]);
        // The sampler's log-probs take precedence over the old ones.
        batch.rollout_log_probs = Some(vec![-2.0, -1.0, -2.0, -1.0, 0.0, 0.0]);
        assert_eq!(loss(&batch).1, [1.0, 1.0, -1.0, -1.0, 0.0, 0.0]);
    }

    #[test]
    fn rejects_a_threshold_that_is_not_a_number() {
        let threshold = f64::NAN;
        assert!(OffPolicyRows { threshold }.check().is_err());
    }
}
