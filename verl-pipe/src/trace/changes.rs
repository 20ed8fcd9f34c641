//! What is not as it was: settings and machine of two runs, or of a run and its replay.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::plan::{Plan, PlannedStage};
use crate::run::records::DataOrigin;
use crate::stage::RowRule;
use crate::trace::conditions::{Conditions, Machine};
use crate::trace::text::count;

/// One thing that is not as it was.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Its name: a setting by its dotted name, such as `models.actor.optimizer.learning_rate`.
    pub name: String,
    /// As it was recorded; null where it was not set.
    pub recorded: Value,
    /// As it is now; null where it is not set.
    pub now: Value,
}

/// A data set whose content is not what it was.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChangedData {
    /// Its name in the pipeline.
    pub name: String,
    /// As the run's `data.json` tells it.
    pub recorded: DataOrigin,
    /// As it is now.
    pub now: DataOrigin,
}

/// Whether a setting decides no number: where and how often something is written, how long is waited.
fn is_idle(name: &str) -> bool {
    const IDLE: [&str; 5] = [
        "run.console_every",
        "run.dir",
        "run.samples_per_step",
        "run.save",
        "run.stage_deadline_s",
    ];
    let recorded = name.starts_with("stages.") && name.ends_with(".debug");
    name == "name" || name.starts_with("trace.") || recorded || IDLE.contains(&name)
}

/// Differences between what a run was recorded under and what it is replayed under.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Changes {
    /// Hash of the plan as recorded and now, where they differ.
    pub plan: Option<(String, String)>,
    /// Settings that decide numbers.
    pub settings: Vec<Change>,
    /// Data sets, where a run was started to replay in it.
    pub data: Vec<ChangedData>,
    /// Why data sets cannot be compared, where they cannot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_unknown: Option<String>,
    /// Parts of the machine.
    pub machine: Vec<Change>,
    /// Whether the trace tells what it was recorded under; where it does not, the plan's hash alone is compared.
    pub is_known: bool,
}

impl Changes {
    /// Between a recording and a replay.
    pub fn between(recorded: &Conditions, now: &Conditions) -> Changes {
        let settings = changed(&recorded.settings, &now.settings);
        Changes {
            settings: settings.filter(|change| !is_idle(&change.name)).collect(),
            machine: machine(&recorded.machine, &now.machine),
            is_known: true,
            ..Changes::of_plans(&recorded.plan_hash, &now.plan_hash)
        }
    }

    /// Where a trace tells the hash of the plan alone.
    pub(crate) fn of_plans(recorded: &str, now: &str) -> Changes {
        Changes {
            plan: (recorded != now).then(|| (recorded.to_owned(), now.to_owned())),
            ..Changes::default()
        }
    }

    /// Adds a setting, unless it is there.
    pub(crate) fn add(&mut self, change: Change) {
        if self.settings.iter().all(|known| known.name != change.name) {
            self.settings.push(change);
        }
    }

    /// Whether what is computed on the host can be expected to have the same bits: same kind of processor, same
    /// system, same sort of build.
    pub fn same_processor(&self) -> bool {
        let matters =
            |change: &Change| !["device", "threads", "verl"].contains(&change.name.as_str());
        !self.machine.iter().any(matters)
    }

    /// Whether what models compute can be expected to have the same bits, where that is on the CPU: same processor,
    /// same device, same type of numbers.
    pub fn same_arithmetic(&self) -> bool {
        let device = self.machine.iter().any(|change| change.name == "device");
        let typed = |change: &Change| change.name.rsplit('.').next() == Some("dtype");
        self.same_processor() && !device && !self.settings.iter().any(typed)
    }

    /// Why a stage is not to blame for rows that are not those of the recording: it is a source, and the data that it
    /// draws from were changed.
    pub(crate) fn other_data(&self, plan: &Plan, stage: &PlannedStage) -> Option<String> {
        if stage.spec.rows != RowRule::Source {
            return None;
        }
        let mut stages = plan.pipe.stages.iter();
        let settings = stages
            .find(|decl| decl.name == stage.name)?
            .config
            .as_object();
        let names = |data: &str| {
            let mut values = settings.into_iter().flat_map(Map::values);
            values.any(|value| value == data)
        };
        // A stage whose settings name no data set may draw from any.
        let any = !plan.pipe.data.iter().any(|data| names(&data.name));
        let changed = self.data.iter().filter(|data| any || names(&data.name));
        let changed = changed.map(|data| format!("`{}` ({})", data.name, data.now.origin));
        let changed: Vec<String> = changed.collect();
        (!changed.is_empty()).then(|| {
            format!(
                "stage `{}` would draw other rows, for data were changed since the recording: {}; put them back as they were to run it again",
                stage.name,
                changed.join(", ")
            )
        })
    }

