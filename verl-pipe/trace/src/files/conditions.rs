//! The conditions of a recording: every setting, the machine, and what the stages declared. `trace/conditions.json`.

use std::fs;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use verl_declare::config::to_toml;
use verl_declare::pipe::DataPipe;
use verl_plan::Plan;
use verl_plan::display::Unwarned;
use verl_plan::schedule::placement::Schedule;
use verl_rules::format::FORMAT;
use verl_run::processor::{c_library, processor_features};
use verl_run::records::Cpu;
use verl_words::resource::CpuKernels;

use crate::files::documents::{Layout, parse};
use crate::files::error::TraceError;
use crate::files::stand_in::StageShape;

/// Content of `trace/conditions.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Conditions {
    /// Trace format number.
    pub format: u32,
    /// SHA-256 of the printed plan, in hexadecimal.
    pub plan_hash: String,
    /// Every setting of the pipeline, as in `config.toml`.
    pub settings: Value,
    /// The machine that it ran on.
    pub machine: Machine,
    /// What the stages declared, in the order of execution.
    pub stages: Vec<StageShape>,
}

/// What can affect the last bits of results besides the settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Machine {
    /// Device group of the models.
    pub device: String,
    /// Operating system.
    pub os: String,
    /// Architecture of the processor.
    pub arch: String,
    /// Processor features that select kernels and functions of the C library.
    pub processor: Vec<String>,
    /// Processor model and cache sizes; empty in traces of older versions.
    #[serde(default)]
    pub cpu: Cpu,
    /// CPU kernels of the models; empty in traces of older versions.
    #[serde(default)]
    pub cpu_kernels: CpuKernels,
    /// C library, such as `glibc 2.36`, which computes some exponentials and logarithms; `other` if it is not glibc.
    /// Absent in traces of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c_library: Option<String>,
    /// Whether the program was built with optimisation.
    pub optimised: bool,
    /// Threads that kernels may use: `RAYON_NUM_THREADS`, else the number of cores. On a CPU no bit depends on it.
    pub threads: usize,
    /// Version of the engine.
    pub verl: String,
}

impl Machine {
    /// This machine, with the models on `device`; `cpu_kernels` are the models' kernels for the CPU.
    pub fn here(device: &str, cpu_kernels: CpuKernels) -> Machine {
        let asked = std::env::var("RAYON_NUM_THREADS").ok();
        let asked = asked.and_then(|text| text.parse().ok());
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        Machine {
            device: device.to_owned(),
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            processor: processor_features()
                .into_iter()
                .map(str::to_owned)
                .collect(),
            cpu: Cpu::here(),
            cpu_kernels,
            c_library: Some(c_library()),
            optimised: !cfg!(debug_assertions),
            threads: asked.filter(|n| *n > 0).unwrap_or_else(cores),
            verl: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

impl Conditions {
    /// The conditions of a schedule on this machine.
    pub fn of(schedule: &Schedule) -> Conditions {
        let plan = schedule.plan();
        Conditions {
            format: FORMAT,
            plan_hash: plan_hash(plan),
            settings: settings_of(plan.pipe()),
            machine: Machine::here(&schedule.devices_text(), plan.pipe().cpu_kernels()),
            stages: plan.stages().iter().map(StageShape::of).collect(),
        }
    }

    /// The conditions that the run in `run_dir` was recorded under; `None` if it did not record them.
    ///
    /// # Errors
    /// A file that is damaged or in another format.
    pub fn read(run_dir: &Path) -> Result<Option<Conditions>, TraceError> {
        let path = Layout::of_run(run_dir).conditions();
        match fs::read_to_string(&path) {
            Ok(text) => parse(&path, &text).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(TraceError::file("read", &path, error)),
        }
    }
}

/// Parts of the machine that `versions.json` of a run also records, for a trace without conditions.
const OF_VERSIONS: [&str; 7] = [
    "arch",
    "c_library",
    "cpu",
    "cpu_kernels",
    "optimised",
    "os",
    "processor",
];

/// These parts of the machine of the run in `run_dir`, and of `now`.
pub(crate) fn of_versions(run_dir: &Path, now: &Machine) -> (Value, Value) {
    let text = fs::read_to_string(run_dir.join("versions.json")).unwrap_or_default();
    let recorded: Value = serde_json::from_str(&text).unwrap_or_default();
    let now = serde_json::to_value(now).unwrap_or_default();
    // The parts on which equal bits depend are compared even if they are not recorded.
    let compared = OF_VERSIONS
        .into_iter()
        .filter(|part| recorded.get(part).is_some() || ["c_library", "cpu_kernels"].contains(part));
    let compared: Vec<&str> = compared.collect();
    let parts = |of: &Value| -> Value {
        let parts = compared
            .iter()
            .map(|part| ((*part).to_owned(), of[*part].clone()));
        Value::Object(parts.collect())
    };
    (parts(&recorded), parts(&now))
}

/// SHA-256 of the printed plan without warnings, in hexadecimal; equal for two runs of one plan.
pub(crate) fn plan_hash(plan: &Plan) -> String {
    let hash = Sha256::digest(Unwarned(plan).to_string().as_bytes());
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every setting of a pipeline, as in `config.toml`.
pub(crate) fn settings_of(pipe: &DataPipe) -> Value {
    // A number that TOML cannot represent ends the run before it begins.
    let text = to_toml(pipe).unwrap_or_default();
    toml::from_str(&text).unwrap_or_default()
}
