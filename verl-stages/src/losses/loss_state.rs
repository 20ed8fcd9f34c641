//! State of an update between optimiser steps: adaptive coefficients, and BCO's running mean of rewards.

use serde::{Deserialize, Serialize};
use verl_algos::AlgoError;
use verl_algos::entropy_control::EntropyController;
use verl_algos::kl_control::KlController;
use verl_algos::losses::{MetricId, MetricSum, Objective};

/// State of a loss; empty for most losses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LossState {
    /// Adapts the coefficient of the KL after each step.
    pub kl: Option<KlController>,
    /// Adapts the coefficient of the entropy bonus after each optimiser step.
    pub entropy: Option<EntropyController>,
    /// δ of `bco_pair`: the mean of all implicit rewards so far.
    pub reward_shift: Option<RunningMean>,
    /// KLs of the optimiser steps of the current step: their sum and number.
    pub(super) kls: (f64, usize),
}

/// A mean of all values so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RunningMean {
    /// Number of values.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
}

impl RunningMean {
    /// Adds `count` values with this mean.
    pub fn add(&mut self, mean: f64, count: usize) {
        self.count += count as u64;
        self.mean += (mean - self.mean) * count as f64 / self.count.max(1) as f64;
    }
}

impl LossState {
    /// Whether there is any state.
    pub fn is_some(&self) -> bool {
        self.kl.is_some() || self.entropy.is_some() || self.reward_shift.is_some()
    }

    /// Sets the coefficients of `objective` for the next optimiser step.
    pub fn steer(&self, objective: &mut Objective) {
        if let Some(kl) = &self.kl {
            objective.set_coef(MetricId::KL_LOSS, kl.coef());
        }
        if let Some(entropy) = &self.entropy {
            objective.set_coef(MetricId::ENTROPY_LOSS, -entropy.coef());
        }
    }

    /// Updates the state with the metrics of an optimiser step on `rows` rows.
    ///
    /// # Errors
    /// An entropy that is not finite.
    pub fn note(&mut self, metrics: &[MetricSum], rows: usize) -> Result<(), AlgoError> {
        let value = |id| MetricSum::find(metrics, id);
        if let (Some(_), Some(kl)) = (&self.kl, value(MetricId::REF_KL)) {
            self.kls = (self.kls.0 + kl, self.kls.1 + 1);
        }
        if let (Some(controller), Some(entropy)) = (&mut self.entropy, value(MetricId::ENTROPY)) {
            controller.update(entropy)?;
        }
        let rewards = (
            value(MetricId::REWARDS_CHOSEN),
            value(MetricId::REWARDS_REJECTED),
        );
        if let (Some(mean), (Some(chosen), Some(rejected))) = (&mut self.reward_shift, rewards)
            && (chosen + rejected).is_finite()
        {
            mean.add((chosen + rejected) / 2.0, rows);
        }
        Ok(())
    }

    /// Ends a step of `rows` rows.
    ///
    /// # Errors
    /// A KL that is not finite.
    pub fn end_step(&mut self, rows: usize) -> Result<(), AlgoError> {
        let (sum, count) = std::mem::take(&mut self.kls);
        match &mut self.kl {
            Some(controller) if count > 0 => controller.update(sum / count as f64, rows),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verl_algos::Aggregation;
    use verl_algos::entropy_control::EntropySteering;
    use verl_algos::losses::{EntropyBonus, KlLoss, Share};

    fn reported(id: MetricId, number: f64) -> MetricSum {
        MetricSum {
            id,
            number,
            share: Share::Mean { count: 1 },
        }
    }

    #[test]
    fn coefficients_follow_the_reported_metrics() {
        let steering = EntropySteering {
            step: 0.25,
            max: 2.0,
            ..EntropySteering::default()
        };
        let mut state = LossState {
            kl: Some(KlController::adaptive(0.5, 0.1, 20.0).unwrap()),
            entropy: Some(EntropyController::adaptive(0.5, steering).unwrap()),
            ..LossState::default()
        };
        let mut objective = Objective::new(Aggregation::TokenMean)
            .with(0.5, KlLoss::default())
            .with(-0.5, EntropyBonus);
        let coefs = |state: &LossState, objective: &mut Objective| {
            state.steer(objective);
            [MetricId::KL_LOSS, MetricId::ENTROPY_LOSS].map(|id| objective.coef(id).unwrap())
        };
        assert_eq!(coefs(&state, &mut objective), [0.5, -0.5]);
        // The entropy is low: its coefficient rises after each optimiser step, that of the KL only after the step.
        for kl in [0.3, 0.1] {
            let metrics = [
                reported(MetricId::REF_KL, kl),
                reported(MetricId::ENTROPY, 0.1),
            ];
            state.note(&metrics, 8).unwrap();
        }
        assert_eq!(coefs(&state, &mut objective), [0.5, -1.0]);
        state.end_step(10).unwrap();
        let kl = 0.5 * (1.0 + 0.2 * 0.5);
        assert_eq!(coefs(&state, &mut objective), [kl, -1.0]);
        // Nothing was measured, so nothing changes.
        state.end_step(10).unwrap();
        assert_eq!(coefs(&state, &mut objective), [kl, -1.0]);
        assert!(
            state
                .note(&[reported(MetricId::ENTROPY, f64::NAN)], 8)
                .is_err()
        );
    }

    #[test]
    fn the_reward_shift_is_the_mean_of_all_rewards() {
        let mut state = LossState {
            reward_shift: Some(RunningMean::default()),
            ..LossState::default()
        };
        let rewards = |chosen, rejected| {
            [
                reported(MetricId::REWARDS_CHOSEN, chosen),
                reported(MetricId::REWARDS_REJECTED, rejected),
            ]
        };
        state.note(&rewards(3.0, 1.0), 2).unwrap();
        assert_eq!(state.reward_shift.unwrap().mean, 2.0);
        state.note(&rewards(0.0, -1.0), 6).unwrap();
        let mean = state.reward_shift.unwrap();
        assert_eq!((mean.mean, mean.count), ((2.0 * 2.0 - 0.5 * 6.0) / 8.0, 8));
    }
}
