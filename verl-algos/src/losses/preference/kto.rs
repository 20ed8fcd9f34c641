//! Kahneman–Tversky optimisation: single responses that are good or bad.

use crate::losses::LossInput;
use burn::tensor::Tensor;

use super::check_beta;
use super::log_space::sigmoid;
use crate::batch::MiniBatch;
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_finite, check_setting};
use crate::losses::{MetricId, PerRow, PreparedRows, RowLoss};
use crate::masked;
use crate::tensor::indices_like;

/// w_D (1 − σ(β(Δ − z₀))) for a desirable row, w_U (1 − σ(β(z₀ − Δ))) for any other; a mean over rows.
///
/// Δ = Σ(ℓ − ℓ_ref). z₀ is a constant of the mini-batch, so that its micro-batches add up: the caller computes it with
/// [`kl_baseline`]. A row of `desirable` without action tokens has Δ = 0. Reported: the implicit rewards βΔ and the
/// log-probs, as means over desirable (`…_chosen`) and other rows (`…_rejected`); `kto_kl`, which is z₀.
///
/// # Shapes
/// Log-probs and ℓ_ref `[M]` of complete rows, `desirable` `[B]`; result: one per row.
/// # Differences
/// TRL computes z₀ from each device's micro-batch, with a mean that ignores NaN; here it is one number of the
/// mini-batch, and a log-prob that is not finite is rejected.
/// # Source
/// Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1; with z₀ = 0: D'Oosterlinck et al. 2024, arXiv:2408.06266.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kto {
    /// The baseline of the rewards.
    pub baseline: KtoBaseline,
    /// β, positive.
    pub beta: f64,
    /// w_D, at least 0.
    pub desirable_weight: f64,
    /// w_U, at least 0.
    pub undesirable_weight: f64,
}

/// z₀ of [`Kto`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KtoBaseline {
    /// [`Preferences::kl_baseline`](crate::Preferences::kl_baseline).
    Kl,
    /// 0, which gives `apo_zero_unpaired`.
    Zero,
}

impl Default for Kto {
    /// β = 0.1, both weights 1.
    fn default() -> Kto {
        Kto {
            baseline: KtoBaseline::Kl,
            beta: 0.1,
            desirable_weight: 1.0,
            undesirable_weight: 1.0,
        }
    }
}

impl Kto {
    /// The loss with z₀ = 0.
    pub fn apo_zero_unpaired() -> Kto {
        Kto {
            baseline: KtoBaseline::Zero,
            ..Kto::default()
        }
    }

    fn desirable<'a>(&self, batch: &'a MiniBatch) -> Result<&'a [bool], AlgoError> {
        let desirable = batch.preferences.desirable.as_deref();
        desirable.ok_or(AlgoError::Missing {
            algorithm: self.name(),
            argument: "desirable",
        })
    }

    fn z0(&self, batch: &MiniBatch) -> Result<f64, AlgoError> {
        match self.baseline {
            KtoBaseline::Zero => Ok(0.0),
            KtoBaseline::Kl => batch.preferences.kl_baseline.ok_or(AlgoError::Missing {
                algorithm: self.name(),
                argument: "kl_baseline",
            }),
        }
    }
}

impl RowLoss for Kto {
    fn id(&self) -> MetricId {
        MetricId::new(match self.baseline {
            KtoBaseline::Kl => "kto",
            KtoBaseline::Zero => "apo_zero_unpaired",
        })
    }

