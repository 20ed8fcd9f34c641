//! Training on the tokens where the policy is least certain.

use burn::tensor::{Bool, Tensor};

use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenFilter, TokenLoss};
use crate::aggregate::Aggregation;
use crate::batch::{MiniBatch, require};
use crate::error::{AlgoError, check_setting};

/// Keeps the tokens whose entropy is ≥ the (1 − q)-quantile over the entire mini-batch.
///
/// Entropies are [`MiniBatch::current_entropies`], so the choice does not depend on the division of the mini-batch. The
/// quantile interpolates between neighbours; ties with it are kept. With several ranks each selects among its own rows.
///
/// # Shapes
/// Entropies `[N]`; one flag per token, `[N]`.
/// # Differences
/// TRL computes the quantile of each forward pass, over all devices. As there, tokens that are left out stay in the
/// denominators.
/// # Source
/// Wang et al. 2025 (beyond the 80/20 rule), arXiv:2506.01939; TRL `top_entropy_quantile`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopEntropyTokens {
    /// q, the share of tokens that are kept, in (0, 1].
    pub quantile: f64,
}

impl Default for TopEntropyTokens {
    /// The paper's fifth.
    fn default() -> TopEntropyTokens {
        TopEntropyTokens { quantile: 0.2 }
    }
}

impl TokenFilter for TopEntropyTokens {
    fn name(&self) -> &'static str {
        "top_entropy_tokens"
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::CurrentEntropies]
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_quantile(self.quantile)
    }

    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        let kept = kept(batch, self.name(), self.quantile)?;
        Ok(kept.into_iter().map(f64::from).collect())
    }

    fn keeps(&self, tokens: &PreparedTokens<'_>) -> Result<Tensor<1, Bool>, AlgoError> {
        Ok(tokens.marks(self.name())?.greater_scalar(0.0))
    }
}

/// The mean entropy of the tokens that [`TopEntropyTokens`] keeps, regardless of the aggregation. Add it with
/// coefficient −c.
///
/// The others are not counted. With several ranks it is the mean of the ranks' means.
///
/// # Shapes
/// Entropies and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// The same as [`TopEntropyTokens`].
/// # Source
/// TRL `entropy_coef` together with `top_entropy_quantile`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopEntropyBonus {
    /// q, the share of tokens that are kept, in (0, 1].
    pub quantile: f64,
}

impl Default for TopEntropyBonus {
    fn default() -> TopEntropyBonus {
        TopEntropyBonus {
            quantile: TopEntropyTokens::default().quantile,
        }
    }
}

impl TokenLoss for TopEntropyBonus {
    fn id(&self) -> MetricId {
        MetricId::TOP_ENTROPY_LOSS
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Entropies, LossInput::CurrentEntropies]
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_quantile(self.quantile)
    }

    fn aggregation(&self, _declared: Aggregation) -> Aggregation {
        Aggregation::TokenSum
    }

    /// The weight of each token in the mean, divided by D, by which the aggregation multiplies.
    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        let kept = kept(batch, self.name(), self.quantile)?;
        let count = kept.iter().filter(|kept| **kept).count() * batch.counts.dp_size;
        let weight = |kept: bool| if kept { 1.0 / count as f64 } else { 0.0 };
        Ok(kept.into_iter().map(weight).collect())
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let weights = tokens.marks(self.name())?;
        let left_out = weights.clone().equal_scalar(0.0);
        let loss = tokens.entropies(self.name())? * weights;
        Ok(PerToken {
            loss: loss.mask_fill(left_out, 0.0),
            metrics: Vec::new(),
        })
    }
}

fn check_quantile(quantile: f64) -> Result<(), AlgoError> {
    let valid = quantile > 0.0 && quantile <= 1.0;
    check_setting(
        "top_entropy_quantile",
        quantile,
        valid,
        "it must lie in (0, 1]",
    )
}

