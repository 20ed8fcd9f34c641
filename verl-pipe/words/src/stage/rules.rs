//! The parts of a stage's declaration: how its input is cut, what it does to rows, when it runs, what it records.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How finely a stage's input may be cut. The executor streams as finely as this allows.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Cardinality {
    /// Any slice of rows; the result for a row does not depend on the others.
    #[default]
    Row,
    /// Whole prompt groups.
    Group,
    /// The whole batch of the step, all waves of it: a barrier.
    Batch,
}

/// What a stage does to the number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowRule {
    /// Creates rows: one per prompt of the step (of each of its waves, see [`Refill`]).
    Source,
    /// One row out for each row in, same identities.
    #[default]
    Same,
    /// Each row becomes `n` samples: `P → P·n`. All keys of the input are carried along.
    Expand(usize),
    /// Drops rows; identities of the others stay. All keys of the input are carried along.
    Filter,
    /// Reads rows and emits none.
    Sink,
}

/// How many groups a filter should keep in a step, and how many waves its source may draw.
///
/// A source draws its prompts in *waves*. When the filter has processed all groups of a wave and kept fewer than
/// `groups` so far, the source draws the next wave, up to `waves` of them. Only the first `groups` kept groups go on,
/// in the order in which they were drawn; the rest is surplus. Stages before the filter process each wave as it
/// arrives; stages after it see one list of rows.
///
/// The engine records, under the name of the stage, `…/waves` (waves drawn), `…/groups_kept` (groups that went on) and
/// `…/groups_surplus` (groups kept beyond the required number).
///
/// ```
/// use verl_pipe::keys::{REWARDS, GROUP_MEANS};
/// use verl_pipe::stage::{Cardinality, OnShort, Refill, RowRule, StageSpec};
///
/// let spec = StageSpec::new()
///     .reads(REWARDS)
///     .writes(GROUP_MEANS)
///     .rows(RowRule::Filter)
///     .cardinality(Cardinality::Group)
///     .refill(Refill { groups: 32, waves: 3, on_short: OnShort::Error });
/// assert_eq!(spec.refill.map(|refill| refill.waves), Some(3));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Refill {
    /// Number of groups that a step should keep.
    pub groups: usize,
    /// Maximum number of waves of a step; with 1, the source draws no additional wave.
    pub waves: usize,
    /// What happens to a step that kept fewer after its last wave.
    pub on_short: OnShort,
}

/// What happens to a step that kept too few groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnShort {
    /// The run ends before anything is updated.
    #[default]
    Error,
    /// The step continues with the groups that were kept; if there are none, the run ends.
    Continue,
}

/// When a stage runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cadence {
    /// As part of every step.
    #[default]
    Step,
    /// Between steps, without rows: before the first step, after every `every` steps, and after the last.
    Observer {
        /// Steps between two runs; 0 means only before the first and after the last step.
        every: u64,
    },
}

/// What a stage does with a model.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reads weights.
    Read,
    /// Changes weights; runs after every stage that reads them in the same step.
    Update,
}

/// How metric values of one step become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reduce {
    /// Weighted mean.
    Mean,
    /// Sum.
    Sum,
    /// Smallest.
    Min,
    /// Largest.
    Max,
    /// The newest value.
    Last,
}

/// A metric that a stage records: documented once, here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Name with its group, for example `actor/loss`.
    pub name: &'static str,
    /// Unit; empty where there is none.
    pub unit: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// How the step's values are reduced.
    pub reduce: Reduce,
    /// What the console and the anomaly rules take it for; `None` if they do not use it.
    pub role: Option<MetricRole>,
}

/// Placeholder for the name of a stage in the name of a metric.
pub const STAGE: &str = "<stage>";

/// Name of `metric` for a stage: [`STAGE`] is replaced by the name of the stage.
pub fn of_stage(metric: &Metric, stage: &str) -> String {
    metric.name.replace(STAGE, stage)
}

/// Metric of a stage that updates a model: optimiser steps that it skipped. The engine declares it for every stage.
pub const NO_SAMPLES: Metric = Metric {
    name: "<stage>/no_samples",
    unit: "optimiser steps",
    meaning: "optimiser steps that were skipped because no token was left to learn from",
    reduce: Reduce::Sum,
    role: None,
};

/// What a metric is to the console and to the anomaly rules, which find metrics by their roles and never by their names.
/// Metrics of several stages may have the same role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MetricRole {
    /// Loss of the model that the run is for.
    Loss,
    /// Mean reward.
    Reward,
    /// KL divergence of the policy from a reference, per token (nats).
    ReferenceKl,
    /// KL divergence of the trainer from the rollout engine, per token (nats).
    RolloutKl,
    /// How far the updates of a step moved the policy, per token (nats).
    UpdateKl,
    /// Difference of two log-probs of the same weights, 0 except for rounding (nats).
    SameWeightsDifference,
    /// Mean entropy of the policy, or an estimate of it (nats).
    Entropy,
    /// Norm of gradients.
    GradientNorm,
    /// Learning rate.
    LearningRate,
    /// Number of optimiser steps of a step.
    OptimizerSteps,
    /// Share of tokens that a clip affects.
    ClippedShare,
    /// Mean length of the responses (tokens).
    ResponseLength,
    /// Share of the responses that reached the token limit.
    TruncatedShare,
    /// How well values predict returns: the explained share of their variance.
    ExplainedVariance,
    /// Log-prob of chosen answers (nats).
    ChosenLogProb,
    /// Log-prob of rejected answers (nats).
    RejectedLogProb,
    /// Estimated distance from the reference that a loss subtracts from its rewards (nats).
    RewardBaseline,
    /// Number of failed rows.
    RowErrors,
}

