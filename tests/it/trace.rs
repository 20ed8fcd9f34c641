//! The trace of a real pipeline: it changes nothing, can restore a step, and survives a kill.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use verl::pipe::plan::Plannable;
use verl::pipe::run::state::RunState;
use verl::pipe::run::trainer::{Trainer, TrainerOptions};
use verl::pipe::trace::files::{Reason, StepManifest, TraceDir};
use verl::pipe::trace::rules::{Hit, Rule, RuleSeverity, StepView};
use verl::pipe::trace::stats::StatRow;

use crate::kit::{GRPO, Place, decided, start};

fn state_before(trace: &TraceDir, manifest: &StepManifest) -> RunState {
    let read = |of: &BTreeMap<String, verl::pipe::trace::files::StateRef>| {
        of.iter()
            .map(|(name, reference)| {
                let stored = trace.state(reference).expect("reads");
                (name.clone(), (reference.version.clone(), stored))
            })
            .collect()
    };
    RunState {
        step: manifest.step - 1,
        models: read(&manifest.models),
        stages: read(&manifest.stage_states),
    }
}

#[test]
fn tracing_changes_nothing_and_a_step_can_be_recalled() {
    let place = Place::new();
    let bare = place.train("bare", &["trace.stats=false"]);
    let full = place.train("full", &["trace.every=1"]);
    let numbers =
        |run: &crate::kit::Finished| run.metrics().iter().map(decided).collect::<Vec<_>>();
    assert_eq!(numbers(&bare), numbers(&full));
    assert!(bare.weights() == full.weights(), "the weights differ");
    assert!(!bare.dir.join("trace").exists());

    let trace = TraceDir::open(&full.dir).expect("opens");
    assert_eq!((trace.steps(), trace.notes().len()), (vec![1, 2, 3], 0));
    for step in [3, 2] {
        let manifest = trace.manifest(step).expect("there");
        let state = state_before(&trace, manifest);
        assert!(state.models.values().all(|(_, stored)| stored.is_some()));
        let mut run = start(&place.grpo("none", &[]));
        run.recall(&state).expect("a state of these models");
        let versions = run.versions().expect("versions");
        assert_eq!(versions["actor"], manifest.models["actor"].version);
        let output = run.step().expect("runs");
        assert_eq!(output.metrics.step, step);
        let recorded = decided(&full.metrics()[step as usize]);
        for (name, value) in output.metrics.values {
            if !name.starts_with("perf/") {
                assert_eq!(recorded[&name].to_bits(), value.to_bits(), "{name}");
            }
        }
    }
    // The frozen reference is stored once, the actor once per step.
    let states = fs::read_dir(full.dir.join("trace/state")).expect("a folder");
    assert_eq!(states.count(), 2 * (3 + 1));
}

/// Stops before the update of step 3.
struct StopAtThree;

impl Rule for StopAtThree {
    fn name(&self) -> &str {
        "stop_at_three"
    }
    fn severity(&self) -> RuleSeverity {
        RuleSeverity::Stop
    }
    fn advice(&self) -> &str {
        "nothing"
    }
    fn before_update(&mut self, view: &StepView<'_>, _: f64) -> Vec<Hit> {
        match view.step {
            3 => vec![Hit::default()],
            _ => Vec::new(),
        }
    }
}

#[test]
fn steps_of_the_flight_recorder_can_be_recalled() {
    let place = Place::new();
    let plain = place.train("plain", &[]);
    let pipe = place.grpo("stopped", &[]).rule(|| StopAtThree);
    let plan = pipe.plan().expect("a plan");
    let mut trainer = Trainer::with_options(plan, TrainerOptions::default()).expect("starts");
    let error = trainer.train().expect_err("stops");
    assert_eq!(error.code(), "R017");
    let trace = TraceDir::open(&place.path("stopped")).expect("opens");
    assert!(trace.steps().ends_with(&[2, 3]), "{:?}", trace.steps());
    for step in [2, 3] {
        let manifest = trace.manifest(step).expect("there");
        assert_eq!(
            (manifest.reason == Reason::Asked, manifest.ended),
            (false, step == 2)
        );
        assert_eq!(manifest.models["actor"].version.step, step - 1);
        let mut run = start(&place.grpo("none", &[]));
        run.recall(&state_before(&trace, manifest))
            .expect("a state of these models");
        let output = run.step().expect("runs");
        let recorded = decided(&plain.metrics()[step as usize]);
        let loss = output.metrics.values["actor/loss"];
        assert_eq!(recorded["actor/loss"].to_bits(), loss.to_bits());
    }
}

