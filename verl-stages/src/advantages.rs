//! Stage `advantages`: computes advantages from rewards, with any estimator of [`estimators`](crate::estimators).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::advantages::{AdvantageInputs, EstimatorInput};
use verl_algos::kl::{KlEstimator, KlEstimatorName};
use verl_algos::{CutUnit, Ragged as AlgoRagged};
use verl_declare::part::Part;
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::field::{Key, LogProbTag, Ragged, Support, Weights};
use verl_words::keys::{
    ADVANTAGES, GROUP_MEANS, MASK_KINDS, OLD_LOG_PROBS, REF_LOG_PROBS, RETURNS, REWARD_BASELINES,
    REWARDS, ROLLOUT_WEIGHTS, SUM_PI_SQUARED, VALUES, mask,
};
use verl_words::resource::{Snapshot, StoredState, WeightsVersion};
use verl_words::stage::{
    BuildContext, Cardinality, ConfigError, Metric, MetricRole, Reduce, Shown, Stage, StageConfig,
    StageContext, StageError, StageSpec,
};

use crate::estimators::{Estimator, Grpo};
use crate::log_probs::{LogProbs, scoring_temperature, scoring_temperature_fault};
use crate::losses::KL_PENALTY;
use crate::settings::coefficient_fault;
use crate::state::{recalled, restored, snapshot, stored};
use crate::steering::{Control, KlControl, KlSteering};

/// Mean reward.
pub const REWARD_MEAN: Metric = Metric {
    name: "reward/mean",
    unit: "reward",
    meaning: "mean reward of the scored responses, before any KL penalty",
    reduce: Reduce::Mean,
    role: Some(MetricRole::Reward),
};
/// Share of groups without signal.
pub const NO_SIGNAL: Metric = Metric {
    name: "reward/groups_without_signal",
    unit: "share",
    meaning: "share of groups of samples whose rewards are all equal, so that they carry no signal",
    reduce: Reduce::Mean,
    role: None,
};
/// Rows without a score.
pub const UNSCORED: Metric = Metric {
    name: "reward/unscored",
    unit: "rows",
    meaning: "responses without a reward; they get advantage 0",
    reduce: Reduce::Sum,
    role: None,
};
/// KL penalty in the reward.
pub const REWARD_KL: Metric = Metric {
    name: "reward/kl",
    unit: "nats",
    meaning: "mean over responses of the mean KL per token that was subtracted from the reward",
    reduce: Reduce::Mean,
    role: Some(MetricRole::ReferenceKl),
};

/// Coefficient of the KL penalty in the reward.
pub const REWARD_KL_COEF: Metric = Metric {
    name: "reward/kl_coef",
    unit: "",
    meaning: "coefficient of the KL that was subtracted from the reward, when it is adaptive",
    reduce: Reduce::Mean,
    role: None,
};

/// Settings of stage `advantages`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Advantages {
    /// The estimator.
    pub estimator: Part<Estimator>,
    /// Coefficient of the KL to the reference that is subtracted from the rewards; 0 needs no reference.
    pub kl_coef: f64,
    /// Whether that coefficient is fixed or follows the KL: `{ kind = "adaptive", target = 0.1, horizon = 10000 }`.
    pub kl_control: KlControl,
    /// Estimator of that KL; a `+` makes no difference here.
    pub kl_estimator: KlEstimatorName,
    /// Temperature of the log-probs that the KL compares and of those that an estimator reads; the sampling temperature
    /// when absent.
    pub temperature: Option<f64>,
}

impl Default for Advantages {
    fn default() -> Self {
        Advantages {
            estimator: Grpo::default().into(),
            kl_coef: 0.0,
            kl_control: KlControl::default(),
            kl_estimator: KlEstimatorName::K1,
            temperature: None,
        }
    }
}

impl StageConfig for Advantages {
    const KIND: &'static str = "advantages";
    const SUMMARY: &'static str =
        "computes advantages from rewards, with an estimator chosen by name";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = Vec::from_iter(coefficient_fault("kl_coef", self.kl_coef));
        faults.extend(scoring_temperature_fault(self.temperature));
        let steering = self.steering(context);
        let steering = steering.map_err(|errors| faults.extend(errors));
        let samples = context.batch.samples.max(1);
        let estimator = self.estimator.build("estimator", context);
        let estimator = estimator.map_err(|errors| faults.extend(errors));
        if let Ok(estimator) = &estimator {
            faults.extend(self.too_few_samples(estimator, samples));
            faults.extend(self.penalty_conflict(estimator));
        }
        let (Ok(steering), Ok(estimator), true) = (steering, estimator, faults.is_empty()) else {
            return Err(faults);
        };
        Ok(Box::new(AdvantagesStage {
            warning: self.single_response(&estimator, samples),
            temperature: scoring_temperature(self.temperature, context),
            config: self.clone(),
            kl: self.kl_estimator.into(),
            steering,
            estimator,
        }))
    }
}