/// The roles of the metrics of a run, by their names.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MetricRoles(Arc<BTreeMap<String, MetricRole>>);

impl MetricRoles {
    /// The role of the metric `name`.
    pub fn get(&self, name: &str) -> Option<MetricRole> {
        self.0.get(name).copied()
    }
}

impl FromIterator<(String, MetricRole)> for MetricRoles {
    fn from_iter<I: IntoIterator<Item = (String, MetricRole)>>(roles: I) -> Self {
        MetricRoles(Arc::new(roles.into_iter().collect()))
    }
}

impl fmt::Display for MetricRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MetricRole::Loss => "a loss",
            MetricRole::Reward => "a mean reward",
            MetricRole::ReferenceKl => "a KL divergence from a reference",
            MetricRole::RolloutKl => "a KL divergence from the rollout engine",
            MetricRole::UpdateKl => "how far updates move the policy",
            MetricRole::SameWeightsDifference => "a difference of log-probs of the same weights",
            MetricRole::Entropy => "an entropy of the policy",
            MetricRole::GradientNorm => "a gradient norm",
            MetricRole::LearningRate => "a learning rate",
            MetricRole::OptimizerSteps => "a number of optimiser steps",
            MetricRole::ClippedShare => "a share of clipped tokens",
            MetricRole::ResponseLength => "a mean length of responses",
            MetricRole::TruncatedShare => "a share of truncated responses",
            MetricRole::ExplainedVariance => "an explained variance of returns",
            MetricRole::ChosenLogProb => "a log-prob of chosen answers",
            MetricRole::RejectedLogProb => "a log-prob of rejected answers",
            MetricRole::RewardBaseline => "a distance from the reference as baseline of rewards",
            MetricRole::RowErrors => "a number of failed rows",
        })
    }
}

/// A metric that the console shows after a step. Each stage declares which of its metrics matter; the console prints
/// those of all stages on one line, ordered by rank, as many as fit.
///
/// ```
/// use verl_pipe::stage::{Metric, Reduce, Shown, StageSpec};
///
/// const ACCURACY: Metric = Metric {
///     name: "judge/accuracy",
///     unit: "share",
///     meaning: "share of verdicts that are right",
///     reduce: Reduce::Mean,
///     role: None,
/// };
/// let spec = StageSpec::new()
///     .metrics(&[ACCURACY])
///     .shows(Shown::of(&ACCURACY, "acc", Shown::OUTCOME).narrow());
/// assert_eq!(spec.shows[0].label, "acc");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// Name of the metric.
    pub metric: &'static str,
    /// The label before the value.
    pub label: &'static str,
    /// Position in the line, and priority: if there is no room, the largest ranks are omitted.
    pub rank: u8,
    /// Characters of the value.
    pub width: usize,
}

impl Shown {
    /// Rank of a loss that measures how good the model is.
    pub const LOSS: u8 = 5;
    /// Rank of what a run is for: reward, accuracy.
    pub const OUTCOME: u8 = 10;
    /// Rank of what the responses look like: length, entropy.
    pub const RESPONSES: u8 = 20;
    /// Rank of distances between policies: KL, share of clipped tokens.
    pub const DISTANCE: u8 = 40;
    /// Rank of gradients.
    pub const GRADIENT: u8 = 60;
    /// Rank of speed.
    pub const SPEED: u8 = 70;
    /// Rank of details that matter when something is wrong.
    pub const DETAIL: u8 = 80;

    /// `metric` after the word `label`, with six characters for its value.
    pub const fn of(metric: &Metric, label: &'static str, rank: u8) -> Shown {
        Shown {
            metric: metric.name,
            label,
            rank,
            width: 6,
        }
    }

    /// With five characters for its value, which must not be negative.
    pub const fn narrow(mut self) -> Shown {
        self.width = 5;
        self
    }
}

/// A quantity that several stages set and that should be equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreement {
    /// What it is, as a phrase.
    pub quantity: &'static str,
    /// The stage's setting.
    pub setting: &'static str,
    /// What it is set to.
    pub value: String,
}

/// What happens to a row whose host-pool call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnRowError {
    /// Its nullable keys become null, and it is counted. Only possible if every written key is nullable.
    #[default]
    Null,
    /// The step ends with the error.
    Stop,
}
