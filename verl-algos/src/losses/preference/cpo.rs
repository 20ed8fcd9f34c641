//! Contrastive preference optimisation, SimPO and AlphaPO: no reference policy.

use crate::losses::LossInput;
use burn::tensor::Tensor;

use super::log_space::exp_m1;
use super::pairwise::{hinge_of, smoothed_sigmoid, squared_to_target};
use super::{ChosenNll, check_beta, check_both_sides, check_label_smoothing, rewards};
use crate::aggregate::Aggregation;
use crate::batch::MiniBatch;
use crate::error::{AlgoError, check_setting};
use crate::losses::{MetricId, Objective, PerRow, PreparedRows, RowLoss};
use crate::names::names;

/// The loss of a pair, as a function of x = c − r, the difference of its responses' log-probs c (chosen) and r
/// (rejected).
///
/// # Shapes
/// x: `[P]`, one per pair; the result has the same shape.
/// # Differences
/// None known compared with TRL.
/// # Source
/// TRL `CPOTrainer`; the papers are listed at [`Cpo`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum CpoLoss {
    /// max(0, 1 − βx) on sums over tokens.
    Hinge,
    /// (x − 1/2β)² on means over tokens.
    Ipo,
    /// −(1 − ε) log σ(βx) − ε log σ(−βx) on sums over tokens: CPO.
    #[default]
    Sigmoid,
    /// The same on means over tokens, with x = c − r − γ/β: SimPO.
    Simpo {
        /// γ, the target margin of rewards, at least 0.
        gamma: f64,
    },
}

names! {
    /// The name of a loss of CPO; SimPO is the sigmoid with a margin.
    #[derive(Default)]
    CpoLossName, "variant of CPO" {
        /// max(0, 1 − βx) on sums over tokens: SLiC.
        Hinge = "hinge",
        /// (x − 1/2β)² on means over tokens.
        Ipo = "ipo",
        /// −log σ(βx) on sums over tokens: CPO.
        #[default]
        Sigmoid = "sigmoid",
    }
}

impl From<CpoLossName> for CpoLoss {
    fn from(name: CpoLossName) -> CpoLoss {
        match name {
            CpoLossName::Hinge => CpoLoss::Hinge,
            CpoLossName::Ipo => CpoLoss::Ipo,
            CpoLossName::Sigmoid => CpoLoss::Sigmoid,
        }
    }
}

/// A [`CpoLoss`] of each pair, a mean over pairs.
///
/// With `alphapo_alpha` each log-prob c is replaced by AlphaPO's reward (1 − p^{−α})/α, p = e^c, computed as
/// (1 − e^{−αc})/α. Reported, as means over pairs: rewards βc and βr, their margin and accuracy, and the log-probs.
/// [`Cpo::objective`] adds the likelihood of chosen responses, which is part of CPO.
///
/// # Shapes
/// Log-probs `[M]` of complete pairs; result `[P]`, one per pair.
/// # Differences
/// TRL computes e^c first, which underflows for long responses.
/// # Source
/// Xu et al. 2024, arXiv:2401.08417; SimPO: Meng et al. 2024, arXiv:2405.14734, eq. 6; AlphaPO: Gupta et al. 2025,
/// arXiv:2501.03884.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cpo {
    /// The loss of a pair.
    pub loss: CpoLoss,
    /// β, positive.
    pub beta: f64,
    /// ε, in [0, ½): assumed share of pairs with a wrong label; read by the sigmoids.
    pub label_smoothing: f64,
    /// α of AlphaPO; `None` or 0 for the log-prob itself.
    pub alphapo_alpha: Option<f64>,
}

impl Default for Cpo {
    fn default() -> Cpo {
        Cpo::new(CpoLoss::Sigmoid)
    }
}

impl Cpo {
    /// This loss with β = 0.1.
    pub fn new(loss: CpoLoss) -> Cpo {
        Cpo {
            loss,
            beta: 0.1,
            label_smoothing: 0.0,
            alphapo_alpha: None,
        }
    }

    /// SimPO with β = 2 and γ = 1, within the paper's ranges.
    pub fn simpo() -> Cpo {
        Cpo {
            beta: 2.0,
            ..Cpo::new(CpoLoss::Simpo { gamma: 1.0 })
        }
    }

    /// SimPO with the reward of AlphaPO, α = 0.25.
    pub fn alphapo() -> Cpo {
        Cpo {
            alphapo_alpha: Some(0.25),
            ..Cpo::simpo()
        }
    }

    /// The loss plus `cpo_alpha` times the negative log-likelihood of chosen responses.
    pub fn objective(self, cpo_alpha: f64) -> Objective {
        let objective = Objective::new(Aggregation::default()).with_rows(1.0, self);
        if cpo_alpha == 0.0 {
            return objective;
        }
        objective.with_rows(cpo_alpha, ChosenNll)
    }

    fn reads_means(&self) -> bool {
        matches!(self.loss, CpoLoss::Ipo | CpoLoss::Simpo { .. })
    }

    fn alpha(&self) -> f64 {
        self.alphapo_alpha.unwrap_or(0.0)
    }

    /// c, or AlphaPO's (1 − e^{−αc})/α.
    fn reward(&self, log_prob: Tensor<1>) -> Tensor<1> {
        match self.alpha() {
            0.0 => log_prob,
            alpha => exp_m1(log_prob * -alpha) / -alpha,
        }
    }
}

