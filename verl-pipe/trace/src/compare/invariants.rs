//! Invariants of recorded rows in any pipeline: what the guards guarantee, and what the standard keys mean.

use std::collections::HashMap;

use verl_plan::schedule::placement::Schedule;
use verl_run::guard::{GuardError, GuardScope, MaskOf};
use verl_run::masks::kinds_of;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RowId};
use verl_words::keys;
use verl_words::stage::RowRule;

use crate::compare::cell::{Cell, cell};
use crate::compare::rows::Rows;
use crate::files::{RecordedBatch, RecordedStage};
use crate::text;

/// A value that violates a rule.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Violation {
    pub output: bool,
    pub key: String,
    pub row: Option<usize>,
    pub sample: Option<RowId>,
    pub index: Option<usize>,
    /// The rule, as a sentence about the value.
    pub what: String,
    pub non_finite: bool,
}

/// The first violation in `stage`: inputs before outputs, keys in their order, then rows.
pub(crate) fn first_violation(
    schedule: &Schedule,
    index: usize,
    stage: &RecordedStage,
) -> Option<Violation> {
    let given = stage.input_ids();
    let emitted = Rows::new(stage.outputs.iter().map(|output| &output.batch));
    let places = |ids: Vec<u64>| -> HashMap<u64, u32> {
        let places = ids.into_iter().enumerate();
        places.map(|(at, id)| (id, at as u32)).collect()
    };
    let orders = [places(emitted.ordered(&given)), places(given)];
    let of = |batches: &[RecordedBatch], output: bool| {
        let order = &orders[usize::from(!output)];
        batches
            .iter()
            .filter_map(|batch| guard(schedule, index, stage, batch, output, order))
            .next()
            .or_else(|| values(batches, output, order))
    };
    of(&stage.inputs, false)
        .or_else(|| of(&stage.outputs, true))
        .or_else(|| missing_rows(schedule, index, stage))
}

/// Checks recorded rows with the guards of a run.
fn guard(
    schedule: &Schedule,
    index: usize,
    stage: &RecordedStage,
    recorded: &RecordedBatch,
    output: bool,
    order: &HashMap<u64, u32>,
) -> Option<Violation> {
    let batch = &recorded.batch;
    let ids: Vec<u64> = batch.ids().iter().map(|id| id.0).collect();
    let positions: Vec<u32> = ids
        .iter()
        .enumerate()
        .map(|(row, id)| order.get(id).copied().unwrap_or(row as u32))
        .collect();
    let planned = &schedule.plan().stages()[index];
    let mask = schedule.wiring().stages[index].mask.as_ref();
    let masks = batch.column(keys::MASK_KINDS.name());
    let kinds = |row: usize| masks.and_then(|masks| kinds_of(masks, row));
    let scope = GuardScope {
        stage: planned.name(),
        wires: &schedule.wiring().stages[index],
        positions: &positions,
        ids: &ids,
        mask: mask.map(|mask| MaskOf {
            dim: &mask.dim,
            kinds: &kinds,
        }),
    };
    let result = if output {
        let same_rows = matches!(planned.spec().rows, RowRule::Same | RowRule::Filter);
        let input = stage
            .inputs
            .iter()
            .find(|input| input.slice == recorded.slice);
        let input = input.filter(|_| same_rows).map(|input| &input.batch);
        let input_ids: Vec<u64> = input.map_or_else(Vec::new, |input| {
            input.ids().iter().map(|id| id.0).collect()
        });
        scope.columns(batch).and_then(|columns| {
            scope.lengths(input.map(|input| (input, input_ids.as_slice())), &columns)
        })
    } else {
        let named = schedule.wiring().stages[index].inputs.iter();
        let names: Vec<&str> = named.map(|input| input.local.as_str()).collect();
        // The guard finds an input's columns by position.
        match batch.select(&names) {
            Ok(batch) => scope.lengths(Some((&batch, &ids)), &[]),
            Err(_) => Err(missing_key(planned.name(), batch, &names)),
        }
    };
    result.err().map(|error| guard_violation(&error, output))
}

fn missing_key(stage: &str, batch: &Batch, names: &[&str]) -> GuardError {
    let missing = names.iter().find(|name| !batch.has(name));
    GuardError::MissingKey {
        stage: stage.to_owned(),
        key: missing.map_or_else(String::new, |name| (*name).to_owned()),
        found: batch.keys().join(", "),
    }
}

fn guard_violation(error: &GuardError, output: bool) -> Violation {
    let mut violation = Violation {
        output,
        key: "sample_id".to_owned(),
        row: None,
        sample: None,
        index: None,
        what: error.to_string(),
        non_finite: false,
    };
    match error {
        GuardError::MissingKey { key, .. }
        | GuardError::UndeclaredKey { key, .. }
        | GuardError::Type { key, .. } => violation.key.clone_from(key),
        GuardError::Null { key, row, id, .. } => {
            violation.key.clone_from(key);
            (violation.row, violation.sample) = (Some(*row), Some(*id));
        }
        GuardError::NonFinite {
            key,
            row,
            id,
            token,
            ..
        } => {
            violation.key.clone_from(key);
            (violation.row, violation.sample, violation.index) = (Some(*row), Some(*id), *token);
            violation.non_finite = true;
        }
        GuardError::Length {
            row, id, lengths, ..
        } => {
            violation.key.clone_from(&lengths.key);
            (violation.row, violation.sample) = (Some(*row), Some(*id));
        }
        GuardError::ForeignRow { id, .. } | GuardError::RepeatedRow { id, .. } => {
            violation.sample = Some(*id);
        }
        GuardError::MissingRows { .. } | GuardError::NoOutput { .. } => {}
    }
    violation
}

