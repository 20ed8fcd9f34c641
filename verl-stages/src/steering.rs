//! Fixed and adaptive coefficients: of the KL penalty, in the reward or in the loss, and of the entropy bonus.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::entropy_control::{EntropyController, EntropySteering};
use verl_algos::kl_control::KlController;
use verl_words::stage::{ConfigError, StageError};

use crate::settings::refusal;

/// Whether a coefficient moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// It stays at its setting.
    #[default]
    Fixed,
    /// It starts at its setting, then follows the KL of each step.
    Adaptive,
}

/// How the coefficient of a KL penalty moves: β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) after each step of n
/// responses.
///
/// # Source
/// Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KlControl {
    /// `fixed` or `adaptive`.
    pub kind: Control,
    /// Target KL, a mean per token (nats); only for `adaptive`, which has no default.
    pub target: Option<f64>,
    /// How slowly the coefficient moves (responses); only for `adaptive`, which has no default.
    pub horizon: Option<f64>,
}

impl KlControl {
    /// The controller of a coefficient that starts at `coef`, in steps of up to `rows` responses.
    ///
    /// # Errors
    /// Adaptive without target or horizon, or with a horizon too short for a step; fixed with either; a coefficient that
    /// could never move.
    pub(crate) fn controller(
        &self,
        coef: f64,
        rows: usize,
    ) -> Result<KlController, Vec<ConfigError>> {
        let named = |error| {
            let fault = refusal("kl_control", &error);
            let setting = match fault.setting.as_str() {
                "target_kl" => "kl_control.target".to_owned(),
                "horizon" => "kl_control.horizon".to_owned(),
                _ => fault.setting.clone(),
            };
            vec![ConfigError { setting, ..fault }]
        };
        let mut faults = Vec::new();
        let given = [
            ("kl_control.target", self.target, "0.1"),
            ("kl_control.horizon", self.horizon, "10000"),
        ];
        if self.kind == Control::Fixed {
            let set = given.into_iter().filter(|(_, value, _)| value.is_some());
            faults.extend(set.map(|(setting, _, _)| {
                ConfigError::new(
                    setting,
                    "has no effect on a fixed coefficient",
                    "remove it, or set `kind = \"adaptive\"`",
                )
            }));
            if !faults.is_empty() {
                return Err(faults);
            }
            return KlController::fixed(coef).map_err(named);
        }
        let missing = given.into_iter().filter(|(_, value, _)| value.is_none());
        faults.extend(missing.map(|(setting, _, usual)| {
            ConfigError::new(
                setting,
                "is not set, but an adaptive coefficient needs it and there is no default",
                format!("set it, for example to {usual}, or set `kind = \"fixed\"`"),
            )
        }));
        if coef == 0.0 {
            faults.push(ConfigError::new(
                "kl_coef",
                "is 0, but an adaptive coefficient changes by a factor and would stay 0 forever",
                "set it to the initial coefficient, for example 0.001, or set `kind = \"fixed\"`",
            ));
        }
        let (Some(target), Some(horizon), true) = (self.target, self.horizon, faults.is_empty())
        else {
            return Err(faults);
        };
        let controller = KlController::adaptive(coef, target, horizon).map_err(named)?;
        // A trial update reports now what would fail after the first step.
        let mut trial = controller.clone();
        trial.update(target, rows).map_err(named)?;
        Ok(controller)
    }
}

/// How the coefficient of the entropy bonus moves: after each optimiser step it rises by `step` if the entropy is at most
/// `target`, and falls by `step` otherwise. There is no bonus while the entropy is above `target`.
///
/// # Source
/// He et al. 2025 (Skywork Open Reasoner 1), arXiv:2505.22312.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EntropyControl {
    /// Mean entropy per token to stay above (nats).
    pub target: f64,
    /// Change of the coefficient per optimiser step.
    pub step: f64,
    /// Smallest coefficient.
    pub min: f64,
    /// Largest coefficient.
    pub max: f64,
}

impl Default for EntropyControl {
    fn default() -> Self {
        let EntropySteering {
            target,
            step,
            min,
            max,
        } = EntropySteering::default();
        EntropyControl {
            target,
            step,
            min,
            max,
        }
    }
}

impl EntropyControl {
    /// The controller of a coefficient that starts at `coef`.
    ///
    /// # Errors
    /// Bounds out of order; a coefficient outside them.
    pub(crate) fn controller(&self, coef: f64) -> Result<EntropyController, ConfigError> {
        let steering = EntropySteering {
            target: self.target,
            step: self.step,
            min: self.min,
            max: self.max,
        };
        EntropyController::adaptive(coef, steering).map_err(|error| {
            let fault = refusal("entropy_control", &error);
            let setting = match fault.setting.as_str() {
                "entropy_target" => "entropy_control.target",
                "entropy_coef_delta" => "entropy_control.step",
                "entropy_coef_min" => "entropy_control.min",
                "entropy_coef_max" => "entropy_control.max",
                other => other,
            };
            ConfigError {
                setting: setting.to_owned(),
                ..fault
            }
        })
    }
}

