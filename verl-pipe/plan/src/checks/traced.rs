//! Stages and rules that `[trace]` refers to exist, and rule names are unique.

use std::collections::BTreeSet;

use verl_rules::RULES;
use verl_words::diagnostic::{Diagnostic, suggest};

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let trace = &draft.pipe.trace;
    let stages: Vec<&str> = draft
        .pipe
        .stages
        .iter()
        .map(|stage| stage.name.as_str())
        .collect();
    let own = draft.pipe.rules.iter().map(|rule| rule.name.as_str());
    let rules: Vec<&str> = RULES.iter().map(|rule| rule.name).chain(own).collect();
    let mut report_unknown = |setting: &str, what: &str, name: &str, known: &[&str]| {
        findings.push(
            Diagnostic::error("P023", format!("unknown {what} `{name}` in `{setting}`"))
                .at(format!("[trace] `{setting}`"))
                .because(format!(
                    "there is no {what} `{name}`, so the setting would have no effect"
                ))
                .help(suggest(name, &format!("{what}s"), known.iter().copied())),
        );
    };
    for name in trace
        .stages
        .iter()
        .filter(|name| !stages.contains(&name.as_str()))
    {
        report_unknown("stages", "stage", name, &stages);
    }
    for name in trace
        .rules
        .keys()
        .filter(|name| !rules.contains(&name.as_str()))
    {
        report_unknown("rules", "rule", name, &rules);
    }
    let mut once = BTreeSet::new();
    let twice: BTreeSet<&str> = rules
        .into_iter()
        .filter(|name| !once.insert(*name))
        .collect();
    findings.extend(twice.into_iter().map(|name| {
        Diagnostic::error("C007", format!("two rules are named `{name}`"))
            .at("rules of the pipeline")
            .because("a setting in `[trace.rules]` with this name would be ambiguous")
            .help("rename the one that was added in Rust")
    }));
}
