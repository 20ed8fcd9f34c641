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

#[cfg(test)]
mod tests {
    use verl_words::stage::{OnShort, Refill};

    use super::*;
    use crate::schedule::batching::{BatchConfig, DevicesConfig, estimate};

    #[test]
    fn the_help_for_sizes_without_a_valid_value() {
        let batch = BatchConfig {
            prompts: 8,
            samples: 2,
            ..BatchConfig::default()
        };
        let devices = DevicesConfig {
            group: "cuda:0-5".to_owned(),
            rollout_tensor_parallel: 1,
        };
        let helps = |refill: Option<&Refill>| -> Vec<String> {
            let (_, violations) = estimate(&batch, &devices, refill);
            violations.iter().map(|found| finding(found).help).collect()
        };
        assert_eq!(helps(None), ["set `prompts` in [batch] to 6 or 9"]);
        // The batch arithmetic must not change the groups that a filter keeps.
        let refill = Refill {
            groups: 8,
            waves: 1,
            on_short: OnShort::Error,
        };
        assert_eq!(
            helps(Some(&refill)),
            [
                "set `prompts` in [batch] to 6 or 9",
                "no `mini_batch` fits these sizes: change one of them first"
            ]
        );
    }
}
