//! What is recorded: section `[trace]` of the pipeline file.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::trace::rules::{RULES, Severity};

/// What is kept of the models' weights and optimiser state with a step that is recorded in full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TraceWeights {
    /// Version and hash.
    Hash,
    /// The state itself, so that the step can be replayed.
    Full,
}

/// Changes a rule; see [`rules`](crate::trace::rules) for their names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RuleSetting {
    /// `off`, `warn` or `stop`; the rule's own when absent.
    pub severity: Option<Severity>,
    /// Where it fires, in the rule's unit, not below 0; the rule's own when absent.
    #[schemars(range(min = 0))]
    pub limit: Option<f64>,
}

/// What a run records (`[trace]`). With the defaults: statistics of every edge at every step, a flight recorder of the
/// last two steps before the current one, and no step in full.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TraceConfig {
    /// Statistics of every edge at every step. Without them there are no rules and no flight recorder either.
    pub stats: bool,
    /// Steps that are recorded in full, counted from 1.
    #[schemars(inner(range(min = 1)))]
    pub steps: Vec<u64>,
    /// Besides them every step whose number is a multiple of this is recorded in full; none when absent (steps).
    #[schemars(range(min = 1))]
    pub every: Option<u64>,
    /// Stages that are recorded of such a step; all when empty.
    pub stages: Vec<String>,
    /// Largest size of all steps in full on disk (megabytes); steps past it are dropped, and told.
    #[schemars(range(min = 1))]
    pub budget_mb: u64,
    /// What is kept of weights and optimiser; when absent `full` for a step of which every stage is recorded, as long
    /// as the state is below `weights_limit_mb`.
    pub weights: Option<TraceWeights>,
    /// Largest state of all models that is kept where `weights` is absent (megabytes).
    pub weights_limit_mb: u64,
    /// Last steps that the flight recorder holds in memory besides the current one; 0 for no flight recorder (steps).
    pub ring_steps: usize,
    /// Largest size of the flight recorder (megabytes); it needs some where `ring_steps` is above 0.
    pub ring_mb: u64,
    /// Times that the flight recorder is written to disk in a run because a rule fired; a step that fails is written in
    /// any case.
    pub ring_writes: usize,
    /// Steps in one file of statistics (steps).
    #[schemars(range(min = 1))]
    pub part_steps: usize,
    /// Rules to tune or to silence, by name; `docs/trace.md` tells what each looks at, its limit and its unit.
    #[schemars(extend("propertyNames" = names_of_rules()))]
    pub rules: BTreeMap<String, RuleSetting>,
}

/// The names that rules have, as JSON Schema.
fn names_of_rules() -> serde_json::Value {
    let names: Vec<&str> = RULES.iter().map(|rule| rule.name).collect();
    serde_json::json!({ "enum": names })
}

impl Default for TraceConfig {
    fn default() -> Self {
        TraceConfig {
            stats: true,
            steps: Vec::new(),
            every: None,
            stages: Vec::new(),
            budget_mb: 4096,
            weights: None,
            weights_limit_mb: 1024,
            ring_steps: 2,
            ring_mb: 256,
            ring_writes: 8,
            part_steps: 32,
            rules: BTreeMap::new(),
        }
    }
}

/// A size in megabytes as bytes; one beyond all memory is the largest.
pub(crate) fn bytes_of(megabytes: u64) -> u64 {
    megabytes.saturating_mul(1 << 20)
}

impl TraceConfig {
    /// Whether anything is asked for in full, stages with a `debug` of their own left out.
    pub fn captures(&self) -> bool {
        self.every.is_some_and(|every| every > 0) || !self.steps.is_empty()
    }

    /// Whether any of the steps 1 to `last` is to be recorded in full, stages with a `debug` of their own left out.
    pub fn captures_up_to(&self, last: u64) -> bool {
        let reached = |step: u64| (1..=last).contains(&step);
        self.every.is_some_and(reached) || self.steps.iter().any(|step| reached(*step))
    }

    /// Whether `step` is to be recorded in full.
    pub fn captures_step(&self, step: u64) -> bool {
        let periodic = |every: u64| every > 0 && step.is_multiple_of(every);
        self.steps.contains(&step) || self.every.is_some_and(periodic)
    }

    /// Whether `stage` is among those that are recorded of such a step.
    pub fn captures_stage(&self, stage: &str) -> bool {
        self.stages.is_empty() || self.stages.iter().any(|name| name == stage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_beyond_all_memory_is_no_small_one() {
        assert_eq!(bytes_of(3), 3 * 1024 * 1024);
        assert_eq!(bytes_of(1 << 44), u64::MAX);
    }

    #[test]
    fn steps_and_stages_are_chosen() {
        let none = TraceConfig::default();
        assert!(none.stats && !none.captures() && !none.captures_step(1));
        let some = TraceConfig {
            steps: vec![7],
            every: Some(5),
            stages: vec!["reward".to_owned()],
            ..TraceConfig::default()
        };
        let chosen: Vec<u64> = (1..12).filter(|step| some.captures_step(*step)).collect();
        assert_eq!(chosen, [5, 7, 10]);
        assert!(some.captures_up_to(5) && !some.captures_up_to(4));
        assert!(some.captures_stage("reward") && !some.captures_stage("update"));
    }
}
