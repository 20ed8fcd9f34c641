//! Estimators of KL(π‖π_ref) from the log-probs of sampled tokens, in plain numbers and as tensors.
//!
//! With δ = ℓ − ℓ_ref of a token sampled from π:
//!
//! | name | value | |
//! |---|---|---|
//! | `k1`, `kl` | δ | unbiased, may be negative |
//! | `abs` | \|δ\| | |
//! | `k2`, `mse` | δ²/2 | its gradient is an unbiased gradient of the KL |
//! | `k3`, `low_var_kl` | e^x − x − 1, x = clip(−δ, ±20), result clip(·, ±10) | unbiased up to the clamps, never negative |
//! | `k3_unclamped` | e^{−δ} + δ − 1 | TRL's form |
//!
//! A `+` after the name keeps the value and takes the gradient of k2 (straight-through).
//!
//! Source: Schulman 2020, "Approximating KL divergence"; verl `kl_penalty`.

use burn::tensor::Tensor;

use crate::error::{AlgoError, check_finite, check_kl_coef};
use crate::functions::exp;
use crate::masked;
use crate::names::names;
use crate::ragged::Ragged;

/// Bound of the exponent of k3: sums with e^20 are still accurate in f32.
const K3_EXPONENT: f64 = 20.0;
/// Bound of the value of k3, so that no single token dominates a batch. Beyond it the gradient is 0.
const K3_VALUE: f64 = 10.0;

/// The value of an estimator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KlValue {
    /// δ.
    K1,
    /// |δ|.
    Abs,
    /// δ²/2.
    K2,
    /// e^{−δ} + δ − 1 with verl's clamps.
    K3,
    /// e^{−δ} + δ − 1.
    K3Unclamped,
}

/// An estimator of KL(π‖π_ref), a function of δ = ℓ − ℓ_ref at a token of π; nats.
///
/// # Shapes
/// δ: a number, or `[M]`, one per token; the result has the same shape.
/// # Differences
/// k3 has verl's clamps: −δ to ±20 and the value to ±10, beyond which its gradient is 0. TRL has none (`k3_unclamped`);
/// OpenRLHF clamps every estimator to ±10. verl's `full` needs complete distributions and is not available, as in verl.
/// # Source
/// Schulman 2020, "Approximating KL divergence"; the names and `+` are verl's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KlEstimator {
    /// Its value.
    pub value: KlValue,
    /// Whether to use the gradient of k2 instead of its own.
    pub straight_through: bool,
}

names! {
    /// The name of an estimator of the KL to the reference.
    KlEstimatorName, "KL estimator" {
        /// verl's name of `k1`.
        Kl = "kl",
        /// verl's name of `k1+`.
        KlPlus = "kl+",
        /// δ = ℓ − ℓ_ref: unbiased, may be negative.
        K1 = "k1",
        /// The value of `k1` with the gradient of `k2`.
        K1Plus = "k1+",
        /// |δ|.
        Abs = "abs",
        /// The value of `abs` with the gradient of `k2`.
        AbsPlus = "abs+",
        /// verl's name of `k2`.
        Mse = "mse",
        /// verl's name of `k2+`.
        MsePlus = "mse+",
        /// δ²/2: its gradient is an unbiased gradient of the KL.
        K2 = "k2",
        /// The same as `k2`.
        K2Plus = "k2+",
        /// verl's name of `k3`.
        LowVarKl = "low_var_kl",
        /// verl's name of `k3+`.
        LowVarKlPlus = "low_var_kl+",
        /// e^{−δ} + δ − 1 with verl's clamps: unbiased up to these, never negative.
        K3 = "k3",
        /// The value of `k3` with the gradient of `k2`.
        K3Plus = "k3+",
        /// e^{−δ} + δ − 1: unbiased, never negative (TRL).
        K3Unclamped = "k3_unclamped",
        /// The value of `k3_unclamped` with the gradient of `k2`.
        K3UnclampedPlus = "k3_unclamped+",
    }
}

impl From<KlEstimatorName> for KlEstimator {
    fn from(name: KlEstimatorName) -> KlEstimator {
        use KlEstimatorName as Name;
        let (value, straight_through) = match name {
            Name::Kl | Name::K1 => (KlValue::K1, false),
            Name::KlPlus | Name::K1Plus => (KlValue::K1, true),
            Name::Abs => (KlValue::Abs, false),
            Name::AbsPlus => (KlValue::Abs, true),
            Name::Mse | Name::K2 => (KlValue::K2, false),
            Name::MsePlus | Name::K2Plus => (KlValue::K2, true),
            Name::LowVarKl | Name::K3 => (KlValue::K3, false),
            Name::LowVarKlPlus | Name::K3Plus => (KlValue::K3, true),
            Name::K3Unclamped => (KlValue::K3Unclamped, false),
            Name::K3UnclampedPlus => (KlValue::K3Unclamped, true),
        };
        KlEstimator {
            value,
            straight_through,
        }
    }
}