/// A rule about each value of a key: its text and its predicate.
type ValueRule = (&'static str, fn(f64) -> bool);

/// Tolerance for values that are computed as sums and lie at the limit of their range.
const ROUNDING: f64 = 1e-5;

/// The rule of a standard key.
fn rule(key: &str) -> Option<ValueRule> {
    let log_prob = key == "log_probs" || key.ends_with("_log_probs");
    Some(match key {
        _ if log_prob => ("a log-prob is never above 0", |v| v <= ROUNDING),
        _ if key == keys::MASK_KINDS.name() => {
            ("a mask kind is 0 (observation) or 1 (action)", |v| v <= 1.0)
        }
        _ if key == keys::ROLLOUT_MASKS.name() || key == keys::DESIRABLE.name() => {
            ("it is 0 or 1", |v| v <= 1.0)
        }
        _ if key == keys::FINISH_REASONS.name() => (
            "a finish reason is 0 (end of sequence), 1 (stop text), 2 (length) or 3 (context)",
            |v| v <= 3.0,
        ),
        _ if key == keys::ENTROPIES.name() => ("an entropy is never below 0", |v| v >= -ROUNDING),
        _ if key == keys::ROLLOUT_WEIGHTS.name() => {
            ("an importance weight is never below 0", |v| v >= 0.0)
        }
        _ => return None,
    })
}

/// Finds a value that the meaning of its key forbids, or a float that is not finite at an action token.
fn values(batches: &[RecordedBatch], output: bool, order: &HashMap<u64, u32>) -> Option<Violation> {
    for recorded in batches {
        let batch = &recorded.batch;
        let ids = batch.ids();
        let masks = batch.column(keys::MASK_KINDS.name());
        for key in batch.keys() {
            let Some(array) = batch.column(&key) else {
                continue;
            };
            for (row, id) in ids.iter().enumerate() {
                let Some(values) = cell(array, row) else {
                    continue;
                };
                let mask = masks.and_then(|masks| cell(masks, row));
                let Some((at, what, non_finite)) = bad_value(&key, &values, mask.as_ref()) else {
                    continue;
                };
                let position = order.get(&id.0).map_or(row, |at| *at as usize);
                return Some(Violation {
                    output,
                    row: Some(position),
                    sample: Some(*id),
                    index: (values.len() > 1).then_some(at),
                    what: format!("the value is {}, but {what}", values.show(at)),
                    non_finite,
                    key,
                });
            }
        }
    }
    None
}

fn bad_value(
    key: &str,
    values: &Cell<'_>,
    mask: Option<&Cell<'_>>,
) -> Option<(usize, &'static str, bool)> {
    if let Some((what, holds)) = rule(key) {
        let bad = (0..values.len()).find(|at| values.number(*at).is_some_and(|v| !holds(v)));
        if let Some(at) = bad {
            return Some((at, what, values.number(at).is_some_and(|v| !v.is_finite())));
        }
    }
    let at = values.first_non_finite()?;
    let acted = match mask {
        Some(Cell::U8(kinds)) if kinds.len() == values.len() => {
            kinds.get(at) == Some(&keys::mask::ACTION)
        }
        _ => true,
    };
    acted.then_some((at, "a finite number is expected at an action", true))
}

/// Finds an input row that the stage did not emit as often as its row rule requires.
fn missing_rows(schedule: &Schedule, index: usize, stage: &RecordedStage) -> Option<Violation> {
    let planned = &schedule.plan().stages()[index];
    let expected = match planned.spec().rows {
        RowRule::Same if !planned.spec().writes.is_empty() => 1,
        RowRule::Expand(n) => n,
        _ => return None,
    };
    let mut emitted: HashMap<u64, usize> = HashMap::new();
    let by_group = matches!(planned.spec().rows, RowRule::Expand(_));
    let name = |id: u64| if by_group { RowId(id).group() } else { id };
    for id in stage.outputs.iter().flat_map(|output| output.batch.ids()) {
        *emitted.entry(name(id.0)).or_default() += 1;
    }
    let ids = stage.input_ids();
    let (row, id, count) = ids.iter().enumerate().find_map(|(row, id)| {
        let count = emitted.get(&name(*id)).copied().unwrap_or(0);
        let tolerated = count == 0 && schedule.tolerates_row_errors(index);
        (count != expected && !tolerated).then_some((row, *id, count))
    })?;
    Some(Violation {
        output: true,
        key: "sample_id".to_owned(),
        row: Some(row),
        sample: Some(RowId(id)),
        index: None,
        what: {
            let times = text::count(count as u64, "time");
            format!("it was emitted {times} instead of {expected}")
        },
        non_finite: false,
    })
}
