//! Batch, rollout, mini- and micro-batch sizes divide.

use verl_words::diagnostic::Diagnostic;

use crate::build::Draft;
use crate::schedule::batching::{GROUP, Violation};
use crate::schedule::groups;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    findings.extend(draft.violations.iter().map(finding));
}

/// A violation as a finding.
pub(crate) fn finding(violation: &Violation) -> Diagnostic {
    if violation.setting == GROUP {
        return groups::finding(violation.rule.clone());
    }
    let split = |setting: &'static str| setting.split_once('.').unwrap_or(("", setting));
    let (section, key) = split(violation.setting);
    let help = match (violation.nearest.as_slice(), &violation.instead) {
        ([], None) => {
            format!("no `{key}` fits these sizes: change one of them first")
        }
        ([], Some((other, values))) => {
            let (section, other) = split(other);
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            format!(
                "no `{key}` fits these sizes: set `{other}` in [{section}] to {} and remove `{key}`",
                values.join(" or ")
            )
        }
        ([value], _) => format!("set `{key} = {value}` in [{section}]"),
        (values, _) => {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            format!("set `{key}` in [{section}] to {}", values.join(" or "))
        }
    };
    Diagnostic::error("S001", format!("`{key}` does not fit the other sizes"))
        .at(format!("[{section}]"))
        .because(violation.rule.clone())
        .help(help)
}
