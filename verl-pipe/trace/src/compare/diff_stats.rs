//! Compares two runs by their statistics only: every step of every run has them, whether or not its rows were recorded
//! in full. The hashes show whether a key was equal to the bit, the means how it developed.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use verl_plan::schedule::placement::Schedule;
use verl_rules::format::Side;
use verl_rules::stats::StatRow;
use verl_words::field::Field;
use verl_words::stage::RowRule;

use crate::compare::diff_inputs::Cause;
use crate::text::{Align, Table, short};

/// Number of steps shown in a trend; if there are more, some are skipped.
const SHOWN_STEPS: usize = 24;

/// One step of both runs, by its statistics.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatsStep {
    /// The step.
    pub step: u64,
    /// Keys that stages emitted in both runs.
    pub keys: usize,
    /// Keys whose hashes differ.
    pub differing: usize,
    /// The first of them in the order of the plan: stage and key.
    pub first: Option<(String, String)>,
    /// Means of the key in which the runs diverge, in the first and in the second run; none for token ids and similar
    /// keys.
    pub means: (Option<f64>, Option<f64>),
    /// Number of values of that key in the first and in the second run.
    pub values: (Option<u64>, Option<u64>),
    /// Whether that key differs.
    pub differs: bool,
}

/// Two runs, by their statistics.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StatsDiff {
    /// Where they diverge: step, stage, key.
    pub parting: Option<(u64, String, String)>,
    /// Whether the values of that key are token ids, masks or similar, which have no mean.
    pub is_identifier: bool,
    /// Whether the stage in which they diverge had the same inputs.
    pub cause: Option<Cause>,
    /// Steps that both runs have, in ascending order.
    pub steps: Vec<StatsStep>,
}

/// Outputs of one step, by stage and key.
type Emitted<'a> = BTreeMap<(&'a str, &'a str), &'a StatRow>;

fn by_step(rows: &[StatRow]) -> BTreeMap<u64, Emitted<'_>> {
    let mut steps: BTreeMap<u64, Emitted<'_>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.side == Side::Output) {
        let step = steps.entry(row.step).or_default();
        step.insert((&row.stage, &row.key), row);
    }
    steps
}

/// Compares the statistics of two runs; `schedule` is that of the first.
pub fn diff_stats(schedule: &Schedule, first: &[StatRow], second: &[StatRow]) -> StatsDiff {
    let (left, right) = (by_step(first), by_step(second));
    let written: Vec<(&str, &str)> = schedule
        .plan()
        .stages()
        .iter()
        .flat_map(|stage| {
            let keys = stage.spec().writes.iter();
            keys.map(|field| (stage.name(), field.name.as_ref()))
        })
        .collect();
    let mut diff = StatsDiff::default();
    for (step, left) in &left {
        let Some(right) = right.get(step) else {
            continue;
        };
        let of_both = |key: &&(&str, &str)| left.contains_key(*key) && right.contains_key(*key);
        let keys: Vec<&(&str, &str)> = written.iter().filter(of_both).collect();
        let differs = |key: &&&(&str, &str)| left[**key].hash != right[**key].hash;
        let own = |(stage, key): &(&str, &str)| ((*stage).to_owned(), (*key).to_owned());
        let first = keys.iter().find(differs).map(|key| own(key));
        if let (None, Some((stage, key))) = (&diff.parting, &first) {
            diff.parting = Some((*step, stage.clone(), key.clone()));
        }
        diff.steps.push(StatsStep {
            step: *step,
            keys: keys.len(),
            differing: keys.iter().filter(differs).count(),
            first,
            means: (None, None),
            values: (None, None),
            differs: false,
        });
    }
    if let Some((step, stage, key)) = &diff.parting {
        diff.cause = cause(schedule, *step, stage, first, second);
        let name = (stage.as_str(), key.as_str());
        let mut stages = schedule.plan().stages().iter();
        let planned = stages.find(|planned| planned.name() == *stage);
        let field = planned.and_then(|stage| stage.spec().writes.iter().find(|f| f.name == *key));
        diff.is_identifier = field.is_some_and(Field::is_identifier);
        for step in &mut diff.steps {
            let first = left[&step.step].get(&name).copied();
            let second = right[&step.step].get(&name).copied();
            step.values = (first.map(|row| row.count), second.map(|row| row.count));
            step.differs = first.map(|row| row.hash) != second.map(|row| row.hash);
            if !diff.is_identifier {
                step.means = (
                    first.and_then(|row| row.mean),
                    second.and_then(|row| row.mean),
                );
            }
        }
    }
    diff
}

/// Whether stage `name` was given the same rows in both runs, by their hashes, which do not cover weights.
fn cause(
    schedule: &Schedule,
    step: u64,
    name: &str,
    first: &[StatRow],
    second: &[StatRow],
) -> Option<Cause> {
    let planned = schedule
        .plan()
        .stages()
        .iter()
        .find(|stage| stage.name() == name)?;
    let given = |rows: &'_ [StatRow]| -> BTreeMap<String, u64> {
        let rows = rows
            .iter()
            .filter(|row| row.step == step && row.stage == name && row.side == Side::Input);
        rows.map(|row| (row.key.clone(), row.hash)).collect()
    };
    let (left, right) = (given(first), given(second));
    Some(match left == right {
        false => Cause::InputsDiffer,
        true if planned.spec().rows == RowRule::Source => Cause::Source,
        true if left.is_empty() => Cause::Unknown,
        true if planned.spec().models.is_empty() => Cause::SameInputs,
        true => {
            let models = planned.spec().models.iter();
            Cause::WeightsUnknown(models.map(|(model, _)| model.clone()).collect())
        }
    })
}

impl fmt::Display for StatsDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((step, stage, key)) = &self.parting else {
            return Ok(());
        };
        writeln!(
            f,
            "by the hashes of the outputs, the runs diverge in step {step}, stage `{stage}`, key `{key}`"
        )?;
        if let Some(cause) = &self.cause {
            writeln!(f, "  {cause}")?;
        }
        let name = format!("{stage}.{key}");
        let (first, second) = match self.is_identifier {
            true => ("values in the first".to_owned(), "in the second"),
            false => (format!("mean of {name} in the first"), "in the second"),
        };
        let mut columns = vec![("step", Align::Right), ("keys that differ", Align::Right)];
        if self.is_identifier {
            columns.push((name.as_str(), Align::Left));
        }
        columns.extend([(first.as_str(), Align::Right), (second, Align::Right)]);
        let mut table = Table::new(&columns);
        let every = self.steps.len().div_ceil(SHOWN_STEPS).max(1);
        let last = self.steps.len().saturating_sub(1);
        let none = || "-".to_owned();
        let mean = |number: Option<f64>| number.map_or_else(none, short);
        let values = |count: Option<u64>| count.map_or_else(none, |count| count.to_string());
        for (at, row) in self.steps.iter().enumerate() {
            if at % every == 0 || at == last || row.step == *step {
                let mut cells = vec![
                    row.step.to_string(),
                    format!("{} of {}", row.differing, row.keys),
                ];
                match self.is_identifier {
                    true => {
                        let word = if row.differs { "differs" } else { "the same" };
                        cells.push(word.to_owned());
                        cells.extend([values(row.values.0), values(row.values.1)]);
                    }
                    false => cells.extend([mean(row.means.0), mean(row.means.1)]),
                }
                table.row(cells);
            }
        }
        write!(f, "{table}")
    }
}
