//! Anomaly rules: what is checked in every step, and what is reported.
//!
//! A rule checks the statistics and rows of a step before the update runs, or its metrics afterwards. It *warns*, or
//! *stops* the run before the optimiser step (a rule on metrics: before the next one).
//!
//! One cause is one event. A rule reports a stage and key when it first matches, and again only after [`QUIET_STEPS`]
//! steps without a match. A finding that follows from another one in the same step (advantages of 0 from equal rewards)
//! is neither reported nor counted. [`Fired`] summarises each rule at the end of a run.
//!
//! [`RULES`] lists the built-in rules; `[trace.rules]` tunes them or turns them off by name:
//!
//! ```toml
//! [trace.rules.entropy_collapse]
//! severity = "stop"
//! limit = 0.05
//! [trace.rules.constant_reward]
//! severity = "off"
//! ```
//!
//! A custom rule implements [`Rule`] and is added to the pipeline (`DataPipe::rule`), or to the registry
//! (`Registry::rule`) for every pipeline that is read with it. It is tuned and turned off like the built-in ones.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

mod book;
mod built_in;
pub mod config;
pub mod format;
mod log_probs;
mod metrics;
mod robust;
mod rows;
pub mod stats;
mod trends;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_words::batch::{Batch, RowId};
use verl_words::resource::WeightsVersion;
use verl_words::stage::{MetricRole, MetricRoles};

use crate::format::Side;
use crate::stats::StatRow;

pub use book::{Fired, QUIET_STEPS, RuleBook};
pub use built_in::{BuiltIn, LimitUnit, RULES, RuleInputs};

/// Number of first steps of a run whose metrics are kept for rules.
pub const EARLY_STEPS: usize = 16;
/// Number of newest steps of a run whose metrics are kept for rules.
pub const HISTORY_STEPS: usize = 64;

/// What a rule does when it fires.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RuleSeverity {
    /// Nothing.
    Off,
    /// A line on the console and in `trace/anomalies.jsonl`; the flight recorder is written.
    Warn,
    /// The same, and the run ends before the optimiser step.
    Stop,
}

/// Rows that entered or left a stage in the step so far.
#[derive(Debug, Clone, Copy)]
pub struct SeenBatch<'a> {
    /// Name of the stage.
    pub stage: &'a str,
    /// Side of the stage.
    pub side: Side,
    /// The rows; keys have the stage's own names.
    pub batch: &'a Batch,
}

/// A step before its update, as rules see it.
pub struct StepView<'a> {
    /// Step of the run.
    pub step: u64,
    /// Statistics of the step so far.
    pub stats: &'a [StatRow],
    /// Rows of the step so far that are still in memory, in order of arrival.
    pub batches: &'a [SeenBatch<'a>],
    /// The stage that is about to update a model, and its input; `None` if the step updates none.
    pub update: Option<SeenBatch<'a>>,
    /// For each log-prob key that was compared with a counterpart, the largest distance of each row.
    pub distances: &'a BTreeMap<String, Vec<(RowId, f64)>>,
    /// By stage: the setting that limits its responses, and its value (tokens).
    pub limits: &'a BTreeMap<String, (&'static str, usize)>,
}

/// A step after its end, as rules see it.
pub struct MetricsView<'a> {
    /// Step of the run.
    pub step: u64,
    /// Its metrics.
    pub metrics: &'a BTreeMap<String, f64>,
    /// Roles of the metrics of the run.
    pub roles: &'a MetricRoles,
    /// Metrics of the previous steps, newest last; at most [`HISTORY_STEPS`].
    pub history: &'a VecDeque<BTreeMap<String, f64>>,
    /// Metrics of the first steps of the run, without this one; at most [`EARLY_STEPS`].
    pub early: &'a [BTreeMap<String, f64>],
    /// The last known versions of the models, with their steps; only every few steps, since a hash reads all weights.
    pub versions: &'a [(u64, BTreeMap<String, WeightsVersion>)],
    /// Whether every device of the run is a CPU.
    pub on_cpu: bool,
}

impl MetricsView<'_> {
    /// The metrics of the step that have one of `roles`, with their values.
    pub fn with_roles(&self, roles: &[MetricRole]) -> impl Iterator<Item = (&str, f64)> {
        let all = self
            .metrics
            .iter()
            .map(|(name, value)| (name.as_str(), *value));
        all.filter(move |(name, _)| {
            self.roles
                .get(name)
                .is_some_and(|role| roles.contains(&role))
        })
    }

    /// Name of the first metric of the step with `role`.
    pub fn named(&self, role: MetricRole) -> Option<&str> {
        let mut names = self.metrics.keys();
        let found = names.find(|name| self.roles.get(name) == Some(role));
        found.map(String::as_str)
    }

    /// The values of `name` in the previous steps that have it, newest last.
    pub fn before(&self, name: &str) -> Vec<f64> {
        self.history
            .iter()
            .filter_map(|step| step.get(name).copied())
            .collect()
    }

    /// The values of `name` in the first steps of the run that have it.
    pub fn first(&self, name: &str) -> Vec<f64> {
        self.early
            .iter()
            .filter_map(|step| step.get(name).copied())
            .collect()
    }

    /// The values of `name` in this step and the `steps - 1` before it, newest last; `None` if one of them lacks it.
    pub fn last(&self, name: &str, steps: usize) -> Option<Vec<f64>> {
        let before = self.history.len().checked_sub(steps.saturating_sub(1))?;
        self.history
            .range(before..)
            .chain([self.metrics])
            .map(|step| step.get(name).copied())
            .collect()
    }
}

