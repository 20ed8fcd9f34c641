//! Replays of recorded steps: for every built-in stage, nothing differs if nothing was changed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use verl::pipe::config::read_pipeline;
use verl::pipe::run::runner::{Run, RunOptions};
use verl::pipe::trace::compare::diff_step;
use verl::pipe::trace::files::{RecordedStep, StepStart};
use verl::pipe::trace::record::MemoryTap;
use verl::pipe::trace::replay::{ReplayError, ReplayScope, Replayer, first_bad};
use verl::prelude::*;

use crate::kit::{GRPO, Place, root, save_value_model};

/// A started run.
fn started(pipe: &DataPipe, options: RunOptions) -> Run {
    let plan = pipe
        .plan()
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)));
    let schedule = plan.schedule().expect("one device group");
    Run::start(schedule, options).expect("a started run")
}

/// Runs `steps` steps on a number of host threads and returns them as recorded, with states and versions of weights,
/// and the run as it was before the first of them.
pub fn record_on(pipe: &DataPipe, steps: u64, host_threads: usize) -> (Vec<RecordedStep>, Run) {
    let options = RunOptions {
        host_threads,
        ..RunOptions::default()
    };
    record_with(pipe, steps, options)
}

/// Like [`record_on`], with other options.
pub fn record_with(pipe: &DataPipe, steps: u64, options: RunOptions) -> (Vec<RecordedStep>, Run) {
    let tap = Arc::new(MemoryTap::default());
    let options = RunOptions {
        tap: tap.clone(),
        ..options
    };
    let mut run = started(pipe, options);
    let mut all = Vec::new();
    for step in 1..=steps {
        let state = run.snapshot().expect("a snapshot");
        let before = run.versions().expect("versions");
        run.step().expect("a step");
        let mut recorded = tap.step(step).expect("a recorded step");
        recorded.seed = Some(run.schedule().plan().context().seed);
        recorded.weights_after = run.versions().expect("versions");
        recorded.state = Some(StepStart::Snapshot(state));
        for (name, stage) in &mut recorded.stages {
            stage.weights.clone_from(&before);
            let declared = pipe.stages.iter().find(|decl| decl.name == *name);
            stage.parameters = declared.map(|decl| decl.config.clone());
        }
        all.push(recorded);
    }
    if let Some(StepStart::Snapshot(first)) = &all[0].state {
        run.restore(first).expect("a snapshot of this run");
    }
    (all, run)
}

/// Like [`record_on`], on three threads.
pub fn record(pipe: &DataPipe, steps: u64) -> (Vec<RecordedStep>, Run) {
    record_on(pipe, steps, 3)
}

const SMALL: [&str; 4] = [
    "steps=2",
    "batch.prompts=8",
    "batch.micro_batch=8",
    "evaluate.questions=4",
];

/// Pipelines with every kind of model and nearly every kind of stage, with overrides that make them small.
pub const EXAMPLES: [(&str, &[&str]); 11] = [
    ("grpo_addition_control.toml", &["batch.samples=2"]),
    (
        "dapo_addition.toml",
        &[
            "batch.mini_batch=2",
            "filter_groups.groups=2",
            "filter_groups.max_waves=8",
        ],
    ),
    ("remax_addition.toml", &[]),
    ("sft_addition.toml", &[]),
    ("dpo_addition.toml", &[]),
    ("kto_addition.toml", &[]),
    ("ilql_addition.toml", &[]),
    ("distillation_addition.toml", &[]),
    ("ppo_addition.toml", &["update.warmup_steps=1"]),
    ("ppo_reward_model_addition.toml", &["update.warmup_steps=1"]),
    (
        "reward_model_addition.toml",
        &["evaluate_reward_model.pairs=4"],
    ),
];