    /// The setting of a stage that was changed to another kind.
    pub(crate) fn kind_of(&self, stage: &str) -> Option<&Change> {
        let name = format!("stages.{stage}.kind");
        let mut settings = self.settings.iter();
        settings.find(|change| change.name == name && !change.recorded.is_null())
    }
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((recorded, now)) = &self.plan {
            let short = |hash: &str| hash.get(..12).unwrap_or(hash).to_owned();
            let (recorded, now) = (short(recorded), short(now));
            let known = match (self.is_known, self.settings.is_empty()) {
                (false, _) => "; the trace does not tell its settings",
                (true, true) => "; no setting differs, so another version plans otherwise",
                (true, false) => "",
            };
            writeln!(
                f,
                "another plan: {recorded} when recorded, {now} now{known}"
            )?;
        }
        for change in &self.settings {
            writeln!(f, "setting {change}")?;
        }
        for data in &self.data {
            writeln!(f, "data {data}")?;
        }
        if let Some(why) = &self.data_unknown {
            writeln!(
                f,
                "data cannot be compared with those of the run, for {why}; where they were changed, a stage that draws from \
                 them emits something else for that alone"
            )?;
        }
        for change in &self.machine {
            writeln!(f, "machine {change}")?;
        }
        if !self.same_arithmetic() {
            writeln!(
                f,
                "equal bits are not to be expected, and not claimed: floats are compared within their tolerance; a token \
                 or another choice that differs may come from rounding"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (recorded, now) = (shown(&self.recorded), shown(&self.now));
        write!(f, "{}: {recorded} when recorded, {now} now", self.name)
    }
}

impl fmt::Display for ChangedData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (recorded, now) = (content(&self.recorded), content(&self.now));
        let (name, origin) = (&self.name, &self.now.origin);
        write!(f, "{name} ({origin}): {recorded} when recorded, {now} now")
    }
}

/// What a data set held.
pub(crate) fn content(of: &DataOrigin) -> String {
    let print = &of.fingerprint;
    let print = print.get(..12).unwrap_or(print);
    format!("{} with fingerprint {print}", count(of.rows as u64, "row"))
}

/// A setting's value for people.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "not set".to_owned(),
        value => value.to_string(),
    }
}

/// What differs between two machines.
pub(crate) fn machine(recorded: &Machine, now: &Machine) -> Vec<Change> {
    let value = |machine: &Machine| serde_json::to_value(machine).unwrap_or_default();
    changed(&value(recorded), &value(now)).collect()
}

/// Leaves of two documents that differ, by dotted names; an entry of a list that has a name goes by it.
pub(crate) fn changed(recorded: &Value, now: &Value) -> impl Iterator<Item = Change> {
    let (mut left, mut right) = (BTreeMap::new(), BTreeMap::new());
    flatten("", recorded, &mut left);
    flatten("", now, &mut right);
    let names: BTreeSet<String> = left.keys().chain(right.keys()).cloned().collect();
    names.into_iter().filter_map(move |name| {
        let of = |side: &BTreeMap<String, Value>| side.get(&name).cloned().unwrap_or_default();
        let (recorded, now) = (of(&left), of(&right));
        let differs = !same(&recorded, &now);
        differs.then_some(Change {
            name,
            recorded,
            now,
        })
    })
}

/// Equal, whether a number was written with a point or without.
fn same(a: &Value, b: &Value) -> bool {
    let both = a.as_f64().zip(b.as_f64());
    a == b || (a.is_f64() || b.is_f64()) && both.is_some_and(|(a, b)| a.to_bits() == b.to_bits())
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
        Value::Null => {}
        value => drop(into.insert(name.to_owned(), value.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn conditions(settings: Value) -> Conditions {
        Conditions {
            format: 1,
            plan_hash: "a".repeat(64),
            settings,
            machine: Machine {
                processor: vec!["avx2".to_owned(), "fma".to_owned()],
                ..Machine::here("cpu")
            },
            stages: Vec::new(),
        }
    }

    #[test]
    fn settings_are_compared_by_name() {
        let first = json!({"run": {"seed": 1}, "stages": [{"name": "x", "t": 1}, {"name": "y"}]});
        let second =
            json!({"run": {"seed": 1.0}, "stages": [{"name": "y"}, {"name": "x", "t": 0.5}]});
        let found: Vec<Change> = changed(&first, &second).collect();
        let expected = Change {
            name: "stages.x.t".to_owned(),
            recorded: json!(1),
            now: json!(0.5),
        };
        assert_eq!(found, [expected]);
    }

    #[test]
    fn what_decides_no_number_is_no_change() {
        let settings = |dir: &str, every: u64, seed: u64| json!({"run": {"dir": dir, "seed": seed}, "trace": {"every": every}});
        let recorded = conditions(settings("a", 1, 5));
        let same = Changes::between(&recorded, &conditions(settings("b", 2, 5)));
        assert!(same.settings.is_empty() && same.plan.is_none() && same.machine.is_empty());
        assert!(same.same_processor() && same.same_arithmetic());
        let mut now = conditions(settings("a", 1, 6));
        now.plan_hash = "b".repeat(64);
        let text = Changes::between(&recorded, &now).to_string();
        let expected = "another plan: aaaaaaaaaaaa when recorded, bbbbbbbbbbbb now\n\
                        setting run.seed: 5 when recorded, 6 now\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn only_the_same_arithmetic_claims_equal_bits() {
        let recorded = conditions(json!({"models": {"actor": {"dtype": "f32"}}}));
        let check = |change: fn(&mut Conditions), processor: bool, arithmetic: bool| {
            let mut now = recorded.clone();
            change(&mut now);
            let changes = Changes::between(&recorded, &now);
            assert_eq!(changes.same_processor(), processor, "{changes}");
            assert_eq!(changes.same_arithmetic(), arithmetic, "{changes}");
            let text = changes.to_string();
            assert_eq!(text.contains("not claimed"), !arithmetic, "{text}");
        };
        check(|_| {}, true, true);
        check(|now| now.machine.threads += 3, true, true);
        check(|now| now.machine.device = "cuda:0".to_owned(), true, false);
        check(|now| drop(now.machine.processor.pop()), false, false);
        check(|now| now.machine.optimised ^= true, false, false);
        check(
            |now| now.settings["models"]["actor"]["dtype"] = "bf16".into(),
            true,
            false,
        );
    }
}
