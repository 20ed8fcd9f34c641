//! What is written into a run folder, as types: the files and their documentation come from the same place.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::data::DataLoaderInterface;
use crate::resource::CpuKernels;
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
    /// The program that ran it ended it before the target step; models are saved as `saved` tells.
    Stopped,
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
    /// Warnings and errors that the run told; `warnings.jsonl` has them.
    #[serde(default)]
    pub warnings: u64,
    /// How often each anomaly rule began to hold; `trace/anomalies.jsonl` tells when and where. Left out while none did.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub anomalies: BTreeMap<String, u64>,
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
    /// Features of the processor by which kernels and functions of the C library are chosen.
    pub processor: Vec<String>,
    /// Make of the processor and sizes of its caches.
    #[serde(default)]
    pub cpu: Cpu,
    /// The kernels of the CPU that the models have.
    #[serde(default)]
    pub cpu_kernels: CpuKernels,
    /// C library, such as `glibc 2.36`; `other` where it is not glibc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c_library: Option<String>,
    /// Whether the program was built with optimisation.
    pub optimised: bool,
}

/// Make of a processor and sizes of its caches. What the system does not say is left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cpu {
    /// Its vendor, such as `GenuineIntel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vendor: Option<String>,
    /// Name of its model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// First-level cache of data of a core (KiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l1d_kib: Option<u64>,
    /// Second-level cache of a core (KiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2_kib: Option<u64>,
    /// Third-level cache (KiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l3_kib: Option<u64>,
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

/// What became of a row in a stage, as `row_errors.jsonl` tells.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RowStatus {
    /// The stage gave an error.
    Failed,
    /// The stage panicked.
    Panicked,
    /// No answer came within the stage's deadline.
    TimedOut,
    /// The stage wrote a column of another number of rows than the row's batch has.
    WrongLength,
    /// The stage read a key that it does not declare.
    MissingKey,
    /// It was scored, but took more than half of the stage's deadline.
    Slow,
    /// Further rows, which are counted here and listed nowhere.
    LeftOut,
}

impl RowStatus {
    /// As messages call it.
    pub fn word(self) -> &'static str {
        match self {
            RowStatus::Failed => "failed",
            RowStatus::Panicked => "panicked",
            RowStatus::TimedOut => "timed out",
            RowStatus::WrongLength => "gave a wrong length",
            RowStatus::MissingKey => "read a key that is not there",
            RowStatus::Slow => "slow",
            RowStatus::LeftOut => "left out",
        }
    }
}

/// A line of `row_errors.jsonl`: a row that failed in a stage or was slow there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RowErrorLine {
    /// Step of the run.
    pub step: u64,
    /// The stage.
    pub stage: String,
    /// Identity of the row, as samples and errors name it: epoch, row of the data set counted from 0, and sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<String>,
    /// Row of the data set that it was made of, counted from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_row: Option<u64>,
    /// What became of it.
    pub status: RowStatus,
    /// Why: the error, or the text and place of the panic.
    pub reason: String,
    /// Time that its call took (seconds).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Rows that this line stands for: 1, or those that are left out.
    pub rows: usize,
}

/// How much a warning matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WarningLevel {
    /// Something is probably not as it was meant.
    Warning,
    /// Something failed.
    Error,
}

/// A line of `warnings.jsonl`: something that whoever runs it should know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarningLine {
    /// Step that ran; 0 before the first.
    pub step: u64,
    /// When it was told (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// How much it matters.
    pub level: WarningLevel,
    /// Module of the program that told it.
    pub source: String,
    /// What was told.
    pub message: String,
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
/// Time of a row, the median.
pub const ROW_S_P50: Metric = metric(
    "perf/stage/<stage>_row_s_p50",
    "seconds",
    "median time of a row's call, of stages whose rows have a deadline; rows that were given up count too",
    Reduce::Last,
);
/// Time of a row, the longest.
pub const ROW_S_MAX: Metric = metric(
    "perf/stage/<stage>_row_s_max",
    "seconds",
    "longest time of a row's call, of stages whose rows have a deadline; rows that were given up count too",
    Reduce::Max,
);
/// Optimiser steps without samples.
pub const NO_SAMPLES: Metric = metric(
    "<stage>/no_samples",
    "optimiser steps",
    "optimiser steps that were left out because no token was left to learn from",
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
pub const ENGINE_METRICS: [Metric; 12] = [
    GROUPS_KEPT,
    GROUPS_SURPLUS,
    MEMORY_MB,
    NO_SAMPLES,
    OBSERVE_S,
    ROW_ERRORS,
    ROW_S_MAX,
    ROW_S_P50,
    STAGE_S,
    STEP_S,
    TOKENS_PER_S,
    WAVES,
];
