//! Supervised fine-tuning.

use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::error::AlgoError;

/// −ℓ = −log π(y): negative log-likelihood of each target token, nats.
///
/// Reported: `nll`, its mean over tokens, regardless of the aggregation.
///
/// # Shapes
/// Log-probs and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// verl shifts the loss mask of all concatenated rows by one, so that a row trained on from its first token affects the
/// last position of the row before; here rows are separate.
/// # Source
/// Maximum likelihood; for instructions Ouyang et al. 2022, arXiv:2203.02155, section 3.5.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SftLoss;

impl TokenLoss for SftLoss {
    fn id(&self) -> MetricId {
        MetricId::SFT_LOSS
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[]
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let nll = -tokens.log_probs();
        Ok(PerToken {
            metrics: vec![(MetricId::new("nll"), nll.clone())],
            loss: nll,
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
    fn mean_of_the_negative_log_probs() {
        let objective = Objective::new(Aggregation::TokenMean).with(1.0, SftLoss);
        let batch = MiniBatch::new(vec![0, 0, 1, 1]);
        let prepared = objective.prepare(&batch).unwrap();
        let (value, grad) = gradient(&[-1.0, -2.0, -3.0, -4.0], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert_eq!(value, 2.5);
        assert_eq!(grad, [-0.25; 4]);
    }
}
