//! What is recorded: section `[trace]` of the pipeline file.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{RULES, RuleSeverity};

/// What a step recorded in full stores of the models' weights and optimiser state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TraceWeights {
    /// Version and hash.
    Hash,
    /// The state itself, so that the step can be replayed.
    Full,
}

/// Overrides the defaults of a rule; [`rules`](crate) lists the names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RuleSetting {
    /// `off`, `warn` or `stop`; the rule's default when absent.
    pub severity: Option<RuleSeverity>,
    /// Limit at which the rule fires, in the rule's unit, at least 0; the rule's default when absent.
    #[schemars(range(min = 0))]
    pub limit: Option<f64>,
}

/// What a run records (`[trace]`). With the defaults: statistics of every edge at every step, a flight recorder of the
/// last two steps before the current one, and no step in full.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TraceConfig {
    /// Record statistics of every edge at every step. Rules and the flight recorder require them.
    pub stats: bool,
    /// Steps to record in full, counted from 1.
    #[schemars(inner(range(min = 1)))]
    pub steps: Vec<u64>,
    /// Also record in full every step whose number is a multiple of this; none when absent (steps).
    #[schemars(range(min = 1))]
    pub every: Option<u64>,
    /// Stages to record in such a step; all when empty.
    pub stages: Vec<String>,
    /// Size limit of all steps recorded in full on disk (megabytes); steps beyond it are dropped with a warning.
    #[schemars(range(min = 1))]
    pub budget_mb: u64,
    /// What to store of weights and optimiser; when absent, `full` for a step in which every stage is recorded if the
    /// state fits in `weights_limit_mb`, else `hash`.
    pub weights: Option<TraceWeights>,
    /// Largest state of all models that is stored when `weights` is absent (megabytes).
    pub weights_limit_mb: u64,
    /// Number of past steps that the flight recorder keeps in memory besides the current one; 0 turns it off (steps).
    pub ring_steps: usize,
    /// Memory limit of the flight recorder (megabytes); above 0 if `ring_steps` is.
    pub ring_mb: u64,
    /// How often a run may write the flight recorder to disk because a rule fired; a step that fails is always written.
    pub ring_writes: usize,
    /// Number of steps in one statistics file (steps).
    #[schemars(range(min = 1))]
    pub part_steps: usize,
    /// Size limit of `timeline.jsonl`, which contains where and when each call of a step ran; the fuller it is, the more steps
    /// are left out; 0 turns it off (megabytes).
    pub timeline_mb: u64,
    /// Rules to tune or turn off, by name; `docs/trace.md` lists what each checks, its limit and its unit.
    #[schemars(extend("propertyNames" = names_of_rules()))]
    pub rules: BTreeMap<String, RuleSetting>,
}

/// The rule names as JSON Schema.
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
            timeline_mb: 32,
            rules: BTreeMap::new(),
        }
    }
}

/// Converts megabytes to bytes; saturates at [`u64::MAX`].
pub fn bytes_of(megabytes: u64) -> u64 {
    megabytes.saturating_mul(1 << 20)
}

impl TraceConfig {
    /// Whether the settings request any step in full, not counting stages with `debug`.
    pub fn captures(&self) -> bool {
        self.every.is_some_and(|every| every > 0) || !self.steps.is_empty()
    }

    /// Whether the settings request any of the steps 1 to `last` in full, not counting stages with `debug`.
    pub fn captures_up_to(&self, last: u64) -> bool {
        let reached = |step: u64| (1..=last).contains(&step);
        self.every.is_some_and(reached) || self.steps.iter().any(|step| reached(*step))
    }

    /// Whether `step` is to be recorded in full.
    pub fn captures_step(&self, step: u64) -> bool {
        let periodic = |every: u64| every > 0 && step.is_multiple_of(every);
        self.steps.contains(&step) || self.every.is_some_and(periodic)
    }

    /// Whether `stage` is recorded in such a step.
    pub fn captures_stage(&self, stage: &str) -> bool {
        self.stages.is_empty() || self.stages.iter().any(|name| name == stage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversized_limit_saturates() {
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
