//! Two runs side by side: aligned by step, stage and sample, where they part, and how far apart they go from there.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde_json::Value;

use crate::diagnostic::quoted;
use crate::schedule::placement::Schedule;
use crate::trace::compare::{ComparedKey, Difference, Pairing, Rows, Tolerance, compare_rows};
use crate::trace::diff_stats::StatsDiff;
use crate::trace::recorded::{RecordedStage, RecordedStep};
use crate::trace::text::{Align, Table, count, short};

/// One key that a stage emitted in both runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KeyDiff {
    /// The stage's own name of the key.
    pub key: String,
    /// Values in rows that both have.
    pub values: u64,
    /// Those that differ.
    pub differences: u64,
    /// Largest distance of two numbers.
    pub largest: f64,
    /// Mean distance over all values.
    pub mean: f64,
}

/// One stage of a step in both runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageDiff {
    /// Its name.
    pub stage: String,
    /// Rows that both emitted.
    pub rows_of_both: usize,
    /// Rows that only the first run emitted.
    pub rows_of_first: usize,
    /// Rows that only the second run emitted.
    pub rows_of_second: usize,
    /// Keys in declared order.
    pub keys: Vec<KeyDiff>,
    /// The first difference; left is the first run.
    pub first: Option<Difference>,
}

/// One step of both runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepDiff {
    /// The step.
    pub step: u64,
    /// Stages that both recorded, in the order of the first run's plan.
    pub stages: Vec<StageDiff>,
}

/// Two runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RunDiff {
    /// Settings that differ: name, value in the first run, value in the second.
    pub settings: Vec<(String, Value, Value)>,
    /// Steps that both recorded.
    pub steps: Vec<StepDiff>,
    /// All steps of both, by their statistics.
    pub stats: StatsDiff,
    /// What could not be compared.
    pub notes: Vec<String>,
}

/// Compares what the stages of one step emitted in two runs. `schedule` is that of the first.
pub fn diff_step(schedule: &Schedule, first: &RecordedStep, second: &RecordedStep) -> StepDiff {
    let stages = schedule.plan.stages.iter().filter_map(|planned| {
        let left = first.stages.get(&planned.name)?;
        let right = second.stages.get(&planned.name)?;
        let keys: Vec<&str> = planned
            .spec
            .writes
            .iter()
            .map(|f| f.name.as_ref())
            .collect();
        Some(diff_stage(&planned.name, &keys, left, right))
    });
    StepDiff {
        step: first.step,
        stages: stages.collect(),
    }
}

fn diff_stage(
    stage: &str,
    keys: &[&str],
    first: &RecordedStage,
    second: &RecordedStage,
) -> StageDiff {
    let left = Rows::new(first.outputs.iter().map(|output| &output.batch));
    let right = Rows::new(second.outputs.iter().map(|output| &output.batch));
    let order = left.ordered(&first.input_ids());
    let other_order = right.ordered(&second.input_ids());
    let both: Vec<u64> = order.iter().copied().filter(|id| right.has(*id)).collect();
    let pairing = |order| Pairing {
        stage,
        order,
        partner: &|id| id,
        absent_is_null: false,
        both_ways: None,
    };
    let rows = compare_rows(
        &Pairing {
            both_ways: Some(&other_order),
            ..pairing(&order)
        },
        &[],
        &left,
        &right,
    );
    let mut diff = StageDiff {
        stage: stage.to_owned(),
        rows_of_both: both.len(),
        rows_of_first: order.len() - both.len(),
        rows_of_second: right.ids().len() - both.len(),
        keys: Vec::new(),
        first: None,
    };
    for key in keys {
        let compared = ComparedKey {
            left: key,
            right: key,
            tolerance: Tolerance::EXACT,
        };
        let found = compare_rows(&pairing(&both), &[compared], &left, &right);
        diff.keys.push(KeyDiff {
            key: (*key).to_owned(),
            values: found.values,
            differences: found.differences,
            largest: found.largest,
            mean: found.total / (found.values.max(1)) as f64,
        });
        diff.first = diff.first.or(found.first);
    }
    // Values of rows that both have say more than rows that one lacks.
    diff.first = diff.first.or(rows.first);
    diff
}

impl StageDiff {
    /// Values and rows that differ.
    pub fn differences(&self) -> u64 {
        let rows = (self.rows_of_first + self.rows_of_second) as u64;
        rows + self.keys.iter().map(|key| key.differences).sum::<u64>()
    }
}

impl StepDiff {
    /// The first difference in the order of the plan.
    pub fn first(&self) -> Option<&Difference> {
        self.stages.iter().find_map(|stage| stage.first.as_ref())
    }
}

impl RunDiff {
    /// Step and place at which the runs part, where rows were recorded.
    pub fn first(&self) -> Option<(u64, &Difference)> {
        let mut steps = self.steps.iter();
        steps.find_map(|step| Some((step.step, step.first()?)))
    }
}

