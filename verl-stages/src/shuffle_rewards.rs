//! Stage `shuffle_rewards`: assigns the step's rewards to other responses, for control runs.
//!
//! A run that learns from rewards must not learn from shuffled ones: any remaining gain has another cause (falling
//! entropy, changed lengths). The distribution of rewards is unchanged.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::random;
use verl_words::batch::Batch;
use verl_words::field::{Key, Scalar};
use verl_words::keys::REWARDS;
use verl_words::stage::{
    BuildContext, Cardinality, ConfigError, Stage, StageConfig, StageContext, StageError, StageSpec,
};

/// Rewards of the same step, in another order.
pub const SHUFFLED_REWARDS: Key<Scalar<f32>> = Key::new(
    "shuffled_rewards",
    "[B]",
    "reward",
    "rewards of the step, assigned to other responses",
)
.nullable()
.finite();

/// Settings of stage `shuffle_rewards`; there are none. `advantages` reads the result through `rename`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ShuffleRewards {}

impl StageConfig for ShuffleRewards {
    const KIND: &'static str = "shuffle_rewards";
    const SUMMARY: &'static str = "assigns the step's rewards to other responses, for control runs";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(ShuffleRewardsStage))
    }
}

/// The running stage.
struct ShuffleRewardsStage;

impl Stage for ShuffleRewardsStage {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(REWARDS)
            .writes(SHUFFLED_REWARDS)
            .cardinality(Cardinality::Batch)
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let rewards = input.get(&REWARDS)?;
        let order = random::shuffle(context.seed, context.step, rewards.len());
        let shuffled: Vec<Option<f32>> = order.into_iter().map(|row| rewards.row(row)).collect();
        let mut output = input.rows_only();
        output.put(&SHUFFLED_REWARDS, shuffled)?;
        context.emit(output)
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::RowId;

    use super::*;
    use crate::sink::run;

    fn shuffled(step: u64, rewards: &[Option<f32>]) -> Vec<Option<f32>> {
        let ids: Vec<RowId> = (0..rewards.len() as u64)
            .map(|row| RowId::prompt(0, row).unwrap())
            .collect();
        let mut batch = Batch::with_rows(&ids);
        batch.put(&REWARDS, rewards.to_vec()).unwrap();
        let kept = run(&mut ShuffleRewardsStage, step, batch);
        let emitted = &kept.batches[0];
        assert_eq!(emitted.ids(), ids);
        emitted.get(&SHUFFLED_REWARDS).unwrap().rows().collect()
    }

    #[test]
    fn rewards_change_places_and_nothing_else() {
        let rewards: Vec<Option<f32>> = (0..50)
            .map(|row| (row % 7 != 0).then_some(row as f32))
            .collect();
        let sorted = |mut values: Vec<Option<f32>>| {
            values.sort_by(|a, b| a.partial_cmp(b).unwrap());
            values
        };
        let once = shuffled(1, &rewards);
        assert_ne!(once, rewards);
        assert_eq!(sorted(once.clone()), sorted(rewards.clone()));
        assert_eq!(once, shuffled(1, &rewards));
        assert_ne!(once, shuffled(2, &rewards));
        assert!(shuffled(1, &[]).is_empty());
    }
}
