//! Every key that is read is written, and by one stage only.

use verl_words::diagnostic::{Diagnostic, nearest, quoted};

use crate::build::{Draft, Missing};

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for (key, by) in draft.written.iter().filter(|(_, by)| !by.again.is_empty()) {
        let stages: Vec<&str> = std::iter::once(by.stage)
            .chain(by.again.iter().copied())
            .map(|index| draft.name(index))
            .collect();
        let last = stages.last().copied().unwrap_or_default();
        findings.push(
            Diagnostic::error(
                "P005",
                format!("`{key}` is written by {} stages", stages.len()),
            )
            .at(format!("stages {}", quoted(stages.iter().copied())))
            .because(
                "a key has one writer; otherwise its value would depend on which of them ran last",
            )
            .help(format!(
                "give the key another name in one of them, for example in `{last}`: \
                     rename = {{ {own} = \"{last}_{own}\" }}",
                own = own_name(draft, by.again.last().copied().unwrap_or(by.stage), key),
            )),
        );
    }
    // A stage that could not be built may be the writer of the key; its own findings come first.
    if draft.complete() {
        findings.extend(
            draft
                .missing
                .iter()
                .map(|missing| unwritten(draft, missing)),
        );
    }
}

/// Stage `index`'s own name of the pipeline's `key`.
fn own_name<'a>(draft: &'a Draft<'_>, index: usize, key: &'a str) -> &'a str {
    let rename = &draft.stages[index].decl.rename;
    rename
        .iter()
        .find(|(_, name)| *name == key)
        .map_or(key, |(own, _)| own.as_str())
}

fn unwritten(draft: &Draft<'_>, missing: &Missing<'_>) -> Diagnostic {
    let Missing { key, reader, read } = missing;
    let spec = draft.stages[*reader].spec.as_ref();
    let remedy = spec.and_then(|spec| spec.remedies.get(read.name.as_ref()));
    let reader = draft.name(*reader);
    let known: Vec<&str> = draft.written.keys().map(String::as_str).collect();
    let near = nearest(key, known.iter().copied());
    let help = match (remedy, near) {
        (Some(remedy), _) => remedy.clone(),
        (None, Some(near)) => {
            let writer = draft.name(draft.written[near].stage);
            format!(
                "did you mean `{near}`, which `{writer}` writes? rename = {{ {} = \"{near}\" }}",
                read.name
            )
        }
        (None, None) if known.is_empty() => "add a stage that writes it".to_owned(),
        (None, None) => format!(
            "add a stage that writes it; the pipeline's keys are {}",
            quoted(known)
        ),
    };
    Diagnostic::error(
        "P002",
        format!("`{reader}` reads `{key}`, which no stage writes"),
    )
    .at(format!("stage `{reader}`"))
    .because(format!(
        "`{reader}` needs `{key}`: {} {}, {}",
        read.dtype, read.shape, read.meaning
    ))
    .help(help)
}
