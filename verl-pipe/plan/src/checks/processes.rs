//! What worker processes must build from settings exists as settings.

use verl_declare::pipe::CUSTOM;
use verl_declare::sizes::WorkerKind;
use verl_words::diagnostic::{Diagnostic, quoted};

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let groups = draft.layout.groups.iter();
    let groups: Vec<&str> = groups
        .filter(|group| group.worker == WorkerKind::Process)
        .map(|group| group.name.as_str())
        .collect();
    if groups.is_empty() {
        return;
    }
    let pipe = draft.pipe;
    let stages = pipe
        .stages
        .iter()
        .map(|stage| ("stage", &stage.kind, &stage.name));
    let models = pipe
        .models
        .iter()
        .map(|model| ("model", &model.kind, &model.name));
    let data = pipe
        .data
        .iter()
        .map(|data| ("data set", &data.kind, &data.name));
    for (what, _, name) in stages
        .chain(models)
        .chain(data)
        .filter(|(_, kind, _)| *kind == CUSTOM)
    {
        findings.push(
            Diagnostic::error("S018", format!("{what} `{name}` cannot be built in a process"))
                .at(format!("{what} `{name}`"))
                .because(format!(
                    "it was given as an object or closure, but the worker of {} is a process, which builds the pipeline from its settings",
                    quoted(groups.iter().copied())
                ))
                .help(format!(
                    "make it a kind with settings and register it, or set `worker = \"thread\"` in [groups.{}]",
                    groups[0]
                )),
        );
    }
}
