//! A custom rule that is reported when it hangs.

use verl_rules::{Hit, MetricsView, Rule, RuleSeverity, StepView};
use verl_run::watch::ActivityReporter;

/// A rule that announces each call, so that the report of a stalled run names it.
pub(crate) struct WatchedRule {
    rule: Box<dyn Rule>,
    activity_reporter: ActivityReporter,
    /// Its name in the report.
    label: String,
}

impl WatchedRule {
    pub(crate) fn new(rule: Box<dyn Rule>, activity_reporter: ActivityReporter) -> WatchedRule {
        let label = format!("rule {}", rule.name());
        WatchedRule {
            rule,
            activity_reporter,
            label,
        }
    }
}

impl Rule for WatchedRule {
    fn name(&self) -> &str {
        self.rule.name()
    }

    fn severity(&self) -> RuleSeverity {
        self.rule.severity()
    }

    fn limit(&self) -> f64 {
        self.rule.limit()
    }

    fn advice(&self) -> &str {
        self.rule.advice()
    }

    fn causes(&self) -> &str {
        self.rule.causes()
    }

    fn follows_from(&self) -> &[&str] {
        self.rule.follows_from()
    }

    fn before_update(&mut self, view: &StepView<'_>, limit: f64) -> Vec<Hit> {
        let rule = &mut self.rule;
        self.activity_reporter
            .at(&self.label, || rule.before_update(view, limit))
    }

    fn after_step(&mut self, view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
        let rule = &mut self.rule;
        self.activity_reporter
            .at(&self.label, || rule.after_step(view, limit))
    }
}
