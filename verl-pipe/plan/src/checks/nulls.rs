//! Nullable keys are read only by stages that declare them nullable.

use verl_words::diagnostic::Diagnostic;

use crate::build::Draft;
use crate::checks::shapes::fits;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for link in draft.links.iter().flatten() {
        if !link.written.nullable || link.read.nullable {
            continue;
        }
        // `shapes::check` reports a different shape.
        let alike = match (link.read.parsed_shape(), link.written.parsed_shape()) {
            (Ok(read), Ok(written)) => fits(&read, &written),
            _ => false,
        };
        if !alike {
            continue;
        }
        let (writer, reader) = (draft.name(link.writer), draft.name(link.reader));
        findings.push(
            Diagnostic::error("P019", format!("`{reader}` cannot use `{}` with nulls", link.key))
                .at(format!("{writer} -> {reader}"))
                .because(format!(
                    "`{writer}` may write null for a row (for example one that failed), but `{reader}` reads a value in every row"
                ))
                .help(format!(
                    "declare the key nullable in `{reader}` and skip such rows, or insert a stage between the two that \
                     drops or fills them"
                )),
        );
    }
}
