//! Optimiser steps of a run by model: the length of learning-rate schedules.

use std::collections::BTreeMap;

use verl_words::diagnostic::Diagnostic;
use verl_words::stage::{Access, OptimizerPasses, StageSpec, Training};

use crate::Plan;
use crate::build::Draft;
use crate::checks::settings::setting_warning;
use crate::tables::Tables;

/// The steps of each model that a stage updates; empty if any stage could not be built, as it may be one of them.
pub(crate) fn of_models(draft: &Draft<'_>, tables: &Tables) -> BTreeMap<String, u64> {
    let mut all: BTreeMap<String, u64> = BTreeMap::new();
    if !draft.complete() {
        return all;
    }
    for (index, stage) in draft.stages.iter().enumerate() {
        let Some(spec) = stage.spec.as_ref().filter(|_| stage.in_step()) else {
            continue;
        };
        let updated = spec.models.iter();
        let updated = updated.filter(|(_, access)| *access == Access::Update);
        for (model, _) in updated {
            let of_stage = of_stage(draft, tables, index, &passes(draft, spec, model));
            let steps = all.entry(model.clone()).or_default();
            *steps = steps.saturating_add(of_stage);
        }
    }
    all
}

/// The passes that the stage declares, or those of the batch arithmetic.
fn passes(draft: &Draft<'_>, spec: &StageSpec, model: &str) -> OptimizerPasses {
    let own = spec.passes.iter().find(|own| own.model == model).cloned();
    own.unwrap_or_else(|| OptimizerPasses {
        model: model.to_owned(),
        passes: draft.context.batch.epochs,
        idle_steps: 0,
    })
}

/// Optimiser steps that a stage takes in the whole run.
fn of_stage(draft: &Draft<'_>, tables: &Tables, index: usize, own: &OptimizerPasses) -> u64 {
    let batch = &draft.context.batch;
    let mini_batches = match tables.input[index].map(|table| &tables.list[table]) {
        Some(table) => {
            let rows = table.num_rows.saturating_mul(table.waves);
            rows.div_ceil(batch.mini_rows.max(1))
        }
        None => batch.mini_batches,
    };
    let a_step = u64::try_from(mini_batches.saturating_mul(own.passes)).unwrap_or(u64::MAX);
    a_step.saturating_mul(draft.context.steps.saturating_sub(own.idle_steps))
}

/// How each model is trained, by the order of declaration.
pub(crate) fn training(draft: &Draft<'_>, steps: &BTreeMap<String, u64>) -> Vec<Option<Training>> {
    let models = draft.pipe.models.iter();
    let training = models.map(|decl| decl.factory.training(*steps.get(&decl.name)?));
    training.collect()
}

/// Adds warnings about how models are trained.
pub(crate) fn check(
    draft: &Draft<'_>,
    training: &[Option<Training>],
    findings: &mut Vec<Diagnostic>,
) {
    for (decl, training) in draft.pipe.models.iter().zip(training) {
        let place = format!("[models.{}] ({})", decl.name, decl.kind);
        let warnings = training.iter().flat_map(|training| &training.warnings);
        findings.extend(warnings.map(|warning| setting_warning(&place, warning)));
    }
}

/// Stores in the plan what depends on the number of optimiser steps: settings of models, and how they are trained.
pub(crate) fn settle(
    plan: &mut Plan,
    steps: BTreeMap<String, u64>,
    training: Vec<Option<Training>>,
) {
    plan.context.optimizer_steps = steps;
    let models = plan.models.iter_mut().zip(&mut plan.pipe.models);
    for ((model, decl), training) in models.zip(training) {
        let Some(training) = training else { continue };
        model.training = Some(training.summary);
        if !training.settings.is_null() {
            decl.config = training.settings;
        }
    }
}