impl KlEstimator {
    /// The k3 estimator with its own gradient.
    pub const K3: KlEstimator = KlEstimator {
        value: KlValue::K3,
        straight_through: false,
    };

    /// Value for one token, nats.
    pub fn value(&self, log_prob: f64, ref_log_prob: f64) -> f64 {
        let delta = log_prob - ref_log_prob;
        match self.value {
            KlValue::K1 => delta,
            KlValue::Abs => delta.abs(),
            KlValue::K2 => delta * delta / 2.0,
            KlValue::K3 => {
                let x = (-delta).clamp(-K3_EXPONENT, K3_EXPONENT);
                (libm::expm1(x) - x).clamp(-K3_VALUE, K3_VALUE)
            }
            KlValue::K3Unclamped => libm::expm1(-delta) + delta,
        }
    }

    /// Values for packed tokens, differentiable in `log_probs`.
    ///
    /// # Shapes
    /// `log_probs`, `ref_log_probs`, result: `[N]`
    pub fn tensor(&self, log_probs: Tensor<1>, ref_log_probs: Tensor<1>) -> Tensor<1> {
        let delta = log_probs - ref_log_probs;
        let value = match self.value {
            KlValue::K1 => delta.clone(),
            KlValue::Abs => delta.clone().abs(),
            KlValue::K2 => half_square(delta.clone()),
            KlValue::K3 => {
                let x = delta.clone().neg().clamp(-K3_EXPONENT, K3_EXPONENT);
                (exp(x.clone()) - x - 1.0).clamp(-K3_VALUE, K3_VALUE)
            }
            KlValue::K3Unclamped => exp(delta.clone().neg()) + delta.clone() - 1.0,
        };
        if !self.straight_through {
            return value;
        }
        let k2 = half_square(delta);
        k2.clone() - k2.detach() + value.detach()
    }
}

fn half_square(delta: Tensor<1>) -> Tensor<1> {
    delta.clone() * delta * 0.5
}

/// Rewards after the KL penalty.
#[derive(Debug, Clone, PartialEq)]
pub struct KlReward {
    /// Score − coefficient · KL on action tokens, 0 on observations. `[B, T~]`
    pub token_level_rewards: Ragged<f64>,
    /// Mean over the non-empty rows of each row's mean KL, nats; input of a controller.
    pub reported_kl: f64,
    /// Number of non-empty rows.
    pub num_sequences: usize,
}

