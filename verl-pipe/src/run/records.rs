//! What is written into a run folder, as types: the files and their documentation come from the same place.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::data::DataLoaderInterface;
use crate::stage::{Metric, Reduce};

/// How far a run has come, as `status.json` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It runs, or its process was killed.
    Running,
    /// The target step was reached and models are saved.
    Finished,
    /// An error ended it.
    Failed,
    /// It was asked to end.
    Cancelled,
}

/// `status.json`: whether what lies in the folder is whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StatusFile {
    /// How far the run has come.
    pub status: Status,
    /// Last whole step, 0 before the first; of a run that goes on, at most a second old.
    pub step: u64,
    /// Step at which the run is to end.
    pub target: u64,
    /// When this was written (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// Models whose folder is whole; left out while there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub saved: Vec<String>,
    /// Those among them that hold a part of the step behind `step`, which failed; left out where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partial: Vec<String>,
    /// Why a run ended that is not finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A data set in `data.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataOrigin {
    /// Where its rows come from: a path, or how they are made.
    pub origin: String,
    /// How many rows there are.
    pub rows: usize,
    /// Hash of its content.
    pub fingerprint: String,
}

impl DataOrigin {
    /// That of an opened data set.
    pub fn of(data: &dyn DataLoaderInterface) -> DataOrigin {
        DataOrigin {
            origin: data.origin(),
            rows: data.len(),
            fingerprint: data.fingerprint(),
        }
    }
}

/// `data.json`: the data sets by their names in the pipeline.
pub type DataFile = BTreeMap<String, DataOrigin>;

/// `versions.json`: what the run was made with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VersionsFile {
    /// Version of the engine.
    #[serde(rename = "verl-pipe")]
    pub engine: String,
    /// Versions of further crates, by their names.
    #[serde(flatten)]
    pub others: Map<String, Value>,
    /// Operating system.
    pub os: String,
    /// Architecture of the processor.
    pub arch: String,
    /// Features of the processor that kernels are chosen by, and with them the last bits of results.
    pub processor: Vec<String>,
    /// Whether the program was built with optimisation.
    pub optimised: bool,
}

/// The kernels of a GPU that a start launched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelTally {
    /// Kernels that NVRTC compiled, which it does in every process.
    pub compiled: usize,
    /// Folder where the driver keeps their machine code for the next process, or why there is none.
    pub driver_cache: String,
}

/// `start.json`: how the run got to the end of its first step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartFile {
    /// Time of reading and checking the pipeline, its devices included (seconds); left out where a program made the plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_s: Option<f64>,
    /// Time of opening data and loading models (seconds).
    pub load_s: f64,
    /// Time between loading and the first step (seconds), that of stages that ran before it above all.
    pub observe_s: f64,
    /// Time of the first step (seconds).
    pub first_step_s: f64,
    /// Of it, the time of each stage's calls, added up (seconds); calls that ran side by side count each.
    pub stages: BTreeMap<String, f64>,
    /// Kernels that were compiled on the way; left out where none were launched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<KernelTally>,
}

/// A line of `metrics.jsonl`: what a step came to. Values that are not finite are `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MetricsLine {
    /// Step of the run; 0 for what was observed before the first.
    pub step: u64,
    /// Epoch in which the step's first prompt was drawn.
    pub epoch: u64,
    /// When the step ended (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// Everything that was recorded, by name.
    #[serde(flatten)]
    pub values: Map<String, Value>,
}

/// A line of `samples.jsonl`: what a stage shows of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SampleLine {
    /// Step of the run; 0 for what was shown before the first.
    pub step: u64,
    /// What the stage shows, by name.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

/// Stands for the name of a stage in the name of a metric.
pub const STAGE: &str = "<stage>";

/// Names of a stage's own metric: those of [`ENGINE_METRICS`] with the stage in the place of [`STAGE`].
pub(crate) fn of_stage(metric: &Metric, stage: &str) -> String {
    metric.name.replace(STAGE, stage)
}

const fn metric(
    name: &'static str,
    unit: &'static str,
    meaning: &'static str,
    reduce: Reduce,
) -> Metric {
    Metric {
        name,
        unit,
        meaning,
        reduce,
    }
}

/// Seconds of a step.
pub const STEP_S: Metric = metric(
    "perf/step_s",
    "seconds",
    "time of the step, from its first call to its last",
    Reduce::Last,
);
/// Rate of a step.
pub const TOKENS_PER_S: Metric = metric(
    "perf/tokens_per_s",
    "tokens a second",
    "`perf/tokens` over `perf/step_s`",
    Reduce::Last,
);
/// Memory of the process.
pub const MEMORY_MB: Metric = metric(
    "perf/memory_mb",
    "megabytes",
    "memory that the process holds, where the system tells",
    Reduce::Last,
);
/// Seconds of observers.
pub const OBSERVE_S: Metric = metric(
    "perf/observe_s",
    "seconds",
    "time of the stages that ran between steps",
    Reduce::Last,
);
/// Seconds of a stage.
pub const STAGE_S: Metric = metric(
    "perf/stage/<stage>_s",
    "seconds",
    "time of the stage's calls, added up; calls that ran side by side count each",
    Reduce::Sum,
);
/// Rows given up.
pub const ROW_ERRORS: Metric = metric(
    "<stage>/row_errors",
    "rows",
    "rows whose call failed, panicked or passed its deadline; their keys are null",
    Reduce::Sum,
);
/// Waves drawn.
pub const WAVES: Metric = metric(
    "<stage>/waves",
    "waves",
    "waves of prompts that the step drew until the filter had kept enough groups",
    Reduce::Last,
);
/// Groups kept.
pub const GROUPS_KEPT: Metric = metric(
    "<stage>/groups_kept",
    "groups",
    "groups that the filter let go on",
    Reduce::Last,
);
/// Groups to spare.
pub const GROUPS_SURPLUS: Metric = metric(
    "<stage>/groups_surplus",
    "groups",
    "groups that the filter kept beyond those that were wanted",
    Reduce::Last,
);

/// Every metric that the engine itself records.
pub const ENGINE_METRICS: [Metric; 9] = [
    GROUPS_KEPT,
    GROUPS_SURPLUS,
    MEMORY_MB,
    OBSERVE_S,
    ROW_ERRORS,
    STAGE_S,
    STEP_S,
    TOKENS_PER_S,
    WAVES,
];
