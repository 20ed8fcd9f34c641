//! A step can determine how many waves it needs: the keys that its filter needs arrive wave by wave.

use verl_words::batch::RowId;
use verl_words::diagnostic::Diagnostic;
use verl_words::stage::{Access, Cardinality, Refill, RowRule, StageSpec};

use crate::build::Draft;
use crate::tables::Tables;

pub(crate) fn check(
    draft: &Draft<'_>,
    order: &[usize],
    tables: &Tables,
    findings: &mut Vec<Diagnostic>,
) {
    let refilling = order.iter().filter_map(|&index| {
        let spec = draft.stages[index].spec.as_ref()?;
        Some((index, spec, spec.refill?))
    });
    let mut first: Option<usize> = None;
    for (index, spec, refill) in refilling {
        match first {
            Some(first) => findings.push(second(draft.name(first), draft.name(index))),
            None => first = Some(index),
        }
        match invalid_refill(spec, &refill) {
            Some(why) => findings.push(
                cannot_refill(
                    draft.name(index),
                    format!("`{}` cannot refill a step", draft.name(index)),
                )
                .because(why)
                .help("fix the declaration of the stage"),
            ),
            None if refill.waves > 1 => {
                findings.extend(silent_source(draft, index, tables));
                findings.extend(barriers(draft, index));
            }
            None => {}
        }
    }
}

fn cannot_refill(name: &str, what: String) -> Diagnostic {
    Diagnostic::error("P021", what).at(format!("stage `{name}`"))
}

fn second(first: &str, second: &str) -> Diagnostic {
    cannot_refill(second, format!("`{first}` and `{second}` both refill the step"))
        .because("a step ends when one filter has kept enough; with two filters, each could request rows that the other drops")
        .help(format!("make `{second}` keep all its rows, or merge the two filters"))
}

/// Why the declaration of a refilling stage is invalid.
fn invalid_refill(spec: &StageSpec, refill: &Refill) -> Option<String> {
    if spec.rows != RowRule::Filter || spec.cardinality != Cardinality::Group {
        return Some(
            "only a filter of whole groups can count the groups that it has kept".to_owned(),
        );
    }
    if refill.groups == 0 {
        return Some("it keeps 0 groups, so nothing can be learnt".to_owned());
    }
    let most = RowId::MAX_WAVES;
    let is_valid = (1..=most).contains(&(refill.waves as u64));
    (!is_valid).then(|| format!("a step has 1 to {most} waves, not {}", refill.waves))
}

/// A source that would draw the same rows again.
fn silent_source(draft: &Draft<'_>, index: usize, tables: &Tables) -> Option<Diagnostic> {
    let table = tables.root(tables.input[index]?);
    let source = tables.list[table].made_by;
    let draws = draft.stages[source]
        .spec
        .as_ref()
        .is_some_and(|spec| spec.draws_waves);
    (!draws).then(|| {
        let (filter, source) = (draft.name(index), draft.name(source));
        cannot_refill(filter, format!("`{source}` draws no further rows for `{filter}`"))
            .at(format!("{source} -> {filter}"))
            .because(format!("`{source}` does not declare that it draws different rows in each wave of a step"))
            .help(format!(
                "limit `{filter}` to one wave, or make `{source}` draw by `StageContext::wave` and declare \
                 `draws_waves`"
            ))
    })
}

/// Reports stages before the filter that wait for the last row of the step, which the filter determines.
fn barriers(draft: &Draft<'_>, index: usize) -> Vec<Diagnostic> {
    let filter = draft.name(index);
    let before = draft.graph.ancestors(index);
    let stages = draft
        .stages
        .iter()
        .enumerate()
        .filter(|(at, _)| before[*at]);
    let waits = stages.filter_map(|(at, stage)| {
        let spec = stage
            .spec
            .as_ref()
            .filter(|spec| spec.rows != RowRule::Source)?;
        let updates = spec
            .models
            .iter()
            .any(|(_, access)| *access == Access::Update);
        let waits = if spec.cardinality == Cardinality::Batch {
            "waits for the whole batch of the step"
        } else if updates {
            "changes weights, so it waits until their readers have seen the whole batch of the step"
        } else {
            return None;
        };
        Some((draft.name(at), waits))
    });
    let finding = |(name, waits): (&str, &str)| {
        cannot_refill(filter, format!("`{name}` and `{filter}` would wait for each other"))
            .at(format!("{name} -> {filter}"))
            .because(format!(
                "`{name}` {waits}, which is complete only when `{filter}` has kept enough, but `{filter}` needs what \
                 `{name}` writes"
            ))
            .help(format!(
                "put `{name}` after `{filter}`, make `{filter}` use keys that do not depend on it, or limit `{filter}` \
                 to one wave"
            ))
    };
    waits.map(finding).collect()
}
