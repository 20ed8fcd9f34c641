//! Names are unique, model names are valid folder names, and renamed keys exist.

use std::collections::BTreeMap;

use verl_words::diagnostic::{Diagnostic, suggest};

use crate::build::Draft;

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
    twice(
        "device group",
        pipe.groups.iter().map(|(name, _)| name.as_str()),
        findings,
    );
    let groups = pipe.groups.iter().map(|(name, _)| name.as_str());
    findings.extend(groups.filter_map(invalid_group_name));
    let models = pipe.models.iter().map(|model| model.name.as_str());
    findings.extend(
        models
            .filter(|name| !is_folder_name(name))
            .map(invalid_model_name),
    );
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
                        "the pipeline renames `{local}` to `{key}`, but the stage neither reads nor writes it"
                    ))
                    .help(suggest(local, "keys of the stage", own.iter().copied())),
            );
        }
    }
}

/// Longest folder name in bytes: file systems allow 255, and temporary folders have longer names.
const MAX_FOLDER_NAME: usize = 200;

/// Whether `name` is valid as the name of a folder that is not hidden and has no path separators.
fn is_folder_name(name: &str) -> bool {
    let separates = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
    !name.is_empty()
        && name.len() <= MAX_FOLDER_NAME
        && !name.starts_with('.')
        && !name.chars().any(separates)
}

/// The finding about a name that a device group cannot have; the timeline of a step calls other lines `host` and `run`.
fn invalid_group_name(name: &str) -> Option<Diagnostic> {
    let why = match name {
        "" => "it is empty",
        "host" => "the timeline calls the host pool so",
        "run" => "the timeline calls the thread of the run so",
        _ if name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-')) =>
        {
            return None;
        }
        _ => "it contains a character other than letters, digits, `_` and `-`",
    };
    Some(
        Diagnostic::error(
            "S010",
            format!("`{name}` is not a valid name of a device group"),
        )
        .at(format!("[groups.{name}]"))
        .because(why)
        .help("choose another name, such as `train`"),
    )
}

fn invalid_model_name(name: &str) -> Diagnostic {
    Diagnostic::error(
        "C004",
        format!("invalid model name `{}`", name.escape_debug()),
    )
    .at("[models]")
    .because("a run saves the model in a folder with this name, and no folder can have it")
    .help("use a name like `actor`, and set `path` to the folder that the model is loaded from")
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
                format!("{} {what}s are named `{name}`", places.len()),
            )
            .at(format!("{what}s number {}", places.join(" and ")))
            .because(format!(
                "settings, messages and the trace identify a {what} by its name"
            ))
            .help(format!(
                "rename one of them, for example `name = \"{name}_2\"`"
            )),
        );
    }
}
