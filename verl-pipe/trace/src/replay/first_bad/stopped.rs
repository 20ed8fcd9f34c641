//! The anomaly for which a rule ended a run, as the first fault.

use verl_plan::schedule::placement::Schedule;
use verl_rules::Anomaly;
use verl_rules::format::Side;
use verl_words::batch::RowId;

use crate::compare::rows_of;
use crate::files::RecordedStep;
use crate::replay::first_bad::{Fault, FirstBad, reaches, through};

/// The anomaly that ended the run, as a fault: step, stage, key and the worst sample come from the rule. `recorded` is
/// the step, if its rows are recorded.
pub fn stopped_fault(
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
