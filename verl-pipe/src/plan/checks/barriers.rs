//! No barrier keeps host work from overlapping generation.

use crate::diagnostic::Diagnostic;
use crate::plan::build::Draft;
use crate::plan::tables::Tables;
use crate::stage::{Cardinality, RowRule};

/// Warns of a `Batch` stage with an expansion upstream and per-row host stages downstream, which it makes wait.
pub(crate) fn check(
    draft: &Draft<'_>,
    order: &[usize],
    _: &Tables,
    findings: &mut Vec<Diagnostic>,
) {
    let n = draft.stages.len();
    // The nearest expansion above each stage, and the barrier below that expansion, if there is one.
    let mut expansion: Vec<Option<usize>> = vec![None; n];
    let mut barrier: Vec<Option<usize>> = vec![None; n];
    let mut held: Vec<Vec<&str>> = vec![Vec::new(); n];
    for &index in order {
        let Some(spec) = &draft.stages[index].spec else {
            continue;
        };
        for &before in draft.graph.predecessors(index) {
            expansion[index] = expansion[index].or(expansion[before]);
            barrier[index] = barrier[index].or(barrier[before]);
        }
        let on_host = spec.models.is_empty() && spec.cardinality == Cardinality::Row;
        if let Some(by) = barrier[index].filter(|_| on_host) {
            held[by].push(draft.name(index));
        }
        if matches!(spec.rows, RowRule::Expand(_)) {
            (expansion[index], barrier[index]) = (Some(index), None);
        } else if spec.cardinality == Cardinality::Batch && expansion[index].is_some() {
            barrier[index] = Some(index);
        }
    }
    for (by, held) in held.iter().enumerate().filter(|(_, held)| !held.is_empty()) {
        let name = draft.name(by);
        let source = expansion[by].map_or("the stages before it", |index| draft.name(index));
        let waiting = crate::diagnostic::quoted(held.iter().copied());
        findings.push(
            Diagnostic::warning("P012", format!("`{name}` keeps {waiting} from running while `{source}` works"))
                .at(format!("{source} -> {name} -> {}", held[0]))
                .because(format!(
                    "`{name}` needs the whole batch of the step, so rows cannot stream from `{source}` to {waiting}"
                ))
                .help(format!(
                    "let {waiting} read keys that are written before `{name}`, or declare `{name}` as Group or Row \
                     where its maths allows"
                )),
        );
    }
}