/// The KL coefficient of a stage that processes a step in several calls: it is constant within a step, and is updated
/// from the mean KL of the whole step when the next one begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct KlSteering {
    controller: KlController,
    step: u64,
    sum: f64,
    rows: usize,
}

impl KlSteering {
    pub(crate) fn new(controller: KlController) -> Self {
        KlSteering {
            controller,
            step: 0,
            sum: 0.0,
            rows: 0,
        }
    }

    /// The coefficient in `step`.
    ///
    /// # Errors
    /// The KL of the previous step is not finite.
    pub(crate) fn coef(&mut self, step: u64) -> Result<f64, StageError> {
        if step != self.step && self.rows > 0 {
            let mean = self.sum / self.rows as f64;
            self.controller
                .update(mean, self.rows)
                .map_err(StageError::failed)?;
            (self.sum, self.rows) = (0.0, 0);
        }
        self.step = step;
        Ok(self.controller.coef())
    }

    /// Records the KL of a response, a mean per token.
    pub(crate) fn measured(&mut self, kl: f64) {
        self.sum += kl;
        self.rows += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adaptive(target: Option<f64>, horizon: Option<f64>) -> KlControl {
        KlControl {
            kind: Control::Adaptive,
            target,
            horizon,
        }
    }

    #[track_caller]
    fn check_refused(control: &KlControl, coef: f64, rows: usize, settings: &[&str]) {
        let faults = control.controller(coef, rows).unwrap_err();
        let found: Vec<&str> = faults.iter().map(|fault| fault.setting.as_str()).collect();
        assert_eq!(found, settings, "{faults:?}");
    }

    #[test]
    fn an_adaptive_coefficient_needs_target_and_horizon() {
        let both = ["kl_control.target", "kl_control.horizon"];
        check_refused(&adaptive(None, None), 0.1, 8, &both);
        check_refused(&adaptive(Some(0.1), None), 0.1, 8, &both[1..]);
        check_refused(&adaptive(None, Some(9.0)), 0.1, 8, &both[..1]);
        check_refused(&adaptive(Some(0.0), Some(9.0)), 0.1, 8, &both[..1]);
        check_refused(&adaptive(Some(0.1), Some(-1.0)), 0.1, 8, &both[1..]);
        // A step of more than five horizons could turn the coefficient negative.
        check_refused(&adaptive(Some(0.1), Some(10.0)), 0.1, 51, &both[1..]);
        check_refused(&adaptive(Some(0.1), Some(10.0)), 0.0, 8, &["kl_coef"]);
        assert!(adaptive(Some(0.1), Some(10.0)).controller(0.1, 50).is_ok());
        let fixed = KlControl {
            target: Some(0.1),
            horizon: Some(10.0),
            ..KlControl::default()
        };
        check_refused(&fixed, 0.1, 8, &both);
        let plain = KlControl::default().controller(0.25, 8).unwrap();
        assert_eq!(plain.coef(), 0.25);
    }

    #[test]
    fn errors_of_the_entropy_coefficient_name_their_settings() {
        let refused = |control: EntropyControl, coef| control.controller(coef).unwrap_err().setting;
        let control = EntropyControl::default;
        assert_eq!(
            refused(
                EntropyControl {
                    max: -1.0,
                    ..control()
                },
                0.0
            ),
            "entropy_control.max"
        );
        assert_eq!(
            refused(
                EntropyControl {
                    step: 0.0,
                    ..control()
                },
                0.0
            ),
            "entropy_control.step"
        );
        assert_eq!(refused(control(), 2.0), "entropy_coef");
        assert_eq!(control().controller(0.01).unwrap().coef(), 0.01);
    }

    #[test]
    fn a_step_in_several_calls_moves_the_coefficient_once() {
        let control = adaptive(Some(0.1), Some(100.0));
        let mut steering = KlSteering::new(control.controller(0.5, 8).unwrap());
        for kl in [0.3, 0.1] {
            assert_eq!(steering.coef(1).unwrap(), 0.5);
            steering.measured(kl);
        }
        // A mean of 0.2 is 100 % above the target, of which 20 % count, over 2 of 100 responses.
        let next = 0.5 * (1.0 + 0.2 * 2.0 / 100.0);
        assert!((steering.coef(2).unwrap() - next).abs() < 1e-15);
        assert!((steering.coef(2).unwrap() - next).abs() < 1e-15);
        // Nothing was measured in step 2.
        assert!((steering.coef(3).unwrap() - next).abs() < 1e-15);
        steering.measured(f64::NAN);
        assert!(steering.coef(4).is_err());
    }
}
