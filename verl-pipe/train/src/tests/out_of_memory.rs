//! A device that runs out of memory ends the run with its own error, whatever was running.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use verl_declare::pipe::ModelFactory;
use verl_plan::Plannable;
use verl_run::error::RunError;
use verl_run::runner::Run;
use verl_words::resource::{
    Footprint, ModelInfo, ModelResource, ResourceError, Shortage, Snapshot, WeightsVersion,
};
use verl_words::stage::{BuildContext, ConfigError, DeviceSupport, ModelWork, StageError};

use super::fakes::*;

/// When the device of a [`Full`] model runs out of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    Loading,
    Refusing,
    TakingSnapshots,
}

/// A model whose device runs out of memory at some point.
struct Full(When);

struct FullModel;

impl ModelResource for FullModel {
    fn version(&self) -> WeightsVersion {
        WeightsVersion {
            step: 0,
            hash: String::new(),
        }
    }
    fn snapshot(&mut self) -> Result<Snapshot, ResourceError> {
        panic!("{FULL}")
    }
    fn restore(&mut self, _: &Snapshot) -> Result<(), ResourceError> {
        Ok(())
    }
    fn save(&mut self, _: &Path) -> Result<(), ResourceError> {
        Ok(())
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl DeviceSupport for Full {
    fn shortage(&self, message: &str) -> Option<Shortage> {
        full(message)
    }
}

impl ModelFactory for Full {
    fn describe(&self, _: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        Ok(ModelInfo {
            num_parameters: 1 << 30,
            weight_bytes: 2 << 30,
            optimizer_bytes: 12 << 30,
            gradient_bytes: 4 << 30,
            footprint: Footprint {
                kept_bytes_per_token: 1 << 20,
                ..Footprint::default()
            },
            smaller: Some("dtype = \"bf16\""),
            ..ModelInfo::default()
        })
    }
    fn trainable(&self) -> bool {
        true
    }
    fn devices(&self) -> &dyn DeviceSupport {
        self
    }
    fn load(
        &self,
        _: &str,
        _: &str,
        _: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        match self.0 {
            When::Loading => panic!("{FULL}"),
            When::Refusing => Err(ResourceError::Failed(FULL.into())),
            When::TakingSnapshots => Ok(Box::new(FullModel)),
        }
    }
}

/// Starts a run whose model is `Full`; its generation declares training on rows of 1,000 tokens.
fn run(when: When) -> Result<Run, RunError> {
    let work = ModelWork::training("actor", 16).tokens(1000);
    let spec = generate_spec().works(work);
    let generate = single("generate", spec, |_, _| Err(StageError::failed(FULL)));
    let mut pipe = pipeline(vec![generate]);
    pipe.models[0].factory = Arc::new(Full(when));
    let schedule = pipe.plan().expect("a plan").schedule().expect("placed");
    Run::start(schedule, options())
}

#[track_caller]
fn check(error: &RunError, during: &str) {
    let RunError::OutOfMemory(full) = error else {
        panic!("{error}");
    };
    let (device, asked) = (&full.device, &full.asked);
    assert_eq!(full.during, during);
    assert_eq!(
        (device.as_str(), asked.as_deref()),
        ("cpu", Some("8.0 GiB"))
    );
    assert_eq!(error.code(), "R018");
}

#[test]
fn the_error_names_the_stage_the_planned_memory_and_a_fix() {
    let error = run(When::TakingSnapshots)
        .expect("a run")
        .step()
        .expect_err("full");
    insta::assert_snapshot!("out_of_memory", error.to_string());
    check(
        &error,
        "step 1, stage `generate`, 6 rows, samples 0.5#0 to 0.0#0",
    );
}

#[test]
fn a_panic_is_reported_like_an_error() {
    let generate = single("generate", generate_spec(), |_, _| panic!("{FULL}"));
    let mut run = start(vec![generate]);
    let error = run.step().expect_err("full");
    check(
        &error,
        "step 1, stage `generate`, 6 rows, samples 0.5#0 to 0.0#0",
    );
    // The thread is still alive: weights can be read.
    assert!(!weights(&mut run).is_empty());
}

#[test]
fn loading_and_requests_between_steps_are_covered() {
    let during = "when asked to load models and start stages";
    for when in [When::Loading, When::Refusing] {
        check(&run(when).expect_err("no run"), during);
    }
    let mut run = run(When::TakingSnapshots).expect("a run");
    check(
        &run.snapshot().expect_err("full"),
        "when asked to take snapshots",
    );
    // The worker is not used after a panic.
    let lost = run.snapshot().expect_err("a lost worker");
    assert_eq!(lost.code(), "R009");
}
