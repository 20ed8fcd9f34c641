//! Token ids have the same meaning for the models that write and that read them.

use std::collections::{BTreeMap, BTreeSet};

use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::resource::Vocabulary;

use crate::build::Draft;

/// Unit of fields that contain token ids.
const TOKEN_ID: &str = "token id";

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    let declared = draft.pipe.models.iter().zip(draft.models);
    let known: BTreeMap<&str, &Vocabulary> = declared
        .filter_map(|(decl, info)| {
            Some((decl.name.as_str(), info.as_ref().ok()?.vocabulary.as_ref()?))
        })
        .collect();
    let mut clashes: BTreeMap<(&str, &str), (usize, Vec<&str>)> = BTreeMap::new();
    for (reader, stage) in draft.stages.iter().enumerate() {
        let mut writers = BTreeSet::new();
        origins(draft, reader, &mut BTreeSet::new(), &mut writers);
        for (own, _) in stage.spec.iter().flat_map(|spec| &spec.models) {
            for &writer in &writers {
                let (Some(reads), Some(written)) = (known.get(own.as_str()), known.get(writer))
                else {
                    continue;
                };
                if let Err(id) = reads.reads(written) {
                    let clash = clashes.entry((writer, own)).or_insert((id, Vec::new()));
                    clash.1.push(&stage.decl.name);
                }
            }
        }
    }
    for ((writer, own), (id, stages)) in clashes {
        let (ids, written) = (known[own].len(), known[writer].len());
        let why = if id >= ids {
            format!(
                "`{writer}` has {written} tokens, but `{own}` has only {ids}, so it would get token ids outside its vocabulary"
            )
        } else {
            format!(
                "`{writer}` has {written} tokens, `{own}` has {ids}, and token id {id} is not the same token, so `{own}` would read different text"
            )
        };
        findings.push(
            Diagnostic::error(
                "P025",
                format!("`{own}` cannot read the tokens of `{writer}`"),
            )
            .at(format!(
                "stage{} {} -> [models.{own}]",
                if stages.len() == 1 { "" } else { "s" },
                quoted(stages.iter().copied())
            ))
            .because(why)
            .help(format!(
                "use a model folder with the tokenizer of `{writer}` for `{own}`"
            )),
        );
    }
}

/// The models with whose vocabulary the token ids that a stage reads were written.
fn origins<'a>(
    draft: &'a Draft<'_>,
    reader: usize,
    seen: &mut BTreeSet<usize>,
    found: &mut BTreeSet<&'a str>,
) {
    if !seen.insert(reader) {
        return;
    }
    for link in draft.links[reader].iter() {
        if link.written.unit != TOKEN_ID {
            continue;
        }
        let spec = draft.stages[link.writer].spec.iter();
        let models: Vec<&str> = spec
            .flat_map(|spec| &spec.models)
            .map(|(model, _)| model.as_str())
            .collect();
        if models.is_empty() {
            // It passes on the token ids that it reads.
            origins(draft, link.writer, seen, found);
        }
        found.extend(models);
    }
}
