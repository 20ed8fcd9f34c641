//! The likelihood of chosen responses.

use crate::losses::LossInput;
use burn::tensor::Tensor;

use crate::error::AlgoError;
use crate::losses::{Mean, MetricId, PerRow, PreparedRows, RowLoss};

/// −ℓ of the chosen responses' tokens, a mean over tokens: the term that ORPO and CPO add to their comparison.
///
/// 0 for a mini-batch without chosen tokens.
///
/// # Shapes
/// Log-probs `[M]`; result: one per chosen row.
/// # Differences
/// TRL's ORPO includes the prompt; here, as in the paper, only the response counts.
/// # Source
/// Xu et al. 2024 (CPO), arXiv:2401.08417; Hong et al. 2024 (ORPO), arXiv:2403.07691.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChosenNll;

impl RowLoss for ChosenNll {
    fn id(&self) -> MetricId {
        MetricId::CHOSEN_NLL
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[]
    }

    fn mean(&self) -> Mean {
        Mean::ChosenTokens
    }

    fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError> {
        Ok(PerRow {
            loss: chosen_nll(rows),
            metrics: Vec::new(),
        })
    }
}

/// −Σ ℓ over the chosen response of each pair, `[P]`.
pub(super) fn chosen_nll(rows: &PreparedRows<'_>) -> Tensor<1> {
    -rows.sides(rows.tokens().log_probs()).chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::batch::MiniBatch;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    #[test]
    fn mean_over_chosen_tokens() {
        let objective = Objective::new(Aggregation::default()).with_rows(1.0, ChosenNll);
        let batch = MiniBatch::new(vec![0, 0, 0, 1, 2, 3]);
        let prepared = objective.prepare(&batch).unwrap();
        let (value, grad) = gradient(&[-1.0, -2.0, -3.0, -100.0, -2.0, -100.0], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert_eq!(value, 2.0);
        assert_eq!(grad, [-0.25, -0.25, -0.25, 0.0, -0.25, 0.0]);
    }
}
