//! The coefficient of the KL penalty, fixed or steered towards a target.

use crate::error::{AlgoError, check_kl_coef, check_setting};
use serde::{Deserialize, Serialize};

/// Largest relative error that the adaptive controller reacts to.
const ERROR_BOUND: f64 = 0.2;

/// Decides the coefficient β of the KL penalty.
///
/// Adaptive: β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) after each batch of n sequences.
///
/// # Shapes
/// One KL and a number of sequences per step.
/// # Differences
/// In verl a KL that is NaN stays in β, and β turns negative once n exceeds five horizons; both are rejected here. n
/// counts sequences, as in verl and in the first TRL; the KL is a mean over a row's tokens as in verl, whereas Ziegler
/// et al. sum over them.
/// # Source
/// Ziegler et al. 2019, arXiv:1909.08593, section 2.2; verl `AdaptiveKLController`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KlController {
    coef: f64,
    target: Option<Target>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Target {
    kl: f64,
    horizon: f64,
}

impl KlController {
    /// A constant coefficient.
    ///
    /// # Errors
    /// A coefficient that is negative or not finite.
    pub fn fixed(coef: f64) -> Result<KlController, AlgoError> {
        check_kl_coef(coef)?;
        Ok(KlController { coef, target: None })
    }

    /// A coefficient that follows the measured KL.
    ///
    /// # Errors
    /// A target or horizon (in sequences) that is not positive.
    pub fn adaptive(coef: f64, target_kl: f64, horizon: f64) -> Result<KlController, AlgoError> {
        let positive = |x: f64| x > 0.0 && x.is_finite();
        check_setting(
            "target_kl",
            target_kl,
            positive(target_kl),
            "it must be positive",
        )?;
        check_setting("horizon", horizon, positive(horizon), "it must be positive")?;
        let mut controller = KlController::fixed(coef)?;
        controller.target = Some(Target {
            kl: target_kl,
            horizon,
        });
        Ok(controller)
    }

    /// The current coefficient.
    pub fn coef(&self) -> f64 {
        self.coef
    }

    /// Records the KL (nats) of a batch of `num_sequences`.
    ///
    /// # Errors
    /// A KL that is not finite, which would stay in the coefficient forever; so many sequences that the coefficient
    /// could become negative (more than 5 horizons).
    pub fn update(&mut self, kl: f64, num_sequences: usize) -> Result<(), AlgoError> {
        let Some(target) = &self.target else {
            return Ok(());
        };
        if !kl.is_finite() {
            return Err(AlgoError::NonFinite {
                argument: "kl",
                position: 0,
                value: kl,
            });
        }
        let steps = num_sequences as f64 / target.horizon;
        check_setting(
            "horizon",
            target.horizon,
            steps * ERROR_BOUND <= 1.0,
            "a batch of more than 5 horizons could turn the coefficient negative",
        )?;
        let error = (kl / target.kl - 1.0).clamp(-ERROR_BOUND, ERROR_BOUND);
        self.coef *= 1.0 + error * steps;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let mut controller = KlController::adaptive(0.001, 0.1, 10_000.0).unwrap();
        let expected = [0.001, 0.00100512, 0.0009999738, 0.0009999738, 0.0010050937];
        for (kl, coef) in [0.1, 0.2, 0.05, 0.1, 1.0].into_iter().zip(expected) {
            controller.update(kl, 256).unwrap();
            assert!((controller.coef() - coef).abs() < 1e-10);
        }
    }

    #[test]
    fn a_rejected_update_changes_nothing() {
        let mut controller = KlController::adaptive(0.1, 0.1, 10.0).unwrap();
        assert!(controller.update(f64::NAN, 4).is_err());
        assert!(controller.update(0.0, 51).is_err());
        assert_eq!(controller.coef(), 0.1);
        assert!(KlController::adaptive(0.1, 0.0, 1.0).is_err());
        assert!(KlController::adaptive(0.1, 0.1, 0.0).is_err());
        assert!(KlController::fixed(f64::NAN).is_err());
    }
}
