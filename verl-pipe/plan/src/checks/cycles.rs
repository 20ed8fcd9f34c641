//! No stage waits for itself.

use verl_words::diagnostic::{Diagnostic, quoted};

use crate::build::Draft;

/// Reports each cycle as a walk through the names of its stages.
pub(crate) fn report(draft: &Draft<'_>, cycles: &[Vec<usize>], findings: &mut Vec<Diagnostic>) {
    for walk in cycles {
        let closed: Vec<usize> = walk.iter().chain(walk.first()).copied().collect();
        let names: Vec<&str> = closed.iter().map(|&index| draft.name(index)).collect();
        let why: Vec<String> = closed
            .windows(2)
            .map(|pair| step(draft, pair[0], pair[1]))
            .collect();
        let what = match walk.as_slice() {
            [_] => format!("`{}` waits for itself", names[0]),
            _ => format!("{} stages wait for each other", walk.len()),
        };
        findings.push(
            Diagnostic::error("P006", what).at(names.join(" -> ")).because(why.join("\n")).help(
                "a step runs from sources to sinks: make one of these stages read a key that is written upstream, or \
                 write under another name (rename)",
            ),
        );
    }
}

fn step(draft: &Draft<'_>, writer: usize, reader: usize) -> String {
    let keys = draft.links[reader]
        .iter()
        .filter(|link| link.writer == writer)
        .map(|link| link.key.as_str());
    format!(
        "`{}` writes {}, which `{}` reads",
        draft.name(writer),
        quoted(keys),
        draft.name(reader)
    )
}
