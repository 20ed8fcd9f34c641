//! Pipelines over several device groups compute what they compute in one.

use verl::pipe::run::metrics::StepMetrics;
use verl::pipe::run::runner::Run;
use verl::prelude::*;

use crate::critic::{ppo_with_reward_model, train_reward_model};
use crate::kit::{Place, start};
use crate::preferences::dpo;

/// The actor and its critic in one group, the models that only score in another.
pub const TWO_GROUPS: &[&str] = &[
    "groups.train.devices=cpu",
    "groups.score.devices=cpu",
    "devices.group=train",
    "ref.group=score",
    "reward.group=score",
];

/// Metrics of three steps without times, and the versions of all models after them.
pub fn three_steps(run: &mut Run) -> String {
    steps_with(run, 3, &mut |_| {})
}

/// As [`three_steps`], with `each` after every step.
pub fn steps_with(run: &mut Run, steps: usize, each: &mut dyn FnMut(&StepMetrics)) -> String {
    let mut all = Vec::new();
    for _ in 0..steps {
        let output = run.step().expect("a step");
        each(&output.metrics);
        let mut values = output.metrics.values;
        values.retain(|name, _| !name.starts_with("perf/"));
        all.push((values, output.samples));
    }
    format!("{all:?}\n{:?}", run.versions().expect("versions"))
}

/// Sampling and evaluation in a group of their own, with a copy of the actor.
pub const ROLLOUT_GROUP: &[&str] = &[
    "groups.train.devices=cpu",
    "groups.rollout.devices=cpu",
    "devices.group=train",
    "generate.group=rollout",
    "evaluate.group=rollout",
];

#[test]
fn an_actor_that_is_sampled_in_another_group_computes_the_same_bits() {
    let place = Place::new();
    let observed = |run: &mut Run| {
        let before = format!("{:?}", run.observe(0).expect("an evaluation").samples);
        let steps = three_steps(run);
        let mut after = run.observe(3).expect("an evaluation");
        after
            .metrics
            .values
            .retain(|name, _| !name.starts_with("perf/"));
        format!(
            "{before}\n{steps}\n{:?}\n{:?}",
            after.metrics.values, after.samples
        )
    };
    let one = observed(&mut start(&place.grpo("one", &[])));
    let pipe = place.grpo("two", ROLLOUT_GROUP);
    let schedule = pipe.plan().expect("a plan").schedule().expect("places");
    let models = |group| {
        let models = schedule.models_at(group);
        let models = models.map(|(decl, is_copy)| (decl.name.as_str(), is_copy));
        models.collect::<Vec<_>>()
    };
    assert!(models(0).contains(&("actor", false)));
    assert_eq!(models(1), [("actor", true)]);
    let mut run = start(&pipe);
    let before = run.snapshot().expect("a snapshot");
    let two = observed(&mut run);
    assert!(one == two, "one group: {one}\ntwo groups: {two}");
    // Restored weights travel again.
    run.restore(&before).expect("a snapshot of this run");
    assert!(two == observed(&mut run), "a restored run differs");
}

#[test]
fn replicas_compute_the_same_bits() {
    let place = Place::new();
    train_reward_model(&place);
    type Declared<'a> = &'a dyn Fn(&[&str]) -> DataPipe;
    let pipes: [Declared<'_>; 3] = [
        &|more| place.grpo("grpo", &[&["batch.micro_batch=2"], more].concat()),
        &|more| ppo_with_reward_model(&place, more),
        &|more| dpo(&place, more),
    ];
    for pipe in pipes {
        let one = three_steps(&mut start(&pipe(&[])));
        for devices in ["cpu:0-1", "cpu:0-2", "cpu:0-3"] {
            let setting = format!("devices.group={devices}");
            let replicated = pipe(&[&setting]);
            let text = replicated.plan().expect("a plan").to_string();
            assert!(text.contains("⌈micro-batches / replicas⌉"), "{text}");
            let many = three_steps(&mut start(&replicated));
            assert!(one == many, "one: {one}\n{devices}: {many}");
        }
    }
    // Replicas that are sampled by replicas in another group.
    let one = three_steps(&mut start(&place.grpo("one", &[])));
    let groups = [
        "groups.train.devices=cpu:0-1",
        "groups.rollout.devices=cpu:0-2",
    ];
    let more = [ROLLOUT_GROUP, &groups].concat();
    let many = three_steps(&mut start(&place.grpo("many", &more)));
    assert!(one == many, "one: {one}\nmany: {many}");
}

#[test]
fn weights_travel_once_for_each_version() {
    let place = Place::new();
    let mut run = start(&place.grpo("run", ROLLOUT_GROUP));
    let mut sent = || {
        let output = run.step().expect("a step");
        output.metrics.get("perf/weight_sync_mb").expect("a metric")
    };
    let first = sent();
    assert!(first > 0.0);
    assert_eq!([sent(), sent()], [first, first]);
    let mut alone = start(&place.grpo("run", &[]));
    let output = alone.step().expect("a step");
    assert_eq!(output.metrics.get("perf/weight_sync_mb"), None);
}

#[test]
fn the_four_models_of_ppo_in_two_groups_compute_the_same_bits() {
    let place = Place::new();
    train_reward_model(&place);
    let one = three_steps(&mut start(&ppo_with_reward_model(&place, &[])));
    let pipe = ppo_with_reward_model(&place, TWO_GROUPS);
    let schedule = pipe.plan().expect("a plan").schedule().expect("places");
    let models = |group| {
        let models = schedule.models_at(group);
        models
            .map(|(decl, _)| decl.name.as_str())
            .collect::<Vec<_>>()
    };
    assert_eq!(models(0), ["actor", "critic"]);
    assert_eq!(models(1), ["ref", "reward"]);
    let mut run = start(&pipe);
    let before = run.snapshot().expect("a snapshot");
    let two = three_steps(&mut run);
    assert!(one == two, "one group: {one}\ntwo groups: {two}");
    run.restore(&before).expect("a snapshot of this run");
    assert!(two == three_steps(&mut run), "a restored run differs");
}

#[test]
fn the_plan_shows_groups_edges_and_the_memory_of_each() {
    let place = Place::new();
    train_reward_model(&place);
    let rollout = [
        "groups.rollout.devices=cpu:0-1",
        "generate.group=rollout",
        "groups.score.worker=process",
    ];
    let pipe = ppo_with_reward_model(&place, &[TWO_GROUPS, &rollout].concat());
    let text = pipe.plan().expect("a plan").to_string();
    let part = |start: &str, end: &str| {
        let from = text
            .find(start)
            .unwrap_or_else(|| panic!("no {start} in {text}"));
        let length = text[from..].find(end).expect("an end");
        text[from..from + length].to_owned()
    };
    let groups = part("device groups", "stages, in the order");
    let edges = part("edges into device groups", "training");
    insta::assert_snapshot!("plan_of_groups", format!("{groups}{edges}"));
    assert_eq!(text.matches("estimated peak memory of").count(), 3);
}
