//! Stage `shape_unended`: changes the rewards of responses that did not end on their own, but reached the token limit or
//! the end of the context.
//!
//! It writes `shaped_rewards`, which `advantages` reads with `rename = { rewards = "shaped_rewards" }`. For responses that
//! come near the limit without reaching it, use stage [`shape_overlong`](crate::shape_overlong).
//!
//! # Source
//! `penalty`: `missing_eos_penalty` of TRL's PPO. `coef`: the "stop properly" penalty of OpenRLHF, after Liu et al. 2025
//! (ProRL), arXiv:2505.24864.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::rewards::eos::{missing_eos_penalty, stop_properly};
use verl_words::batch::Batch;
use verl_words::keys::{FINISH_REASONS, REWARDS, SHAPED_REWARDS, finish};
use verl_words::stage::{
    BuildContext, ConfigError, Stage, StageConfig, StageContext, StageError, StageSpec,
};

use crate::settings::{metrics, refusal};

metrics! {
    UNENDED: "shape_unended/share", "share", "share of responses that did not end on their own";
}

/// Settings of stage `shape_unended`; set exactly one of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ShapeUnended {
    /// Subtracted from the reward (reward, 0 or more).
    pub penalty: Option<f64>,
    /// A value in [0, 1] multiplies the reward; a negative value replaces it.
    pub coef: Option<f64>,
}

impl ShapeUnended {
    fn shaped(
        &self,
        rewards: &[Option<f64>],
        ended: &[bool],
    ) -> Result<Vec<Option<f64>>, verl_algos::AlgoError> {
        match (self.penalty, self.coef) {
            (Some(penalty), _) => missing_eos_penalty(rewards, ended, penalty),
            (None, coef) => stop_properly(rewards, ended, coef.unwrap_or(1.0)),
        }
    }
}

impl StageConfig for ShapeUnended {
    const KIND: &'static str = "shape_unended";
    const SUMMARY: &'static str = "changes the rewards of responses that did not end on their own";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        if self.penalty.is_some() == self.coef.is_some() {
            let (reason, help) = match self.penalty {
                None => (
                    "is not set, and neither is `coef`, so nothing would change",
                    "set `penalty` to the amount to subtract, or `coef` to the factor to multiply the reward by",
                ),
                Some(_) => (
                    "is set together with `coef`, but only one of them applies",
                    "remove one of the two",
                ),
            };
            return Err(vec![ConfigError::new("penalty", reason, help)]);
        }
        let setting = if self.penalty.is_some() {
            "penalty"
        } else {
            "coef"
        };
        self.shaped(&[], &[]).map_err(|error| {
            vec![ConfigError {
                setting: setting.to_owned(),
                ..refusal(setting, &error)
            }]
        })?;
        Ok(Box::new(self.clone()))
    }
}

impl Stage for ShapeUnended {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(REWARDS)
            .reads(FINISH_REASONS)
            .writes(SHAPED_REWARDS)
            .metrics(&[UNENDED])
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let rewards = input.get(&REWARDS)?;
        let rewards: Vec<Option<f64>> = rewards.rows().map(|row| row.map(f64::from)).collect();
        let reasons = input.get(&FINISH_REASONS)?;
        let ended: Vec<bool> = reasons
            .values()
            .iter()
            .map(|reason| !finish::is_cut(*reason))
            .collect();
        for ended in &ended {
            context.record(&UNENDED, f64::from(!ended));
        }
        let shaped = self.shaped(&rewards, &ended).map_err(StageError::failed)?;
        let shaped: Vec<Option<f32>> = shaped.iter().map(|row| row.map(|x| x as f32)).collect();
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
    use verl_words::batch::RowId;

    use super::*;
    use crate::sink::run;

    #[track_caller]
    fn check(penalty: Option<f64>, coef: Option<f64>, expected: [Option<f32>; 4]) {
        let ids: Vec<RowId> = (0..4).map(RowId).collect();
        let mut batch = Batch::with_rows(&ids);
        let rewards = vec![Some(1.0f32), Some(1.0), None, Some(0.5)];
        batch.put(&REWARDS, rewards).unwrap();
        let reasons = vec![finish::EOS, finish::LENGTH, finish::CONTEXT, finish::STOP];
        batch.put(&FINISH_REASONS, reasons).unwrap();
        let config = ShapeUnended { penalty, coef };
        let mut stage = config.build(&BuildContext::default()).expect("a stage");
        let kept = run(stage.as_mut(), 1, batch);
        let shaped = kept.batches[0].get(&SHAPED_REWARDS).unwrap();
        assert_eq!(shaped.rows().collect::<Vec<_>>(), expected);
        assert_eq!(kept.mean(&UNENDED), Some(0.5));
    }

    #[test]
    fn by_hand() {
        let with = |second| [Some(1.0), Some(second), None, Some(0.5)];
        check(Some(0.75), None, with(0.25));
        check(None, Some(0.25), with(0.25));
        check(None, Some(0.0), with(0.0));
        check(None, Some(-1.0), with(-1.0));
    }

    #[test]
    fn exactly_one_setting_is_required() {
        let refused = |penalty, coef| {
            let faults = ShapeUnended { penalty, coef }.build(&BuildContext::default());
            faults.err().unwrap()[0].setting.clone()
        };
        assert_eq!(refused(None, None), "penalty");
        assert_eq!(refused(Some(1.0), Some(0.5)), "penalty");
        assert_eq!(refused(Some(-1.0), None), "penalty");
        assert_eq!(refused(None, Some(1.5)), "coef");
    }
}
