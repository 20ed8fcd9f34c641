//! Reads and writes stated in the pipeline agree with what the stage declares.

use verl_words::diagnostic::{Diagnostic, quoted};

use crate::build::{Draft, DraftStage};

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for statement in &draft.pipe.misplaced {
        let (what, method) = match statement.as_str() {
            "model_in" => ("model", "model"),
            _ => ("stage", "add_stage"),
        };
        findings.push(
            Diagnostic::error("P014", format!("`{statement}` is stated before any {what}"))
                .at(format!("pipeline `{}`", draft.pipe.name))
                .because(format!(
                    "it applies to the last {what} added, and there is none yet"
                ))
                .help(format!("put it after `{method}`")),
        );
    }
    for stage in draft.stages {
        let Some(spec) = &stage.spec else { continue };
        let names = |fields: &[verl_words::field::Field]| -> Vec<String> {
            fields
                .iter()
                .map(|field| stage.key(&field.name).to_owned())
                .collect()
        };
        let (reads, optional, writes) = (
            names(&spec.reads),
            names(&spec.reads_optional),
            names(&spec.writes),
        );
        if let Some(stated) = &stage.decl.stated_reads {
            differ(stage, "read", stated, &reads, &optional, findings);
        }
        if let Some(stated) = &stage.decl.stated_writes {
            differ(stage, "write", stated, &writes, &[], findings);
        }
    }
}

fn differ(
    stage: &DraftStage<'_>,
    verb: &str,
    stated: &[String],
    needed: &[String],
    optional: &[String],
    findings: &mut Vec<Diagnostic>,
) {
    let unknown: Vec<&str> = stated
        .iter()
        .filter(|name| !needed.contains(name) && !optional.contains(name))
        .map(String::as_str)
        .collect();
    let unstated: Vec<&str> = needed
        .iter()
        .filter(|name| !stated.contains(name))
        .map(String::as_str)
        .collect();
    let mut why = Vec::new();
    if !unknown.is_empty() {
        why.push(format!("it does not {verb} {}", quoted(unknown)));
    }
    if !unstated.is_empty() {
        why.push(format!(
            "it {verb}s {}, which is not stated",
            quoted(unstated)
        ));
    }
    if why.is_empty() {
        return;
    }
    let name = &stage.decl.name;
    findings.push(
        Diagnostic::error(
            "P014",
            format!("`{name}` does not {verb} exactly the stated keys"),
        )
        .at(format!("stage `{name}` ({})", stage.decl.kind))
        .because(why.join("\n"))
        .help(format!(
            "state {}s({}), or remove the statement: the stage declares its keys itself",
            verb,
            quoted(needed.iter().map(String::as_str))
        )),
    );
}
