//! Differences in settings, data and machine between two runs, or between a run and its replay.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use verl_plan::{Plan, PlannedStage};
use verl_run::processor::OTHER_LIBRARY;
use verl_run::records::DataOrigin;
use verl_words::stage::RowRule;

use crate::files::{Conditions, Machine};
use crate::text::count;

/// One thing that has changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Its name: a setting by its dotted name, such as `models.actor.optimizer.learning_rate`.
    pub name: String,
    /// The recorded value; null if it was not set.
    pub recorded: Value,
    /// The current value; null if it is not set.
    pub now: Value,
}

/// A data set whose content has changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChangedData {
    /// Its name in the pipeline.
    pub name: String,
    /// As recorded in the run's `data.json`.
    pub recorded: DataOrigin,
    /// As it is now.
    pub now: DataOrigin,
}

/// Whether a setting does not affect any computed number: where and how often something is written, how long to wait.
fn affects_no_number(name: &str) -> bool {
    const IRRELEVANT: [&str; 5] = [
        "run.console_every",
        "run.dir",
        "run.samples_per_step",
        "run.save",
        "run.stage_deadline_s",
    ];
    let recorded = name.starts_with("stages.") && name.ends_with(".debug");
    name == "name" || name.starts_with("trace.") || recorded || IRRELEVANT.contains(&name)
}

/// Why equal bits are not expected on the CPU of another machine, in words; empty if they are expected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Unclaimed {
    /// Reasons that apply to all stages.
    pub stages: Vec<String>,
    /// Additional reasons that apply to stages with models.
    pub models: Vec<String>,
}

/// Differences between the conditions of a recording and those of its replay.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Changes {
    /// Hash of the plan as recorded and now, if they differ.
    pub plan: Option<(String, String)>,
    /// Settings that affect computed numbers.
    pub settings: Vec<Change>,
    /// Data sets, if a run was started for the replay.
    pub data: Vec<ChangedData>,
    /// Why data sets cannot be compared, if they cannot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_unknown: Option<String>,
    /// Parts of the machine.
    pub machine: Vec<Change>,
    /// Why equal bits are not expected on this machine, if they are not.
    pub unclaimed: Unclaimed,
    /// Whether the trace records its conditions; if not, only the hash of the plan is compared.
    pub is_known: bool,
}

impl Changes {
    /// The differences between a recording and a replay.
    pub fn between(recorded: &Conditions, now: &Conditions) -> Changes {
        let settings = changed(&recorded.settings, &now.settings);
        let value = |machine: &Machine| serde_json::to_value(machine).unwrap_or_default();
        Changes {
            settings: settings
                .filter(|change| !affects_no_number(&change.name))
                .collect(),
            is_known: true,
            ..Changes::of_plans(&recorded.plan_hash, &now.plan_hash)
        }
        .with_machines(&value(&recorded.machine), &value(&now.machine))
    }

    /// The same, with the differences between two machines.
    pub(crate) fn with_machines(self, recorded: &Value, now: &Value) -> Changes {
        let machine = machine(recorded, now);
        Changes {
            unclaimed: unclaimed(recorded, now, &machine),
            machine,
            ..self
        }
    }

    /// The differences for a trace that records only the hash of the plan.
    pub(crate) fn of_plans(recorded: &str, now: &str) -> Changes {
        Changes {
            plan: (recorded != now).then(|| (recorded.to_owned(), now.to_owned())),
            ..Changes::default()
        }
    }

    /// Adds a setting, unless it is listed already.
    pub(crate) fn add(&mut self, change: Change) {
        if self.settings.iter().all(|known| known.name != change.name) {
            self.settings.push(change);
        }
    }

    /// Whether results of stages without models are expected to have the same bits: on any processor of the
    /// architecture that has AVX2 and FMA, with the same C library, operating system and build profile.
    pub fn repeats_host_bits(&self) -> bool {
        self.unclaimed.stages.is_empty()
    }

    /// Whether results of models on the CPU are expected to have the same bits: as for [`Changes::repeats_host_bits`],
    /// and with the same device, the same `dtype`, and kernels that add in the same order.
    pub fn repeats_model_bits(&self) -> bool {
        let device = self.machine.iter().any(|change| change.name == "device");
        let typed = |change: &Change| change.name.rsplit('.').next() == Some("dtype");
        self.repeats_host_bits()
            && self.unclaimed.models.is_empty()
            && !device
            && !self.settings.iter().any(typed)
    }

