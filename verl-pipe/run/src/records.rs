//! Types of the files in a run folder: the files and their documentation are generated from them.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_words::data::DataLoaderInterface;
use verl_words::resource::CpuKernels;
use verl_words::stage::{Metric, MetricRole, Reduce};
pub use verl_words::stage::{NO_SAMPLES, STAGE, of_stage};

/// State of a run, as recorded in `status.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The run is in progress, or its process was killed.
    Running,
    /// The target step was reached and models are saved.
    Finished,
    /// An error ended the run.
    Failed,
    /// The run was asked to end.
    Cancelled,
    /// The program ended the run before the target step; `saved` lists the saved models.
    Stopped,
}

/// `status.json`: whether the content of the folder is complete.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StatusFile {
    /// State of the run.
    pub status: Status,
    /// Last completed step, 0 before the first; at most one second old while the run is in progress.
    pub step: u64,
    /// Step at which the run is configured to end.
    pub target: u64,
    /// When this was written (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// Models whose folder is complete; omitted if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub saved: Vec<String>,
    /// Saved models that contain a part of the step after `step`, which failed; omitted if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partial: Vec<String>,
    /// Why the run ended without finishing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Number of warnings and errors that the run reported; `warnings.jsonl` lists them.
    #[serde(default)]
    pub warnings: u64,
    /// How often each anomaly rule fired; `trace/anomalies.jsonl` lists when and where. Omitted if none fired.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub anomalies: BTreeMap<String, u64>,
}

/// A data set in `data.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataOrigin {
    /// Where its rows come from: a path, or how they are generated.
    pub origin: String,
    /// Number of rows.
    pub rows: usize,
    /// Hash of the content.
    pub fingerprint: String,
}

impl DataOrigin {
    /// The origin of an opened data set.
    pub fn of(data: &dyn DataLoaderInterface) -> DataOrigin {
        DataOrigin {
            origin: data.origin(),
            rows: data.len(),
            fingerprint: data.fingerprint(),
        }
    }
}

/// `data.json`: the data sets by name in the pipeline.
pub type DataFile = BTreeMap<String, DataOrigin>;

/// `versions.json`: versions and hardware of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VersionsFile {
    /// Version of the engine.
    #[serde(rename = "verl-pipe")]
    pub engine: String,
    /// Versions of further crates, by name.
    #[serde(flatten)]
    pub others: Map<String, Value>,
    /// Operating system.
    pub os: String,
    /// Architecture of the processor.
    pub arch: String,
    /// Processor features that select kernels and functions of the C library.
    pub processor: Vec<String>,
    /// Processor model and cache sizes.
    #[serde(default)]
    pub cpu: Cpu,
    /// CPU kernels that the models use.
    #[serde(default)]
    pub cpu_kernels: CpuKernels,
    /// C library, such as `glibc 2.36`; `other` if it is not glibc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c_library: Option<String>,
    /// Whether the program was built with optimisations.
    pub optimised: bool,
}

/// Processor model and cache sizes. Values that the system does not report are omitted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cpu {
    /// Vendor, such as `GenuineIntel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vendor: Option<String>,
    /// Model name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// First-level data cache of a core (KiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l1d_kib: Option<u64>,
    /// Second-level cache of a core (KiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2_kib: Option<u64>,
    /// Third-level cache (KiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l3_kib: Option<u64>,
}

/// GPU kernels that were launched during the start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelTally {
    /// Number of kernels that NVRTC compiled; it compiles them anew in every process.
    pub compiled: usize,
    /// Folder where the driver caches their machine code for the next process, or why there is none.
    pub driver_cache: String,
}

/// `start.json`: how long each part of the start took, up to the end of the first step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartFile {
    /// Time to read and check the pipeline, including its devices (seconds); omitted if a program made the plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_s: Option<f64>,
    /// Time to open data and load models (seconds).
    pub load_s: f64,
    /// Time between loading and the first step (seconds), mostly spent in stages that run before it.
    pub observe_s: f64,
    /// Time of the first step (seconds).
    pub first_step_s: f64,
    /// Total time of each stage's calls in the first step (seconds); concurrent calls are added up.
    pub stages: BTreeMap<String, f64>,
    /// Kernels that were compiled during the start; omitted if none were launched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<KernelTally>,
}

/// A line of `metrics.jsonl`: the metrics of a step. Values that are not finite are `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MetricsLine {
    /// Step of the run; 0 for observations before the first step.
    pub step: u64,
    /// Epoch of the step's first prompt.
    pub epoch: u64,
    /// When the step ended (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// All recorded values, by name.
    #[serde(flatten)]
    pub values: Map<String, Value>,
}

/// A line of `samples.jsonl`: a sample of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SampleLine {
    /// Step of the run; 0 for samples before the first step.
    pub step: u64,
    /// Fields of the sample, by name.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

