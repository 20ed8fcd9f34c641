//! Weights at the start and end of a step that does not store them itself: from the model as loaded, or from another
//! step of the trace.

use std::collections::{BTreeMap, BTreeSet};

use verl_plan::schedule::placement::Schedule;
use verl_run::runner::{RunSnapshot, RunState};
use verl_words::resource::{StoredState, WeightsVersion};

use crate::files::{RecordedStep, StepStart, TraceDir};

/// Where the state of trained models at the start of a step comes from.
#[derive(Default)]
pub(super) struct Sources {
    /// States from other steps, by model.
    pub elsewhere: BTreeMap<String, (WeightsVersion, Option<StoredState>)>,
    /// Models whose state is not available, with where it was searched.
    pub stateless: BTreeMap<String, String>,
    /// Notes for the user, by model.
    pub notes: Vec<(String, String)>,
}

impl Sources {
    /// Notes for the user about the models that the stages in `order` use.
    pub(super) fn notes_of(&self, schedule: &Schedule, order: &BTreeSet<usize>) -> Vec<String> {
        let stages = order.iter().map(|index| &schedule.plan().stages()[*index]);
        let used: BTreeSet<&String> = stages
            .flat_map(|stage| stage.spec().models.iter().map(|(model, _)| model))
            .collect();
        let notes = self.notes.iter().filter(|(model, _)| used.contains(model));
        notes.map(|(_, note)| note.clone()).collect()
    }

    /// Finds the state of each trained model: in the step, in the model as loaded, or in other steps.
    pub(super) fn of_step(
        schedule: &Schedule,
        recorded: &RecordedStep,
        initial: &RunSnapshot,
        trace: Option<&TraceDir>,
    ) -> Sources {
        let mut found = Sources::default();
        let models = schedule.plan().models().iter();
        for model in models.filter(|model| !model.updaters.is_empty()) {
            let name = &model.name;
            let state = recorded.state.as_ref();
            if recorded.step <= 1 || state.is_some_and(|state| state.has_model(name)) {
                continue;
            }
            let Some(version) = version_before(recorded, name) else {
                found.stateless.insert(name.clone(), String::new());
                continue;
            };
            if initial.models.get(name) == Some(version) {
                let note = format!(
                    "the weights of `{name}` at the start of step {} are not stored; by their hash they are those of the model as loaded",
                    recorded.step
                );
                found.notes.push((name.clone(), note));
                continue;
            }
            found.search_other_steps(trace, recorded.step, name, version);
        }
        found
    }

    fn search_other_steps(
        &mut self,
        trace: Option<&TraceDir>,
        step: u64,
        model: &str,
        version: &WeightsVersion,
    ) {
        let mut steps = trace.map(TraceDir::steps).unwrap_or_default();
        // Earlier steps first, and nearer ones before others.
        steps.sort_by_key(|other| (*other > step, other.abs_diff(step)));
        for other in steps {
            let Some(trace) = trace else { break };
            let manifest = trace.manifest(other).ok();
            let reference = manifest.and_then(|manifest| manifest.models.get(model));
            let Some(reference) = reference.filter(|r| r.version == *version && r.state.is_some())
            else {
                continue;
            };
            match trace.state(reference) {
                Ok(stored) => {
                    let note = format!(
                        "the weights of `{model}` at the start of step {step} are not stored; by their hash they are those of step {other}"
                    );
                    self.notes.push((model.to_owned(), note));
                    self.elsewhere
                        .insert(model.to_owned(), (version.clone(), stored));
                    return;
                }
                Err(error) => self.notes.push((model.to_owned(), error.to_string())),
            }
        }
        let searched =
            "; by their hash, neither the model as loaded nor another step has these weights";
        self.stateless.insert(model.to_owned(), searched.to_owned());
    }
}

/// Version of a model at the start of a step, if its hash was recorded.
fn version_before<'a>(recorded: &'a RecordedStep, model: &str) -> Option<&'a WeightsVersion> {
    let of_state = match &recorded.state {
        Some(StepStart::Stored(state)) => state.models.get(model).map(|(version, _)| version),
        _ => None,
    };
    let mut stages = recorded.stages.values();
    let of_stage = || stages.find_map(|stage| stage.weights.get(model));
    let version = of_state.or_else(of_stage)?;
    (!version.hash.is_empty()).then_some(version)
}

/// The state at the start of the next step, for models whose hash after this step is not recorded.
pub(super) fn state_after<'a>(
    recorded: &RecordedStep,
    models: impl Iterator<Item = &'a String>,
    trace: &TraceDir,
) -> RunState {
    let known = |model: &&String| {
        let version = recorded.weights_after.get(*model);
        version.is_some_and(|version| !version.hash.is_empty())
    };
    let manifest = trace.manifest(recorded.step + 1).ok();
    let states = models.filter(|model| !known(model)).filter_map(|model| {
        let reference = manifest?.models.get(model)?;
        let stored = trace.state(reference).ok()??;
        Some((model.clone(), (reference.version.clone(), Some(stored))))
    });
    RunState {
        step: recorded.step,
        models: states.collect(),
        stages: BTreeMap::new(),
    }
}
