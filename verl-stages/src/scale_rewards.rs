//! Stage `scale_rewards`: centres rewards, divides them by a standard deviation, and clips them.
//!
//! It writes `scaled_rewards`, which `advantages` reads with `rename = { rewards = "scaled_rewards" }`, so that group
//! filters and metrics still see the original scores. A row without a reward stays without one.
//!
//! # Differences
//! TRL and trlX add a machine epsilon to the deviation; here rewards are not divided by a deviation of 0.
//!
//! # Source
//! trlX `scale_reward` and `cliprange_reward`; TRL's first PPO. OpenRLHF clips at ±10.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::rewards::scaling::{RewardScale, RewardScaler};
use verl_words::batch::Batch;
use verl_words::field::{Key, Scalar};
use verl_words::keys::{GROUP_MEANS, REWARDS};
use verl_words::resource::{Snapshot, StoredState, WeightsVersion};
use verl_words::stage::{
    BuildContext, Cardinality, ConfigError, Stage, StageConfig, StageContext, StageError, StageSpec,
};

use crate::settings::metrics;
use crate::state::{recalled, restored, snapshot, stored};

/// Rewards divided by a standard deviation and clipped.
pub const SCALED_REWARDS: Key<Scalar<f32>> = Key::new(
    "scaled_rewards",
    "[B]",
    "reward",
    "one reward per response, scaled and clipped; null where it could not be scored",
)
.nullable()
.finite();

metrics! {
    CLIPPED: "scale_rewards/clipped_share", "share", "share of the scored responses whose reward is at the clip bound";
    DEVIATION: "scale_rewards/running_std", "reward", "standard deviation of all rewards seen so far";
}

/// The standard deviation that rewards are divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// None: rewards are not divided.
    #[default]
    None,
    /// That of the step's rewards.
    Batch,
    /// That of all rewards of the run so far.
    Running,
    /// `reference_std`, such as that of the first steps of another run.
    Reference,
}

/// Settings of stage `scale_rewards`; the defaults leave rewards unchanged.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScaleRewards {
    /// The standard deviation that rewards are divided by: `none`, `batch`, `running`, `reference`.
    pub scale: Scale,
    /// Whether the mean of the same rewards is subtracted.
    pub centre: bool,
    /// Rewards are clipped to ± this (reward, after scaling); not clipped when absent.
    pub clip: Option<f64>,
    /// Mean of the reference (reward); 0 when absent.
    pub reference_mean: Option<f64>,
    /// Standard deviation of the reference (reward).
    pub reference_std: Option<f64>,
}

impl ScaleRewards {
    fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        let positive = |value: f64| value > 0.0 && value.is_finite();
        if let Some(clip) = self.clip.filter(|clip| !positive(*clip)) {
            let help = "set it to the largest reward to keep, for example 10, or leave it out";
            faults.push(ConfigError::new("clip", format!("is {clip}"), help));
        }
        let is_reference = self.scale == Scale::Reference;
        let given = [
            ("reference_mean", self.reference_mean),
            ("reference_std", self.reference_std),
        ];
        for (setting, value) in given {
            if !is_reference && value.is_some() {
                faults.push(ConfigError::new(
                    setting,
                    "is only read with `scale = \"reference\"`",
                    "remove it, or set `scale = \"reference\"`",
                ));
            }
        }
        if is_reference && !self.reference_std.is_some_and(positive) {
            faults.push(ConfigError::new(
                "reference_std",
                "is not a number above 0, but `scale` is `reference`",
                "set it to the standard deviation of the reference rewards",
            ));
        }
        faults
    }
}

impl StageConfig for ScaleRewards {
    const KIND: &'static str = "scale_rewards";
    const SUMMARY: &'static str = "rewards divided by a standard deviation and clipped";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let faults = self.faults();
        if !faults.is_empty() {
            return Err(faults);
        }
        let scale = match self.scale {
            Scale::None => RewardScale::None,
            Scale::Batch => RewardScale::Batch,
            Scale::Running => RewardScale::Running,
            Scale::Reference => RewardScale::Reference {
                mean: self.reference_mean.unwrap_or(0.0),
                std: self.reference_std.unwrap_or(1.0),
            },
        };
        Ok(Box::new(ScaleRewardsStage {
            scaler: RewardScaler::new(scale, self.centre, self.clip),
        }))
    }
}

/// The running stage.
struct ScaleRewardsStage {
    scaler: RewardScaler,
}

