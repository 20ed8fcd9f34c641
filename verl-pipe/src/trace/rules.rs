//! Anomaly rules: what is looked for in every step, and what is said when it is found.
//!
//! A rule looks at the statistics and rows of a step before the update runs, or at its metrics after it. It *warns*, or
//! *stops* the run before the optimiser moves (a rule on metrics: before the next one).
//!
//! One cause is one event. A rule reports a stage and key when it begins to hold, and again only after it has not held
//! for [`QUIET_STEPS`] steps. What follows from another finding of the same step (advantages of 0 from equal
//! rewards) is counted, not reported. [`Fired`] sums up each rule at the end of a run.
//!
//! Built-in rules stand in [`RULES`]; `[trace.rules]` tunes or silences them by name:
//!
//! ```toml
//! [trace.rules.entropy_collapse]
//! severity = "stop"
//! limit = 0.05
//! [trace.rules.constant_reward]
//! severity = "off"
//! ```
//!
//! A rule of one's own implements [`Rule`] and is added to the pipeline
//! ([`DataPipe::rule`](crate::pipe::DataPipe::rule)), or to the registry
//! ([`Registry::rule`](crate::registry::Registry::rule)) for every pipeline that is read with it. It is tuned and silenced
//! like those that are built in.

mod book;
mod built_in;
mod log_probs;
mod metrics;
mod robust;
mod rows;
mod trends;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, RowId};
use crate::resource::WeightsVersion;
use crate::trace::format::Side;
use crate::trace::stats::StatRow;

pub(crate) use book::RuleBook;
pub use book::{Fired, QUIET_STEPS};
pub use built_in::{BuiltIn, LooksAt, RULES};

/// First steps of a run whose metrics are kept for rules.
pub const EARLY_STEPS: usize = 16;
/// Newest steps of a run whose metrics are kept for rules.
pub const HISTORY_STEPS: usize = 64;

/// What a rule does when it fires.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Nothing; it is not even looked at.
    Off,
    /// A line on the console and in `trace/anomalies.jsonl`; the flight recorder is written.
    Warn,
    /// The same, and the run ends before the optimiser moves.
    Stop,
}

/// Rows that entered or left a stage in the step so far.
#[derive(Debug, Clone, Copy)]
pub struct SeenBatch<'a> {
    /// Name of the stage.
    pub stage: &'a str,
    /// Which side of it.
    pub side: Side,
    /// The rows, in the stage's own names.
    pub batch: &'a Batch,
}

/// A step before its update, as rules see it.
pub struct StepView<'a> {
    /// Step of the run.
    pub step: u64,
    /// Statistics of what came by so far.
    pub stats: &'a [StatRow],
    /// Rows that came by so far and are still in memory, in the order of stages.
    pub batches: &'a [SeenBatch<'a>],
    /// The stage that is about to update a model, and its input; `None` where the pipeline updates none.
    pub update: Option<SeenBatch<'a>>,
    /// For each log-prob key that was compared with a counterpart: its name, and the largest distance of each row.
    pub distances: &'a BTreeMap<String, Vec<(RowId, f64)>>,
    /// By stage: the longest response that a setting of the stage allows, and the name of the setting.
    pub limits: &'a BTreeMap<String, (&'static str, usize)>,
}

/// A step after its end, as rules see it.
pub struct MetricsView<'a> {
    /// Step of the run.
    pub step: u64,
    /// Its metrics.
    pub metrics: &'a BTreeMap<String, f64>,
    /// Metrics of the steps before, the newest last; [`HISTORY_STEPS`] at most.
    pub history: &'a VecDeque<BTreeMap<String, f64>>,
    /// Metrics of the first steps of the run, this one left out; [`EARLY_STEPS`] at most.
    pub early: &'a [BTreeMap<String, f64>],
    /// Versions of the models when they were looked at last, and the step; now and then only, as a hash reads all
    /// weights.
    pub versions: &'a [(u64, BTreeMap<String, WeightsVersion>)],
    /// Whether every device of the run is a CPU.
    pub on_cpu: bool,
}

impl MetricsView<'_> {
    /// The values of `name` in the steps before that have it, the newest last.
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

    /// The value of `name` in this step and the `steps - 1` before, the newest last; `None` where one lacks it.
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
    /// Name of the stage; a metric's group where it is about a metric.
    pub stage: String,
    /// The key, or the metric.
    pub key: String,
    /// What was measured, in the rule's unit.
    pub value: f64,
    /// The rows that did most for it, the worst first.
    pub samples: Vec<RowId>,
    /// What is wrong, as a fragment that stands alone.
    pub what: String,
}

/// Looks for one kind of anomaly.
pub trait Rule: Send {
    /// Its name, unique.
    fn name(&self) -> &str;
    /// What it does when it fires, unless a setting says otherwise.
    fn severity(&self) -> Severity {
        Severity::Warn
    }
    /// Where it fires, unless a setting says otherwise.
    fn limit(&self) -> f64 {
        0.0
    }
    /// What to do when it has fired.
    fn advice(&self) -> &str;
    /// What usually causes it, as a list; empty where nothing is known.
    fn causes(&self) -> &str {
        ""
    }
    /// Names of rules from whose findings this one's follow: it reports nothing in a step in which one of them holds.
    fn follows_from(&self) -> &[&str] {
        &[]
    }
    /// Looks at a step before its update.
    fn before_update(&mut self, _view: &StepView<'_>, _limit: f64) -> Vec<Hit> {
        Vec::new()
    }
    /// Looks at a step after its end.
    fn after_step(&mut self, _view: &MetricsView<'_>, _limit: f64) -> Vec<Hit> {
        Vec::new()
    }
}

/// A declared rule of one's own; each run makes its own rule of it.
#[derive(Clone)]
pub struct RuleDecl {
    /// Its name, unique among all rules.
    pub name: String,
    /// What it does when it fires, unless a setting says otherwise.
    pub severity: Severity,
    /// Where it fires, unless a setting says otherwise.
    pub limit: f64,
    /// Makes the rule.
    pub build: Arc<dyn Fn() -> Box<dyn Rule> + Send + Sync>,
}

impl RuleDecl {
    /// The rule that `make` makes.
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
    /// Number of the trace's format.
    pub format: u32,
    /// Name of the rule.
    pub rule: String,
    /// What it does.
    pub severity: Severity,
    /// Step of the run.
    pub step: u64,
    /// Name of the stage, or group of the metric.
    pub stage: String,
    /// The key, or the metric.
    pub key: String,
    /// The rows that did most for it, the worst first: `epoch.row#sample`.
    pub samples: Vec<String>,
    /// The same as numbers, as in the column `sample_id`.
    pub sample_ids: Vec<u64>,
    /// What was measured, in the rule's unit (see `docs/trace.md`); null where it is no finite number.
    pub value: Option<f64>,
    /// Where the rule fires, in the same unit.
    pub limit: f64,
    /// What is wrong, in words.
    pub what: String,
    /// What usually causes it; empty where nothing is known.
    #[serde(default)]
    pub causes: String,
    /// What to do about it.
    pub advice: String,
    /// Command that shows the step; empty where nothing is recorded of it.
    #[serde(default)]
    pub command: String,
}

/// On one line; with `{:#}` each part on a line of its own.
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
#[path = "rules/tests.rs"]
mod tests;
