//! Stage `advantages`: rewards into advantages, by an estimator chosen by name.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::advantages::{AdvantageEstimator, AdvantageInputs, Grpo};
use verl_algos::kl::KlEstimator;
use verl_algos::{CutUnit, Ragged as AlgoRagged};
use verl_pipe::batch::{Batch, RaggedColumn};
use verl_pipe::field::{LogProbTag, Support, Weights};
use verl_pipe::keys::{
    ADVANTAGES, GROUP_MEANS, MASK_KINDS, OLD_LOG_PROBS, REF_LOG_PROBS, REWARDS, mask,
};
use verl_pipe::stage::{
    BuildContext, Cardinality, ConfigError, Metric, Reduce, Stage, StageConfig, StageContext,
    StageError, StageSpec,
};

use crate::algorithms::KL_PENALTY;

/// Mean reward.
pub const REWARD_MEAN: Metric = Metric {
    name: "reward/mean",
    unit: "reward",
    meaning: "mean reward of the scored responses, before any KL penalty",
    reduce: Reduce::Mean,
};
/// Share of groups without signal.
pub const NO_SIGNAL: Metric = Metric {
    name: "reward/groups_without_signal",
    unit: "share",
    meaning: "share of prompt groups whose rewards are all equal, so that they teach nothing",
    reduce: Reduce::Mean,
};
/// Rows without a score.
pub const UNSCORED: Metric = Metric {
    name: "reward/unscored",
    unit: "rows",
    meaning: "responses without a reward; they get advantage 0",
    reduce: Reduce::Sum,
};
/// KL penalty in the reward.
pub const REWARD_KL: Metric = Metric {
    name: "reward/kl",
    unit: "nats",
    meaning: "mean over responses of the mean KL per token that was taken off the reward",
    reduce: Reduce::Mean,
};

/// Estimators by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// (s − μ_g) / (σ_g + ε).
    #[default]
    Grpo,
    /// s − μ_g.
    DrGrpo,
}

/// Settings of stage `advantages`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Advantages {
    /// The estimator.
    pub estimator: Estimator,
    /// ε added to the group's deviation.
    pub epsilon: f64,
    /// Coefficient of the KL to the reference that is taken off the rewards; 0 needs no reference.
    pub kl_coef: f64,
    /// Estimator of that KL: `k1`, `k2`, `k3`, `abs`.
    pub kl_estimator: String,
    /// Temperature of the log-probs that the KL compares.
    pub temperature: f64,
}

impl Default for Advantages {
    fn default() -> Self {
        Advantages {
            estimator: Estimator::Grpo,
            epsilon: 1e-6,
            kl_coef: 0.0,
            kl_estimator: "k1".to_owned(),
            temperature: 1.0,
        }
    }
}

impl StageConfig for Advantages {
    const KIND: &'static str = "advantages";
    const SUMMARY: &'static str = "rewards into advantages, by an estimator chosen by name";

    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::new();
        for (name, value) in [("epsilon", self.epsilon), ("kl_coef", self.kl_coef)] {
            if !(value >= 0.0 && value.is_finite()) {
                faults.push(ConfigError::new(
                    name,
                    format!("is {value}"),
                    "set it to a number from 0",
                ));
            }
        }
        let kl = KlEstimator::parse(&self.kl_estimator).map_err(|error| {
            faults.push(ConfigError::new(
                "kl_estimator",
                format!("is refused: {error}"),
                "use one of k1, k2, k3, abs",
            ))
        });
        let (Ok(kl), true) = (kl, faults.is_empty()) else {
            return Err(faults);
        };
        let estimator: Box<dyn AdvantageEstimator> = match self.estimator {
            Estimator::Grpo => Box::new(Grpo {
                epsilon: Some(self.epsilon),
            }),
            Estimator::DrGrpo => Box::new(Grpo::without_std()),
        };
        Ok(Box::new(AdvantagesStage {
            config: self.clone(),
            kl,
            estimator,
        }))
    }
}