impl Stage for ScaleRewardsStage {
    fn spec(&self) -> StageSpec {
        let spec = StageSpec::new()
            .reads(REWARDS)
            // Read only for its rows: after a group filter, dropped rows do not count.
            .reads_optional(GROUP_MEANS)
            .writes(SCALED_REWARDS)
            .cardinality(Cardinality::Batch);
        let spec = match self.scaler.clip {
            Some(_) => spec.metrics(&[CLIPPED]),
            None => spec,
        };
        match self.scaler.scale {
            RewardScale::Running => spec.metrics(&[DEVIATION]),
            _ => spec,
        }
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let rewards = input.get(&REWARDS)?;
        let rewards: Vec<Option<f64>> = rewards.rows().map(|row| row.map(f64::from)).collect();
        let scaled = self.scaler.scale(&rewards).map_err(StageError::failed)?;
        if let Some(clip) = self.scaler.clip {
            for reward in scaled.iter().flatten() {
                context.record(&CLIPPED, f64::from(reward.abs() >= clip));
            }
        }
        if let (RewardScale::Running, Some(std)) = (self.scaler.scale, self.scaler.moments.std()) {
            context.record(&DEVIATION, std);
        }
        let scaled: Vec<Option<f32>> = scaled.iter().map(|row| row.map(|x| x as f32)).collect();
        let mut output = input.rows_only();
        output.put(&SCALED_REWARDS, scaled)?;
        context.emit(output)
    }

    fn snapshot(&mut self) -> Result<Option<Snapshot>, StageError> {
        Ok(Some(snapshot(&self.scaler)))
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), StageError> {
        self.scaler = restored(snapshot)?;
        Ok(())
    }

    fn store(&mut self, snapshot: &Snapshot) -> Result<Option<StoredState>, StageError> {
        stored::<RewardScaler>(snapshot)
    }

    fn recall(
        &mut self,
        version: &WeightsVersion,
        stored: &StoredState,
    ) -> Result<Snapshot, StageError> {
        recalled::<RewardScaler>(version, stored)
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RowId;

    use super::*;
    use crate::sink::run;

    fn stage(config: &ScaleRewards) -> Box<dyn Stage> {
        config.build(&BuildContext::default()).expect("a stage")
    }

    fn scaled(stage: &mut dyn Stage, rewards: &[Option<f32>]) -> Vec<Option<f32>> {
        let ids: Vec<RowId> = (0..rewards.len() as u64).map(RowId).collect();
        let mut batch = Batch::with_rows(&ids);
        batch.put(&REWARDS, rewards.to_vec()).unwrap();
        let kept = run(stage, 1, batch);
        kept.batches[0]
            .get(&SCALED_REWARDS)
            .unwrap()
            .rows()
            .collect()
    }

    #[test]
    fn by_hand() {
        let rewards = [Some(1.0), None, Some(3.0), Some(5.0)];
        let config = ScaleRewards {
            scale: Scale::Batch,
            centre: true,
            clip: Some(0.75),
            ..ScaleRewards::default()
        };
        let expected = [Some(-0.75), None, Some(0.0), Some(0.75)];
        assert_eq!(scaled(stage(&config).as_mut(), &rewards), expected);
        let none = ScaleRewards::default();
        assert_eq!(scaled(stage(&none).as_mut(), &rewards), rewards);
        let reference = ScaleRewards {
            scale: Scale::Reference,
            reference_std: Some(2.0),
            ..ScaleRewards::default()
        };
        let expected = [Some(0.5), None, Some(1.5), Some(2.5)];
        assert_eq!(scaled(stage(&reference).as_mut(), &rewards), expected);
    }

    #[test]
    fn the_running_deviation_is_state() {
        let config = ScaleRewards {
            scale: Scale::Running,
            ..ScaleRewards::default()
        };
        let mut stage = stage(&config);
        scaled(stage.as_mut(), &[Some(1.0), Some(3.0)]);
        let kept = stage.snapshot().unwrap().expect("state");
        let first = scaled(stage.as_mut(), &[Some(5.0), Some(9.0)]);
        let other = scaled(stage.as_mut(), &[Some(5.0), Some(9.0)]);
        assert_ne!(first, other);
        stage.restore(&kept).unwrap();
        assert_eq!(scaled(stage.as_mut(), &[Some(5.0), Some(9.0)]), first);
    }

    #[test]
    fn contradictory_settings_are_refused() {
        let refused = |config: ScaleRewards| -> Vec<String> {
            let faults = config.build(&BuildContext::default()).err();
            let faults = faults.unwrap_or_default().into_iter();
            faults.map(|fault| fault.setting).collect()
        };
        let base = ScaleRewards::default;
        assert_eq!(
            refused(ScaleRewards {
                clip: Some(0.0),
                reference_std: Some(1.0),
                ..base()
            }),
            ["clip", "reference_std"]
        );
        assert_eq!(
            refused(ScaleRewards {
                scale: Scale::Reference,
                ..base()
            }),
            ["reference_std"]
        );
    }
}
