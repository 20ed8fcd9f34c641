//! Batch, rollout, mini- and micro-batch sizes divide.

use crate::diagnostic::Diagnostic;
use crate::plan::build::Draft;
use crate::schedule::batching::Violation;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    findings.extend(draft.violations.iter().map(finding));
}

/// A violation as a finding.
pub(crate) fn finding(violation: &Violation) -> Diagnostic {
    let (section, key) = violation
        .setting
        .split_once('.')
        .unwrap_or(("", violation.setting));
    let help = match violation.nearest.as_slice() {
        [] => format!("set `{key}` in [{section}]"),
        [value] => format!("set `{key} = {value}` in [{section}]"),
        values => {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            format!("set `{key}` in [{section}] to {}", values.join(" or "))
        }
    };
    Diagnostic::error("S001", format!("`{key}` does not fit the other sizes"))
        .at(format!("[{section}]"))
        .because(violation.rule.clone())
        .help(help)
}
