//! Anomaly rules: what is looked for in every step, and what is said when it is found.
//!
//! A rule looks at the statistics and rows of a step before the update runs, or at its metrics after it. It *warns*, or
//! *stops* the run before the optimiser moves (a rule on metrics: before the next one). It is told once when it begins
//! to hold for a stage and key, and again only after it has ceased to.
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

mod built_in;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, RowId};
use crate::resource::WeightsVersion;
use crate::trace::format::{FORMAT, Side};
use crate::trace::stats::StatRow;

pub use built_in::{BuiltIn, LooksAt, RULES};

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
}

/// A step after its end, as rules see it.
pub struct MetricsView<'a> {
    /// Step of the run.
    pub step: u64,
    /// Its metrics.
    pub metrics: &'a BTreeMap<String, f64>,
    /// Metrics of the steps before, the newest last; some dozens at most.
    pub history: &'a VecDeque<BTreeMap<String, f64>>,
    /// Versions of the models when they were looked at last, and the step; now and then only, as a hash reads all
    /// weights.
    pub versions: &'a [(u64, BTreeMap<String, WeightsVersion>)],
    /// Whether every device of the run is a CPU.
    pub on_cpu: bool,
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
    /// What to look at when it has fired.
    fn advice(&self) -> &str;
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
    /// What to look at next.
    pub advice: String,
}

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
        if !self.samples.is_empty() {
            write!(f, "; worst samples {}", self.samples.join(", "))?;
        }
        write!(f, "; next: {}", self.advice)
    }
}

struct Armed {
    rule: Box<dyn Rule>,
    severity: Severity,
    limit: f64,
    /// Stages and keys for which it held when it was looked at last: before the update, after the step.
    holds: [BTreeSet<(String, String)>; 2],
}

/// The rules of a run.
pub(crate) struct RuleBook {
    armed: Vec<Armed>,
}

impl RuleBook {
    /// Built-in rules and those of the user, as `settings` change them.
    pub(crate) fn new(
        own: Vec<Box<dyn Rule>>,
        settings: &BTreeMap<String, crate::trace::config::RuleSetting>,
    ) -> RuleBook {
        let built_in = RULES.iter().map(|rule| Box::new(*rule) as Box<dyn Rule>);
        let armed = built_in.chain(own).filter_map(|rule| {
            let setting = settings.get(rule.name()).copied().unwrap_or_default();
            let severity = setting.severity.unwrap_or(rule.severity());
            (severity > Severity::Off).then(|| Armed {
                severity,
                limit: setting.limit.unwrap_or(rule.limit()),
                rule,
                holds: Default::default(),
            })
        });
        RuleBook {
            armed: armed.collect(),
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.armed.iter().any(|armed| armed.rule.name() == name)
    }

    pub(crate) fn before_update(&mut self, view: &StepView<'_>) -> Vec<Anomaly> {
        self.look(0, view.step, |rule, limit| rule.before_update(view, limit))
    }

    pub(crate) fn after_step(&mut self, view: &MetricsView<'_>) -> Vec<Anomaly> {
        self.look(1, view.step, |rule, limit| rule.after_step(view, limit))
    }

    fn look(
        &mut self,
        moment: usize,
        step: u64,
        look: impl Fn(&mut dyn Rule, f64) -> Vec<Hit>,
    ) -> Vec<Anomaly> {
        let mut found = Vec::new();
        for armed in &mut self.armed {
            let hits = look(armed.rule.as_mut(), armed.limit);
            let holds = hits
                .iter()
                .map(|hit| (hit.stage.clone(), hit.key.clone()))
                .collect();
            let before = std::mem::replace(&mut armed.holds[moment], holds);
            let new = hits
                .into_iter()
                .filter(|hit| !before.contains(&(hit.stage.clone(), hit.key.clone())));
            found.extend(new.map(|hit| Anomaly {
                format: FORMAT,
                rule: armed.rule.name().to_owned(),
                severity: armed.severity,
                step,
                stage: hit.stage,
                key: hit.key,
                samples: hit.samples.iter().map(ToString::to_string).collect(),
                sample_ids: hit.samples.iter().map(|id| id.0).collect(),
                value: hit.value.is_finite().then_some(hit.value),
                limit: armed.limit,
                what: hit.what,
                advice: armed.rule.advice().to_owned(),
            }));
        }
        found
    }
}

#[cfg(test)]
#[path = "rules/tests.rs"]
mod tests;