    fn inputs(&self) -> &'static [LossInput] {
        let all = &[
            LossInput::RefLogProbs,
            LossInput::Desirable,
            LossInput::KlBaseline,
        ];
        match self.baseline {
            KtoBaseline::Kl => all,
            KtoBaseline::Zero => &all[..2],
        }
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Row
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_beta(self.beta)?;
        let weights = [
            ("desirable_weight", self.desirable_weight),
            ("undesirable_weight", self.undesirable_weight),
        ];
        weights.into_iter().try_for_each(|(name, weight)| {
            let valid = weight >= 0.0 && weight.is_finite();
            check_setting(
                name,
                weight,
                valid,
                "it must be a finite number of at least 0",
            )
        })
    }

    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        self.desirable(batch)?;
        self.z0(batch)?;
        Ok(Vec::new())
    }

    fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError> {
        let tokens = rows.tokens();
        let desirable = self.desirable(tokens.batch())?;
        let z0 = self.z0(tokens.batch())?;
        let log_probs = tokens.log_probs();
        let deltas = rows.row_sums(log_probs.clone() - tokens.ref_log_probs(self.name())?);
        let of_each = |good: f64, bad: f64| {
            let each = desirable.iter().map(|&d| if d { good } else { bad });
            rows.column(&each.collect::<Vec<f64>>())
        };
        // 1 − σ(x) = σ(−x)
        let x = (deltas.clone() - z0) * of_each(self.beta, -self.beta);
        let loss = sigmoid(-x) * of_each(self.desirable_weight, self.undesirable_weight);
        let rewards = deltas.detach() * self.beta;
        let log_probs = rows.row_sums(log_probs.detach());
        let mut metrics = vec![(MetricId::KTO_KL, rewards.zeros_like() + z0)];
        let reported = [
            (MetricId::REWARDS_CHOSEN, &rewards, true),
            (MetricId::REWARDS_REJECTED, &rewards, false),
            (MetricId::LOG_PROBS_CHOSEN, &log_probs, true),
            (MetricId::LOG_PROBS_REJECTED, &log_probs, false),
        ];
        for (id, values, wanted) in reported {
            let own = |place: &usize| desirable[rows.units()[*place]] == wanted;
            let own: Vec<usize> = (0..rows.units().len()).filter(own).collect();
            if !own.is_empty() {
                let own: Tensor<1> = values.clone().select(0, indices_like(&own, values));
                metrics.push((id, own));
            }
        }
        Ok(PerRow { loss, metrics })
    }
}

/// z₀ = max(0, mean of `log_ratios`), nats: how far the policy is from its reference on responses to other prompts.
///
/// `log_ratios` contains Σ(ℓ − ℓ_ref) of each mismatched row of the mini-batch over all ranks, in which a prompt is
/// followed by the response to another one ([`mismatched_rows`]), scored without gradient.
///
/// # Shapes
/// `log_ratios`: `[B]`; result: one number.
/// # Errors
/// Fewer than two rows; a number that is not finite.
/// # Differences
/// TRL leaves rows with NaN out of the mean; here they are rejected.
/// # Source
/// Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1; TRL `KTOTrainer`.
pub fn kl_baseline(log_ratios: &[f64]) -> Result<f64, AlgoError> {
    check_rows(log_ratios.len())?;
    check_finite("kl_log_ratios", log_ratios)?;
    Ok(masked::mean(log_ratios).max(0.0))
}

/// For each row, the row whose response follows its prompt: the next one, and the first for the last.
///
/// # Shapes
/// Result: `[B]`, a row for each row.
/// # Errors
/// Fewer than two rows, because the only response belongs to the prompt.
/// # Differences
/// Reversing the rows, as some do, pairs the middle row of an odd number with itself.
/// # Source
/// TRL `KTOTrainer`, which also rotates by one.
pub fn mismatched_rows(num_rows: usize) -> Result<Vec<usize>, AlgoError> {
    check_rows(num_rows)?;
    Ok((1..num_rows).chain([0]).collect())
}

