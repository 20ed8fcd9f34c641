//! The report of a replay.

use std::fmt;

use serde::Serialize;
use verl_plan::schedule::placement::Schedule;
use verl_words::diagnostic::quoted;
use verl_words::stage::Cadence;

use crate::compare::{Changes, Comparison, Difference, Tolerance};
use crate::files::RecordedStep;
use crate::replay::scope::ReplayScope;
use crate::text::{Align, Table, count};

/// The result of one stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplayedStage {
    /// Its name.
    pub stage: String,
    /// Its kind.
    pub kind: String,
    /// Number of input rows; for a source, of output rows.
    pub rows: usize,
    /// Keys that were compared, with the tolerance.
    pub keys: Vec<(String, Tolerance)>,
    /// Models whose weights were compared, before the stage or, if it changes them, after it.
    pub weights: Vec<String>,
    /// The comparison; left is the trace, right the replay.
    pub compared: Comparison,
    /// The error if it failed when it was run again; then nothing was compared.
    pub failed: Option<String>,
}

/// A stage that was not run again.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SkippedStage {
    /// Its name.
    pub stage: String,
    /// Why it was not.
    pub why: String,
}

/// The result of a replay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplayReport {
    /// The step.
    pub step: u64,
    /// Device group of the models.
    pub device: String,
    /// What has changed since the step was recorded.
    pub changes: Changes,
    /// Stages that were run again, in the order of the plan.
    pub stages: Vec<ReplayedStage>,
    /// Stages that could not be run again; later stages were given their recorded outputs.
    pub skipped: Vec<SkippedStage>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl ReplayReport {
    /// Number of differences in all stages.
    pub fn differences(&self) -> u64 {
        self.stages
            .iter()
            .map(|stage| stage.compared.differences)
            .sum()
    }

    /// Number of stages that failed when they were run again.
    pub fn failures(&self) -> usize {
        let failed = |stage: &&ReplayedStage| stage.failed.is_some();
        self.stages.iter().filter(failed).count()
    }

    /// Whether there is a result: a stage whose values or weights were compared, or one that failed.
    pub fn has_result(&self) -> bool {
        let has_result = |stage: &ReplayedStage| stage.is_compared() || stage.failed.is_some();
        self.stages.iter().any(has_result)
    }

    /// The first difference in the order of the plan.
    pub fn first(&self) -> Option<&Difference> {
        self.stages
            .iter()
            .find_map(|stage| stage.compared.first.as_ref())
    }
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "replay of step {} on {}", self.step, self.device)?;
        write!(f, "{}", self.changes)?;
        if !self.stages.is_empty() {
            write!(f, "{}", self.table())?;
        }
        for skipped in &self.skipped {
            writeln!(f, "not run again: {}", skipped.why)?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        for stage in &self.stages {
            if let Some(error) = &stage.failed {
                writeln!(f, "`{}` failed when it was run again: {error}", stage.stage)?;
            }
        }
        if !self.has_result() {
            let done = if self.stages.is_empty() {
                "run again"
            } else {
                "compared"
            };
            return writeln!(f, "nothing was {done}");
        }
        write!(f, "{}", count(self.differences(), "difference"))?;
        if self.failures() > 0 {
            write!(f, ", {} failed", count(self.failures() as u64, "stage"))?;
        }
        if let Some(first) = self.first() {
            write!(
                f,
                "; the first: {}\n{}",
                first.place(),
                first.explain("recorded", "replayed")
            )?;
        }
        writeln!(f)
    }
}

impl ReplayReport {
    fn table(&self) -> Table {
        let mut table = Table::new(&[
            ("stage", Align::Left),
            ("rows", Align::Right),
            ("values", Align::Right),
            ("compared", Align::Left),
            ("result", Align::Left),
        ]);
        for stage in &self.stages {
            table.row([
                stage.stage.clone(),
                stage.rows.to_string(),
                stage.compared.values.to_string(),
                stage.what(),
                stage.result(),
            ]);
        }
        table
    }
}

impl ReplayedStage {
    fn is_compared(&self) -> bool {
        !self.keys.is_empty() || !self.weights.is_empty()
    }

    fn what(&self) -> String {
        let mut parts: Vec<String> = Vec::new();
        if !self.keys.is_empty() {
            parts.push(count(self.keys.len() as u64, "key"));
        }
        let weights = self.weights.iter();
        parts.extend(weights.map(|model| format!("weights of {model}")));
        match (&self.failed, self.is_compared()) {
            (Some(_), _) => "nothing".to_owned(),
            (None, false) => "nothing: it emits no rows".to_owned(),
            (None, true) => parts.join(", "),
        }
    }

    fn result(&self) -> String {
        let exact = self.keys.iter().all(|(_, tolerance)| tolerance.is_exact());
        match self.compared.differences {
            _ if self.failed.is_some() => "failed".to_owned(),
            0 if !self.is_compared() => "run, not compared".to_owned(),
            0 if exact => "bit-equal".to_owned(),
            0 => format!(
                "within tolerance, largest distance {:e}",
                self.compared.largest
            ),
            n => count(n, "difference"),
        }
    }
}

/// Notes about a step before anything is run.
pub(super) fn notes_of(
    schedule: &Schedule,
    recorded: &RecordedStep,
    scope: &ReplayScope,
) -> Vec<String> {
    let mut notes = Vec::new();
    let plan = schedule.plan();
    if let Some(error) = &recorded.error {
        notes.push(format!("the step failed when it was recorded: {error}"));
    }
    if recorded
        .seed
        .is_some_and(|seed| seed != plan.context().seed)
    {
        notes.push("replayed with the recorded seed".to_owned());
    }
    let is_planned = |name: &&str| plan.stages().iter().any(|stage| stage.name() == *name);
    let names = recorded.stages.keys().map(String::as_str);
    let gone: Vec<&str> = names.filter(|name| !is_planned(name)).collect();
    if !gone.is_empty() {
        notes.push(format!(
            "recorded, but not in this pipeline: {}",
            quoted(gone)
        ));
    }
    if *scope == ReplayScope::Step {
        let in_step = plan
            .stages()
            .iter()
            .filter(|stage| stage.spec().cadence == Cadence::Step);
        let missing: Vec<&str> = in_step
            .map(|stage| stage.name())
            .filter(|name| !recorded.stages.contains_key(*name))
            .collect();
        if !missing.is_empty() {
            notes.push(format!("not recorded and skipped: {}", quoted(missing)));
        }
    }
    notes
}
