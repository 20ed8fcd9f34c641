//! Direct preference optimisation and its relatives.

use super::pairwise::Pairs;
use super::{FDivergence, PreferenceLoss, check_beta, rewards};
use crate::aggregate::Aggregation;
use crate::batch::MiniBatch;
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::functions::exp;
use crate::losses::{LossInput, Mean, MetricId, Objective, PerRow, PreparedRows, RowLoss};

/// A [`PreferenceLoss`] of each pair's log-ratios to the reference, a mean over pairs.
///
/// Δ_w = Σ w_t (ℓ − ℓ_ref) over the chosen response, Δ_l likewise, w_t = 1 without `ld_alpha`. Reported, as means over
/// pairs: the implicit rewards βΔ_w and βΔ_l, their margin and accuracy, and the log-probs of both responses.
///
/// # Shapes
/// Log-probs and ℓ_ref `[M]` of complete pairs; result `[P]`, one per pair.
/// # Differences
/// WPO weights for `sft` or for sorted pairs are rejected; TRL multiplies there too. Its earlier versions bounded a
/// weight by 1.
/// # Source
/// Rafailov et al. 2023, arXiv:2305.18290; the sources of the losses are listed at [`PreferenceLoss`].
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use verl_algos::losses::{Dpo, Objective, PreferenceLoss};
/// use verl_algos::{Aggregation, MiniBatch};
///
/// let dpo = Dpo::new(PreferenceLoss::Sigmoid);
/// let objective = Objective::new(Aggregation::default()).with_rows(1.0, dpo);
/// // One pair: row 0 is the chosen response, row 1 the rejected one.
/// let mut batch = MiniBatch::new(vec![0, 0, 1]);
/// batch.ref_log_probs = Some(vec![-1.0, -2.0, -0.5]);
/// let log_probs = Tensor::<1>::from_floats([-1.0, -2.0, -0.5], &Device::flex());
/// let partial = objective.prepare(&batch)?.loss(&batch.whole(log_probs, None))?;
/// assert_eq!(partial.loss.into_scalar::<f32>(), 2f32.ln());
/// # Ok::<(), verl_algos::AlgoError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dpo {
    /// The loss of a pair.
    pub loss: PreferenceLoss,
    /// β, positive: the cost of a departure from the reference.
    pub beta: f64,
    /// The divergence that turns a log-ratio into an implicit reward.
    pub divergence: FDivergence,
    /// LD-DPO: weight in [0, 1] of the tokens beyond the length of the pair's shorter response (Liu et al. 2024,
    /// arXiv:2409.06411). With 1 or `None` all have the same weight.
    pub ld_alpha: Option<f64>,
    /// WPO: each pair is weighted by e^{mean(ℓ − log Σ π²)} of both its responses, without gradient (Zhou et al. 2024,
    /// arXiv:2406.11827, eq. 2). Needs [`MicroBatch::log_sum_sq_probs`](crate::MicroBatch::log_sum_sq_probs).
    pub wpo: bool,
}

impl Default for Dpo {
    fn default() -> Dpo {
        Dpo::new(PreferenceLoss::default())
    }
}

impl Dpo {
    /// This loss with β = 0.1 and the reverse KL.
    pub fn new(loss: PreferenceLoss) -> Dpo {
        Dpo {
            loss,
            beta: 0.1,
            divergence: FDivergence::ReverseKl,
            ld_alpha: None,
            wpo: false,
        }
    }

    /// Σ weight · loss, each with the other settings of `self`, such as MPO's 0.8 `sigmoid` + 0.2 `bco_pair` +
    /// `sft`.
    pub fn mixture(&self, losses: &[(f64, PreferenceLoss)]) -> Objective {
        let terms = losses.iter();
        terms.fold(
            Objective::new(Aggregation::default()),
            |sum, &(weight, loss)| sum.with_rows(weight, Dpo { loss, ..*self }),
        )
    }

    fn conflict(&self, setting: &'static str, reason: &'static str) -> AlgoError {
        AlgoError::Conflict {
            loss: self.name(),
            setting,
            reason,
        }
    }
}

