//! Two stages do not both do what a pipeline usually does once.

use std::collections::BTreeMap;

use verl_words::diagnostic::{Diagnostic, quoted};

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let mut doers: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for stage in draft.stages {
        for what in stage.spec.iter().flat_map(|spec| &spec.once) {
            doers.entry(what).or_default().push(&stage.decl.name);
        }
    }
    for (what, doers) in doers.iter().filter(|(_, doers)| doers.len() > 1) {
        let stages = quoted(doers.iter().copied());
        findings.push(
            Diagnostic::warning("P020", format!("{stages} each add {what}"))
                .at(format!("stages {stages}"))
                .because(
                    "each is valid on its own, but together they act with the sum of their strengths",
                )
                .help("disable it in all but one of them, unless this is intended"),
        );
    }
}