/// Settings of two resolved configurations that differ, by dotted names; where a run lies is no setting.
pub fn diff_settings(first: &Value, second: &Value) -> Vec<(String, Value, Value)> {
    let (mut left, mut right) = (BTreeMap::new(), BTreeMap::new());
    flatten("", first, &mut left);
    flatten("", second, &mut right);
    let names: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
    let value =
        |of: &BTreeMap<String, Value>, name: &String| of.get(name).cloned().unwrap_or(Value::Null);
    names
        .into_iter()
        .filter(|name| *name != "run.dir" && left.get(*name) != right.get(*name))
        .map(|name| (name.clone(), value(&left, name), value(&right, name)))
        .collect()
}

fn flatten(name: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
    let inner = |part: &str| match name.is_empty() {
        true => part.to_owned(),
        false => format!("{name}.{part}"),
    };
    match value {
        Value::Object(fields) => {
            for (part, value) in fields {
                flatten(&inner(part), value, into);
            }
        }
        // Stages are known by their names, not by their places.
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (at, item) in items.iter().enumerate() {
                let own = item.get("name").and_then(Value::as_str);
                let part = own.map_or_else(|| at.to_string(), str::to_owned);
                flatten(&inner(&part), item, into);
            }
        }
        value => drop(into.insert(name.to_owned(), value.clone())),
    }
}

impl fmt::Display for RunDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, first, second) in &self.settings {
            writeln!(f, "setting {name}: {first} | {second}")?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        let Some((step, first)) = self.first() else {
            return self.write_without_rows(f);
        };
        writeln!(f, "the runs part in step {step}, {}", first.place())?;
        writeln!(f, "{}", first.explain("first run", "second run"))?;
        self.write_trend(f, first)?;
        write!(f, "{}", self.stats)
    }
}

impl RunDiff {
    /// What there is to say where no recorded row differs.
    fn write_without_rows(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = count(self.steps.len() as u64, "step");
        let hashes = count(self.stats.steps.len() as u64, "step");
        match (self.steps.len(), self.stats.steps.len()) {
            (0, 0) => writeln!(f, "no step is recorded in both runs"),
            (_, _) if self.stats.parting.is_some() => write!(f, "{}", self.stats),
            (0, _) => writeln!(f, "no difference; {hashes} compared by their hashes"),
            (_, 0) => writeln!(f, "no difference; {rows} compared"),
            (_, _) => writeln!(
                f,
                "no difference; {rows} compared row by row, {hashes} by their hashes"
            ),
        }
    }

    /// A line a step: what differs, and how far the key that differed first lies apart.
    fn write_trend(&self, f: &mut fmt::Formatter<'_>, first: &Difference) -> fmt::Result {
        let key = format!("{}.{}", first.stage, first.key);
        let (mean, largest) = (format!("mean |Δ| {key}"), format!("largest |Δ| {key}"));
        let mut table = Table::new(&[
            ("step", Align::Right),
            ("values that differ", Align::Right),
            ("rows of one only", Align::Right),
            (mean.as_str(), Align::Right),
            (largest.as_str(), Align::Right),
            ("stages that differ", Align::Left),
        ]);
        for step in &self.steps {
            let keys = || step.stages.iter().flat_map(|stage| &stage.keys);
            let values: u64 = keys().map(|key| key.values).sum();
            let differing: u64 = keys().map(|key| key.differences).sum();
            let lone: usize = step
                .stages
                .iter()
                .map(|stage| stage.rows_of_first + stage.rows_of_second)
                .sum();
            let of_key = step.stages.iter().find(|stage| stage.stage == first.stage);
            let of_key =
                of_key.and_then(|stage| stage.keys.iter().find(|key| key.key == first.key));
            let number =
                |of: fn(&KeyDiff) -> f64| of_key.map_or("-".to_owned(), |key| short(of(key)));
            let differ: Vec<&str> = step
                .stages
                .iter()
                .filter(|stage| stage.differences() > 0)
                .map(|stage| stage.stage.as_str())
                .collect();
            table.row([
                step.step.to_string(),
                format!("{:.2} %", 100.0 * differing as f64 / values.max(1) as f64),
                lone.to_string(),
                number(|key| key.mean),
                number(|key| key.largest),
                quoted(differ),
            ]);
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn settings_are_compared_by_name() {
        let first = json!({"run": {"dir": "a", "seed": 1}, "stages": [{"name": "x", "t": 1}, {"name": "y"}]});
        let second = json!({"run": {"dir": "b", "seed": 1}, "stages": [{"name": "y"}, {"name": "x", "t": 0.5}]});
        assert_eq!(
            diff_settings(&first, &second),
            [("stages.x.t".to_owned(), json!(1), json!(0.5))]
        );
    }
}
