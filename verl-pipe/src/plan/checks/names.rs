//! Names are unique, those of models can be folders, and renamed keys exist.

use std::collections::BTreeMap;

use crate::diagnostic::{Diagnostic, suggest};
use crate::plan::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let pipe = draft.pipe;
    twice(
        "stage",
        pipe.stages.iter().map(|stage| stage.name.as_str()),
        findings,
    );
    twice(
        "model",
        pipe.models.iter().map(|model| model.name.as_str()),
        findings,
    );
    twice(
        "data set",
        pipe.data.iter().map(|data| data.name.as_str()),
        findings,
    );
    let unfit = pipe.models.iter().map(|model| model.name.as_str());
    findings.extend(unfit.filter(|name| !is_folder(name)).map(no_folder));
    for stage in draft.stages {
        let Some(spec) = &stage.spec else { continue };
        let fields = spec
            .reads
            .iter()
            .chain(&spec.reads_optional)
            .chain(&spec.writes);
        let own: Vec<&str> = fields.map(|field| field.name.as_ref()).collect();
        for (local, key) in stage
            .decl
            .rename
            .iter()
            .filter(|(local, _)| !own.contains(&local.as_str()))
        {
            findings.push(
                Diagnostic::error("P016", format!("`{}` has no key `{local}` to rename", stage.decl.name))
                    .at(format!("stage `{}`, rename", stage.decl.name))
                    .because(format!(
                        "`{local}` was to be called `{key}` in this pipeline, but the stage neither reads nor writes it"
                    ))
                    .help(suggest(local, "keys of the stage", own.iter().copied())),
            );
        }
    }
}

/// Longest name of a folder, in bytes: file systems hold 255, and what is written aside is called longer.
const LONGEST: usize = 200;

/// Whether a folder can be called so, that lies where it is looked for and is not hidden.
fn is_folder(name: &str) -> bool {
    let separates = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
    !name.is_empty()
        && name.len() <= LONGEST
        && !name.starts_with('.')
        && !name.chars().any(separates)
}

fn no_folder(name: &str) -> Diagnostic {
    Diagnostic::error(
        "C004",
        format!("no folder can be called `{}`", name.escape_debug()),
    )
    .at("[models]")
    .because("what a run makes of a model is saved in a folder with the model's name")
    .help("call it something like `actor`; where it comes from is its `path`")
}

fn twice<'a>(what: &str, names: impl Iterator<Item = &'a str>, findings: &mut Vec<Diagnostic>) {
    let mut places: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (index, name) in names.enumerate() {
        places
            .entry(name)
            .or_default()
            .push((index + 1).to_string());
    }
    for (name, places) in places.iter().filter(|(_, places)| places.len() > 1) {
        findings.push(
            Diagnostic::error(
                "P001",
                format!("{} {what}s are called `{name}`", places.len()),
            )
            .at(format!("{what}s number {}", places.join(" and ")))
            .because(format!(
                "settings, messages and the trace address a {what} by its name"
            ))
            .help(format!(
                "give one of them a name of its own, for example `name = \"{name}_2\"`"
            )),
        );
    }
}
