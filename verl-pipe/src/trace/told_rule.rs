//! A rule of one's own that is told when it hangs.

use crate::run::watch::Teller;
use crate::trace::rules::{Hit, MetricsView, Rule, Severity, StepView};

/// A rule that says when it looks, so that a run which waits for it names it.
pub(crate) struct ToldRule {
    rule: Box<dyn Rule>,
    teller: Teller,
    /// As it is told.
    words: String,
}

impl ToldRule {
    pub(crate) fn new(rule: Box<dyn Rule>, teller: Teller) -> ToldRule {
        let words = format!("rule {}", rule.name());
        ToldRule {
            rule,
            teller,
            words,
        }
    }
}

impl Rule for ToldRule {
    fn name(&self) -> &str {
        self.rule.name()
    }

    fn severity(&self) -> Severity {
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
        self.teller
            .at(&self.words, || rule.before_update(view, limit))
    }

    fn after_step(&mut self, view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
        let rule = &mut self.rule;
        self.teller.at(&self.words, || rule.after_step(view, limit))
    }
}
