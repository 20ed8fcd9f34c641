//! The anomaly for which a rule ended a run, as recorded in `anomalies.jsonl`.

use std::fs;

use crate::batch::RowId;
use crate::schedule::placement::Schedule;
use crate::trace::first_bad::{Fault, FirstBad, reaches, through};
use crate::trace::format::Side;
use crate::trace::recorded::RecordedStep;
use crate::trace::rules::{Anomaly, RuleSeverity};
use crate::trace::show::rows_of;
use crate::trace::store::TraceDir;

impl TraceDir {
    /// What the rules found, in order. Skips unreadable lines, such as one that a killed run left incomplete.
    pub fn anomalies(&self) -> Vec<Anomaly> {
        let bytes = fs::read(self.layout().anomalies()).unwrap_or_default();
        let lines = bytes.split(|byte| *byte == b'\n');
        let read = lines.filter_map(|line| serde_json::from_slice(line).ok());
        read.collect()
    }

    /// The anomaly that ended the run, if the run ended that way: `reason` is the one in its `status.json`.
    pub fn stopped(&self, reason: &str) -> Option<Anomaly> {
        let stops = |anomaly: &Anomaly| {
            anomaly.severity == RuleSeverity::Stop && reason.starts_with(&anomaly.to_string())
        };
        self.anomalies().into_iter().rev().find(stops)
    }
}

/// The anomaly that ended the run, as a fault: step, stage, key and the worst sample come from the rule. `recorded` is
/// the step, if its rows are recorded.
pub(crate) fn stopped_fault(
    schedule: &Schedule,
    anomaly: &Anomaly,
    recorded: Option<&RecordedStep>,
) -> FirstBad {
    let mut stages = schedule.plan().stages().iter();
    let index = stages.position(|stage| stage.name() == anomaly.stage);
    let written = index.is_some_and(|index| {
        let spec = schedule.plan().stages()[index].spec();
        spec.writes.iter().any(|field| field.name == anomaly.key)
    });
    let side = match written {
        true => Side::Output,
        false => Side::Input,
    };
    let stage = recorded.and_then(|step| step.stages.get(&anomaly.stage));
    let worst = anomaly.sample_ids.first().map(|id| RowId(*id));
    let row = stage.zip(worst).and_then(|(stage, worst)| {
        let mut rows = rows_of(stage).into_iter();
        rows.position(|row| row == worst)
    });
    FirstBad {
        step: anomaly.step,
        stage: anomaly.stage.clone(),
        fault: Fault::Failed,
        side: side.as_str(),
        key: anomaly.key.clone(),
        row,
        sample: anomaly.samples.first().cloned(),
        index: None,
        what: format!(
            "the rule `{}` ended the run: {}\n{}",
            anomaly.rule, anomaly.what, anomaly.advice
        ),
        through: index.map_or_else(Vec::new, |index| through(schedule, index)),
        reaches: index.map_or_else(Vec::new, |index| {
            reaches(schedule, index, side.as_str(), &anomaly.key)
        }),
    }
}