impl RowLoss for Dpo {
    fn id(&self) -> MetricId {
        MetricId::new(self.loss.reported_name())
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::RefLogProbs]
    }

    fn cut_unit(&self) -> CutUnit {
        self.loss.cut_unit()
    }

    fn mean(&self) -> Mean {
        self.loss.mean()
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_beta(self.beta)?;
        self.loss.check()?;
        self.divergence.check()?;
        if let Some(alpha) = self.ld_alpha {
            let valid = (0.0..=1.0).contains(&alpha);
            check_setting("ld_alpha", alpha, valid, "it must lie in [0, 1]")?;
        }
        if self.wpo && self.loss.sorts() {
            return Err(self.conflict("wpo", "sorted pairs have no individual weights"));
        }
        if self.wpo && self.loss == PreferenceLoss::Sft {
            return Err(self.conflict("wpo", "it is not a loss of pairs"));
        }
        let is_plain = matches!(self.loss, PreferenceLoss::Aot { .. });
        if is_plain && self.divergence != FDivergence::ReverseKl {
            let reason = "it compares log-probs, not log-ratios; use `dpo_aot_unpaired`";
            return Err(self.conflict("divergence", reason));
        }
        Ok(())
    }

    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        let dp_size = batch.counts.dp_size as f64;
        let rule = "this loss sorts all pairs of a mini-batch, which must be on one rank";
        check_setting(
            "dp_size",
            dp_size,
            dp_size == 1.0 || !self.loss.sorts(),
            rule,
        )?;
        let weights = |alpha| length_weights(&batch.rows, &batch.row_lengths(), alpha);
        Ok(self.ld_alpha.map(weights).unwrap_or_default())
    }

    fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError> {
        let tokens = rows.tokens();
        let log_probs = tokens.log_probs();
        let reference = tokens.ref_log_probs(self.name())?;
        let mut ratios = log_probs.clone() - reference.clone();
        let mut ref_log_probs = reference;
        if self.ld_alpha.is_some() {
            let weights = tokens.marks(self.name())?;
            ratios = ratios * weights.clone();
            ref_log_probs = ref_log_probs * weights;
        }
        let ratios = rows.sides(ratios);
        let pairs = Pairs {
            deltas: ratios.map(|delta| self.divergence.derivative(delta)),
            ref_log_probs: rows.sides(ref_log_probs),
            lengths: rows.side_lengths(),
            beta: self.beta,
            reward_shift: tokens.batch().preferences.reward_shift,
        };
        let mut loss = self.loss.pairs(rows, &pairs);
        if self.wpo {
            let aligned = log_probs.clone().detach() - tokens.log_sum_sq_probs(self.name())?;
            let means = rows.side_means(aligned);
            loss = loss * exp(means.chosen + means.rejected);
        }
        let implicit = ratios.map(|delta| delta * self.beta);
        Ok(PerRow {
            loss,
            metrics: rewards::reported(&implicit, &rows.sides(log_probs)),
        })
    }
}

