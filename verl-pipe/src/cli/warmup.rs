//! `pipe warmup`: fills the GPU driver's cache with the kernels of a pipeline before a run needs them.
//!
//! It loads the models and takes one step, which compiles every kernel; it creates no run folder. The driver caches the
//! kernels' machine code, which later starts of the same pipeline reuse.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_declare::registry::Registry;
use verl_plan::schedule::groups::DeviceGroup;
use verl_plan::{Plan, Plannable};
use verl_run::error::RunError;
use verl_run::records::StartFile;
use verl_run::runner::{Run, RunOptions};
use verl_train::timeline::{Kernels, Timeline};
use verl_words::diagnostic::Diagnostic;

use super::json_error::{JsonError, write_json};
use super::{PipelineArgs, write_findings};

/// Arguments of `pipe warmup`.
#[derive(Debug, Clone, Args)]
pub struct WarmupArgs {
    /// The pipeline.
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Prints one JSON object: the duration of each part and the driver's kernel cache, or the error with all findings.
    #[arg(long)]
    pub json: bool,
}

/// The result of a warm-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Warmup {
    /// Name of the pipeline.
    pub pipeline: String,
    /// Its device group.
    pub devices: String,
    /// Why there was nothing to do; omitted if there was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nothing: Option<String>,
    /// How long each part took; omitted if nothing was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartFile>,
}

enum Failure {
    Findings(Vec<Diagnostic>),
    Run(RunError),
}

/// Takes one step of a pipeline on a GPU and prints how long each part took. Returns the exit code.
///
/// # Errors
/// If `out` cannot be written.
pub fn warmup(
    args: &WarmupArgs,
    registry: &Registry,
    kernels: Arc<dyn Kernels>,
    out: &mut dyn Write,
) -> io::Result<u8> {
    let began = Instant::now();
    let plan = args.pipeline.read(registry).and_then(|pipe| pipe.plan());
    let done = plan
        .map_err(Failure::Findings)
        .and_then(|plan| warm(plan, began, kernels));
    match done {
        Ok(done) if args.json => write_json(&done, out).map(|()| 0),
        Ok(done) => write!(out, "{}", text(&done)).map(|()| 0),
        Err(Failure::Findings(findings)) if args.json => {
            JsonError::of_findings(&findings).write(out).map(|()| 1)
        }
        Err(Failure::Findings(findings)) => write_findings(&findings, out).map(|()| 1),
        Err(Failure::Run(error)) if args.json => {
            let help = format!("see `docs/errors/{}.md`", error.code());
            let error = JsonError::new(error.code(), error.to_string(), help);
            error.write(out).map(|()| 1)
        }
        Err(Failure::Run(error)) => writeln!(out, "error[{}]: {error}", error.code()).map(|()| 1),
    }
}

fn warm(plan: Plan, began: Instant, kernels: Arc<dyn Kernels>) -> Result<Warmup, Failure> {
    let groups = plan.groups();
    let group: Vec<String> = groups.iter().map(DeviceGroup::devices_text).collect();
    let group = group.join(", ");
    let mut done = Warmup {
        pipeline: plan.pipe().name.clone(),
        devices: group.clone(),
        nothing: None,
        start: None,
    };
    let mut devices = groups.iter().flat_map(|group| &group.devices);
    if !devices.any(|device| kernels.used_on(device)) {
        done.nothing = Some(format!("this build compiles nothing for `{group}`"));
        return Ok(done);
    }
    let schedule = plan.schedule().map_err(Failure::Findings)?;
    let mut timeline = Timeline::load(schedule.plan(), Some(began), Some(kernels));
    let mut run = Run::start(schedule, RunOptions::default()).map_err(Failure::Run)?;
    timeline.loaded();
    let output = run.step().map_err(Failure::Run)?;
    done.start = Some(timeline.first_step(&output.metrics));
    Ok(done)
}

