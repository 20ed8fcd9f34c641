//! Rules on the rows and statistics of a step, before its update.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, UInt8Type, UInt32Type};
use arrow_array::{Array, ArrayRef};
use arrow_buffer::ScalarBuffer;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::batch::{Batch, RowId};
use verl_words::keys::{ADVANTAGES, FINISH_REASONS, MASK_KINDS, RESPONSES, REWARDS, finish, mask};
use xxhash_rust::xxh3::xxh3_64;

use super::robust::{percent, shown};
use super::{Hit, SeenBatch, StepView};
use crate::format::Side;
use crate::stats::{StatRow, bytes, floats};

/// Number of rows that a finding lists.
const NAMED: usize = 5;
/// Fewest rewards, and fewest groups of samples, for which equal rewards are meaningful.
const EQUAL_REWARDS: u64 = 8;
const EQUAL_GROUPS: usize = 4;
/// Fewest advantages for which zeros are meaningful.
const ADVANTAGE_TOKENS: u64 = 32;
/// Fewest responses for a meaningful share.
const SHARE_ROWS: usize = 8;
/// Fewest responses, and fewest prompts, for which equal responses are meaningful.
const SAME_ROWS: usize = 16;
const SAME_PROMPTS: usize = 4;
/// Number of tokens at the end of a response that are checked for a loop, and its longest period.
const LOOP_TOKENS: usize = 32;
const LOOP_PERIOD: usize = 8;

pub(super) fn non_finite(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    let values = |count: u64, more: &str| match count {
        1 => format!("1 value{more} is NaN or infinite"),
        n => format!("{n} values{more} are NaN or infinite"),
    };
    let Some(update) = view.update else {
        let of_outputs = view.stats.iter().filter(|row| row.side == Side::Output);
        return of_outputs
            .filter(|row| row.non_finite as f64 > limit)
            .map(|row| Hit {
                value: row.non_finite as f64,
                what: values(row.non_finite, ""),
                ..at(row)
            })
            .collect();
    };
    let ids = update.batch.ids();
    let kinds = update.batch.column(MASK_KINDS.name());
    let mut hits = Vec::new();
    for key in update.batch.keys() {
        let Some(array) = update.batch.column(&key) else {
            continue;
        };
        let bad: Vec<(usize, u64)> = (0..ids.len())
            .map(|row| (row, bad_values(array, kinds, row)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let total: u64 = bad.iter().map(|(_, count)| count).sum();
        if total as f64 > limit {
            hits.push(Hit {
                stage: update.stage.to_owned(),
                key,
                value: total as f64,
                samples: bad.iter().take(NAMED).map(|(row, _)| ids[*row]).collect(),
                what: format!(
                    "{}, in {} of {} rows",
                    values(total, " under the mask"),
                    bad.len(),
                    ids.len()
                ),
            });
        }
    }
    hits
}

/// Number of values in a row that are NaN or infinite and not at an observation token.
fn bad_values(array: &ArrayRef, kinds: Option<&ArrayRef>, row: usize) -> u64 {
    if let Some(scalars) = array.as_primitive_opt::<Float32Type>() {
        return u64::from(scalars.is_valid(row) && !scalars.value(row).is_finite());
    }
    let Some(values) = floats(array, row) else {
        return 0;
    };
    let kinds = kinds.and_then(|kinds| bytes(kinds, row));
    let kinds = kinds.filter(|kinds| kinds.len() == values.len());
    let counts = |token: usize| kinds.is_none_or(|kinds| kinds[token] != mask::OBSERVATION);
    let bad = values.iter().enumerate();
    bad.filter(|(token, value)| !value.is_finite() && counts(*token))
        .count() as u64
}

pub(super) fn advantage_variance(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, ADVANTAGES.name())
        .filter_map(|row| {
            let variance = row.std?.powi(2);
            let size = |batch: &Batch, at: usize| {
                let values = floats(batch.column(&row.key)?, at)?;
                values.iter().map(|v| f64::from(v.abs())).reduce(f64::max)
            };
            (variance > limit).then(|| Hit {
                value: variance,
                samples: worst(view, row, size),
                what: format!(
                    "the variance is {}, above {}; the values go from {} to {}",
                    shown(variance),
                    shown(limit),
                    shown(row.min.unwrap_or_default()),
                    shown(row.max.unwrap_or_default())
                ),
                ..at(row)
            })
        })
        .collect()
}

pub(super) fn zero_advantages(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, ADVANTAGES.name())
        .filter_map(|row| {
            let share = row.zeros as f64 / row.count.max(1) as f64;
            (row.count >= ADVANTAGE_TOKENS && share >= limit).then(|| Hit {
                value: share,
                what: format!(
                    "{} of {} advantages are 0 and teach nothing",
                    row.zeros, row.count
                ),
                ..at(row)
            })
        })
        .collect()
}

