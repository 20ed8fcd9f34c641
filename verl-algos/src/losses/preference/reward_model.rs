//! The loss of a reward model.

use super::log_space::log_sigmoid;
use super::{check_both_sides, rewards};
use crate::batch::MiniBatch;
use crate::error::{AlgoError, check_setting};
use crate::losses::{LossInput, MetricId, PerRow, PreparedRows, RowLoss};

/// −log σ(s_w − s_l − m) + c (s_w + s_l)²: Bradley–Terry on the scores of a pair, a mean over pairs.
///
/// A row's score is the output of the scalar head at its last action token,
/// [`MicroBatch::values`](crate::MicroBatch::values); at other tokens nothing is read, so a mini-batch may contain just
/// one token per row. m is the pair's margin, 0 without [`Preferences::margins`](crate::Preferences::margins). The
/// second term keeps scores near 0, because the first does not depend on their level. Reported, as means over pairs:
/// scores of both sides, their margin (without m) and accuracy.
///
/// # Shapes
/// Values `[M]` of complete pairs, margins `[P]`; result `[P]`, one per pair.
/// # Differences
/// The same as TRL. OpenRLHF has the margin and no centring.
/// # Source
/// Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margins: Touvron et al. 2023, arXiv:2307.09288, eq. 2; centring:
/// Eisenstein et al. 2023, arXiv:2312.09244.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RewardModelLoss {
    /// c, at least 0; 0.01 is common.
    pub center_coefficient: f64,
}

impl RowLoss for RewardModelLoss {
    fn id(&self) -> MetricId {
        MetricId::new("reward_model")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Values]
    }

    fn check(&self) -> Result<(), AlgoError> {
        let c = self.center_coefficient;
        let valid = c >= 0.0 && c.is_finite();
        let rule = "it must be a finite number of at least 0";
        check_setting("center_coefficient", c, valid, rule)
    }

    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        check_both_sides(self.name(), batch)?;
        Ok(Vec::new())
    }

    fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError> {
        let scores = rows.side_lasts(rows.tokens().values(self.name())?);
        let mut margin = scores.margin();
        if let Some(margins) = &rows.tokens().batch().preferences.margins {
            margin = margin - rows.column(margins);
        }
        let mut loss = -log_sigmoid(margin);
        if self.center_coefficient > 0.0 {
            let sums = scores.chosen.clone() + scores.rejected.clone();
            loss = loss + sums.square() * self.center_coefficient;
        }
        Ok(PerRow {
            loss,
            metrics: rewards::of_rewards(&scores),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    /// Loss and gradient of two pairs; only the last token of the first row is read.
    fn evaluate(loss: RewardModelLoss, margins: Option<Vec<f64>>) -> (f64, Vec<f64>) {
        let objective = Objective::new(Aggregation::default()).with_rows(1.0, loss);
        let mut batch = MiniBatch::new(vec![0, 0, 1, 2, 3]);
        batch.preferences.margins = margins;
        let prepared = objective.prepare(&batch).unwrap();
        gradient(&[f64::NAN, 2.0, 1.0, 0.5, 0.5], |scores| {
            let mut whole = batch.whole(scores.clone().detach(), None);
            whole.values = Some(scores);
            prepared.loss(&whole).unwrap().loss
        })
    }

    #[test]
    fn by_hand() {
        let softplus = |x: f64| (1.0 + (-x).exp()).ln();
        let plain = RewardModelLoss::default();
        let (value, grad) = evaluate(plain, None);
        assert!((value - (softplus(1.0) + softplus(0.0)) / 2.0).abs() < 1e-12);
        assert_eq!(grad[0], 0.0);
        assert_eq!(grad[3..], [-0.25, 0.25]);
        let (value, _) = evaluate(plain, Some(vec![1.0, -2.0]));
        assert!((value - (softplus(0.0) + softplus(2.0)) / 2.0).abs() < 1e-12);
        let centred = RewardModelLoss {
            center_coefficient: 0.1,
        };
        let (value, _) = evaluate(centred, None);
        let expected = (softplus(1.0) + 0.9 + softplus(0.0) + 0.1) / 2.0;
        assert!((value - expected).abs() < 1e-12);
    }

    #[test]
    fn rejects_a_row_without_a_score() {
        let plain = RewardModelLoss::default();
        assert!(plain.prepare(&MiniBatch::new(vec![0])).is_err());
        let negative = RewardModelLoss {
            center_coefficient: -1.0,
        };
        assert!(negative.check().is_err());
        let objective = Objective::new(Aggregation::default()).with_rows(1.0, plain);
        let batch = MiniBatch::new(vec![0, 1]);
        let scores = crate::tensor::test::constant(&[1.0, 0.0]);
        let prepared = objective.prepare(&batch).unwrap();
        let error = prepared.loss(&batch.whole(scores, None)).unwrap_err();
        assert_eq!(error.to_string(), "`reward_model` needs `values`");
    }
}