/// The running stage.
struct AdvantagesStage {
    config: Advantages,
    kl: KlEstimator,
    estimator: Box<dyn AdvantageEstimator>,
}

impl AdvantagesStage {
    fn tag(&self, weights: Weights) -> LogProbTag {
        LogProbTag {
            policy: None,
            temperature: Some(self.config.temperature),
            support: Some(Support::Full),
            weights: Some(weights),
        }
    }

    /// Scores minus the summed KL penalty of the action tokens.
    fn penalise(
        &self,
        input: &Batch,
        actions: &AlgoRagged<bool>,
        scores: &mut [Option<f64>],
        context: &mut StageContext<'_>,
    ) -> Result<(), StageError> {
        let (old, reference) = (input.get(&OLD_LOG_PROBS)?, input.get(&REF_LOG_PROBS)?);
        for (row, score) in scores.iter_mut().enumerate() {
            let tokens = actions
                .row(row)
                .iter()
                .zip(old.row(row))
                .zip(reference.row(row))
                .filter(|((action, _), _)| **action);
            let kls: Vec<f64> = tokens
                .map(|((_, old), reference)| self.kl.value(f64::from(*old), f64::from(*reference)))
                .collect();
            if kls.is_empty() {
                continue;
            }
            let sum: f64 = kls.iter().sum();
            context.record(&REWARD_KL, sum / kls.len() as f64);
            *score = score.map(|score| score - self.config.kl_coef * sum);
        }
        Ok(())
    }
}

impl Stage for AdvantagesStage {
    fn spec(&self) -> StageSpec {
        let cardinality = match self.estimator.cut_unit() {
            CutUnit::Row => Cardinality::Row,
            CutUnit::Pair | CutUnit::Group => Cardinality::Group,
            CutUnit::MiniBatch => Cardinality::Batch,
        };
        let mut spec = StageSpec::new()
            .reads(REWARDS)
            .reads(MASK_KINDS)
            // For its rows alone: behind a filter of groups, those that were dropped have no advantages.
            .reads_optional(GROUP_MEANS)
            .writes(ADVANTAGES)
            .cardinality(cardinality)
            .metrics(&[REWARD_MEAN, NO_SIGNAL, UNSCORED]);
        if self.config.kl_coef != 0.0 {
            spec = spec
                .reads(OLD_LOG_PROBS.tagged(self.tag(Weights::StepStart)))
                .reads(REF_LOG_PROBS.tagged(self.tag(Weights::Frozen)))
                .metrics(&[REWARD_KL])
                .once(KL_PENALTY);
        }
        spec
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let kinds = input.get(&MASK_KINDS)?;
        let actions = AlgoRagged::from_rows(kinds.rows().map(|row| {
            row.iter()
                .map(|kind| *kind == mask::ACTION)
                .collect::<Vec<_>>()
        }));
        let mut scores: Vec<Option<f64>> = input
            .get(&REWARDS)?
            .rows()
            .map(|reward| reward.map(f64::from))
            .collect();
        for score in &scores {
            match score {
                Some(score) => context.record(&REWARD_MEAN, *score),
                None => context.record(&UNSCORED, 1.0),
            }
        }
        for group in input.group_ranges() {
            let flat = scores[group.clone()]
                .windows(2)
                .all(|pair| pair[0] == pair[1]);
            context.record(&NO_SIGNAL, f64::from(flat && group.len() > 1));
        }
        if self.config.kl_coef != 0.0 {
            self.penalise(&input, &actions, &mut scores, context)?;
        }
        let inputs = AdvantageInputs {
            groups: Some(input.groups()),
            scores: Some(&scores),
            ..AdvantageInputs::new(&actions)
        };
        let result = self
            .estimator
            .estimate(&inputs)
            .map_err(StageError::failed)?;
        let rows = result
            .advantages
            .rows()
            .map(|row| row.iter().map(|a| *a as f32).collect::<Vec<_>>());
        let mut output = input.rows_only();
        output.put(&ADVANTAGES, RaggedColumn::from_rows(rows))?;
        context.emit(output)
    }
}