pub(super) fn constant_reward(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, REWARDS.name())
        .filter_map(|row| {
            let (min, max) = (row.min?, row.max?);
            let first = |_: &Batch, at: usize| Some(-(at as f64));
            if min == max && row.count >= EQUAL_REWARDS {
                return Some(Hit {
                    value: 1.0,
                    samples: worst(view, row, first),
                    what: format!("all {} rewards are {}", row.count, shown(min)),
                    ..at(row)
                });
            }
            let (constant, groups, samples) = constant_groups(view, row);
            let share = constant as f64 / groups.max(1) as f64;
            (groups >= EQUAL_GROUPS && share > limit).then(|| Hit {
                value: share,
                samples,
                what: format!(
                    "rewards are equal within {constant} of {groups} groups, so these teach nothing"
                ),
                ..at(row)
            })
        })
        .collect()
}

/// Number of groups with equal rewards, number of groups with more than one row, and a row of some of the former.
fn constant_groups(view: &StepView<'_>, row: &StatRow) -> (usize, usize, Vec<RowId>) {
    let mut groups: BTreeMap<u64, (Vec<f32>, RowId)> = BTreeMap::new();
    for seen in seen(view, row) {
        let column = seen.batch.column(&row.key);
        let Some(rewards) = column.and_then(|c| c.as_primitive_opt::<Float32Type>()) else {
            continue;
        };
        for (reward, id) in rewards.iter().zip(seen.batch.ids()) {
            let entry = groups.entry(id.group()).or_insert((Vec::new(), id));
            entry.0.extend(reward);
        }
    }
    groups.retain(|_, (rewards, _)| rewards.len() > 1);
    let constant: Vec<RowId> = groups
        .values()
        .filter(|(rewards, _)| rewards.iter().all(|reward| reward == &rewards[0]))
        .map(|(_, id)| *id)
        .collect();
    let named = constant.iter().take(NAMED).copied().collect();
    (constant.len(), groups.len(), named)
}

pub(super) fn length_limit(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, FINISH_REASONS.name())
        .filter_map(|row| {
            let share = row.truncated_share?;
            let cut = |batch: &Batch, at: usize| {
                let reasons = batch.column(&row.key)?.as_primitive_opt::<UInt8Type>()?;
                is_cut(reasons.value(at)).then_some(-(at as f64))
            };
            (share > limit && row.count >= SHARE_ROWS as u64).then(|| Hit {
                value: share,
                samples: worst(view, row, cut),
                what: format!(
                    "{} of the responses reached the token limit{}",
                    percent(share),
                    which_limit(view, row)
                ),
                ..at(row)
            })
        })
        .collect()
}

/// Whether a response was cut off.
fn is_cut(reason: u8) -> bool {
    !matches!(reason, finish::EOS | finish::STOP)
}

/// Whether the stage's setting or the model's context cut the responses off, judging by their lengths.
fn which_limit(view: &StepView<'_>, row: &StatRow) -> String {
    let Some((setting, most)) = view.limits.get(&row.stage) else {
        return String::new();
    };
    let (mut by_setting, mut by_context) = (0, 0);
    for seen in seen(view, row) {
        let (Some(reasons), Some(responses)) = (
            seen.batch.column(&row.key),
            seen.batch.column(RESPONSES.name()),
        ) else {
            continue;
        };
        let Some(reasons) = reasons.as_primitive_opt::<UInt8Type>() else {
            continue;
        };
        for at in (0..reasons.len()).filter(|at| is_cut(reasons.value(*at))) {
            match tokens(responses, at).map(|tokens| tokens.len()) {
                Some(length) if length < *most => by_context += 1,
                Some(_) => by_setting += 1,
                None => {}
            }
        }
    }
    match (by_setting, by_context) {
        (0, 0) => String::new(),
        (_, 0) => format!(": all by `{setting} = {most}`; raise it if they would end later"),
        (0, _) => format!(
            ": all by the model's context, before `{setting} = {most}`; use shorter prompts or a model with a longer context"
        ),
        (a, b) => format!(
            ": {a} by `{setting} = {most}`, {b} by the model's context, for which their prompts are too long"
        ),
    }
}

