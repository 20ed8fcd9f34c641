//! Stage `shape_overlong`: subtracts a penalty from the rewards of responses near or above the token limit.
//!
//! A truncated response has no answer, however good its reasoning; a reward that falls before the limit teaches the
//! policy to finish in time. The stage writes `shaped_rewards`, so that group filters still see the plain rewards: equal
//! answers of different lengths are not a signal.
//!
//! To leave truncated responses out of the loss instead, set `mask_truncated` in stage `update`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::rewards::overlong::OverlongPenalty;
use verl_words::batch::Batch;
use verl_words::keys::{RESPONSES, REWARDS, SHAPED_REWARDS};
use verl_words::stage::{
    BuildContext, ConfigError, Metric, Reduce, Stage, StageConfig, StageContext, StageError,
    StageSpec,
};

use crate::generate::LONGEST;

/// Mean penalty.
pub const PENALTY_MEAN: Metric = Metric {
    name: "overlong/penalty_mean",
    unit: "reward",
    meaning: "mean length penalty that is added to the reward of a response: 0 or less",
    reduce: Reduce::Mean,
    role: None,
};
/// Share of responses that are penalised.
pub const PENALISED: Metric = Metric {
    name: "overlong/penalised_share",
    unit: "share",
    meaning: "share of responses long enough to be penalised",
    reduce: Reduce::Mean,
    role: None,
};

/// Settings of stage `shape_overlong`; the first two have no default. `advantages` reads the result through `rename`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ShapeOverlong {
    /// L_max: length at which the penalty is `penalty`; the `max_new_tokens` of stage `generate` (tokens).
    pub max_tokens: usize,
    /// Length of the range below `max_tokens` in which the penalty grows from 0 (tokens).
    pub buffer_tokens: usize,
    /// Penalty of a response of `max_tokens` tokens.
    pub penalty: f64,
    /// Whether the penalty stays at `penalty` above `max_tokens`; otherwise it keeps growing.
    pub cap: bool,
}

impl Default for ShapeOverlong {
    fn default() -> Self {
        ShapeOverlong {
            max_tokens: 0,
            buffer_tokens: 0,
            penalty: 1.0,
            cap: false,
        }
    }
}

impl ShapeOverlong {
    /// What is added to the reward of a response of `length` tokens.
    fn added(&self, length: usize) -> Result<f64, StageError> {
        let penalty = OverlongPenalty {
            max_length: self.max_tokens,
            buffer: self.buffer_tokens,
            factor: self.penalty,
            capped: self.cap,
        };
        penalty.penalty(length).map_err(StageError::failed)
    }
}

impl StageConfig for ShapeOverlong {
    const KIND: &'static str = "shape_overlong";
    const SUMMARY: &'static str =
        "subtracts a penalty from the rewards of responses near the token limit";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::new();
        if self.max_tokens == 0 {
            faults.push(ConfigError::new(
                "max_tokens",
                "is missing or 0",
                "set it to the `max_new_tokens` of `generate`",
            ));
        }
        if self.buffer_tokens == 0 || self.buffer_tokens > self.max_tokens {
            faults.push(ConfigError::new(
                "buffer_tokens",
                format!(
                    "is {}, outside 1 to max_tokens = {}",
                    self.buffer_tokens, self.max_tokens
                ),
                "set it to the number of tokens before the limit within which a response should end, for example a fifth of the limit",
            ));
        }
        if !(self.penalty >= 0.0 && self.penalty.is_finite()) {
            faults.push(ConfigError::new(
                "penalty",
                format!("is {}", self.penalty),
                "set it to 0 or more; it is subtracted from the reward",
            ));
        }
        if faults.is_empty() {
            Ok(Box::new(self.clone()))
        } else {
            Err(faults)
        }
    }
}

impl Stage for ShapeOverlong {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(REWARDS)
            .reads(RESPONSES)
            .writes(SHAPED_REWARDS)
            .agrees(LONGEST, "max_tokens", self.max_tokens)
            .metrics(&[PENALTY_MEAN, PENALISED])
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (rewards, responses) = (input.get(&REWARDS)?, input.get(&RESPONSES)?);
        let mut shaped = Vec::with_capacity(input.num_rows());
        for (row, reward) in rewards.rows().enumerate() {
            let penalty = self.added(responses.row_len(row))?;
            context.record(&PENALTY_MEAN, penalty);
            context.record(&PENALISED, f64::from(penalty < 0.0));
            shaped.push(reward.map(|reward| (f64::from(reward) + penalty) as f32));
        }
        let mut output = input.rows_only();
        output.put(&SHAPED_REWARDS, shaped)?;
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

#[cfg(test)]
mod tests {
    use verl_words::batch::{RaggedColumn, RowId};

    use super::*;
    use crate::sink::{RecordingSink, run};

    fn shaped(
        config: &ShapeOverlong,
        rows: &[(Option<f32>, usize)],
    ) -> (Vec<Option<f32>>, RecordingSink) {
        let ids: Vec<RowId> = (0..rows.len() as u64).map(RowId).collect();
        let mut batch = Batch::with_rows(&ids);
        let rewards: Vec<Option<f32>> = rows.iter().map(|row| row.0).collect();
        batch.put(&REWARDS, rewards).unwrap();
        let responses = rows.iter().map(|row| vec![0u32; row.1]);
        batch
            .put(&RESPONSES, RaggedColumn::from_rows(responses))
            .unwrap();
        let kept = run(&mut config.clone(), 1, batch);
        let shaped = kept.batches[0].get(&SHAPED_REWARDS).unwrap();
        (shaped.rows().collect(), kept)
    }

    #[test]
    fn rewards_fall_towards_the_limit_and_nulls_stay_null() {
        let config = ShapeOverlong {
            max_tokens: 8,
            buffer_tokens: 4,
            penalty: 0.5,
            cap: false,
        };
        let rows = [
            (Some(1.0), 4),
            (Some(1.0), 6),
            (Some(0.0), 8),
            (None, 8),
            (Some(1.0), 10),
        ];
        let (rewards, kept) = shaped(&config, &rows);
        let expected = [Some(1.0), Some(0.75), Some(-0.5), None, Some(0.25)];
        assert_eq!(rewards, expected);
        assert_eq!(kept.mean(&PENALISED), Some(0.8));
        assert_eq!(kept.mean(&PENALTY_MEAN), Some(-0.4));
        let capped = ShapeOverlong {
            cap: true,
            ..config
        };
        assert_eq!(shaped(&capped, &rows).0[4], Some(0.5));
    }

    #[test]
    fn settings_out_of_range_are_all_reported() {
        let refused = |config: ShapeOverlong| match config.build(&BuildContext::default()) {
            Ok(_) => Vec::new(),
            Err(faults) => faults.into_iter().map(|fault| fault.setting).collect(),
        };
        let config = ShapeOverlong {
            penalty: -1.0,
            ..ShapeOverlong::default()
        };
        assert_eq!(refused(config), ["max_tokens", "buffer_tokens", "penalty"]);
        let config = ShapeOverlong {
            max_tokens: 8,
            buffer_tokens: 9,
            ..ShapeOverlong::default()
        };
        assert_eq!(refused(config), ["buffer_tokens"]);
    }
}