impl Advantages {
    /// The controller of the KL coefficient; `None` if the coefficient is fixed.
    fn steering(&self, context: &BuildContext) -> Result<Option<KlSteering>, Vec<ConfigError>> {
        let rows = context.batch.groups.max(context.batch.prompts) * context.batch.samples;
        let controller = self.kl_control.controller(self.kl_coef.max(0.0), rows)?;
        let moves = self.kl_control.kind == Control::Adaptive;
        Ok(moves.then(|| KlSteering::new(controller)))
    }

    /// Refuses fewer responses to a prompt than the estimator needs.
    fn too_few_samples(&self, estimator: &Estimator, samples: usize) -> Option<ConfigError> {
        let needed = estimator.smallest_group();
        let fault = || {
            ConfigError::new(
                "estimator",
                format!(
                    "is `{}`, which needs at least {needed} responses to a prompt, but `samples` is {samples}",
                    self.estimator.kind()
                ),
                format!(
                    "set `samples` in [batch] to {needed} or more, or choose another estimator"
                ),
            )
        };
        (samples < needed).then(fault)
    }

    /// Refuses a KL penalty that the estimator cannot use, or that it already subtracts itself.
    fn penalty_conflict(&self, estimator: &Estimator) -> Option<ConfigError> {
        let kind = self.estimator.kind();
        let (reason, help) = if !estimator.components().keys.is_empty() {
            (
                format!(
                    "subtracts a KL penalty from `rewards`, but `{kind}` reads the rewards of several functions"
                ),
                "set it to 0 and penalise the KL in the loss instead: set `kl_coef` of the loss in `update`",
            )
        } else if estimator.inputs().contains(&EstimatorInput::RefLogProbs) {
            (
                format!(
                    "subtracts a KL penalty from `rewards`, but `{kind}` already subtracts one itself"
                ),
                "set it to 0, or set the estimator's own coefficient to 0",
            )
        } else {
            return None;
        };
        (self.kl_coef != 0.0).then(|| ConfigError::new("kl_coef", reason, help))
    }

    /// Warns if a prompt has one response, but the estimator compares the responses to a prompt.
    fn single_response(&self, estimator: &Estimator, samples: usize) -> Option<ConfigError> {
        let compares = estimator.inputs().contains(&EstimatorInput::Groups);
        let warning = || {
            ConfigError::new(
                "estimator",
                format!(
                    "is `{}`, which compares the responses to a prompt, but `samples` is 1: a single response keeps its raw reward",
                    self.estimator.kind()
                ),
                "set `samples` in [batch] to 2 or more, or choose an estimator that does not compare responses, for example `reinforce_plus_plus`",
            )
        };
        (compares && samples == 1).then(warning)
    }
}

/// Help if no stage writes critic values.
const NO_VALUES: &str = "put a `values` stage before it, which writes a critic's value of each response token, or choose an estimator that needs no critic, for example `grpo`";
/// Help if no stage writes the scores of reference responses.
const NO_BASELINES: &str = "put two stages before it: `baseline`, which answers each prompt greedily, and a `reward` that scores the answer, with rename = { responses = \"baseline_responses\", response_texts = \"baseline_response_texts\", rewards = \"reward_baselines\" }; or choose an estimator that needs no baseline, for example `rloo`";
/// Help if no stage writes Σ π².
const NO_SQUARES: &str = "set `sum_pi_squared = true` in the `log_probs` stage that writes `old_log_probs`, or choose an estimator without a baseline for each token, for example `rloo`";
/// Help if no stage writes the old log-probs.
pub(crate) const NO_OLD: &str = "put a `log_probs` stage before it";
/// Help if no stage writes log-probs of a reference.
pub(crate) const NO_REFERENCE: &str = "put a `log_probs` stage before it that scores a frozen model: role = \"reference\", model = \"ref\"; or set the coefficient of the KL to 0";
/// Help if no stage writes the rewards of a component.
const NO_COMPONENT: &str =
    "put a `reward` stage before it that writes this key: rename = { rewards = \"NAME\" }";

