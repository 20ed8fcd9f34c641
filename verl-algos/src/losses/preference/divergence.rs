//! Divergences from the reference policy other than the reverse KL.

use burn::tensor::Tensor;

use super::log_space::{exp_m1, log_sigmoid};
use crate::error::{AlgoError, check_setting};
use crate::names::names;

/// The f-divergence that keeps the policy near its reference; DPO's implicit reward is β f′(π/π_ref).
///
/// Each log-ratio Δ of a row is replaced by f′ at e^Δ. Exponents are clamped to ±80.
///
/// # Shapes
/// Log-ratios `[P]`, one per side of each pair; the result has the same shape.
/// # Differences
/// TRL keeps Δ itself in `apo_zero` and `apo_down`; here it is replaced everywhere.
/// # Source
/// Wang et al. 2023, arXiv:2309.16240.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum FDivergence {
    /// Δ: plain DPO.
    #[default]
    ReverseKl,
    /// 1 − e^{−Δ}.
    ForwardKl,
    /// ln 2 + log σ(Δ): Jensen–Shannon.
    JensenShannon,
    /// (e^{(α − 1)Δ} − 1)/(α − 1); Δ for α = 1.
    Alpha {
        /// α, any finite number.
        alpha: f64,
    },
}

names! {
    /// The name of a divergence from the reference; u is the ratio π/π_ref.
    #[derive(Default)]
    FDivergenceName, "divergence" {
        /// The α-divergence: rewards (u^{α − 1} − 1)/(α − 1).
        AlphaDivergence = "alpha_divergence",
        /// The forward KL: rewards 1 − 1/u.
        ForwardKl = "forward_kl",
        /// Jensen–Shannon: rewards ln(2u/(1 + u)).
        JsDivergence = "js_divergence",
        /// The reverse KL, plain DPO: rewards ln u.
        #[default]
        ReverseKl = "reverse_kl",
    }
}

impl FDivergence {
    /// The divergence with this name; `alpha` is used only by `alpha_divergence`.
    ///
    /// # Errors
    /// `alpha_divergence` without its `alpha`, or with one that is not finite.
    pub fn named(name: FDivergenceName, alpha: Option<f64>) -> Result<FDivergence, AlgoError> {
        let divergence = match name {
            FDivergenceName::AlphaDivergence => FDivergence::Alpha {
                alpha: alpha.ok_or(AlgoError::MissingSetting {
                    algorithm: name.as_str(),
                    setting: "alpha",
                    reason: "1 is the reverse KL, 2 is Pearson's χ², and values between are a choice",
                })?,
            },
            FDivergenceName::ForwardKl => FDivergence::ForwardKl,
            FDivergenceName::JsDivergence => FDivergence::JensenShannon,
            FDivergenceName::ReverseKl => FDivergence::ReverseKl,
        };
        divergence.check()?;
        Ok(divergence)
    }

    /// Rejects settings out of range.
    ///
    /// # Errors
    /// An α that is not finite.
    pub fn check(&self) -> Result<(), AlgoError> {
        match *self {
            FDivergence::Alpha { alpha } => {
                check_setting("alpha", alpha, alpha.is_finite(), "it must be finite")
            }
            _ => Ok(()),
        }
    }

    /// f′ at e^Δ.
    pub(super) fn derivative(&self, delta: Tensor<1>) -> Tensor<1> {
        match *self {
            FDivergence::ReverseKl => delta,
            FDivergence::ForwardKl => -exp_m1(-delta),
            FDivergence::JensenShannon => log_sigmoid(delta) + std::f64::consts::LN_2,
            FDivergence::Alpha { alpha: 1.0 } => delta,
            FDivergence::Alpha { alpha } => exp_m1(delta * (alpha - 1.0)) / (alpha - 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::gradient;

    #[track_caller]
    fn check(name: FDivergenceName, alpha: f64, value: f64, slope: f64) {
        let divergence = FDivergence::named(name, Some(alpha)).unwrap();
        let (got, grad) = gradient(&[2f64.ln()], |d| divergence.derivative(d));
        assert!((got - value).abs() < 1e-12, "{name}: {got}");
        assert!((grad[0] - slope).abs() < 1e-12, "{name}: {grad:?}");
        // A policy equal to its reference has no reward.
        let (zero, slope) = gradient(&[0.0], |d| divergence.derivative(d));
        assert!(zero.abs() < 1e-12 && slope[0] > 0.0, "{name}: {zero}");
    }

    #[test]
    fn at_twice_the_reference() {
        let ln2 = 2f64.ln();
        check(FDivergenceName::ReverseKl, 0.0, ln2, 1.0);
        check(FDivergenceName::ForwardKl, 0.0, 0.5, 0.5);
        check(
            FDivergenceName::JsDivergence,
            0.0,
            (4.0f64 / 3.0).ln(),
            1.0 / 3.0,
        );
        check(FDivergenceName::AlphaDivergence, 1.0, ln2, 1.0);
        check(FDivergenceName::AlphaDivergence, 2.0, 1.0, 2.0);
        check(FDivergenceName::AlphaDivergence, 0.0, 0.5, 0.5);
    }

    #[test]
    fn only_the_alpha_divergence_needs_alpha() {
        for name in FDivergenceName::ALL {
            let needs_alpha = *name == FDivergenceName::AlphaDivergence;
            for alpha in [None, Some(f64::NAN)] {
                assert_eq!(FDivergence::named(*name, alpha).is_err(), needs_alpha);
            }
            assert!(FDivergence::named(*name, Some(0.5)).is_ok());
        }
    }
}
