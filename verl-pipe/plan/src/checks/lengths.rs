//! Keys that a stage reads with one ragged letter have equal lengths: the letters are followed through the graph.

use std::collections::HashMap;

use verl_words::diagnostic::Diagnostic;
use verl_words::shape::Dim;

use crate::build::{Draft, Link};
use crate::tables::Tables;

/// Lengths of rows, identified by their origin: the stage that first wrote them and its letter.
type Lengths = (usize, String);

pub(crate) fn check(
    draft: &Draft<'_>,
    order: &[usize],
    _: &Tables,
    findings: &mut Vec<Diagnostic>,
) {
    // Lengths cannot be followed through the graph if the keys of a stage are unknown because it could not be built.
    if !draft.complete() {
        return;
    }
    let mut of_key: HashMap<&str, Lengths> = HashMap::new();
    for &index in order {
        let stage = &draft.stages[index];
        let Some(spec) = &stage.spec else { continue };
        let mut bound: HashMap<String, (Lengths, &Link<'_>)> = HashMap::new();
        // One finding for each pair of lengths that meet, however many keys have them.
        let mut reported: Vec<(String, Lengths)> = Vec::new();
        for link in &draft.links[index] {
            let (Some(letter), Some(lengths)) = (letter(link.read), of_key.get(link.key.as_str()))
            else {
                continue;
            };
            match bound.get(&letter) {
                Some((other, first)) if other != lengths => {
                    let pair = (letter.clone(), lengths.clone());
                    if !reported.contains(&pair) {
                        let first = Read {
                            link: first,
                            lengths: other,
                        };
                        findings.push(unequal(draft, &letter, first, Read { link, lengths }));
                        reported.push(pair);
                    }
                }
                Some(_) => {}
                None => {
                    bound.insert(letter, (lengths.clone(), link));
                }
            }
        }
        for field in &spec.writes {
            if let Some(letter) = letter(field) {
                let lengths = bound
                    .get(&letter)
                    .map_or((index, letter), |(lengths, _)| lengths.clone());
                of_key.insert(stage.key(&field.name), lengths);
            }
        }
    }
}

fn letter(field: &verl_words::field::Field) -> Option<String> {
    field
        .parsed_shape()
        .ok()?
        .0
        .into_iter()
        .find_map(|dim| match dim {
            Dim::Ragged(name) => Some(name.into_owned()),
            _ => None,
        })
}

/// A read key, and its lengths.
struct Read<'a> {
    link: &'a Link<'a>,
    lengths: &'a Lengths,
}

fn unequal(draft: &Draft<'_>, letter: &str, first: Read<'_>, second: Read<'_>) -> Diagnostic {
    let (first_lengths, second_lengths) = (first.lengths, second.lengths);
    let (first, second) = (first.link, second.link);
    let reader = draft.name(second.reader);
    let origin = |(stage, letter): &Lengths| format!("{letter}~ of `{}`", draft.name(*stage));
    let writer = draft.name(second.writer);
    Diagnostic::error(
        "P017",
        format!("`{reader}` reads `{}` and `{}` with equal lengths, but their lengths may differ", first.key, second.key),
    )
    .at(format!("{}, {writer} -> {reader}", draft.name(first.writer)))
    .because(format!(
        "`{reader}` reads both with the dim {letter}~; `{}` has the lengths {}, `{}` the lengths {}",
        first.key,
        origin(first_lengths),
        second.key,
        origin(second_lengths)
    ))
    .help(format!(
        "read them with two letters; or, if `{writer}` writes `{}` with the lengths of a key that it reads, make it \
         declare both with the same letter",
        second.key
    ))
}