/// The running stage.
struct AdvantagesStage {
    config: Advantages,
    temperature: f64,
    kl: KlEstimator,
    steering: Option<KlSteering>,
    estimator: Estimator,
    warning: Option<ConfigError>,
}

impl AdvantagesStage {
    fn tag(&self, weights: Weights) -> LogProbTag {
        LogProbTag {
            policy: None,
            temperature: Some(self.temperature),
            support: Some(Support::Full),
            weights: Some(weights),
        }
    }

    fn reads(&self, input: EstimatorInput) -> bool {
        self.estimator.inputs().contains(&input)
    }

    /// Whether the estimator or the penalty reads the log-probs of the old policy.
    fn reads_old(&self) -> bool {
        self.config.kl_coef != 0.0 || self.reads(EstimatorInput::OldLogProbs)
    }

    /// Whether the estimator or the penalty reads the log-probs of the reference.
    fn reads_reference(&self) -> bool {
        self.config.kl_coef != 0.0 || self.reads(EstimatorInput::RefLogProbs)
    }

    /// The raw rewards of each component.
    fn component_scores(&self, input: &Batch) -> Result<Vec<Vec<Option<f64>>>, StageError> {
        let keys = self.estimator.components().keys.iter();
        keys.map(|key| scores_of(input, key)).collect()
    }

    /// The score of each row: its reward, or the weighted sum of the components that scored it. `None` if none did, or
    /// if the row's baseline response has no score.
    fn scores(
        &self,
        input: &Batch,
        components: &[Vec<Option<f64>>],
        baselines: Option<&[Option<f64>]>,
    ) -> Result<Vec<Option<f64>>, StageError> {
        let mut scores = if components.is_empty() {
            scores_of(input, REWARDS.name())?
        } else {
            let weights = &self.estimator.components().weights;
            let row = |row: usize| {
                let each = components.iter().zip(weights);
                let scored = each.filter_map(|(scores, weight)| Some(scores[row]? * weight));
                scored.reduce(|sum, next| sum + next)
            };
            (0..input.num_rows()).map(row).collect()
        };
        if let Some(baselines) = baselines {
            let compared = scores.iter_mut().zip(baselines);
            compared.for_each(|(score, baseline)| *score = score.filter(|_| baseline.is_some()));
        }
        Ok(scores)
    }

    fn report(&self, input: &Batch, scores: &[Option<f64>], context: &mut StageContext<'_>) {
        for score in scores {
            match score {
                Some(score) => context.record(&REWARD_MEAN, *score),
                None => context.record(&UNSCORED, 1.0),
            }
        }
        if self.reads(EstimatorInput::Groups) {
            for group in input.group_ranges() {
                let mut pairs = scores[group.clone()].windows(2);
                let flat = pairs.all(|pair| pair[0] == pair[1]);
                context.record(&NO_SIGNAL, f64::from(flat && group.len() > 1));
            }
        }
    }

    /// Estimated KL of each action token; 0 at observations.
    fn token_kls(
        &mut self,
        input: &Batch,
        actions: &AlgoRagged<bool>,
        context: &mut StageContext<'_>,
    ) -> Result<AlgoRagged<f64>, StageError> {
        let (old, reference) = (input.get(&OLD_LOG_PROBS)?, input.get(&REF_LOG_PROBS)?);
        let kls = actions.map(|row, token, action| {
            let pair = (old.row(row)[token], reference.row(row)[token]);
            let kl = || self.kl.value(f64::from(pair.0), f64::from(pair.1));
            if action { kl() } else { 0.0 }
        });
        for (kls, count) in kls.rows().zip(actions.counts()) {
            if count > 0 {
                let mean = kls.iter().sum::<f64>() / count as f64;
                context.record(&REWARD_KL, mean);
                if let Some(steering) = &mut self.steering {
                    steering.measured(mean);
                }
            }
        }
        Ok(kls)
    }
}

/// The score of each row minus the KL penalty of its action tokens.
fn outcomes(scores: &[Option<f64>], penalties: Option<&AlgoRagged<f64>>) -> Vec<Option<f64>> {
    let penalty = |row| penalties.map_or(0.0, |rows| rows.row(row).iter().sum::<f64>());
    let rows = scores.iter().enumerate();
    rows.map(|(row, score)| Some((*score)? - penalty(row)))
        .collect()
}

