//! Converts the failure of a call into the error that ends the run.

use verl_plan::display::bytes;
use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::diagnostic::quoted;
use verl_words::stage::StageError;

use crate::channel::CallFailure;
use crate::error::{FullDevice, RunError};

/// The error for a failed call of stage `index`.
pub(super) fn call_error(
    schedule: &Schedule,
    step: u64,
    index: usize,
    rows: String,
    failure: CallFailure,
) -> RunError {
    let stage = schedule.plan().stages()[index].name().to_owned();
    let message = match &failure {
        CallFailure::Error(StageError::Cancelled) => return RunError::Cancelled { step },
        CallFailure::Error(source) => source.to_string(),
        CallFailure::Panic(message) | CallFailure::Lost(message) => message.clone(),
    };
    if let Place::Group(group) = schedule.places()[index] {
        let during = format!("step {step}, stage `{stage}`, {rows}");
        if let Some(full) = out_of_memory(schedule, group, Some(index), during, &message) {
            return full;
        }
    }
    match failure {
        CallFailure::Error(source) => RunError::Stage {
            step,
            stage,
            rows,
            source: Box::new(source),
        },
        CallFailure::Panic(message) => RunError::Panic {
            step,
            stage,
            rows,
            message,
        },
        CallFailure::Lost(reason) => RunError::Lost {
            worker: match schedule.places()[index] {
                Place::Group(group) => schedule.groups()[group].name.clone(),
                Place::Host => stage.clone(),
            },
            reason: format!("during step {step}, stage `{stage}`, {rows}: {reason}"),
        },
    }
}

/// The error for a device that is out of memory, if `message` says so; the models recognise such messages. The error
/// states the planned memory use while `stage` runs (or the peak) and which settings to change.
pub(super) fn out_of_memory(
    schedule: &Schedule,
    group: usize,
    stage: Option<usize>,
    during: String,
    message: &str,
) -> Option<RunError> {
    let plan = schedule.plan();
    let mut models = plan.pipe().models.iter();
    let shortage = models.find_map(|model| model.factory.devices().shortage(message))?;
    let memory = plan.memory_of(group);
    let stage = stage.map(|index| plan.stages()[index].name());
    let own = memory
        .work
        .iter()
        .filter(|work| Some(work.stage.as_str()) == stage);
    let work = own.max_by_key(|work| work.bytes).or(memory.largest());
    // The estimate counts these rows as zero, so they are the most likely cause.
    let unbounded = work.filter(|work| !work.unbounded.is_empty());
    let first = unbounded.map_or(String::new(), |work| {
        let keys = quoted(work.unbounded.iter().map(String::as_str));
        format!("limit the length of {keys}, which the plan counts as zero, or ")
    });
    Some(RunError::OutOfMemory(Box::new(FullDevice {
        during,
        device: schedule.groups()[group].name.clone(),
        asked: shortage.asked.map(bytes),
        planned: memory.breakdown(work),
        help: format!("{first}{}", memory.advice(work)),
    })))
}
