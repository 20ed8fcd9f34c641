//! Stages that are configured with the same quantity agree on its value.

use std::collections::BTreeMap;

use verl_words::diagnostic::Diagnostic;
use verl_words::stage::Agreement;

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let mut first: BTreeMap<&str, (&str, &Agreement)> = BTreeMap::new();
    for stage in draft.stages {
        let name = stage.decl.name.as_str();
        for own in stage.spec.iter().flat_map(|spec| &spec.agreements) {
            let (other, said) = *first.entry(own.quantity).or_insert((name, own));
            if said.value == own.value {
                continue;
            }
            findings.push(
                Diagnostic::warning(
                    "C008",
                    format!("setting `{}` is probably a mistake", own.setting),
                )
                .at(format!("stage `{name}` ({})", stage.decl.kind))
                .because(format!(
                    "`{}` is {} here, but `{}` of `{other}` is {}; both are the {}",
                    own.setting, own.value, said.setting, said.value, own.quantity
                ))
                .help(format!(
                    "set `{}` to {}, or `{}` of `{other}` to {}",
                    own.setting, said.value, said.setting, own.value
                )),
            );
        }
    }
}