/// The reward of each token: the score on the last action token, minus the KL penalty of each token.
fn token_rewards(
    actions: &AlgoRagged<bool>,
    scores: &[Option<f64>],
    penalties: Option<&AlgoRagged<f64>>,
) -> AlgoRagged<f64> {
    let last: Vec<Option<usize>> = actions
        .rows()
        .map(|row| row.iter().rposition(|action| *action))
        .collect();
    actions.map(|row, token, _| {
        let penalty = penalties.map_or(0.0, |rows| rows.row(row)[token]);
        let score = scores[row].filter(|_| last[row] == Some(token));
        score.unwrap_or(0.0) - penalty
    })
}

impl Stage for AdvantagesStage {
    fn spec(&self) -> StageSpec {
        let cardinality = match self.estimator.cut_unit() {
            CutUnit::Row => Cardinality::Row,
            CutUnit::Pair | CutUnit::Group => Cardinality::Group,
            CutUnit::MiniBatch => Cardinality::Batch,
        };
        let mut spec = StageSpec::new()
            .scored_by(LogProbs::KIND)
            .at_temperature_of(MASK_KINDS.name());
        for key in &self.estimator.components().keys {
            spec = spec.reads(REWARDS.field().renamed(key.clone()));
            spec = spec.remedy(key, NO_COMPONENT.replace("NAME", key));
        }
        if self.estimator.components().keys.is_empty() {
            spec = spec.reads(REWARDS);
        }
        spec = spec
            .reads(MASK_KINDS)
            // Only for its rows: after `filter_groups`, dropped rows get no advantages.
            .reads_optional(GROUP_MEANS)
            .writes(ADVANTAGES)
            .cardinality(cardinality)
            .metrics(&[REWARD_MEAN, UNSCORED])
            .shows(Shown::of(&REWARD_MEAN, "reward", Shown::OUTCOME));
        if self.reads(EstimatorInput::Groups) {
            spec = spec.metrics(&[NO_SIGNAL]);
        }
        if self.reads(EstimatorInput::Values) {
            // A critic learns the returns.
            spec = spec.reads(VALUES).writes(RETURNS);
            spec = spec.remedy(VALUES.name(), NO_VALUES);
        }
        if self.reads(EstimatorInput::RewardBaselines) {
            spec = spec.reads_broadcast(REWARD_BASELINES);
            spec = spec.remedy(REWARD_BASELINES.name(), NO_BASELINES);
        }
        if self.reads(EstimatorInput::SumPiSquared) {
            spec = spec
                .reads(SUM_PI_SQUARED.tagged(self.tag(Weights::StepStart)))
                .remedy(SUM_PI_SQUARED.name(), NO_SQUARES)
                .reads_optional(ROLLOUT_WEIGHTS);
        }
        if self.reads_old() {
            spec = spec
                .reads(OLD_LOG_PROBS.tagged(self.tag(Weights::StepStart)))
                .remedy(OLD_LOG_PROBS.name(), NO_OLD);
        }
        if self.reads_reference() {
            spec = spec
                .reads(REF_LOG_PROBS.tagged(self.tag(Weights::Frozen)))
                .remedy(REF_LOG_PROBS.name(), NO_REFERENCE)
                .once(KL_PENALTY);
        }
        if self.config.kl_coef != 0.0 {
            spec = spec
                .metrics(&[REWARD_KL])
                .shows(Shown::of(&REWARD_KL, "kl", Shown::DISTANCE));
        }
        if self.steering.is_some() {
            spec = spec.metrics(&[REWARD_KL_COEF]);
        }
        self.warning.iter().cloned().fold(spec, StageSpec::warning)
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let kinds = input.get(&MASK_KINDS)?;
        let actions = AlgoRagged::from_rows(kinds.rows().map(|row| {
            row.iter()
                .map(|kind| *kind == mask::ACTION)
                .collect::<Vec<_>>()
        }));
        let baselines = self
            .reads(EstimatorInput::RewardBaselines)
            .then(|| scores_of(&input, REWARD_BASELINES.name()))
            .transpose()?;
        let components = self.component_scores(&input)?;
        let scores = self.scores(&input, &components, baselines.as_deref())?;
        self.report(&input, &scores, context);
        let coef = match &mut self.steering {
            Some(steering) => {
                let coef = steering.coef(context.step)?;
                context.record(&REWARD_KL_COEF, coef);
                coef
            }
            None => self.config.kl_coef,
        };
        let kls = (self.config.kl_coef != 0.0)
            .then(|| self.token_kls(&input, &actions, context))
            .transpose()?;
        let penalties = kls.map(|kls| kls.map(|_, _, kl| coef * kl));

        // A row without a score carries no signal. The estimator sees none of its tokens as an action, so the row is
        // left out of the statistics and gets advantage 0.
        let scored = actions.map(|row, _, action| action && scores[row].is_some());
        let rewards = self
            .reads(EstimatorInput::TokenLevelRewards)
            .then(|| token_rewards(&scored, &scores, penalties.as_ref()));
        let outcomes = outcomes(&scores, penalties.as_ref());
        let tokens = |wanted: bool, key: &Key<Ragged<f32>>| -> Result<_, StageError> {
            let column = wanted.then(|| input.get(key)).transpose()?;
            Ok(column.map(|column| AlgoRagged::from_rows(column.rows())))
        };
        let values = tokens(self.reads(EstimatorInput::Values), &VALUES)?;
        let old = tokens(self.reads(EstimatorInput::OldLogProbs), &OLD_LOG_PROBS)?;
        let reference = tokens(self.reads(EstimatorInput::RefLogProbs), &REF_LOG_PROBS)?;
        let reads_squares = self.reads(EstimatorInput::SumPiSquared);
        let squares = tokens(reads_squares, &SUM_PI_SQUARED)?;
        let has_weights = reads_squares && input.has(ROLLOUT_WEIGHTS.name());
        let weights = tokens(has_weights, &ROLLOUT_WEIGHTS)?;
        // A row whose baseline has no score counts as unscored, so its number is not read.
        let baselines = baselines
            .map(|rows| -> Vec<f64> { rows.into_iter().map(Option::unwrap_or_default).collect() });
        let inputs = AdvantageInputs {
            groups: Some(input.groups()),
            scores: Some(&outcomes),
            token_level_rewards: rewards.as_ref(),
            values: values.as_ref(),
            reward_baselines: baselines.as_deref(),
            reward_components: (!components.is_empty()).then_some(&components),
            old_log_probs: old.as_ref(),
            ref_log_probs: reference.as_ref(),
            sum_pi_squared: squares.as_ref(),
            rollout_weights: weights.as_ref(),
            ..AdvantageInputs::new(&scored)
        };
        let result = self
            .estimator
            .estimate(&inputs)
            .map_err(StageError::failed)?;
        let mut output = input.rows_only();
        output.put(&ADVANTAGES, narrowed(&result.advantages))?;
        if let Some(values) = &values {
            let returns = result.returns.ok_or_else(|| {
                let name = self.estimator.name();
                let reason =
                    "reads a critic's values, but computes no returns for the critic to learn";
                StageError::failed(format!("estimator `{name}` {reason}"))
            })?;
            // A row without a score must not train the critic: its returns are the critic's own values.
            let returns = returns.map(|row, token, value| {
                let unscored = scores[row].is_none() && actions.row(row)[token];
                if unscored {
                    values.row(row)[token]
                } else {
                    value
                }
            });
            output.put(&RETURNS, narrowed(&returns))?;
        }
        context.emit(output)
    }

    fn snapshot(&mut self) -> Result<Option<Snapshot>, StageError> {
        Ok(self.steering.as_ref().map(snapshot))
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), StageError> {
        self.steering = Some(restored(snapshot)?);
        Ok(())
    }

    fn store(&mut self, snapshot: &Snapshot) -> Result<Option<StoredState>, StageError> {
        stored::<KlSteering>(snapshot)
    }

    fn recall(
        &mut self,
        version: &WeightsVersion,
        stored: &StoredState,
    ) -> Result<Snapshot, StageError> {
        recalled::<KlSteering>(version, stored)
    }
}

/// A column of rewards.
fn scores_of(input: &Batch, key: &str) -> Result<Vec<Option<f64>>, StageError> {
    let rewards = input.get_as(&REWARDS, key)?;
    Ok(rewards.rows().map(|reward| reward.map(f64::from)).collect())
}

/// Rows of f64 as an f32 column.
fn narrowed(rows: &AlgoRagged<f64>) -> RaggedColumn<f32> {
    let rows = rows.rows();
    RaggedColumn::from_rows(rows.map(|row| row.iter().map(|v| *v as f32).collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests;
