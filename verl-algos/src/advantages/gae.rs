//! Generalised advantage estimation.

use super::{AdvantageEstimator, AdvantageInputs, Advantages, EstimatorInput, backward_scan};
use crate::cut::CutUnit;
use crate::error::{AlgoError, check_setting};
use crate::masked;

/// Â_t = δ_t + γλ Â_{t+1}, δ_t = r_t + γ V_{t+1} − V_t; returns Â + V. Advantages are whitened over the batch unless
/// `whiten` is off; returns never are.
///
/// Observations are skipped, as if they did not exist. After the last action token V and Â are 0.
///
/// # Shapes
/// Rewards, values, advantages and returns: `[B, T~]`, 0 at observations.
/// # Errors
/// No rewards or values; whitening of fewer than two action tokens.
/// # Differences
/// Values at observations are ignored, so that a NaN there cannot spread; verl carries it as m·x + (1 − m)·y, and
/// repeats the next whitened advantage at masked slots. TRL's PPO takes the value of slot t + 1 regardless of its mask,
/// and sets advantages of padding to 0 after whitening; OpenRLHF multiplies values and rewards by the mask and scans
/// all slots.
/// # Source
/// Schulman et al. 2016, arXiv:1506.02438, eq. 16; the whitening is verl's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gae {
    /// Discount γ, in [0, 1].
    pub gamma: f64,
    /// λ, in [0, 1].
    pub gae_lambda: f64,
    /// Whether advantages get mean 0 and variance 1.
    pub whiten: bool,
}

impl Default for Gae {
    /// γ = λ = 1, whitened, as in verl.
    fn default() -> Gae {
        Gae {
            gamma: 1.0,
            gae_lambda: 1.0,
            whiten: true,
        }
    }
}

impl AdvantageEstimator for Gae {
    fn name(&self) -> &'static str {
        "gae"
    }

    fn cut_unit(&self) -> CutUnit {
        if self.whiten {
            CutUnit::MiniBatch
        } else {
            CutUnit::Row
        }
    }

    fn inputs(&self) -> &'static [EstimatorInput] {
        &[EstimatorInput::TokenLevelRewards, EstimatorInput::Values]
    }

    fn check(&self) -> Result<(), AlgoError> {
        let unit = |x: f64| (0.0..=1.0).contains(&x);
        let rule = "it must lie in [0, 1]";
        check_setting("gamma", self.gamma, unit(self.gamma), rule)?;
        check_setting("gae_lambda", self.gae_lambda, unit(self.gae_lambda), rule)
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        self.check()?;
        let rewards = inputs.rewards(self.name())?;
        let values = inputs.packed(self.name(), "values", inputs.values)?;
        let rows = inputs.actions.packed_rows();
        let scan = backward_scan(&rows, (0.0, 0.0), |t, (next_value, next)| {
            let delta = rewards[t] + self.gamma * next_value - values[t];
            (values[t], delta + self.gamma * self.gae_lambda * next)
        });
        let raw: Vec<f64> = scan.into_iter().map(|(_, advantage)| advantage).collect();
        let returns: Vec<f64> = raw.iter().zip(&values).map(|(a, v)| a + v).collect();
        let advantages = if self.whiten {
            masked::whiten(&raw)?
        } else {
            raw
        };
        Ok(Advantages {
            advantages: inputs.actions.scatter(&advantages)?,
            returns: Some(inputs.actions.scatter(&returns)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::test::check;
    use crate::ragged::Ragged;

    #[test]
    fn by_hand() {
        let actions = Ragged::<bool>::from_rows([vec![true, false, true, true], vec![true, true]]);
        let rewards = Ragged::<f64>::from_rows([vec![0.0, 0.0, 0.0, 1.0], vec![0.0, 0.5]]);
        let values = Ragged::<f64>::from_rows([vec![0.1, 0.2, 0.3, 0.4], vec![0.5, 0.4]]);
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.token_level_rewards = Some(&rewards);
        assert!(Gae::default().estimate(&inputs).is_err());
        inputs.values = Some(&values);
        let mut gae = Gae {
            gamma: 0.9,
            gae_lambda: 0.8,
            whiten: false,
        };
        let raw = gae.estimate(&inputs).unwrap();
        let expected = [0.52424, 0.0, 0.492, 0.6, -0.068, 0.1];
        check(raw.advantages.values(), &expected);
        let returns = [0.62424, 0.0, 0.792, 1.0, 0.432, 0.5];
        check(raw.returns.as_ref().unwrap().values(), &returns);
        gae.whiten = true;
        let white = gae.estimate(&inputs).unwrap();
        let expected = [0.659561, 0.0, 0.550285, 0.916347, -1.347811, -0.778382];
        check(white.advantages.values(), &expected);
        assert_eq!(white.returns, raw.returns);
    }
}