    /// A message that equal bits are expected although the machine differs, with the differences; `None` if it does not
    /// differ or they are not expected. `sides` formats both values of a part.
    pub fn other_machine(&self, sides: impl Fn(&Change) -> String) -> Option<String> {
        if !self.repeats_model_bits() {
            return None;
        }
        let named = |name: &str| self.machine.iter().find(|change| change.name == name);
        let with_sides = |what: &str, change: Option<&Change>| match change {
            Some(change) => format!("another {what} ({})", sides(change)),
            None => format!("another {what}"),
        };
        let processor = self.machine.iter().any(|change| is_processor(&change.name));
        let processor = processor.then(|| with_sides("processor", named("cpu.model")));
        let others = [
            ("width of registers", "cpu_kernels.registers"),
            ("number of threads", "threads"),
        ];
        let others = others.into_iter().filter_map(|(what, name)| {
            let change = named(name)?;
            Some(with_sides(what, Some(change)))
        });
        let all: Vec<String> = processor.into_iter().chain(others).collect();
        let them = if all.len() == 1 { "it" } else { "them" };
        let all = listed(&all)?;
        Some(format!(
            "{all}: equal bits are expected on the CPU, because sums do not depend on {them}"
        ))
    }

    /// Why equal bits are not expected on this machine; `None` if they are.
    pub fn why_bits_may_differ(&self) -> Option<String> {
        let Unclaimed { stages, models } = &self.unclaimed;
        let all: Vec<&str> = stages.iter().chain(models).map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Why a stage is not at fault for rows that differ from the recording: it is a source, and the data that it draws
    /// from were changed.
    pub(crate) fn other_data(&self, plan: &Plan, stage: &PlannedStage) -> Option<String> {
        if stage.spec().rows != RowRule::Source {
            return None;
        }
        let mut stages = plan.pipe().stages.iter();
        let settings = stages
            .find(|decl| decl.name == stage.name())?
            .config
            .as_object();
        let names = |data: &str| {
            let mut values = settings.into_iter().flat_map(Map::values);
            values.any(|value| value == data)
        };
        // A stage whose settings do not name a data set may draw from any.
        let any = !plan.pipe().data.iter().any(|data| names(&data.name));
        let changed = self.data.iter().filter(|data| any || names(&data.name));
        let changed = changed.map(|data| format!("`{}` ({})", data.name, data.now.origin));
        let changed: Vec<String> = changed.collect();
        (!changed.is_empty()).then(|| {
            format!(
                "stage `{}` would draw different rows, because data were changed since the recording: {}; restore the data to run it again",
                stage.name(),
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
                (false, _) => "; the trace does not record its settings",
                (true, true) => "; no setting differs, so another version planned it differently",
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
                "data cannot be compared with those of the run: {why}; if they were changed, this is why a stage that draws \
                 from them emits something else"
            )?;
        }
        let repeats = self.repeats_model_bits();
        for change in &self.machine {
            let mark = match repeats && affects_no_bits(&change.name) {
                true => " (affects no bits)",
                false => "",
            };
            let Change { name, .. } = change;
            writeln!(f, "machine {name}: {}{mark}", recorded_and_now(change))?;
        }
        if let Some(expected) = self.other_machine(recorded_and_now) {
            writeln!(f, "{expected}")?;
        }
        if !repeats {
            let why = self.why_bits_may_differ();
            let why = why.map_or_else(String::new, |why| format!(" ({why})"));
            writeln!(
                f,
                "equal bits are not expected{why}: floats are compared within their tolerance; a token or another choice \
                 that differs may come from rounding"
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

/// Describes the content of a data set.
pub(crate) fn content(of: &DataOrigin) -> String {
    let print = &of.fingerprint;
    let print = print.get(..12).unwrap_or(print);
    format!("{} with fingerprint {print}", count(of.rows as u64, "row"))
}

/// A setting's value for display.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Null => "not set".to_owned(),
        value => value.to_string(),
    }
}

/// A part of the machine, when recorded and now.
fn recorded_and_now(change: &Change) -> String {
    let recorded = match &change.recorded {
        Value::Null => "not recorded".to_owned(),
        value => format!("{value} when recorded"),
    };
    let now = match &change.now {
        Value::Null => "not known".to_owned(),
        value => value.to_string(),
    };
    format!("{recorded}, {now} now")
}

/// `a`, `a and b`, `a, b and c`; `None` for an empty list.
fn listed(items: &[String]) -> Option<String> {
    let (last, before) = items.split_last()?;
    Some(match before {
        [] => last.clone(),
        before => format!("{} and {last}", before.join(", ")),
    })
}

/// Whether a part of the machine identifies its processor.
fn is_processor(name: &str) -> bool {
    name == "processor" || name.starts_with("cpu.")
}

/// Whether a part of the machine does not affect bits if equal bits are expected.
fn affects_no_bits(name: &str) -> bool {
    is_processor(name) || ["cpu_kernels.registers", "threads"].contains(&name)
}

/// The differences between two machines. A size or name of the processor that one of them does not report is ignored.
fn machine(recorded: &Value, now: &Value) -> Vec<Change> {
    let known = |change: &Change| {
        let both = !change.recorded.is_null() && !change.now.is_null();
        both || !change.name.starts_with("cpu.")
    };
    changed(recorded, now).filter(known).collect()
}

/// Why equal bits are not expected on the CPU of two machines that differ in `changes`.
fn unclaimed(recorded: &Value, now: &Value, changes: &[Change]) -> Unclaimed {
    let differs = |name: &str| changes.iter().find(|change| change.name == name);
    let mut stages = Vec::new();
    let parts = [
        ("arch", "another processor architecture"),
        ("os", "another operating system"),
        ("optimised", "another build profile"),
    ];
    let parts = parts
        .into_iter()
        .filter(|(name, _)| differs(name).is_some());
    stages.extend(parts.map(|(_, why)| why.to_owned()));
    let computes = "which computes some exponentials and logarithms";
    match differs("c_library") {
        Some(change) if change.recorded.is_null() => {
            stages.push(format!(
                "the recording does not state its C library, {computes}"
            ));
        }
        Some(_) => stages.push(format!("another C library, {computes}")),
        None => {}
    }
    if changes.iter().any(|change| is_processor(&change.name)) {
        if now["c_library"] == OTHER_LIBRARY {
            stages.push(format!(
                "another processor and an unknown version of the C library, {computes}"
            ));
        }
        let lacks = |machine: &Value| {
            let has = |feature: &str| {
                let features = machine["processor"].as_array();
                features.is_some_and(|all| all.iter().any(|known| known == feature))
            };
            machine["arch"] == "x86_64" && !(has("avx2") && has("fma"))
        };
        if lacks(recorded) || lacks(now) {
            stages.push(
                "a processor without AVX2 and FMA, where the C library computes exponentials and logarithms differently"
                    .to_owned(),
            );
        }
    }
    let sums = [recorded, now].map(|machine| machine["cpu_kernels"]["sums"].as_str());
    let mut models = Vec::new();
    match sums {
        [Some(then), Some(now)] if then != now => stages.push(format!(
            "kernels add in another order: `{then}` when recorded, `{now}` now"
        )),
        [Some(_), Some(_)] => {}
        [None, Some(_)] => {
            models
                .push("the recording does not state the order in which its kernels add".to_owned());
        }
        [then, None] => {
            let of_kernels = |change: &Change| change.name == "cpu_kernels.registers";
            let other = |change: &Change| is_processor(&change.name) || of_kernels(change);
            if then.is_some() || changes.iter().any(other) {
                models.push(
                    "a model kind does not declare that its sums are the same on every processor"
                        .to_owned(),
                );
            }
        }
    }
    Unclaimed { stages, models }
}

/// Leaves of two documents that differ, by dotted names; a list entry with a name is identified by it.
pub fn changed(recorded: &Value, now: &Value) -> impl Iterator<Item = Change> {
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

/// Whether two values are equal; `1` equals `1.0`.
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
        // Stages are identified by name, not by position.
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
#[path = "changes_tests.rs"]
mod tests;