fn text(done: &Warmup) -> String {
    let mut text = format!("{} on {}\n", done.pipeline, done.devices);
    let mut line = |name: &str, value: String| text.push_str(&format!("  {name:<12} {value}\n"));
    if let Some(nothing) = &done.nothing {
        line("nothing to do", nothing.clone());
    }
    if let Some(start) = &done.start {
        let seconds = |seconds: f64| format!("{seconds:.2} s");
        line("check", seconds(start.check_s.unwrap_or_default()));
        line("load", seconds(start.load_s));
        line("first step", seconds(start.first_step_s));
        let stages: &BTreeMap<String, f64> = &start.stages;
        for (stage, taken) in stages {
            line(&format!("  {stage}"), seconds(*taken));
        }
        if let Some(kernels) = &start.kernels {
            line("kernels", format!("{} compiled", kernels.compiled));
            line("driver cache", kernels.driver_cache.clone());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use verl_run::records::KernelTally;

    use super::*;
    use crate::cli::counting::Count;

    /// Compiles kernels for one device.
    struct Fake(&'static str);

    impl Kernels for Fake {
        fn used_on(&self, device: &str) -> bool {
            device == self.0
        }
        fn tally(&self) -> Option<KernelTally> {
            Some(KernelTally {
                compiled: 2,
                driver_cache: "/cache".to_owned(),
            })
        }
    }

    /// Exit code and output if kernels are compiled for `device`.
    fn run(device: &'static str, more: &[&str], json: bool) -> (u8, String) {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("count.toml");
        std::fs::write(&file, "name = \"count\"\n[[stages]]\nkind = \"count\"\n").unwrap();
        let args = WarmupArgs {
            pipeline: PipelineArgs {
                file,
                overrides: more.iter().map(|text| (*text).to_owned()).collect(),
            },
            json,
        };
        let mut out = Vec::new();
        let registry = Registry::new().stage::<Count>();
        let code = warmup(&args, &registry, Arc::new(Fake(device)), &mut out).unwrap();
        (code, String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_step_is_taken_and_reported() {
        let (code, out) = run("cpu", &[], false);
        assert_eq!(code, 0);
        assert!(out.starts_with("count on cpu\n  check "), "{out}");
        assert!(out.contains("    count "), "{out}");
        assert!(
            out.ends_with("  kernels      2 compiled\n  driver cache /cache\n"),
            "{out}"
        );
        let (code, out) = run("cpu", &[], true);
        let warmup: Warmup = serde_json::from_str(&out).unwrap();
        let start = warmup.start.unwrap();
        assert!(code == 0 && warmup.nothing.is_none());
        assert!(start.stages.contains_key("count") && start.kernels.unwrap().compiled == 2);
    }

    #[test]
    fn without_kernels_nothing_is_done() {
        let (code, out) = run("cuda:0", &["count.fail_at=1"], false);
        assert_eq!(code, 0);
        assert_eq!(
            out,
            "count on cpu\n  nothing to do this build compiles nothing for `cpu`\n"
        );
        let (_, out) = run("cuda:0", &[], true);
        let warmup: Warmup = serde_json::from_str(&out).unwrap();
        assert!(warmup.nothing.is_some() && warmup.start.is_none());
    }

    #[test]
    fn errors_are_reported() {
        let (code, out) = run("cpu", &["count.fail_at=1"], true);
        let failure: JsonError = serde_json::from_str(&out).unwrap();
        assert!(
            code == 1 && failure.error.message.contains("no rows left"),
            "{out}"
        );
        let (code, out) = run("cpu", &["count.fail_at=1"], false);
        assert!(code == 1 && out.starts_with("error["), "{out}");
        let (code, out) = run("cpu", &["count.fail_att=1"], true);
        let failure: JsonError = serde_json::from_str(&out).unwrap();
        assert_eq!((code, failure.error.code.as_str()), (1, "C002"));
    }
}
