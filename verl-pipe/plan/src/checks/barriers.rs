//! No barrier prevents host work from overlapping with generation.

use verl_words::diagnostic::Diagnostic;
use verl_words::stage::{Cardinality, RowRule};

use crate::build::Draft;
use crate::tables::Tables;

/// Warns about a `Batch` stage between an expansion upstream and per-row host stages downstream, which have to wait.
pub(crate) fn check(
    draft: &Draft<'_>,
    order: &[usize],
    _: &Tables,
    findings: &mut Vec<Diagnostic>,
) {
    let n = draft.stages.len();
    // The nearest expansion upstream of each stage, and the barrier after that expansion, if there is one.
    let mut expansion: Vec<Option<usize>> = vec![None; n];
    let mut barrier: Vec<Option<usize>> = vec![None; n];
    let mut waiting_stages: Vec<Vec<&str>> = vec![Vec::new(); n];
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
            waiting_stages[by].push(draft.name(index));
        }
        if matches!(spec.rows, RowRule::Expand(_)) {
            (expansion[index], barrier[index]) = (Some(index), None);
        } else if spec.cardinality == Cardinality::Batch && expansion[index].is_some() {
            barrier[index] = Some(index);
        }
    }
    for (by, stages) in waiting_stages
        .iter()
        .enumerate()
        .filter(|(_, stages)| !stages.is_empty())
    {
        let name = draft.name(by);
        let source = expansion[by].map_or("the stages before it", |index| draft.name(index));
        let waiting = verl_words::diagnostic::quoted(stages.iter().copied());
        findings.push(
            Diagnostic::warning("P012", format!("`{name}` makes {waiting} wait until `{source}` is done"))
                .at(format!("{source} -> {name} -> {}", stages[0]))
                .because(format!(
                    "`{name}` needs the whole batch of the step, so rows cannot stream from `{source}` to {waiting}"
                ))
                .help(format!(
                    "make {waiting} read keys that are written before `{name}`, or declare `{name}` as Group or Row \
                     if its maths allows"
                )),
        );
    }
}
