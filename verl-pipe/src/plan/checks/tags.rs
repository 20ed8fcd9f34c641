//! Log-probs are of the distribution that their reader needs.

use crate::diagnostic::Diagnostic;
use crate::field::LogProbTag;
use crate::plan::build::{Draft, Link};

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for link in draft.links.iter().flatten() {
        let Some(need) = &link.read.tag else { continue };
        let unknown = LogProbTag::default();
        let parts = need.mismatches(link.written.tag.as_ref().unwrap_or(&unknown));
        if !parts.is_empty() {
            findings.push(mismatch(draft, link, need, &parts));
        }
    }
}

fn mismatch(
    draft: &Draft<'_>,
    link: &Link<'_>,
    need: &LogProbTag,
    parts: &[(&'static str, String, String)],
) -> Diagnostic {
    let (writer, reader) = (draft.name(link.writer), draft.name(link.reader));
    let why: Vec<String> = parts
        .iter()
        .map(|(part, need, have)| {
            format!("{part}: `{reader}` needs {need}, `{writer}` writes {have}")
        })
        .collect();
    let matching = draft.written.iter().find(|(_, by)| {
        by.stage != link.reader
            && by.field.dtype == link.read.dtype
            && by
                .field
                .tag
                .as_ref()
                .is_some_and(|tag| need.mismatches(tag).is_empty())
    });
    let mut help = Vec::new();
    if parts.iter().any(|(part, ..)| *part == "temperature") {
        help.push("set the same `temperature` in both stages".to_owned());
    }
    help.push(match matching {
        Some((key, by)) => format!(
            "read `{key}`, written by `{}`, which has what is needed: rename = {{ {} = \"{key}\" }}",
            draft.name(by.stage),
            link.read.name
        ),
        None => {
            let model = need.policy.as_deref().map_or("the model".to_owned(), |name| format!("`{name}`"));
            format!("recompute them with a stage (`log_probs`) that scores the responses with {model} as {need}")
        }
    });
    Diagnostic::error(
        "P007",
        format!(
            "`{}` is not of the distribution that `{reader}` needs",
            link.key
        ),
    )
    .at(format!("{writer} -> {reader}"))
    .because(format!(
        "{}\na ratio of probabilities of two distributions is biased, although nothing looks wrong",
        why.join("\n")
    ))
    .help(help.join("; or "))
}