/// An example file, made small.
pub fn example(place: &Place, file: &str, more: &[&str]) -> DataPipe {
    let path = root().join("examples/pipelines").join(file);
    let text = std::fs::read_to_string(&path).expect("an example");
    let small = SMALL.iter().filter(|setting| {
        !setting.starts_with("evaluate.") || text.contains("kind = \"evaluate\"")
    });
    let overrides = small.chain(more).map(|text| (*text).to_owned());
    let mut overrides: Vec<String> = overrides.collect();
    overrides.insert(0, format!("run.dir={}", place.path("run").display()));
    if file.starts_with("ppo_reward_model") {
        let reward = place.path("reward");
        if !reward.exists() {
            save_value_model(&root().join("examples/models/addition-base"), &reward);
        }
        overrides.push(format!("reward.path={}", reward.display()));
    }
    read_pipeline(&path, &overrides, &verl::registry())
        .unwrap_or_else(|findings| panic!("{file}: {}", Findings(findings)))
}

/// Records a pipeline, replays its second step and finds no difference. Returns the kinds of its stages.
#[track_caller]
fn check_replays(pipe: &DataPipe, name: &str) -> Vec<String> {
    let (recorded, mut run) = record(pipe, 2);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    let report = replayer
        .replay(&recorded[1], &ReplayScope::Step)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(report.differences(), 0, "{name}:\n{report}");
    for stage in &report.stages {
        assert!(stage.rows > 0, "{name}:\n{report}");
        assert!(stage.keys.iter().all(|(_, tolerance)| tolerance.is_exact()));
    }
    let schedule = pipe.plan().map_err(Findings).expect("a plan").schedule();
    let schedule = schedule.expect("one device group");
    for step in &recorded {
        let bad = first_bad(&schedule, step, None).expect("nothing to run");
        assert_eq!(bad, None, "{name}: {}", bad.as_ref().expect("a fault"));
    }
    report
        .stages
        .iter()
        .map(|stage| stage.kind.clone())
        .collect()
}

#[test]
fn every_built_in_stage_replays_bit_by_bit() {
    let place = Place::new();
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for (file, more) in EXAMPLES {
        seen.extend(check_replays(&example(&place, file, more), file));
    }
    let advantages = "[[stages]]\nkind = \"advantages\"";
    let corrected = GRPO.replace(
        advantages,
        &format!("[[stages]]\nkind = \"correct_rollout\"\n\n{advantages}"),
    );
    let taught = GRPO
        .replace(advantages, "[[stages]]\nkind = \"teacher_advantages\"")
        .replace("name = \"ref_log_probs\"", "name = \"teacher_log_probs\"");
    let shaped = GRPO.replace(
        advantages,
        &format!("[[stages]]\nkind = \"scale_rewards\"\nscale = \"running\"\n\n[[stages]]\nkind = \"shape_unended\"\npenalty = 0.5\n\n{advantages}\nrename = {{ rewards = \"scaled_rewards\" }}"),
    );
    for (name, text) in [
        ("corrected", &corrected),
        ("taught", &taught),
        ("shaped", &shaped),
    ] {
        // Two optimiser steps per step, over two passes.
        let more = ["batch.mini_batch=2", "batch.epochs=2"];
        let pipe = place
            .parse(text, "run", &more)
            .unwrap_or_else(|findings| panic!("{name}: {}", Findings(findings)));
        seen.extend(check_replays(&pipe, name));
    }
    let registry = verl::registry();
    let kinds = registry.stages().iter().map(|kind| kind.name);
    // An evaluation runs between steps and passes on no rows.
    let missing: Vec<&str> = kinds
        .filter(|kind| !kind.starts_with("evaluate") && !seen.contains(*kind))
        .collect();
    assert!(missing.is_empty(), "not replayed: {missing:?}");
}

#[test]
fn one_stage_or_all_from_one_on_can_be_replayed() {
    let place = Place::new();
    let pipe = place.grpo("none", &[]);
    let (recorded, mut run) = record(&pipe, 3);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    let mut stages = |step: usize, scope: ReplayScope| -> Vec<String> {
        let report = replayer.replay(&recorded[step], &scope).expect("a replay");
        assert_eq!(report.differences(), 0, "{report}");
        report.stages.into_iter().map(|stage| stage.stage).collect()
    };
    // In any order of steps: each starts from its own state.
    for step in [2, 0, 1] {
        for name in ["generate", "reward", "update"] {
            assert_eq!(stages(step, ReplayScope::Stage(name.to_owned())), [name]);
        }
    }
    let from = ReplayScope::From("advantages".to_owned());
    assert_eq!(stages(1, from), ["advantages", "update"]);
    assert_eq!(stages(1, ReplayScope::Step).len(), 7);
}

