//! Two runs compared by their statistics alone: every step of every run has them, rows recorded in full or not. The
//! hashes tell whether a key was the same to the bit, the means how it went on.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::schedule::placement::Schedule;
use crate::stage::RowRule;
use crate::trace::diff_inputs::Cause;
use crate::trace::format::Side;
use crate::trace::stats::StatRow;
use crate::trace::text::{Align, Table, short};

/// Steps that are shown in a trend; with more, some are left out.
const SHOWN_STEPS: usize = 24;

/// One step of both runs, by its statistics.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatsStep {
    /// The step.
    pub step: u64,
    /// Keys that stages emitted in both runs.
    pub keys: usize,
    /// Those whose hashes differ.
    pub differing: usize,
    /// The first of them in the order of the plan: stage and key.
    pub first: Option<(String, String)>,
    /// Means of the key in which the runs part, in the first and in the second run.
    pub means: (Option<f64>, Option<f64>),
}

/// Two runs, by their statistics.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StatsDiff {
    /// Where they part: step, stage, key.
    pub parting: Option<(u64, String, String)>,
    /// Whether the stage in which they part was given the same.
    pub cause: Option<Cause>,
    /// Steps that both have, rising.
    pub steps: Vec<StatsStep>,
}

/// What stages emitted in one step, by stage and key.
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
pub(crate) fn diff_stats(schedule: &Schedule, first: &[StatRow], second: &[StatRow]) -> StatsDiff {
    let (left, right) = (by_step(first), by_step(second));
    let written: Vec<(&str, &str)> = schedule
        .plan
        .stages
        .iter()
        .flat_map(|stage| {
            let keys = stage.spec.writes.iter();
            keys.map(|field| (stage.name.as_str(), field.name.as_ref()))
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
        });
    }
    if let Some((step, stage, key)) = &diff.parting {
        diff.cause = cause(schedule, *step, stage, first, second);
        let name = (stage.as_str(), key.as_str());
        for step in &mut diff.steps {
            let mean = |of: &BTreeMap<u64, Emitted<'_>>| of[&step.step].get(&name)?.mean;
            step.means = (mean(&left), mean(&right));
        }
    }
    diff
}

/// Whether stage `name` was given the same rows in both runs, by their hashes. Those tell nothing of weights.
fn cause(
    schedule: &Schedule,
    step: u64,
    name: &str,
    first: &[StatRow],
    second: &[StatRow],
) -> Option<Cause> {
    let planned = schedule
        .plan
        .stages
        .iter()
        .find(|stage| stage.name == name)?;
    let given = |rows: &'_ [StatRow]| -> BTreeMap<String, u64> {
        let rows = rows
            .iter()
            .filter(|row| row.step == step && row.stage == name && row.side == Side::Input);
        rows.map(|row| (row.key.clone(), row.hash)).collect()
    };
    let (left, right) = (given(first), given(second));
    Some(match left == right {
        false => Cause::InputsDiffer,
        true if planned.spec.rows == RowRule::Source => Cause::Source,
        true if left.is_empty() => Cause::Unknown,
        true if planned.spec.models.is_empty() => Cause::SameInputs,
        true => {
            let models = planned.spec.models.iter();
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
            "by the hashes of what was emitted, the runs part in step {step}, stage `{stage}`, key `{key}`"
        )?;
        if let Some(cause) = &self.cause {
            writeln!(f, "  {cause}")?;
        }
        let (first, second) = (
            format!("mean of {stage}.{key} in the first"),
            "in the second".to_owned(),
        );
        let mut table = Table::new(&[
            ("step", Align::Right),
            ("keys that differ", Align::Right),
            (first.as_str(), Align::Right),
            (second.as_str(), Align::Right),
        ]);
        let every = self.steps.len().div_ceil(SHOWN_STEPS).max(1);
        let last = self.steps.len().saturating_sub(1);
        let shown = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), short);
        for (at, row) in self.steps.iter().enumerate() {
            if at % every == 0 || at == last || row.step == *step {
                table.row([
                    row.step.to_string(),
                    format!("{} of {}", row.differing, row.keys),
                    shown(row.means.0),
                    shown(row.means.1),
                ]);
            }
        }
        write!(f, "{table}")
    }
}