/// Weight of each token, `[N]`: 1 up to the length of the pair's shorter response, `alpha` beyond.
fn length_weights(rows: &[usize], lengths: &[usize], alpha: f64) -> Vec<f64> {
    let length = |row: usize| lengths.get(row).copied().unwrap_or(0);
    let mut seen = vec![0; lengths.len()];
    let each = rows.iter().map(|&row| {
        seen[row] += 1;
        let is_shared = seen[row] <= length(row).min(length(row ^ 1));
        if is_shared { 1.0 } else { alpha }
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Counts;
    use crate::tensor::test::{constant, read};

    /// Two pairs with rows of 2, 1, 1, 3 tokens.
    fn batch() -> MiniBatch {
        let mut batch = MiniBatch::new(vec![0, 0, 1, 2, 3, 3, 3]);
        batch.ref_log_probs = Some(vec![-1.0; 7]);
        batch
    }

    fn value(objective: &Objective, batch: &MiniBatch) -> Result<f64, AlgoError> {
        let log_probs = constant(&[-0.5, -0.7, -2.0, -0.2, -1.5, -2.5, -1.1]);
        let mut whole = batch.whole(log_probs, None);
        whole.log_sum_sq_probs = Some(constant(&[-0.5; 7]));
        let partial = objective.prepare(batch)?.loss(&whole)?;
        Ok(read(partial.loss)[0])
    }

    #[track_caller]
    fn check(dpo: Dpo, expected: [f64; 2]) {
        let objective = Objective::new(Aggregation::default()).with_rows(1.0, dpo);
        let got = value(&objective, &batch()).unwrap();
        let expected = (expected[0] + expected[1]) / 2.0;
        assert!(
            (got - expected).abs() < 1e-12,
            "{got} differs from {expected}"
        );
    }

    #[test]
    fn by_hand() {
        // Log-ratios .5 .3 | -1 and .8 | -.5 -1.5 -.1
        let softplus = |x: f64| (1.0 + (-x).exp()).ln();
        let plain = Dpo {
            beta: 1.0,
            ..Dpo::default()
        };
        check(plain, [softplus(1.8), softplus(2.9)]);
        let ld = Dpo {
            ld_alpha: Some(0.5),
            ..plain
        };
        check(ld, [softplus(1.65), softplus(2.1)]);
        let wpo = Dpo { wpo: true, ..plain };
        let weights = [(-0.1f64 - 1.5).exp(), (0.3f64 - 1.2).exp()];
        check(
            wpo,
            [weights[0] * softplus(1.8), weights[1] * softplus(2.9)],
        );
        let forward = Dpo {
            divergence: FDivergence::ForwardKl,
            ..plain
        };
        let x = |w: f64, l: f64| -(-w).exp() + (-l).exp();
        check(forward, [softplus(x(0.8, -1.0)), softplus(x(0.8, -2.1))]);
    }

    #[test]
    fn a_mixture_is_the_weighted_sum() {
        let of = |losses: &[(f64, PreferenceLoss)]| {
            value(&Dpo::default().mixture(losses), &batch()).unwrap()
        };
        let losses = [
            PreferenceLoss::Sigmoid,
            PreferenceLoss::BcoPair,
            PreferenceLoss::Sft,
        ];
        let single = losses.map(|loss| of(&[(1.0, loss)]));
        let weights = [0.8, 0.2, 1.0];
        let mixed = of(&std::array::from_fn::<_, 3, _>(|i| (weights[i], losses[i])));
        let expected: f64 = single.iter().zip(weights).map(|(l, w)| l * w).sum();
        assert!((mixed - expected).abs() < 1e-12, "{mixed}");
    }

    #[test]
    fn rejects_invalid_settings() {
        let refused = |dpo: Dpo, word: &str| {
            let error = dpo.check().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        let plain = Dpo::default();
        refused(Dpo { beta: 0.0, ..plain }, "beta");
        let ld_alpha = Some(1.5);
        refused(Dpo { ld_alpha, ..plain }, "ld_alpha");
        for loss in [PreferenceLoss::AOT_UNPAIRED, PreferenceLoss::Sft] {
            let wpo = true;
            refused(Dpo { loss, wpo, ..plain }, "wpo");
        }
        let aot = Dpo {
            loss: PreferenceLoss::AOT,
            divergence: FDivergence::ForwardKl,
            ..plain
        };
        refused(aot, "divergence");
    }

    #[test]
    fn rejects_missing_inputs_and_sorting_over_ranks() {
        let sigmoid = Dpo::default().mixture(&[(1.0, PreferenceLoss::Sigmoid)]);
        let mut without = batch();
        without.ref_log_probs = None;
        let error = value(&sigmoid, &without).unwrap_err().to_string();
        assert_eq!(error, "`dpo_sigmoid` needs `ref_log_probs`");
        let mut two = batch();
        two.counts = Counts {
            dp_size: 2,
            ..Counts::declared(14, 8)
        };
        let aot = Dpo::default().mixture(&[(1.0, PreferenceLoss::AOT)]);
        let error = value(&aot, &two).unwrap_err();
        assert!(error.to_string().contains("one rank"), "{error}");
        assert!(value(&sigmoid, &two).is_ok());
    }
}