impl RowLoss for Cpo {
    fn id(&self) -> MetricId {
        MetricId::new(match self.loss {
            _ if self.alpha() != 0.0 => "cpo_alphapo",
            CpoLoss::Hinge => "cpo_hinge",
            CpoLoss::Ipo => "cpo_ipo",
            CpoLoss::Sigmoid => "cpo_sigmoid",
            CpoLoss::Simpo { .. } => "cpo_simpo",
        })
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[]
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_beta(self.beta)?;
        check_label_smoothing(self.label_smoothing)?;
        let alpha = self.alpha();
        check_setting(
            "alphapo_alpha",
            alpha,
            alpha.is_finite(),
            "it must be finite",
        )?;
        match self.loss {
            CpoLoss::Simpo { gamma } => {
                let valid = gamma >= 0.0 && gamma.is_finite();
                let rule = "it must be a finite number of at least 0";
                check_setting("simpo_gamma", gamma, valid, rule)
            }
            CpoLoss::Hinge | CpoLoss::Ipo if self.label_smoothing > 0.0 => {
                Err(AlgoError::Conflict {
                    loss: self.name(),
                    setting: "label_smoothing",
                    reason: "only the sigmoid losses use it",
                })
            }
            _ => Ok(()),
        }
    }

    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        if self.reads_means() {
            check_both_sides(self.name(), batch)?;
        }
        Ok(Vec::new())
    }

    fn rows(&self, rows: &PreparedRows<'_>) -> Result<PerRow, AlgoError> {
        let log_probs = rows.tokens().log_probs();
        let log_probs = if self.reads_means() {
            rows.side_means(log_probs)
        } else {
            rows.sides(log_probs)
        };
        let unscaled = log_probs.map(|log_prob| self.reward(log_prob));
        let x = unscaled.margin();
        let loss = match self.loss {
            CpoLoss::Hinge => hinge_of(x * self.beta),
            CpoLoss::Ipo => squared_to_target(x, self.beta),
            CpoLoss::Sigmoid => smoothed_sigmoid(x * self.beta, self.label_smoothing),
            CpoLoss::Simpo { gamma } => {
                smoothed_sigmoid(x * self.beta - gamma, self.label_smoothing)
            }
        };
        let rewards = unscaled.map(|reward| reward * self.beta);
        Ok(PerRow {
            loss,
            metrics: rewards::reported(&rewards, &log_probs),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, read};

    /// Rows of 2 and 1 tokens: sums −1 and −0.9, means −0.5 and −0.9.
    fn value(objective: &Objective) -> f64 {
        let batch = MiniBatch::new(vec![0, 0, 1]);
        let whole = batch.whole(constant(&[-0.2, -0.8, -0.9]), None);
        read(
            objective
                .prepare(&batch)
                .unwrap()
                .loss(&whole)
                .unwrap()
                .loss,
        )[0]
    }

    #[track_caller]
    fn check(cpo: Cpo, expected: f64) {
        let got = value(&cpo.objective(0.0));
        assert!((got - expected).abs() < 1e-6, "{got}");
        let with_nll = value(&cpo.objective(2.0));
        assert!((with_nll - expected - 1.0).abs() < 1e-6, "{with_nll}");
    }

    #[test]
    fn by_hand() {
        let softplus = |x: f64| (1.0 + (-x).exp()).ln();
        let simpo = Cpo {
            loss: CpoLoss::Simpo { gamma: 0.5 },
            ..Cpo::simpo()
        };
        check(simpo, 0.554355);
        let alpha = Cpo {
            alphapo_alpha: Some(1.0),
            ..simpo
        };
        let x = -(0.5f64.exp()) + 0.9f64.exp();
        check(alpha, softplus(2.0 * x - 0.5));
        check(Cpo::new(CpoLoss::Sigmoid), softplus(-0.01));
        check(Cpo::new(CpoLoss::Hinge), 1.01);
        check(Cpo::new(CpoLoss::Ipo), (0.4f64 - 5.0).powi(2));
        let smoothed = Cpo {
            label_smoothing: 0.25,
            ..Cpo::default()
        };
        check(smoothed, 0.75 * softplus(-0.01) + 0.25 * softplus(0.01));
    }

    #[test]
    fn rejects_invalid_settings_and_sides() {
        let plain = Cpo::default();
        assert!(
            Cpo {
                beta: -1.0,
                ..plain
            }
            .check()
            .is_err()
        );
        let label_smoothing = 0.1;
        let loss = CpoLoss::Hinge;
        let smoothed = Cpo {
            loss,
            label_smoothing,
            ..plain
        };
        assert!(smoothed.check().is_err());
        assert!(Cpo::new(CpoLoss::Simpo { gamma: -1.0 }).check().is_err());
        let alphapo_alpha = Some(f64::NAN);
        assert!(
            Cpo {
                alphapo_alpha,
                ..plain
            }
            .check()
            .is_err()
        );
        // A mean over no tokens would look like a certain response; a sum over none is 0.
        let empty = MiniBatch::new(vec![1]);
        let error = Cpo::simpo().prepare(&empty).unwrap_err();
        assert!(error.to_string().contains("row 0"), "{error}");
        assert!(plain.prepare(&empty).is_ok());
    }
}
