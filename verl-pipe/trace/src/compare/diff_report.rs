//! The report of the comparison of two runs.

use std::fmt;

use verl_words::diagnostic::quoted;

use crate::compare::changes::{Change, shown};
use crate::compare::diff::{KeyDiff, Parting, RunDiff, StepDiff};
use crate::compare::diff_inputs::Cause;
use crate::compare::difference::DifferenceKind;
use crate::text::{Align, Table, count, short};

impl fmt::Display for RunDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, first, second) in &self.settings {
            writeln!(f, "setting {name}: {} | {}", shown(first), shown(second))?;
        }
        self.write_changes(f, "data set", &self.data)?;
        self.write_changes(f, "machine", &self.machine)?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        let Some(parting) = self.parting() else {
            return self.write_without_rows(f);
        };
        let Parting { step, first, cause } = &parting;
        writeln!(f, "the runs diverge in step {step}, {}", first.place())?;
        writeln!(f, "{}", first.explain("first run", "second run"))?;
        writeln!(f, "  {cause}{}", self.outside(&parting))?;
        self.write_trend(f, &parting)?;
        write!(f, "{}", self.stats)
    }
}

impl RunDiff {
    fn write_changes(
        &self,
        f: &mut fmt::Formatter<'_>,
        what: &str,
        changes: &[Change],
    ) -> fmt::Result {
        for change in changes {
            let (first, second) = (shown(&change.recorded), shown(&change.now));
            writeln!(f, "{what} {}: {first} | {second}", change.name)?;
        }
        Ok(())
    }

    /// What is known about the origin of a difference from outside.
    fn outside(&self, parting: &Parting<'_>) -> String {
        let weights = parting.first.kind == DifferenceKind::Weights;
        let earliest = self.steps.first().map(|step| step.step) == Some(parting.step);
        match parting.cause {
            Cause::InputsDiffer if weights && parting.step <= 1 => {
                ": the runs began with different weights".to_owned()
            }
            Cause::InputsDiffer if weights && earliest => {
                ": the runs diverged earlier, in steps that are not recorded in both, or began with different weights"
                    .to_owned()
            }
            Cause::Source => self.of_data(parting),
            _ => String::new(),
        }
    }

    /// Whether different rows were drawn, or the same rows with different content; and what differs in data and seed.
    fn of_data(&self, parting: &Parting<'_>) -> String {
        let rows = parting.first.kind == DifferenceKind::Row;
        let drawn = match rows {
            true => "different rows were drawn",
            false => "the same rows were drawn, with different content",
        };
        let mut why: Vec<&str> = Vec::new();
        if !self.data.is_empty() {
            why.push("the data sets differ");
        }
        if self.settings.iter().any(|(name, ..)| name == "run.seed") {
            why.push("the seeds differ");
        }
        let own = format!("stages.{}.", parting.first.stage);
        let of_stage = |name: &str| {
            name.starts_with(&own) || name.starts_with("batch.") || name.starts_with("data.")
        };
        if self.settings.iter().any(|(name, ..)| of_stage(name)) {
            why.push("its settings differ");
        }
        match why.is_empty() {
            true => format!(", {drawn}; the recorded data sets, seed and settings are the same"),
            false => format!(", {drawn}; {}", why.join(", ")),
        }
    }

    /// The report if no recorded row differs.
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

    /// The key whose distance is followed: the one in which the runs diverge, else the first that differs anywhere.
    fn followed(&self, parting: &Parting<'_>) -> Option<(&str, &str)> {
        let keys = || {
            let steps = self.steps.iter();
            let stages = steps.flat_map(|step| &step.stages);
            stages.flat_map(|stage| stage.keys.iter().map(|key| (stage.stage.as_str(), key)))
        };
        let of_parting = |(stage, key): &(&str, &KeyDiff)| {
            (*stage, key.key.as_str()) == (parting.first.stage.as_str(), parting.first.key.as_str())
        };
        let own = keys().find(of_parting);
        let found = own.or_else(|| keys().find(|(_, key)| key.differences > 0));
        found.map(|(stage, key)| (stage, key.key.as_str()))
    }

    /// One line per step: what differs, and the distance in the key that differed first; for token ids and similar
    /// keys, how many differ.
    fn write_trend(&self, f: &mut fmt::Formatter<'_>, parting: &Parting<'_>) -> fmt::Result {
        let Some((stage, key)) = self.followed(parting) else {
            return Ok(());
        };
        let name = format!("{stage}.{key}");
        let of_key = |step: &StepDiff| step.key(stage, key).map(|found| found.is_identifier);
        let is_identifier = self.steps.iter().find_map(of_key) == Some(true);
        let apart = match is_identifier {
            true => vec![format!("of {name}")],
            false => vec![format!("mean |Δ| {name}"), format!("largest |Δ| {name}")],
        };
        let mut columns = vec![
            ("step", Align::Right),
            ("values that differ", Align::Right),
            ("rows of one only", Align::Right),
        ];
        columns.extend(apart.iter().map(|name| (name.as_str(), Align::Right)));
        columns.push(("stages that differ", Align::Left));
        let mut table = Table::new(&columns);
        for step in &self.steps {
            table.row(step.trend(step.key(stage, key), is_identifier));
        }
        write!(f, "{table}")
    }
}

impl StepDiff {
    fn key(&self, stage: &str, key: &str) -> Option<&KeyDiff> {
        let of_stage = self.stages.iter().find(|other| other.stage == stage);
        of_stage.and_then(|stage| stage.keys.iter().find(|other| other.key == key))
    }

    fn trend(&self, of_key: Option<&KeyDiff>, is_identifier: bool) -> Vec<String> {
        let keys = || self.stages.iter().flat_map(|stage| &stage.keys);
        let values: u64 = keys().map(|key| key.values).sum();
        let differing: u64 = keys().map(|key| key.differences).sum();
        let unpaired =
            |stage: &crate::compare::diff::StageDiff| stage.rows_of_first + stage.rows_of_second;
        let unpaired: usize = self.stages.iter().map(unpaired).sum();
        let differ: Vec<&str> = self
            .stages
            .iter()
            .filter(|stage| stage.differences() > 0)
            .map(|stage| stage.stage.as_str())
            .collect();
        let none = || "-".to_owned();
        let mut cells = vec![
            self.step.to_string(),
            format!("{:.2} %", 100.0 * differing as f64 / values.max(1) as f64),
            unpaired.to_string(),
        ];
        match is_identifier {
            true => cells.push(of_key.map_or_else(none, KeyDiff::differing)),
            false => {
                cells.push(of_key.map_or_else(none, KeyDiff::apart));
                let largest = of_key.and_then(|key| key.largest);
                cells.push(largest.map_or_else(none, short));
            }
        }
        cells.push(quoted(differ));
        cells
    }
}

impl KeyDiff {
    /// `3 of 512 differ`, with the first pair without a distance: `3 of 512 differ, lengths 5 and 7`.
    fn differing(&self) -> String {
        let mut text = format!("{} of {} differ", self.differences, self.values);
        if let Some(unlike) = &self.unlike {
            text += &format!(", {unlike}");
        }
        text
    }

    /// The mean distance and the first pair without one: `0.25`, `lengths 5 and 7`, `0.25, lengths 5 and 7`.
    fn apart(&self) -> String {
        let mean = self
            .mean
            .filter(|mean| *mean > 0.0 || self.unlike.is_none());
        let parts = [mean.map(short), self.unlike.clone()];
        let known: Vec<String> = parts.into_iter().flatten().collect();
        match known.is_empty() {
            true => "-".to_owned(),
            false => known.join(", "),
        }
    }
}
