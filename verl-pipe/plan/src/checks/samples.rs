//! A stage that trains gets the number of rows per prompt that the batch arithmetic assumes.

use verl_words::diagnostic::Diagnostic;
use verl_words::stage::Access;

use crate::build::Draft;
use crate::tables::Tables;

pub(crate) fn check(
    draft: &Draft<'_>,
    order: &[usize],
    tables: &Tables,
    findings: &mut Vec<Diagnostic>,
) {
    // A stage that could not be built may be the one that makes the samples.
    if !draft.complete() {
        return;
    }
    let samples = draft.context.batch.samples;
    for &index in order {
        let Some(spec) = draft.stages[index].spec.as_ref() else {
            continue;
        };
        let updates = spec
            .models
            .iter()
            .any(|(_, access)| *access == Access::Update);
        let Some(table) = tables.input[index].filter(|_| updates) else {
            continue;
        };
        let rows = tables.rows_per_prompt(Some(table));
        if rows == samples {
            continue;
        }
        let name = draft.name(index);
        findings.push(
            Diagnostic::error(
                "S002",
                format!("`{name}` gets {rows} rows a prompt, but `samples` is {samples}"),
            )
            .at(format!("[batch] samples, stage `{name}`"))
            .because(format!(
                "mini-batches and micro-batches assume {samples} rows a prompt, so they would be cut in the wrong \
                 places"
            ))
            .help(format!(
                "set `samples = {rows}` in [batch], or make the stages before `{name}` produce {samples} rows of each prompt"
            )),
        );
    }
}
