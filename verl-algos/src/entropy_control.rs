//! The coefficient of the entropy bonus, fixed or steered towards a target.

use crate::error::{AlgoError, check_finite, check_setting};
use serde::{Deserialize, Serialize};

/// Decides the coefficient c of the entropy bonus.
///
/// Adaptive: after each optimiser step with mean entropy H, c ← min(c + Δ, max) if H ≤ target, else max(c − Δ, min).
/// The bonus is applied only while the last entropy is at most the target: above it the entropy needs no increase.
///
/// # Shapes
/// One entropy per step.
/// # Differences
/// None known: the step of 0.005 and the target of 0.2 are TRL's too.
/// # Source
/// TRL `use_adaptive_entropy`; He et al. 2025 (Skywork Open Reasoner 1), arXiv:2505.22312.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EntropyController {
    coef: f64,
    steering: Option<EntropySteering>,
    last: Option<f64>,
}

/// Parameters of an adaptive coefficient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EntropySteering {
    /// Target of the mean entropy per token, nats; the controller tries to keep the entropy above it.
    pub target: f64,
    /// Δ > 0, the change per step.
    pub step: f64,
    /// Smallest coefficient, at least 0.
    pub min: f64,
    /// Largest coefficient.
    pub max: f64,
}

impl Default for EntropySteering {
    fn default() -> EntropySteering {
        EntropySteering {
            target: 0.2,
            step: 0.005,
            min: 0.0,
            max: 1.0,
        }
    }
}

impl EntropyController {
    /// A constant coefficient; 0 for none, negative to lower the entropy.
    ///
    /// # Errors
    /// A coefficient that is not finite.
    pub fn fixed(coef: f64) -> Result<EntropyController, AlgoError> {
        check_setting("entropy_coef", coef, coef.is_finite(), "it must be finite")?;
        Ok(EntropyController {
            coef,
            steering: None,
            last: None,
        })
    }

    /// A coefficient that follows the measured entropy.
    ///
    /// # Errors
    /// Bounds out of order, a coefficient outside them, a step that is not positive, a target that is not finite.
    pub fn adaptive(coef: f64, steering: EntropySteering) -> Result<EntropyController, AlgoError> {
        let EntropySteering {
            target,
            step,
            min,
            max,
        } = steering;
        check_setting(
            "entropy_target",
            target,
            target.is_finite(),
            "it must be finite",
        )?;
        let positive = step > 0.0 && step.is_finite();
        check_setting("entropy_coef_delta", step, positive, "it must be positive")?;
        check_setting("entropy_coef_min", min, min >= 0.0, "it must be at least 0")?;
        let ordered = max >= min && max.is_finite();
        let rule = "it must be finite and at least entropy_coef_min";
        check_setting("entropy_coef_max", max, ordered, rule)?;
        let inside = (min..=max).contains(&coef);
        let rule = "it must lie between entropy_coef_min and entropy_coef_max";
        check_setting("entropy_coef", coef, inside, rule)?;
        Ok(EntropyController {
            coef,
            steering: Some(steering),
            last: None,
        })
    }

    /// The coefficient to apply now: the bonus is added to the loss with −coef. 0 while the last entropy is above the
    /// target.
    pub fn coef(&self) -> f64 {
        match (self.steering, self.last) {
            (Some(steering), Some(last)) if last > steering.target => 0.0,
            _ => self.coef,
        }
    }

    /// Records the mean entropy (nats) of an optimiser step's tokens.
    ///
    /// # Errors
    /// An entropy that is not finite; in that case nothing changes.
    pub fn update(&mut self, entropy: f64) -> Result<(), AlgoError> {
        let Some(steering) = self.steering else {
            return Ok(());
        };
        check_finite("entropy", &[entropy])?;
        self.coef = if entropy <= steering.target {
            (self.coef + steering.step).min(steering.max)
        } else {
            (self.coef - steering.step).max(steering.min)
        };
        self.last = Some(entropy);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coefficient_follows_the_entropy() {
        let steering = EntropySteering {
            max: 0.012,
            ..EntropySteering::default()
        };
        let mut controller = EntropyController::adaptive(0.0, steering).unwrap();
        // Entropy, then the coefficient that is applied: 0 while it is above the target.
        let steps = [
            (0.2, 0.005),
            (0.1, 0.010),
            (0.1, 0.012),
            (0.3, 0.0),
            (0.1, 0.012),
            (0.3, 0.0),
            (0.3, 0.0),
            (0.3, 0.0),
            (0.1, 0.005),
        ];
        assert_eq!(controller.coef(), 0.0);
        for (entropy, coef) in steps {
            controller.update(entropy).unwrap();
            assert!((controller.coef() - coef).abs() < 1e-12, "{controller:?}");
        }
    }

    #[test]
    fn a_fixed_coefficient_stays() {
        let mut controller = EntropyController::fixed(0.01).unwrap();
        controller.update(5.0).unwrap();
        assert_eq!(controller.coef(), 0.01);
    }

    #[test]
    fn rejects_invalid_settings() {
        let adaptive = EntropyController::adaptive;
        let plain = EntropySteering::default();
        assert!(EntropyController::fixed(f64::NAN).is_err());
        assert!(adaptive(2.0, plain).is_err());
        assert!(adaptive(0.0, EntropySteering { step: 0.0, ..plain }).is_err());
        assert!(adaptive(0.0, EntropySteering { min: -0.1, ..plain }).is_err());
        let target = f64::NAN;
        assert!(adaptive(0.0, EntropySteering { target, ..plain }).is_err());
        let mut controller = adaptive(0.1, plain).unwrap();
        assert!(controller.update(f64::NAN).is_err());
        assert_eq!(controller.coef(), 0.1);
    }
}
