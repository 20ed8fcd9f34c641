//! The rules of a run: which are on, what they found, and which findings are new.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Anomaly, Hit, MetricsView, RULES, Rule, RuleSeverity, StepView};
use crate::config::RuleSetting;
use crate::format::FORMAT;

/// Steps without a match after which a rule reports the same stage and key again.
pub const QUIET_STEPS: u64 = 16;

/// How often a rule fired in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Fired {
    /// Name of the rule.
    pub rule: String,
    /// Severity of the rule.
    pub severity: RuleSeverity,
    /// Number of reports; matches that are at most [`QUIET_STEPS`] steps apart are one.
    pub events: u64,
    /// Number of steps in which it matched.
    pub steps: u64,
    /// The first of these steps.
    pub first_step: u64,
    /// The last of these steps.
    pub last_step: u64,
    /// What was wrong when it first fired.
    pub what: String,
    /// Command that shows that step; empty if there is none.
    pub command: String,
}

impl std::fmt::Display for Fired {
    /// `grad_norm_spike: 3 steps, from 127 to 391; at first: the norm is …`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Fired {
            rule,
            steps,
            first_step,
            last_step,
            what,
            ..
        } = self;
        match steps {
            1 => write!(f, "{rule}: step {first_step}: {what}"),
            n if last_step - first_step + 1 == *n => write!(
                f,
                "{rule}: steps {first_step} to {last_step}, at first: {what}"
            ),
            n => write!(
                f,
                "{rule}: {n} steps from {first_step} to {last_step}, at first: {what}"
            ),
        }
    }
}

/// A stage and a key.
type Place = (String, String);

struct Armed {
    rule: Box<dyn Rule>,
    severity: RuleSeverity,
    limit: f64,
    /// The last step in which it matched, by place.
    last_match: BTreeMap<Place, u64>,
    fired: Option<Fired>,
}

/// The rules of a run.
pub struct RuleBook {
    armed: Vec<Armed>,
    /// The current step, and the rules that matched in it, reported or not.
    matching: (u64, BTreeSet<String>),
}

impl RuleBook {
    /// Built-in and custom rules, with the overrides in `settings`.
    pub fn new(custom: Vec<Box<dyn Rule>>, settings: &BTreeMap<String, RuleSetting>) -> RuleBook {
        let built_in = RULES.iter().map(|rule| Box::new(*rule) as Box<dyn Rule>);
        // A rule that is off still runs if it is a cause, so that what follows from it is not reported either.
        let causes: BTreeSet<&str> = RULES
            .iter()
            .flat_map(|rule| rule.follows_from)
            .copied()
            .collect();
        let armed = built_in.chain(custom).filter_map(|rule| {
            let setting = settings.get(rule.name()).copied().unwrap_or_default();
            let severity = setting.severity.unwrap_or(rule.severity());
            let runs = severity > RuleSeverity::Off || causes.contains(rule.name());
            runs.then(|| Armed {
                severity,
                limit: setting.limit.unwrap_or(rule.limit()),
                rule,
                last_match: BTreeMap::new(),
                fired: None,
            })
        });
        RuleBook {
            armed: armed.collect(),
            matching: (0, BTreeSet::new()),
        }
    }

    /// Whether a rule is on.
    pub fn has(&self, name: &str) -> bool {
        let mut armed = self.armed.iter();
        armed.any(|armed| armed.severity > RuleSeverity::Off && armed.rule.name() == name)
    }

    /// The rules that fired, in the order in which they run.
    pub fn fired(&self) -> Vec<Fired> {
        let fired = self.armed.iter().map(|armed| &armed.fired);
        fired.flatten().cloned().collect()
    }

    /// Runs the rules on a step before its update; `command` makes the command that shows a finding.
    pub fn before_update(
        &mut self,
        view: &StepView<'_>,
        command: &dyn Fn(&Hit) -> String,
    ) -> Vec<Anomaly> {
        self.run(view.step, command, |rule, limit| {
            rule.before_update(view, limit)
        })
    }

    /// Runs the rules on the metrics of a step; `command` makes the command that shows a finding.
    pub fn after_step(
        &mut self,
        view: &MetricsView<'_>,
        command: &dyn Fn(&Hit) -> String,
    ) -> Vec<Anomaly> {
        self.run(view.step, command, |rule, limit| {
            rule.after_step(view, limit)
        })
    }

    fn run(
        &mut self,
        step: u64,
        command: &dyn Fn(&Hit) -> String,
        check: impl Fn(&mut dyn Rule, f64) -> Vec<Hit>,
    ) -> Vec<Anomaly> {
        if self.matching.0 != step {
            self.matching = (step, BTreeSet::new());
        }
        let matching = &mut self.matching.1;
        let mut found = Vec::new();
        for armed in &mut self.armed {
            let hits = check(armed.rule.as_mut(), armed.limit);
            let follows = armed.rule.follows_from().iter();
            let follows = { follows }.any(|cause| matching.contains(*cause));
            if !hits.is_empty() {
                matching.insert(armed.rule.name().to_owned());
            }
            // A rule that stops the run does so even if its finding follows from another one.
            if armed.severity == RuleSeverity::Off
                || follows && armed.severity != RuleSeverity::Stop
            {
                continue;
            }
            let mut anomalies = Vec::new();
            for hit in hits {
                let place = (hit.stage.clone(), hit.key.clone());
                let last = armed.last_match.insert(place, step);
                if last.is_none_or(|last| step > last + QUIET_STEPS) {
                    let command = command(&hit);
                    anomalies.push(armed.anomaly(step, hit, command));
                } else {
                    armed.tally(step, &hit.what, "", 0);
                }
            }
            if let Some(first) = anomalies.first() {
                armed.tally(step, &first.what, &first.command, anomalies.len() as u64);
            }
            found.extend(anomalies);
        }
        found
    }
}

impl Armed {
    /// Counts a step in which the rule matched; a second call for the same step only adds its events.
    fn tally(&mut self, step: u64, what: &str, command: &str, events: u64) {
        let fired = self.fired.get_or_insert_with(|| Fired {
            rule: self.rule.name().to_owned(),
            severity: self.severity,
            events: 0,
            steps: 0,
            first_step: step,
            last_step: 0,
            what: what.to_owned(),
            command: command.to_owned(),
        });
        fired.events += events;
        fired.steps += u64::from(fired.last_step != step);
        fired.last_step = step;
    }

    fn anomaly(&self, step: u64, hit: Hit, command: String) -> Anomaly {
        Anomaly {
            format: FORMAT,
            rule: self.rule.name().to_owned(),
            severity: self.severity,
            step,
            stage: hit.stage,
            key: hit.key,
            samples: hit.samples.iter().map(ToString::to_string).collect(),
            sample_ids: hit.samples.iter().map(|id| id.0).collect(),
            value: hit.value.is_finite().then_some(hit.value),
            limit: self.limit,
            what: hit.what,
            causes: self.rule.causes().to_owned(),
            advice: self.rule.advice().to_owned(),
            command,
        }
    }
}
