//! What a rule found and ended a run for, as `anomalies.jsonl` tells it.

use std::fs;

use crate::batch::RowId;
use crate::schedule::placement::Schedule;
use crate::trace::first_bad::{Fault, FirstBad, reaches, through};
use crate::trace::format::Side;
use crate::trace::recorded::RecordedStep;
use crate::trace::rules::{Anomaly, Severity};
use crate::trace::show::rows_of;
use crate::trace::store::TraceDir;

impl TraceDir {
    /// What the rules found, as it came. Lines that cannot be read, such as one that a killed run began, are left out.
    pub fn anomalies(&self) -> Vec<Anomaly> {
        let bytes = fs::read(self.layout().anomalies()).unwrap_or_default();
        let lines = bytes.split(|byte| *byte == b'\n');
        let read = lines.filter_map(|line| serde_json::from_slice(line).ok());
        read.collect()
    }

    /// What a rule found and ended the run for, where the run says that it ended so: `reason` is what its `status.json`
    /// gives.
    pub fn stopped(&self, reason: &str) -> Option<Anomaly> {
        let stops = |anomaly: &Anomaly| {
            anomaly.severity == Severity::Stop && reason.starts_with(&anomaly.to_string())
        };
        self.anomalies().into_iter().rev().find(stops)
    }
}

/// What a rule ended the run for, as a fault: step, stage, key and the worst sample are the rule's. `recorded` is the
/// step, where its rows are there.
pub(crate) fn stopped_fault(
    schedule: &Schedule,
    anomaly: &Anomaly,
    recorded: Option<&RecordedStep>,
) -> FirstBad {
    let mut stages = schedule.plan.stages.iter();
    let index = stages.position(|stage| stage.name == anomaly.stage);
    let written = index.is_some_and(|index| {
        let spec = &schedule.plan.stages[index].spec;
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