/// Outcome of a row in a stage, as recorded in `row_errors.jsonl`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RowStatus {
    /// The stage returned an error.
    Failed,
    /// The stage panicked.
    Panicked,
    /// The stage did not answer within its deadline.
    TimedOut,
    /// The stage wrote a column whose number of rows differs from that of the batch.
    WrongLength,
    /// The stage read a key that it does not declare.
    MissingKey,
    /// The row succeeded, but took more than half of the stage's deadline.
    Slow,
    /// Further rows that are counted here but not listed.
    LeftOut,
}

impl RowStatus {
    /// The word used in messages.
    pub fn word(self) -> &'static str {
        match self {
            RowStatus::Failed => "failed",
            RowStatus::Panicked => "panicked",
            RowStatus::TimedOut => "timed out",
            RowStatus::WrongLength => "returned a wrong length",
            RowStatus::MissingKey => "read a missing key",
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
    /// Identity of the row, as in samples and errors: epoch, row of the data set counted from 0, and sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<String>,
    /// Row of the data set that it comes from, counted from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_row: Option<u64>,
    /// Outcome of the row.
    pub status: RowStatus,
    /// Reason: the error, or the message and location of the panic.
    pub reason: String,
    /// Duration of its call (seconds).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Number of rows that this line stands for: 1, or the number of rows left out.
    pub rows: usize,
}

/// Severity of a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WarningLevel {
    /// Something is probably not as intended.
    Warning,
    /// Something failed.
    Error,
}

/// A line of `warnings.jsonl`: a warning or an error of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarningLine {
    /// Step during which it was reported; 0 before the first.
    pub step: u64,
    /// When it was reported (seconds since 1970-01-01 UTC).
    pub timestamp: f64,
    /// Severity.
    pub level: WarningLevel,
    /// Module of the program that reported it.
    pub source: String,
    /// The message.
    pub message: String,
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
        role: None,
    }
}

/// Seconds of a step.
pub const STEP_S: Metric = metric(
    "perf/step_s",
    "seconds",
    "time of the step, from its first call to its last",
    Reduce::Last,
);
/// Worker processes that were started again.
pub const RESTARTS: Metric = metric(
    "perf/worker_restarts",
    "count",
    "worker processes that were lost and started again; only in steps with any",
    Reduce::Last,
);
/// Seconds in which weights travelled to other device groups.
pub const SYNC_S: Metric = metric(
    "perf/weight_sync_s",
    "seconds",
    "time in which weights travelled to copies in other device groups; only in runs with such copies",
    Reduce::Last,
);
/// Weights that travelled to other device groups.
pub const SYNC_MB: Metric = metric(
    "perf/weight_sync_mb",
    "MB",
    "weights that travelled to copies in other device groups; only in runs with such copies",
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
    "memory that the process uses, if the system reports it",
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
    "total time of the stage's calls; concurrent calls are added up",
    Reduce::Sum,
);
/// Rows that failed.
pub const ROW_ERRORS: Metric = Metric {
    role: Some(MetricRole::RowErrors),
    ..metric(
        "<stage>/row_errors",
        "rows",
        "rows whose call failed, panicked or exceeded its deadline; their keys are null",
        Reduce::Sum,
    )
};
/// Time of a row, the median.
pub const ROW_S_P50: Metric = metric(
    "perf/stage/<stage>_row_s_p50",
    "seconds",
    "median time of a row's call, for stages whose rows have a deadline; includes rows that failed",
    Reduce::Last,
);
/// Time of a row, the longest.
pub const ROW_S_MAX: Metric = metric(
    "perf/stage/<stage>_row_s_max",
    "seconds",
    "longest time of a row's call, for stages whose rows have a deadline; includes rows that failed",
    Reduce::Max,
);
/// Waves drawn.
pub const WAVES: Metric = metric(
    "<stage>/waves",
    "waves",
    "waves of prompts that the step drew until the filter kept enough groups",
    Reduce::Last,
);
/// Groups kept.
pub const GROUPS_KEPT: Metric = metric(
    "<stage>/groups_kept",
    "groups",
    "groups that the filter passed on",
    Reduce::Last,
);
/// Surplus groups.
pub const GROUPS_SURPLUS: Metric = metric(
    "<stage>/groups_surplus",
    "groups",
    "groups that the filter kept beyond the wanted number",
    Reduce::Last,
);

/// Every metric that the engine itself records.
pub const ENGINE_METRICS: [Metric; 15] = [
    GROUPS_KEPT,
    GROUPS_SURPLUS,
    MEMORY_MB,
    NO_SAMPLES,
    OBSERVE_S,
    RESTARTS,
    ROW_ERRORS,
    ROW_S_MAX,
    ROW_S_P50,
    STAGE_S,
    STEP_S,
    SYNC_MB,
    SYNC_S,
    TOKENS_PER_S,
    WAVES,
];