pub(super) fn same_responses(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, RESPONSES.name())
        .filter_map(|row| {
            let mut prompts = BTreeSet::new();
            let mut counts: HashMap<u64, (usize, RowId)> = HashMap::new();
            let mut rows = 0;
            for (id, tokens) in responses(view, row) {
                prompts.insert(id.group());
                rows += 1;
                let hash = xxh3_64(tokens.inner().as_slice());
                counts.entry(hash).or_insert((0, id)).0 += 1;
            }
            let most = counts
                .values()
                .max_by_key(|(count, id)| (*count, std::cmp::Reverse(*id)));
            let (count, id) = *most?;
            let share = count as f64 / rows as f64;
            let enough = rows >= SAME_ROWS && prompts.len() >= SAME_PROMPTS;
            (enough && share > limit).then(|| Hit {
                value: share,
                samples: vec![id],
                what: format!(
                    "{count} of {rows} responses to {} prompts are the same tokens",
                    prompts.len()
                ),
                ..at(row)
            })
        })
        .collect()
}

pub(super) fn looping_responses(view: &StepView<'_>, limit: f64) -> Vec<Hit> {
    outputs(view, RESPONSES.name())
        .filter_map(|row| {
            let mut rows = 0;
            let looping: Vec<RowId> = responses(view, row)
                .inspect(|_| rows += 1)
                .filter(|(_, tokens)| ends_in_loop(tokens))
                .map(|(id, _)| id)
                .collect();
            let share = looping.len() as f64 / rows.max(1) as f64;
            (rows >= SHARE_ROWS && share > limit).then(|| Hit {
                value: share,
                samples: looping.iter().take(NAMED).copied().collect(),
                what: format!(
                    "{} of {rows} responses end in a loop of at most {LOOP_PERIOD} tokens",
                    looping.len()
                ),
                ..at(row)
            })
        })
        .collect()
}

/// Whether the last tokens repeat with a short period.
fn ends_in_loop(tokens: &[u32]) -> bool {
    let Some(end) = tokens
        .len()
        .checked_sub(LOOP_TOKENS)
        .map(|at| &tokens[at..])
    else {
        return false;
    };
    (1..=LOOP_PERIOD).any(|period| end[period..] == end[..LOOP_TOKENS - period])
}

/// The responses that a row of statistics is about.
fn responses<'a>(
    view: &StepView<'a>,
    row: &'a StatRow,
) -> impl Iterator<Item = (RowId, ScalarBuffer<u32>)> {
    seen(view, row).flat_map(|seen| {
        let column = seen.batch.column(&row.key);
        let ids = seen.batch.ids().into_iter().enumerate();
        ids.filter_map(move |(at, id)| Some((id, tokens(column?, at)?)))
    })
}

/// Row `row` of a ragged u32 column, without copying tokens.
fn tokens(array: &ArrayRef, row: usize) -> Option<ScalarBuffer<u32>> {
    let list = array.as_list_opt::<i32>()?;
    let values = list.values().as_primitive_opt::<UInt32Type>()?.values();
    let offsets = list.value_offsets();
    let (start, end) = (offsets[row] as usize, offsets[row + 1] as usize);
    list.is_valid(row).then(|| values.slice(start, end - start))
}

pub(super) fn at(row: &StatRow) -> Hit {
    Hit {
        stage: row.stage.clone(),
        key: row.key.clone(),
        ..Hit::default()
    }
}

/// Statistics of what stages wrote under their own name `key`.
fn outputs<'a>(view: &StepView<'a>, key: &'a str) -> impl Iterator<Item = &'a StatRow> {
    let rows = view.stats.iter();
    rows.filter(move |row| row.side == Side::Output && row.key == key)
}

/// The batches that a row of statistics is about.
fn seen<'a>(view: &StepView<'a>, row: &'a StatRow) -> impl Iterator<Item = SeenBatch<'a>> {
    let batches = view.batches.iter().copied();
    batches.filter(move |seen| seen.stage == row.stage && seen.side == row.side)
}

/// The rows with the largest size; rows without a size are skipped.
fn worst(
    view: &StepView<'_>,
    row: &StatRow,
    size: impl Fn(&Batch, usize) -> Option<f64>,
) -> Vec<RowId> {
    let mut rows: Vec<(f64, RowId)> = Vec::new();
    for seen in seen(view, row) {
        let ids = seen.batch.ids();
        let sized = ids.iter().enumerate();
        rows.extend(sized.filter_map(|(at, id)| Some((size(seen.batch, at)?, *id))));
    }
    largest(rows)
}

pub(super) fn largest(mut rows: Vec<(f64, RowId)>) -> Vec<RowId> {
    rows.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    rows.into_iter().take(NAMED).map(|(_, id)| id).collect()
}