/// The tiny pipeline, whose rewards take times that depend only on `salt` and the row.
fn with_latencies(place: &Place, salt: u64) -> DataPipe {
    let late = StageSpec::new()
        .reads(keys::REWARDS)
        .writes(keys::SHAPED_REWARDS)
        .slice_rows(1);
    let stage = stage_fn(late, move |mut batch, context| {
        let id = batch.ids().first().map_or(0, |id| id.0);
        let mixed = (id ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        std::thread::sleep(Duration::from_millis(mixed));
        let rewards: Vec<Option<f32>> = batch.get(&keys::REWARDS)?.rows().collect();
        batch.put(&keys::SHAPED_REWARDS, rewards)?;
        context.emit(batch)
    });
    let pipe = place.grpo("none", &["batch.prompts=6", "batch.micro_batch=4"]);
    let mut pipe = pipe.add_stage("late", stage);
    let advantages = pipe
        .stages
        .iter_mut()
        .find(|stage| stage.name == "advantages");
    let advantages = advantages.expect("the stage");
    let shaped = ("rewards".to_owned(), "shaped_rewards".to_owned());
    advantages.rename.extend([shaped]);
    pipe
}

#[test]
fn latencies_and_thread_counts_change_no_bit() {
    let place = Place::new();
    let schedule = |pipe: &DataPipe| {
        let plan = pipe.plan().map_err(Findings).expect("a plan");
        plan.schedule().expect("one device group")
    };
    let pipe = with_latencies(&place, 0);
    let (first, _) = record_on(&pipe, 2, 2);
    for (salt, threads) in [(0, 5), (11, 2), (12, 3), (13, 8)] {
        let (other, _) = record_on(&with_latencies(&place, salt), 2, threads);
        for (a, b) in first.iter().zip(&other) {
            let diff = diff_step(&schedule(&pipe), a, b);
            assert_eq!(diff.first(), None, "salt {salt}, {threads} threads");
            assert!(diff.stages.iter().all(|stage| stage.differences() == 0));
            assert_eq!(a.weights_after, b.weights_after);
        }
    }
}

#[test]
fn what_cannot_be_replayed_is_reported() {
    let place = Place::new();
    let pipe = place.grpo("none", &[]);
    let (mut recorded, mut run) = record(&pipe, 2);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    let mut replay = |step: &RecordedStep, scope: ReplayScope| match replayer.replay(step, &scope) {
        Ok(report) => report.to_string(),
        Err(error) => error.to_string(),
    };
    let of = |name: &str| ReplayScope::Stage(name.to_owned());
    let mut texts = vec![
        replay(&recorded[1], of("advantage")),
        replay(&recorded[1], of("evaluate")),
    ];
    recorded[1].state = None;
    texts.push(replay(&recorded[1], of("generate")));
    // Stages without a trained model need no state; nor does the first step.
    texts.push(replay(&recorded[1], of("reward")));
    recorded[0].state = None;
    texts.push(replay(&recorded[0], of("update")));
    recorded[1].stages.remove("reward");
    texts.push(replay(&recorded[1], of("reward")));
    recorded[1].seed = Some(6);
    texts.push(replay(
        &recorded[1],
        ReplayScope::From("advantages".to_owned()),
    ));
    insta::assert_snapshot!(texts.join("\n---\n"));
    let error = replayer.replay(&recorded[1], &of("update"));
    assert!(matches!(error, Err(ReplayError::NoState { .. })));
    // In a replay of the entire step, the rest is still run.
    let report = replayer.replay(&recorded[1], &ReplayScope::Step);
    let report = report.expect("a replay");
    let again: Vec<&str> = report.stages.iter().map(|s| s.stage.as_str()).collect();
    assert_eq!(again, ["ref_log_probs", "advantages"]);
    let skipped: Vec<&str> = report.skipped.iter().map(|s| s.stage.as_str()).collect();
    assert_eq!(skipped, ["prompts", "generate", "old_log_probs", "update"]);
}
