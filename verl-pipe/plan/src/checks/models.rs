//! Models that are used or saved exist, models that are updated are trainable, and no model is unused.

use std::collections::BTreeMap;

use verl_words::diagnostic::{Diagnostic, quoted, suggest};
use verl_words::stage::Access;

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let mut users: BTreeMap<&str, Vec<(&str, Access)>> = BTreeMap::new();
    for stage in draft.stages {
        for (model, access) in stage.spec.iter().flat_map(|spec| &spec.models) {
            users
                .entry(model)
                .or_default()
                .push((&stage.decl.name, *access));
        }
    }
    let known = &draft.context.models;
    for (model, users) in users
        .iter()
        .filter(|(model, _)| !known.iter().any(|name| name == *model))
    {
        let stages = quoted(users.iter().map(|(stage, _)| *stage));
        findings.push(
            Diagnostic::error("P009", format!("there is no model `{model}`"))
                .at(format!(
                    "stage{} {stages}",
                    if users.len() == 1 { "" } else { "s" }
                ))
                .because(format!(
                    "{stages} requires it, but the pipeline declares no model with this name"
                ))
                .help(format!(
                    "declare [models.{model}], or set the stage's `model` to another model; {}",
                    suggest(model, "models", known.iter().map(String::as_str))
                )),
        );
    }
    for name in draft.pipe.run.save.iter().flatten() {
        if !known.contains(name) {
            findings.push(
                Diagnostic::error("P009", format!("there is no model `{name}`"))
                    .at("[run] save")
                    .because(
                        "it is to be saved at the end of the run, but the pipeline declares no model with this name",
                    )
                    .help(suggest(name, "models", known.iter().map(String::as_str))),
            );
        }
    }
    for decl in &draft.pipe.models {
        let name = decl.name.as_str();
        let users = users.get(name).map_or(&[][..], Vec::as_slice);
        let updaters = quoted(
            users
                .iter()
                .filter(|(_, access)| *access == Access::Update)
                .map(|(stage, _)| *stage),
        );
        let place = format!("[models.{name}]");
        if !updaters.is_empty() && !decl.factory.trainable() {
            findings.push(
                Diagnostic::error(
                    "P010",
                    format!("{updaters} cannot update `{name}` because it is frozen"),
                )
                .at(format!("{updaters} -> {place}"))
                .because(format!(
                    "`{name}` is declared without an optimiser, so its weights never change"
                ))
                .help(format!(
                    "add [models.{name}.optimizer] with a `learning_rate`, or update another model"
                )),
            );
        }
        // A stage that could not be built may be the one that uses the model.
        if !draft.complete() {
            continue;
        }
        if users.is_empty() {
            findings.push(
                Diagnostic::warning("P011", format!("no stage uses the model `{name}`"))
                    .at(place)
                    .because("it would be loaded and use memory without effect")
                    .help("remove it, or set a stage's `model` to it"),
            );
        } else if updaters.is_empty() && decl.factory.trainable() {
            findings.push(
                Diagnostic::warning("P011", format!("no stage updates the model `{name}`"))
                    .at(place)
                    .because(
                        "it is declared with an optimiser, whose state uses memory without effect",
                    )
                    .help("remove its optimiser to freeze it, or add a stage that updates it"),
            );
        }
    }
}