fn check_rows(got: usize) -> Result<(), AlgoError> {
    if got >= 2 {
        return Ok(());
    }
    Err(AlgoError::TooFew {
        algorithm: "kto",
        unit: "rows",
        needed: 2,
        got,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::losses::Objective;
    use crate::tensor::test::{constant, gradient};

    /// A desirable row with Δ = 1 and another with Δ = −1.
    fn batch() -> MiniBatch {
        let mut batch = MiniBatch::new(vec![0, 1]);
        batch.ref_log_probs = Some(vec![-2.0, -2.0]);
        batch.preferences.desirable = Some(vec![true, false]);
        batch.preferences.kl_baseline = Some(0.2);
        batch
    }

    fn objective(kto: Kto) -> Objective {
        Objective::new(Aggregation::default()).with_rows(1.0, kto)
    }

    #[track_caller]
    fn check(kto: Kto, batch: &MiniBatch, expected: f64) {
        let objective = objective(kto);
        let prepared = objective.prepare(batch).unwrap();
        let (value, grad) = gradient(&[-1.0, -3.0], |l| {
            prepared.loss(&batch.whole(l, None)).unwrap().loss
        });
        assert!((value - expected).abs() < 1e-6, "{value}");
        assert!(grad[0] < 0.0 && grad[1] > 0.0, "{grad:?}");
    }

    #[test]
    fn by_hand() {
        let kto = Kto::default();
        check(kto, &batch(), (0.480011 + 0.470036) / 2.0);
        check(Kto::apo_zero_unpaired(), &batch(), 0.475021);
        let weighted = Kto {
            desirable_weight: 2.0,
            undesirable_weight: 0.5,
            ..kto
        };
        check(weighted, &batch(), (2.0 * 0.480011 + 0.5 * 0.470036) / 2.0);
        // A row without tokens: Δ = 0, 1 − σ(0.1 · 0.2).
        let mut empty = batch();
        empty.preferences.desirable = Some(vec![true, false, false]);
        check(kto, &empty, (0.480011 + 0.470036 + 0.495000) / 3.0);
    }

    #[test]
    fn reports_good_and_bad_rows_apart() {
        let (batch, objective) = (batch(), objective(Kto::default()));
        let prepared = objective.prepare(&batch).unwrap();
        let whole = batch.whole(constant(&[-1.0, -3.0]), None);
        let metrics = prepared.loss(&whole).unwrap().read_metrics().unwrap();
        let of = |id: MetricId| metrics.iter().find(|m| m.id == id).unwrap().value();
        let got = [
            MetricId::KTO_KL,
            MetricId::REWARDS_CHOSEN,
            MetricId::REWARDS_REJECTED,
        ]
        .map(of);
        assert_eq!(got, [0.2, 0.1, -0.1]);
        let got = [MetricId::LOG_PROBS_CHOSEN, MetricId::LOG_PROBS_REJECTED].map(of);
        assert_eq!(got, [-1.0, -3.0]);
    }

    #[test]
    fn the_baseline_is_a_non_negative_mean_over_others() {
        assert_eq!(kl_baseline(&[0.5, -0.1]), Ok(0.2));
        assert_eq!(kl_baseline(&[0.5, -0.7]), Ok(0.0));
        assert!(kl_baseline(&[0.5]).is_err());
        assert!(kl_baseline(&[0.5, f64::NAN]).is_err());
        for num_rows in 2..6 {
            let other = mismatched_rows(num_rows).unwrap();
            assert!(other.iter().enumerate().all(|(row, other)| row != *other));
        }
        let error = mismatched_rows(1).unwrap_err();
        assert!(error.to_string().contains("at least 2 rows"), "{error}");
    }

    #[test]
    fn rejects_missing_columns_and_settings_out_of_range() {
        let refused = |batch: &MiniBatch, word: &str| {
            let error = objective(Kto::default()).prepare(batch).map(drop);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        let mut without = batch();
        without.preferences.kl_baseline = None;
        refused(&without, "kl_baseline");
        without.preferences.desirable = None;
        refused(&without, "desirable");
        let negative = Kto {
            desirable_weight: -1.0,
            ..Kto::default()
        };
        assert!(negative.check().is_err());
    }
}