#[test]
fn log_probs_are_compared_with_their_counterparts() {
    let place = Place::new();
    let run = place.train("run", &[]);
    let trace = TraceDir::open(&run.dir).expect("opens");
    let rows = trace.stats(1..=1).expect("reads");
    let of = |stage: &str, key: &str| {
        let row = rows.iter().find(|row| row.stage == stage && row.key == key);
        row.unwrap_or_else(|| panic!("{stage} {key}")).clone()
    };
    let old = of("old_log_probs", "old_log_probs");
    let ratio = old.ratio.expect("compared");
    assert_eq!(ratio.counterpart, "rollout_log_probs");
    assert!(ratio.tokens > 0 && ratio.diff_max < 1e-4 && ratio.ess > 0.999);
    let reference = of("ref_log_probs", "ref_log_probs")
        .ratio
        .expect("compared");
    assert_eq!(reference.counterpart, "old_log_probs");
    // The reference starts as the policy.
    assert_eq!((reference.k1, reference.diff_max), (0.0, 0.0));
    let texts = of("generate", "response_texts");
    assert!(texts.length_mean.is_some() && texts.truncated_share.is_some());
    assert_eq!(run.metrics()[1]["actor/first_ppo_kl"].as_f64(), Some(0.0));
}

/// `pipe train` on the tiny pipeline in a separate process.
fn spawn(place: &Place, run: &str, threads: &str, more: &[&str]) -> Child {
    let file = place.path("tiny.toml");
    fs::write(&file, GRPO).expect("a file");
    Command::new(env!("CARGO_BIN_EXE_pipe"))
        .arg("train")
        .arg(&file)
        .arg(format!("run.dir={}", place.path(run).display()))
        .args(more)
        .env("RAYON_NUM_THREADS", threads)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts")
}

fn stats(dir: &Path) -> Vec<StatRow> {
    let trace = TraceDir::open(dir).expect("opens");
    trace.stats(..).expect("reads")
}

#[test]
fn statistics_do_not_depend_on_the_number_of_threads() {
    let place = Place::new();
    for threads in ["1", "4"] {
        let ended = spawn(&place, threads, threads, &[]).wait().expect("ends");
        assert!(ended.success());
    }
    let (one, four) = (stats(&place.path("1")), stats(&place.path("4")));
    assert!(!one.is_empty());
    assert_eq!(one, four);
}

#[test]
fn a_killed_run_leaves_a_trace_that_opens() {
    let place = Place::new();
    for (at, wanted) in [1usize, 4, 9].into_iter().enumerate() {
        let run = format!("run{at}");
        let dir = place.path(&run);
        let mut child = spawn(&place, &run, "2", &["steps=100000", "--debug"]);
        let since = Instant::now();
        let begun = || fs::read_dir(dir.join("trace/steps")).map_or(0, Iterator::count);
        while begun() < wanted && since.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // SIGKILL: the process ends immediately.
        child.kill().expect("is killed");
        let _ = child.wait();
        let trace = TraceDir::open(&dir).expect("opens");
        let steps = trace.steps();
        assert!(steps.len() + trace.notes().len() >= wanted, "{steps:?}");
        assert!(trace.notes().len() <= 1, "{:?}", trace.notes());
        // Complete up to the last complete step.
        assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
        for step in &steps {
            let whole = trace.step(*step).expect("reads");
            assert_eq!(whole.stages.len(), 7);
            state_before(&trace, &whole.manifest);
        }
        let last = stats(&dir).last().map_or(0, |row| row.step);
        assert!(last >= steps.len() as u64, "{last} {steps:?}");
    }
}
