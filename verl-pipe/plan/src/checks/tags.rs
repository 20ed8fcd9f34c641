//! Log-probs come from the distribution that their reader needs; other numbers from the model and weights it needs.

use verl_words::diagnostic::Diagnostic;
use verl_words::field::LogProbTag;

use crate::build::{Draft, Link};

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
            && by.field.unit == link.read.unit
            && by
                .field
                .tag
                .as_ref()
                .is_some_and(|tag| need.mismatches(tag).is_empty())
    });
    // Without a temperature and a support it is not a probability.
    let is_probability = need.temperature.is_some() || need.support.is_some();
    let (of, consequence) = if is_probability {
        (
            "distribution",
            "a ratio of probabilities of two distributions is biased without any visible sign",
        )
    } else {
        (
            "model",
            "numbers of another model or of other weights would be used without any visible sign",
        )
    };
    let mut help = Vec::new();
    let differs = |name| parts.iter().any(|(part, ..)| *part == name);
    if differs("temperature") {
        help.push(
            "set `temperature` only in the stage that samples; the other stages then use the same temperature"
                .to_owned(),
        );
    }
    if differs("policy") && !is_probability {
        help.push("set the same `model` in both stages".to_owned());
    }
    help.push(match matching {
        Some((key, by)) => format!(
            "read `{key}`, written by `{}`, which matches: rename = {{ {} = \"{key}\" }}",
            draft.name(by.stage),
            link.read.name
        ),
        None if !is_probability => format!("recompute them as {need}"),
        None => {
            let model = need
                .policy
                .as_deref()
                .map_or("the model".to_owned(), |name| format!("`{name}`"));
            let stage = draft.stages[link.reader]
                .spec
                .as_ref()
                .and_then(|spec| spec.scored_by);
            let stage = stage.map_or("a stage".to_owned(), |kind| format!("a stage (`{kind}`)"));
            format!("recompute them with {stage} that scores the responses with {model} as {need}")
        }
    });
    Diagnostic::error(
        "P007",
        format!(
            "`{}` does not come from the {of} that `{reader}` needs",
            link.key
        ),
    )
    .at(format!("{writer} -> {reader}"))
    .because(format!("{}\n{consequence}", why.join("\n")))
    .help(help.join("; or "))
}