/// Whether each token's entropy is at least the quantile.
fn kept(batch: &MiniBatch, algorithm: &'static str, quantile: f64) -> Result<Vec<bool>, AlgoError> {
    let column = &batch.current_entropies;
    let entropies = require(algorithm, "current_entropies", column)?;
    let mut sorted = entropies.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return Ok(Vec::new());
    };
    let place = (1.0 - quantile) * last as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    let threshold = sorted[below] + (place - below as f64) * (sorted[above] - sorted[below]);
    Ok(entropies.iter().map(|h| *h >= threshold).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Counts;
    use crate::losses::{GpgLoss, Objective};
    use crate::tensor::test::{constant, gradient};

    fn batch(entropies: &[f64]) -> MiniBatch {
        let mut batch = MiniBatch::new(vec![0; entropies.len()]);
        batch.current_entropies = Some(entropies.to_vec());
        batch.advantages = Some(vec![1.0; entropies.len()]);
        batch
    }

    #[track_caller]
    fn check(entropies: &[f64], quantile: f64, expected: &[bool]) {
        assert_eq!(
            kept(&batch(entropies), "test", quantile).unwrap(),
            expected,
            "{entropies:?} {quantile}"
        );
    }

    #[test]
    fn the_upper_share_is_kept() {
        check(
            &[0.1, 0.5, 0.3, 0.4, 0.2],
            0.4,
            &[false, true, false, true, false],
        );
        check(&[0.1, 0.5, 0.3], 1.0, &[true, true, true]);
        check(&[0.2, 0.2, 0.2], 0.01, &[true, true, true]);
        check(&[0.7], 0.5, &[true]);
        check(&[], 0.5, &[]);
    }

    #[test]
    fn tokens_left_out_stay_in_the_denominator() {
        let filter = TopEntropyTokens { quantile: 0.4 };
        let objective = Objective::new(Aggregation::TokenMean).with_filters(
            1.0,
            GpgLoss,
            vec![Box::new(filter)],
        );
        let batch = batch(&[0.1, 0.5, 0.3, 0.4, 0.2]);
        let prepared = objective.prepare(&batch).unwrap();
        let (loss, grad) = gradient(&[-1.0; 5], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert!((loss - 0.4).abs() < 1e-12);
        assert_eq!(grad, [0.0, -0.2, 0.0, -0.2, 0.0]);
    }

    #[test]
    fn the_bonus_is_the_mean_of_those_kept() {
        let bonus = TopEntropyBonus { quantile: 0.4 };
        let objective = Objective::new(Aggregation::TokenMean).with(1.0, bonus);
        let entropies = [0.1, 0.5, 0.3, 0.4, 0.2];
        let mut batch = batch(&entropies);
        for dp_size in [1, 2] {
            batch.counts = Counts {
                tokens: Some(5 * dp_size),
                sequences: None,
                dp_size,
            };
            let prepared = objective.prepare(&batch).unwrap();
            let (loss, grad) = gradient(&entropies, |h| {
                let micro = batch.whole(constant(&[-1.0; 5]).autodiff(), Some(h));
                prepared.loss(&micro).unwrap().loss
            });
            assert!((loss - 0.45).abs() < 1e-12);
            assert_eq!(grad, [0.0, 0.5, 0.0, 0.5, 0.0]);
        }
    }

    #[test]
    fn rejects_missing_entropies_and_shares_out_of_range() {
        let objective =
            Objective::new(Aggregation::TokenMean).with(1.0, TopEntropyBonus::default());
        let error = objective.prepare(&MiniBatch::new(vec![0])).unwrap_err();
        assert!(error.to_string().contains("current_entropies"), "{error}");
        for quantile in [0.0, 1.1, f64::NAN] {
            assert!(TokenFilter::check(&TopEntropyTokens { quantile }).is_err());
            assert!(TokenLoss::check(&TopEntropyBonus { quantile }).is_err());
        }
    }
}
