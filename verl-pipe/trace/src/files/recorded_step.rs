//! A recorded step in memory: the input and output of every stage.

use std::collections::BTreeMap;

use verl_rules::Anomaly;
use verl_run::runner::{RunSnapshot, RunState};
use verl_words::batch::Batch;
use verl_words::resource::WeightsVersion;

use crate::files::altered::AlteredKey;
use crate::files::documents::StepManifest;
use crate::files::error::TraceError;
use crate::files::trace_dir::{DamagedFile, SliceTrace, StageTrace, StepTrace};

/// An input or output batch of one call of a stage; keys have the stage's own names.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedBatch {
    /// Wave of a source's call, else 0.
    pub wave: u64,
    /// Number of the stage's slice in this step.
    pub slice: usize,
    /// The rows.
    pub batch: Batch,
}

/// Input and output of one stage in one step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RecordedStage {
    /// One batch per call, by slice.
    pub inputs: Vec<RecordedBatch>,
    /// All emitted batches, by slice and then in order of arrival.
    pub outputs: Vec<RecordedBatch>,
    /// Versions of the models before the stage ran, if recorded.
    pub weights: BTreeMap<String, WeightsVersion>,
    /// Resolved configuration of the stage, if recorded.
    pub parameters: Option<serde_json::Value>,
}

/// One recorded step.
#[derive(Debug, Clone, Default)]
pub struct RecordedStep {
    /// The step, counted from 1.
    pub step: u64,
    /// Seed of the recorded run, if recorded.
    pub seed: Option<u64>,
    /// Stages by name.
    pub stages: BTreeMap<String, RecordedStage>,
    /// Versions of the models after the step, if recorded.
    pub weights_after: BTreeMap<String, WeightsVersion>,
    /// State of models and stages when the step began, if recorded.
    pub state: Option<StepStart>,
    /// Why the step failed, if it did.
    pub error: Option<String>,
    /// The anomaly in this step for which a rule ended the run.
    pub stopped: Option<Anomaly>,
    /// Keys whose rows differ from those in the statistics.
    pub altered: Vec<AlteredKey>,
    /// Unusable files of the step; [`RecordedStep::stages`] has nothing from them.
    pub damaged: Vec<DamagedFile>,
}

/// State of models and stages when a step began.
#[derive(Debug, Clone)]
pub enum StepStart {
    /// A snapshot; usable only in the run that made it.
    Snapshot(RunSnapshot),
    /// Read from a trace; usable in any run of the same pipeline.
    Stored(RunState),
}

impl StepStart {
    /// Whether it has the state of `model`.
    pub fn has_model(&self, model: &str) -> bool {
        match self {
            StepStart::Snapshot(snapshot) => snapshot.models.contains_key(model),
            StepStart::Stored(state) => {
                let stored = state.models.get(model);
                stored.is_some_and(|(_, stored)| stored.is_some())
            }
        }
    }
}

impl RecordedStep {
    /// What is wrong with the file of `stage`, if it is unusable.
    pub fn damage_of(&self, stage: &str) -> Option<&TraceError> {
        let mut files = self.damaged.iter();
        let file = files.find(|file| file.stage.as_deref() == Some(stage))?;
        Some(&file.error)
    }

    /// A step read from a trace, without its state. `after` is the manifest of the following step, which has the
    /// versions of the weights after this one.
    pub fn from_trace(trace: StepTrace, after: Option<&StepManifest>) -> RecordedStep {
        let step = trace.manifest.step;
        let next = after.filter(|after| after.step == step + 1);
        let versions = next.into_iter().flat_map(|after| &after.models);
        let manifest = &trace.manifest;
        RecordedStep {
            step,
            error: (!manifest.ended).then(|| manifest.notes.join("; ")),
            seed: trace.stages.first().map(|stage| stage.manifest.seed),
            weights_after: versions
                .map(|(model, state)| (model.clone(), state.version.clone()))
                .collect(),
            stages: trace
                .stages
                .into_iter()
                .map(|stage| (stage.manifest.stage.clone(), RecordedStage::from(stage)))
                .collect(),
            damaged: trace.damaged,
            ..RecordedStep::default()
        }
    }
}

impl From<StageTrace> for RecordedStage {
    fn from(stage: StageTrace) -> Self {
        let side = |slices: Vec<SliceTrace>| {
            let batches = slices.into_iter().map(|slice| RecordedBatch {
                wave: slice.wave,
                slice: slice.slice,
                batch: slice.batch,
            });
            batches.collect()
        };
        RecordedStage {
            inputs: side(stage.inputs),
            outputs: side(stage.outputs),
            weights: stage.manifest.models,
            parameters: Some(stage.manifest.parameters),
        }
    }
}

impl RecordedStage {
    /// Identities of the input rows, in declared order.
    pub fn input_ids(&self) -> Vec<u64> {
        let batches = self.inputs.iter().map(|input| &input.batch);
        batches
            .flat_map(|batch| batch.ids().into_iter().map(|id| id.0))
            .collect()
    }

    /// Sorts the batches by slice.
    pub(crate) fn sort(&mut self) {
        self.inputs.sort_by_key(|batch| batch.slice);
        self.outputs.sort_by_key(|batch| batch.slice);
    }
}
