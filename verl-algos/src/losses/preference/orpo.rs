//! Odds-ratio preference optimisation: supervised training with a preference term.

use super::log_space::{log_sigmoid, log1m_exp};
use super::{ChosenNll, check_beta, check_both_sides, rewards};
use crate::aggregate::Aggregation;
use crate::batch::MiniBatch;
use crate::error::AlgoError;
use crate::losses::{LossInput, MetricId, Objective, PerRow, PreparedRows, RowLoss};

/// ORPO = the negative log-likelihood of chosen responses, a mean over tokens, plus [`OrpoOdds`].
///
/// # Shapes
/// The same as [`OrpoOdds`].
/// # Differences
/// The same as [`ChosenNll`] and [`OrpoOdds`].
/// # Source
/// Hong et al. 2024, arXiv:2403.07691, eq. 6.
pub fn orpo(beta: f64) -> Objective {
    Objective::new(Aggregation::default())
        .with_rows(1.0, ChosenNll)
        .with_rows(1.0, OrpoOdds { beta })
}

/// −β log σ(o), o = c − r − [log(1 − e^c) − log(1 − e^r)], with c, r the mean log-probs of a pair's responses; a mean
/// over pairs.
///
/// o is the log of the chosen response's odds over those of the rejected one. [`orpo`] adds the likelihood. Reported,
/// as
/// means over pairs: `log_odds`, rewards βc and βr, their margin and accuracy, and the mean log-probs c and r.
///
/// # Shapes
/// Log-probs `[M]` of complete pairs; result `[P]`, one per pair.
/// # Differences
/// The odds are TRL's; its likelihood includes the prompt, [`ChosenNll`] only the response.
/// # Source
/// Hong et al. 2024, arXiv:2403.07691, eq. 7.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OrpoOdds {
    /// β, positive; λ in the paper.
    pub beta: f64,
}

impl Default for OrpoOdds {
    fn default() -> OrpoOdds {
        OrpoOdds { beta: 0.1 }
    }
}

impl RowLoss for OrpoOdds {
    fn id(&self) -> MetricId {
        MetricId::new("orpo_odds")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[]
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_beta(self.beta)
    }

    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        check_both_sides(self.name(), batch)?;
        Ok(Vec::new())
    }

    fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError> {
        let log_probs = rows.side_means(rows.tokens().log_probs());
        let log_odds = log_probs.margin() - log_probs.map(log1m_exp).margin();
        let rewards = log_probs.map(|log_prob| log_prob * self.beta);
        let mut metrics = rewards::reported(&rewards, &log_probs);
        metrics.push((MetricId::LOG_ODDS, log_odds.clone()));
        Ok(PerRow {
            loss: log_sigmoid(log_odds) * -self.beta,
            metrics,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::gradient;

    fn evaluate(objective: &Objective, log_probs: &[f64; 3]) -> (f64, Vec<f64>) {
        let batch = MiniBatch::new(vec![0, 0, 1]);
        let prepared = objective.prepare(&batch).unwrap();
        gradient(log_probs, |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        })
    }

    #[test]
    fn by_hand() {
        let odds = Objective::new(Aggregation::default()).with_rows(1.0, OrpoOdds { beta: 1.0 });
        let (value, grad) = evaluate(&odds, &[-0.2, -0.8, -0.9]);
        assert!((value - 0.367729).abs() < 1e-6, "{value}");
        assert!(grad[0] == grad[1] && grad[0] < 0.0 && grad[2] > 0.0);
        let (value, _) = evaluate(&orpo(2.0), &[-0.2, -0.8, -0.9]);
        assert!((value - 2.0 * 0.367729 - 0.5).abs() < 2e-6, "{value}");
    }

    #[test]
    fn a_certain_answer_stays_finite() {
        for log_probs in [[0.0, 0.0, -1.0], [-1.0, -1.0, 0.0], [0.0; 3]] {
            let (value, grad) = evaluate(&orpo(0.1), &log_probs);
            assert!(value.is_finite(), "{value}");
            assert!(grad.iter().all(|g| g.is_finite()), "{grad:?}");
        }
    }

    #[test]
    fn rejects_a_response_without_tokens() {
        let error = orpo(0.1).prepare(&MiniBatch::new(vec![1])).map(drop);
        let error = error.unwrap_err();
        assert!(error.to_string().contains("row 0"), "{error}");
        assert!(OrpoOdds { beta: 0.0 }.check().is_err());
    }
}
