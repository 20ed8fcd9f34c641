//! What a stage that fails when it is run again takes along.

use std::collections::BTreeMap;

use crate::run::error::RunError;
use crate::schedule::placement::{Place, Schedule};
use crate::trace::compare::Comparison;
use crate::trace::recorded::RecordedStep;
use crate::trace::replay::chosen::changed_models;
use crate::trace::replay::report::ReplayedStage;

/// Whether an error is the stage's own, and not the run's.
pub(super) fn is_of_stage(error: &RunError) -> bool {
    matches!(
        error,
        RunError::Stage { .. }
            | RunError::Panic { .. }
            | RunError::Deadline { .. }
            | RunError::Guard { .. }
    )
}

/// What stages that failed took along with them.
#[derive(Default)]
pub(super) struct Lost {
    /// Models in an unknown state, and the stage that left them so.
    models: BTreeMap<String, String>,
    /// The stage whose call the models' thread still holds on to.
    thread: Option<String>,
}

impl Lost {
    pub(super) fn add(&mut self, schedule: &Schedule, index: usize, error: &RunError) {
        let planned = &schedule.plan.stages[index];
        let models = changed_models(planned);
        self.models
            .extend(models.map(|model| (model.clone(), planned.name.clone())));
        let hangs = matches!(error, RunError::Deadline { .. });
        if hangs && schedule.places[index] != Place::Host {
            self.thread = Some(planned.name.clone());
        }
    }

    /// Why a stage cannot be run after what failed.
    pub(super) fn keeps(&self, schedule: &Schedule, index: usize) -> Option<String> {
        let planned = &schedule.plan.stages[index];
        if let Some(stage) = self
            .thread
            .as_ref()
            .filter(|_| schedule.places[index] != Place::Host)
        {
            return Some(format!(
                "stage `{}` needs the models, and `{stage}` still holds on to them",
                planned.name
            ));
        }
        let mut models = planned.spec.models.iter();
        let (model, changer) = models.find_map(|(model, _)| self.models.get_key_value(model))?;
        Some(format!(
            "stage `{}` works with `{model}` as `{changer}` left it, which failed",
            planned.name
        ))
    }
}

/// What is told of a stage that failed.
pub(super) fn failed_stage(
    schedule: &Schedule,
    index: usize,
    recorded: &RecordedStep,
    error: &RunError,
) -> ReplayedStage {
    let planned = &schedule.plan.stages[index];
    ReplayedStage {
        stage: planned.name.clone(),
        kind: planned.kind.clone(),
        rows: recorded.stages[&planned.name].input_ids().len(),
        keys: Vec::new(),
        weights: Vec::new(),
        compared: Comparison::default(),
        failed: Some(error.to_string()),
    }
}
