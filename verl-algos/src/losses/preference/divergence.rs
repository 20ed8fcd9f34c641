//! Divergences from the reference policy other than the reverse KL.

use burn::tensor::Tensor;

use super::log_space::{exp_m1, log_sigmoid};
use crate::error::{AlgoError, check_setting};

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

impl FDivergence {
    /// The names of all divergences.
    pub const NAMES: &'static [&'static str] = &[
        "alpha_divergence",
        "forward_kl",
        "js_divergence",
        "reverse_kl",
    ];

    /// The divergence with this name; `alpha` is used only by `alpha_divergence`.
    ///
    /// # Errors
    /// An unknown name; `alpha_divergence` without its `alpha`, or with one that is not finite.
    pub fn parse(name: &str, alpha: Option<f64>) -> Result<FDivergence, AlgoError> {
        match name {
            "reverse_kl" => Ok(FDivergence::ReverseKl),
            "forward_kl" => Ok(FDivergence::ForwardKl),
            "js_divergence" => Ok(FDivergence::JensenShannon),
            "alpha_divergence" => {
                let alpha = alpha.ok_or(AlgoError::MissingSetting {
                    algorithm: "alpha_divergence",
                    setting: "alpha",
                    reason: "1 is the reverse KL, 2 is Pearson's χ², and values between are a choice",
                })?;
                let divergence = FDivergence::Alpha { alpha };
                divergence.check()?;
                Ok(divergence)
            }
            _ => Err(AlgoError::UnknownName {
                what: "divergence",
                name: name.to_owned(),
                known: FDivergence::NAMES.to_vec(),
            }),
        }
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
    fn check(name: &str, alpha: f64, value: f64, slope: f64) {
        let divergence = FDivergence::parse(name, Some(alpha)).unwrap();
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
        check("reverse_kl", 0.0, ln2, 1.0);
        check("forward_kl", 0.0, 0.5, 0.5);
        check("js_divergence", 0.0, (4.0f64 / 3.0).ln(), 1.0 / 3.0);
        check("alpha_divergence", 1.0, ln2, 1.0);
        check("alpha_divergence", 2.0, 1.0, 2.0);
        check("alpha_divergence", 0.0, 0.5, 0.5);
    }

    #[test]
    fn rejects_unknown_names() {
        assert!(FDivergence::parse("alpha_divergence", None).is_err());
        assert!(FDivergence::parse("alpha_divergence", Some(f64::NAN)).is_err());
        let error = FDivergence::parse("kl", None).unwrap_err();
        assert!(error.to_string().contains("reverse_kl"), "{error}");
        for name in FDivergence::NAMES {
            assert!(FDivergence::parse(name, Some(0.5)).is_ok());
        }
    }
}