/// Subtracts coefficient · KL(π_old‖π_ref) from each action token's score.
///
/// # Shapes
/// `token_level_scores`, `old_log_probs`, `ref_log_probs`, `actions`: `[B, T~]`
/// # Errors
/// Rows whose lengths differ from those of `actions`; a log-prob or score of an action token that is not finite; a
/// coefficient that is negative or not finite.
/// # Differences
/// verl counts rows without action tokens in the reported KL, as 0; here they are excluded. NaN at an observation has
/// no effect.
/// # Source
/// Ziegler et al. 2019, arXiv:1909.08593; verl `apply_kl_penalty`.
pub fn kl_in_reward(
    token_level_scores: &Ragged<f64>,
    old_log_probs: &Ragged<f64>,
    ref_log_probs: &Ragged<f64>,
    actions: &Ragged<bool>,
    estimator: KlEstimator,
    coef: f64,
) -> Result<KlReward, AlgoError> {
    check_kl_coef(coef)?;
    let scores = token_level_scores.select("token_level_scores", actions)?;
    let old = old_log_probs.select("old_log_probs", actions)?;
    let reference = ref_log_probs.select("ref_log_probs", actions)?;
    check_finite("token_level_scores", &scores)?;
    check_finite("old_log_probs", &old)?;
    check_finite("ref_log_probs", &reference)?;
    let kl: Vec<f64> = old
        .iter()
        .zip(&reference)
        .map(|(&l, &r)| estimator.value(l, r))
        .collect();
    let rewards: Vec<f64> = scores.iter().zip(&kl).map(|(s, k)| s - coef * k).collect();
    let means = masked::row_means(&kl, &actions.packed_rows(), actions.num_rows())?;
    let num_sequences = actions.counts().iter().filter(|n| **n > 0).count();
    Ok(KlReward {
        token_level_rewards: actions.scatter(&rewards)?,
        reported_kl: masked::sum(&means) / num_sequences.max(1) as f64,
        num_sequences,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{gradient, read};

    #[track_caller]
    fn check(name: KlEstimatorName, delta: f64, expected: f64) {
        let estimator = KlEstimator::from(name);
        let value = estimator.value(delta - 1.0, -1.0);
        assert!((value - expected).abs() < 1e-5, "{name}({delta}) = {value}");
        let (values, _) = gradient(&[delta - 1.0], |l| {
            let reference = l.clone().detach() * 0.0 - 1.0;
            estimator.tensor(l, reference)
        });
        assert!(
            (values - expected).abs() < 1e-5,
            "{name}({delta}) = {values}"
        );
    }

    #[test]
    fn by_hand() {
        check(KlEstimatorName::K1, -5.0, -5.0);
        check(KlEstimatorName::Abs, -5.0, 5.0);
        check(KlEstimatorName::K2, 5.0, 12.5);
        check(KlEstimatorName::K3, 0.1, 0.004837);
        check(KlEstimatorName::K3, -0.1, 0.005171);
        check(KlEstimatorName::K3, 1.0, 0.367879);
        check(KlEstimatorName::K3, -1.0, 0.718282);
        check(KlEstimatorName::K3, 5.0, 4.006738);
        check(KlEstimatorName::K3, -5.0, 10.0);
        check(KlEstimatorName::K3, 30.0, 10.0);
        check(KlEstimatorName::K3, -30.0, 10.0);
        check(KlEstimatorName::K3Unclamped, -5.0, 142.413159);
        check(KlEstimatorName::K3Plus, 1.0, 0.367879);
    }

    #[test]
    fn a_plus_takes_the_gradient_of_k2() {
        for name in ["k1+", "abs+", "k2+", "k3+", "k3_unclamped+", "k2"] {
            let estimator = KlEstimator::from(name.parse::<KlEstimatorName>().unwrap());
            let (_, grad) = gradient(&[-0.5, -3.0], |l| {
                let reference = l.clone().detach() * 0.0 - 1.0;
                estimator.tensor(l, reference)
            });
            assert_eq!(grad, [0.5, -2.0], "{name}");
        }
    }

    #[test]
    fn k3_has_no_gradient_beyond_its_clamp() {
        let (_, grad) = gradient(&[-6.0, -30.0, 30.0], |l| {
            let reference = l.clone().detach() * 0.0;
            KlEstimator::K3.tensor(l, reference)
        });
        assert_eq!(grad, [0.0, 0.0, 0.0]);
    }

    #[test]
    fn names_with_a_plus_are_straight_through() {
        for name in KlEstimatorName::ALL {
            let straight_through = KlEstimator::from(*name).straight_through;
            assert_eq!(straight_through, name.as_str().ends_with('+'), "{name}");
        }
    }

    #[test]
    fn the_penalty_is_subtracted_from_each_action() {
        let actions = Ragged::<bool>::from_rows([vec![true, false, true], vec![], vec![true]]);
        let scores = Ragged::<f64>::from_rows([vec![0.0, f64::NAN, 1.0], vec![], vec![0.5]]);
        let old = Ragged::<f64>::from_rows([vec![-1.0, f64::NAN, -1.0], vec![], vec![-1.0]]);
        let reference = Ragged::<f64>::from_rows([vec![-2.0, 0.0, -1.5], vec![], vec![-0.5]]);
        let run = |coef| {
            let k1 = KlEstimatorName::K1.into();
            kl_in_reward(&scores, &old, &reference, &actions, k1, coef)
        };
        let got = run(0.5).unwrap();
        assert_eq!(got.token_level_rewards.values(), [-0.5, 0.0, 0.75, 0.75]);
        assert_eq!((got.reported_kl, got.num_sequences), (0.125, 2));
        assert!(run(f64::NAN).is_err());
        assert!(run(-1.0).is_err());
    }

    #[test]
    fn the_tensor_form_is_the_plain_form() {
        let deltas = [-3.0, -0.2, 0.0, 0.7, 2.0];
        for name in KlEstimatorName::ALL {
            let estimator = KlEstimator::from(*name);
            let log_probs = crate::tensor::test::constant(&deltas);
            let zeros = crate::tensor::test::constant(&[0.0; 5]);
            let tensor = read(estimator.tensor(log_probs, zeros));
            for (delta, value) in deltas.iter().zip(tensor) {
                assert!((estimator.value(*delta, 0.0) - value).abs() < 1e-12);
            }
        }
    }
}