/// What a rule found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Hit {
    /// Name of the stage, or group of the metric.
    pub stage: String,
    /// The key, or the metric.
    pub key: String,
    /// Measured value, in the rule's unit.
    pub value: f64,
    /// The rows that contribute most, worst first.
    pub samples: Vec<RowId>,
    /// What is wrong, as a fragment that stands alone.
    pub what: String,
}

/// Detects one kind of anomaly.
pub trait Rule: Send {
    /// Its unique name.
    fn name(&self) -> &str;
    /// What it does when it fires, unless a setting overrides it.
    fn severity(&self) -> RuleSeverity {
        RuleSeverity::Warn
    }
    /// Limit at which it fires, unless a setting overrides it.
    fn limit(&self) -> f64 {
        0.0
    }
    /// What to do when it has fired.
    fn advice(&self) -> &str;
    /// Likely causes, as a list; empty if none are known.
    fn causes(&self) -> &str {
        ""
    }
    /// Names of rules whose findings imply this one's: it reports nothing in a step in which one of them matches,
    /// unless its severity is [`RuleSeverity::Stop`].
    fn follows_from(&self) -> &[&str] {
        &[]
    }
    /// Checks a step before its update.
    fn before_update(&mut self, _view: &StepView<'_>, _limit: f64) -> Vec<Hit> {
        Vec::new()
    }
    /// Checks a step after its end.
    fn after_step(&mut self, _view: &MetricsView<'_>, _limit: f64) -> Vec<Hit> {
        Vec::new()
    }
}

/// Declaration of a custom rule; each run builds its own instance.
#[derive(Clone)]
pub struct RuleDecl {
    /// Its name, unique among all rules.
    pub name: String,
    /// What it does when it fires, unless a setting overrides it.
    pub severity: RuleSeverity,
    /// Limit at which it fires, unless a setting overrides it.
    pub limit: f64,
    /// Builds the rule.
    pub build: Arc<dyn Fn() -> Box<dyn Rule> + Send + Sync>,
}

impl RuleDecl {
    /// Declares the rule that `make` returns.
    pub fn new<R: Rule + 'static>(make: impl Fn() -> R + Send + Sync + 'static) -> RuleDecl {
        let rule = make();
        RuleDecl {
            name: rule.name().to_owned(),
            severity: rule.severity(),
            limit: rule.limit(),
            build: Arc::new(move || Box::new(make())),
        }
    }
}

impl fmt::Debug for RuleDecl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuleDecl")
            .field("name", &self.name)
            .field("severity", &self.severity)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// A rule that fired: a line of `trace/anomalies.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Anomaly {
    /// Trace format number.
    pub format: u32,
    /// Name of the rule.
    pub rule: String,
    /// Severity of the rule.
    pub severity: RuleSeverity,
    /// Step of the run.
    pub step: u64,
    /// Name of the stage, or group of the metric.
    pub stage: String,
    /// The key, or the metric.
    pub key: String,
    /// The rows that contribute most, worst first: `epoch.row#sample`.
    pub samples: Vec<String>,
    /// The same as numbers, as in the column `sample_id`.
    pub sample_ids: Vec<u64>,
    /// Measured value, in the rule's unit (see `docs/trace.md`); null if it is not finite.
    pub value: Option<f64>,
    /// Limit at which the rule fires, in the same unit.
    pub limit: f64,
    /// What is wrong, in words.
    pub what: String,
    /// Likely causes; empty if none are known.
    #[serde(default)]
    pub causes: String,
    /// What to do about it.
    pub advice: String,
    /// Command that shows the step; empty if there is none.
    #[serde(default)]
    pub command: String,
}

/// On one line; with `{:#}` each part on its own line.
impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Anomaly {
            rule,
            step,
            stage,
            key,
            what,
            ..
        } = self;
        write!(f, "{rule}: step {step}, `{stage}`, `{key}`: {what}")?;
        let between = if f.alternate() { "\n  " } else { "; " };
        let samples = self.samples.join(", ");
        let command = match self.command.as_str() {
            "" => String::new(),
            command => format!("`{command}`"),
        };
        for (word, text) in [
            ("worst samples", samples.as_str()),
            ("likely causes:", self.causes.as_str()),
            ("next:", self.advice.as_str()),
            ("look further:", command.as_str()),
        ] {
            if !text.is_empty() {
                write!(f, "{between}{word} {text}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
