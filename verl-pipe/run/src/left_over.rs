//! Partial updates that a failed step left in the weights of models.

use std::collections::BTreeMap;

use verl_words::stage::Access;

use crate::error::RunError;
use crate::runner::{Progress, Run};
use crate::worker::{Answer, Query};

/// Partial update that a failed step left in the weights of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftOver {
    /// Some of the step's optimiser steps: the weights are valid, but not those of a completed step.
    Part,
    /// An optimiser step that may be incomplete: a stage that updates the model panicked.
    Torn,
}

impl Run {
    /// Models whose weights contain a part of a failed step, until they are restored. All others are as of the last
    /// completed step.
    pub fn left_over(&self) -> &BTreeMap<String, LeftOver> {
        &self.left
    }

    /// Before a call in `group`, which is idle: records the optimiser steps of the group's models if it is the first call
    /// of the step that updates one of them.
    pub(super) fn note_update(
        &mut self,
        progress: &mut Progress,
        group: usize,
        stage: usize,
    ) -> Result<(), RunError> {
        let noted = progress.steps_before.as_ref();
        let is_noted = |model: &str| noted.is_some_and(|noted| noted.contains_key(model));
        if self.updated_by(stage).all(is_noted) {
            return Ok(());
        }
        if let Answer::OptimizerSteps(steps) = self.ask(group, Query::OptimizerSteps)? {
            let noted = progress.steps_before.get_or_insert_default();
            noted.extend(steps);
        }
        Ok(())
    }

    /// Records the partial updates of a failed step.
    pub(super) fn note_left_over(&mut self, progress: &Progress) {
        let Some(before) = &progress.steps_before else {
            return;
        };
        // If the worker does not answer, it cannot save a model either.
        if let Ok(now) = self.optimizer_steps() {
            let moved = now
                .into_iter()
                .filter(|(name, steps)| before.get(name).is_some_and(|before| before != steps));
            self.left
                .extend(moved.map(|(name, _)| (name, LeftOver::Part)));
        }
        for stage in &progress.panicked {
            let torn: Vec<String> = self.updated_by(*stage).map(str::to_owned).collect();
            self.left
                .extend(torn.into_iter().map(|name| (name, LeftOver::Torn)));
        }
    }

    fn updated_by(&self, stage: usize) -> impl Iterator<Item = &str> {
        let models = self.schedule.plan().stages()[stage].spec().models.iter();
        models
            .filter(|(_, access)| *access == Access::Update)
            .map(|(name, _)| name.as_str())
    }

    fn optimizer_steps(&mut self) -> Result<BTreeMap<String, u64>, RunError> {
        let answers = self.ask_workers(|_| Query::OptimizerSteps)?;
        let steps = answers.into_iter().filter_map(|answer| match answer {
            Answer::OptimizerSteps(steps) => Some(steps),
            _ => None,
        });
        Ok(steps.flatten().collect())
    }
}
