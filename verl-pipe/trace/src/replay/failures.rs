//! Consequences of a stage that fails when it is run again.

use std::collections::BTreeMap;

use verl_plan::schedule::placement::{Place, Schedule};
use verl_run::error::RunError;

use crate::compare::Comparison;
use crate::files::RecordedStep;
use crate::replay::report::ReplayedStage;
use crate::replay::scope::changed_models;

/// Whether an error comes from the stage and not from the run.
pub(super) fn is_of_stage(error: &RunError) -> bool {
    matches!(
        error,
        RunError::Stage { .. }
            | RunError::Panic { .. }
            | RunError::Deadline { .. }
            | RunError::Guard { .. }
    )
}

/// What failed stages have made unusable.
#[derive(Default)]
pub(super) struct Lost {
    /// Models in an unknown state, with the stage that left them in it.
    models: BTreeMap<String, String>,
    /// The stage whose call still blocks the models' thread.
    thread: Option<String>,
}

impl Lost {
    pub(super) fn add(&mut self, schedule: &Schedule, index: usize, error: &RunError) {
        let planned = &schedule.plan().stages()[index];
        let models = changed_models(planned);
        self.models
            .extend(models.map(|model| (model.clone(), planned.name().to_owned())));
        let hangs = matches!(error, RunError::Deadline { .. });
        if hangs && schedule.places()[index] != Place::Host {
            self.thread = Some(planned.name().to_owned());
        }
    }

    /// Why a stage cannot be run after these failures.
    pub(super) fn why_blocked(&self, schedule: &Schedule, index: usize) -> Option<String> {
        let planned = &schedule.plan().stages()[index];
        if let Some(stage) = self
            .thread
            .as_ref()
            .filter(|_| schedule.places()[index] != Place::Host)
        {
            return Some(format!(
                "stage `{}` needs the models, but `{stage}` still uses them",
                planned.name()
            ));
        }
        let mut models = planned.spec().models.iter();
        let (model, changer) = models.find_map(|(model, _)| self.models.get_key_value(model))?;
        Some(format!(
            "stage `{}` uses `{model}` as left by `{changer}`, which failed",
            planned.name()
        ))
    }
}

/// The report of a stage that failed.
pub(super) fn failed_stage(
    schedule: &Schedule,
    index: usize,
    recorded: &RecordedStep,
    error: &RunError,
) -> ReplayedStage {
    let planned = &schedule.plan().stages()[index];
    ReplayedStage {
        stage: planned.name().to_owned(),
        kind: planned.kind().to_owned(),
        rows: recorded.stages[planned.name()].input_ids().len(),
        keys: Vec::new(),
        weights: Vec::new(),
        compared: Comparison::default(),
        failed: Some(error.to_string()),
    }
}
