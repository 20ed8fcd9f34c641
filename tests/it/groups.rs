//! Pipelines over several device groups compute what they compute in one.

use verl::pipe::run::runner::Run;
use verl::prelude::*;

use crate::critic::{ppo_with_reward_model, train_reward_model};
use crate::kit::{Place, start};

/// The actor and its critic in one group, the models that only score in another.
const TWO_GROUPS: &[&str] = &[
    "groups.train.devices=cpu",
    "groups.score.devices=cpu",
    "devices.group=train",
    "ref.group=score",
    "reward.group=score",
];

/// Metrics of three steps without times, and the versions of all models after them.
fn three_steps(run: &mut Run) -> String {
    let mut steps = Vec::new();
    for _ in 0..3 {
        let output = run.step().expect("a step");
        let mut values = output.metrics.values;
        values.retain(|name, _| !name.starts_with("perf/"));
        steps.push((values, output.samples));
    }
    format!("{steps:?}\n{:?}", run.versions().expect("versions"))
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
