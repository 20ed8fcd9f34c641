//! Dynamic sampling on a real model: waves, the groups that are kept, and the end of a run without a signal.

use verl::pipe::config::read_pipeline;
use verl::pipe::diagnostic::Findings;
use verl::pipe::pipe::DataPipe;
use verl::pipe::run::runner::{Run, StepOutput};

use crate::kit::{GRPO, Place, root, start, trainer};

/// The example file with overrides, run in `place`.
fn example(place: &Place, more: &[&str]) -> DataPipe {
    let mut overrides: Vec<String> = more.iter().map(|text| (*text).to_owned()).collect();
    overrides.push(format!("run.dir={}", place.path("run").display()));
    let file = root().join("examples/pipelines/dapo_addition.toml");
    read_pipeline(&file, &overrides, &verl::registry())
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)))
}

#[test]
fn the_example_keeps_groups_with_a_signal() {
    let place = Place::new();
    let small = [
        "steps=2",
        "batch.prompts=4",
        "batch.mini_batch=2",
        "batch.micro_batch=8",
        "filter_groups.groups=4",
        "filter_groups.max_waves=8",
        "evaluate.questions=8",
    ];
    let mut trainer = trainer(&example(&place, &small)).expect("a trainer");
    for _ in 0..2 {
        let metrics = trainer.step().expect("a step");
        let get = |name: &str| metrics.get(name).unwrap_or_else(|| panic!("{name}"));
        let (waves, kept) = (get("filter_groups/waves"), get("filter_groups/groups_kept"));
        assert_eq!(kept, 4.0);
        assert!((1.0..=8.0).contains(&waves), "{waves}");
        let with_signal = get("filter_groups/signal_share") * waves * 4.0;
        let surplus = get("filter_groups/groups_surplus");
        assert!((with_signal - kept - surplus).abs() < 1e-9, "{metrics:?}");
        // Rewards differ within each trained group, but not within each drawn group.
        assert_eq!(get("reward/groups_without_signal"), 0.0);
        assert!(get("overlong/penalty_mean") <= 0.0);
        assert!(get("actor/grad_norm") > 0.0);
    }
}

#[test]
fn a_model_that_never_answers_gets_helpful_advice() {
    let place = Place::new();
    let tiny = format!("actor.path={}", place.path("tiny").display());
    let hopeless = [
        tiny.as_str(),
        "actor.init=random",
        "steps=2",
        "batch.prompts=4",
        "batch.mini_batch=2",
        "batch.micro_batch=8",
        "filter_groups.groups=4",
        "evaluate.questions=2",
    ];
    let mut trainer = trainer(&example(&place, &hopeless)).expect("a trainer");
    let error = trainer.train().expect_err("no answer is right");
    assert_eq!(error.code(), "R016");
    let text = error.to_string();
    for word in [
        "0 of 16 groups in 4 waves",
        "filter_groups/all_low 16.0000",
        "filter_groups/score_mean 0.0000",
        "batch.prompts",
    ] {
        assert!(text.contains(word), "`{word}` is not in {text}");
    }
}

/// [`GRPO`] with a filter that keeps three groups with a low mean, so that steps differ in their number of waves.
fn filtered(place: &Place, more: &[&str]) -> DataPipe {
    let filter = "kind = \"filter_groups\"\ngroups = 3\nmax_mean = 0.5";
    let advantages = "[[stages]]\nkind = \"advantages\"";
    let text = GRPO
        .replace(advantages, &format!("[[stages]]\n{filter}\n\n{advantages}"))
        .replace("micro_batch = 8", "micro_batch = 4");
    place
        .parse(&text, "run", more)
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)))
}

/// The metrics of a step that depend only on the seed.
fn decided(output: StepOutput) -> Vec<(String, f64)> {
    let values = output.metrics.values.into_iter();
    values
        .filter(|(name, _)| !name.starts_with("perf/"))
        .collect()
}

fn weights(run: &mut Run) -> String {
    run.versions().expect("a worker")["actor"].hash.clone()
}

#[test]
fn refilled_steps_repeat_bit_by_bit_whatever_the_bound() {
    let place = Place::new();
    let steps = |waves: &str| {
        let mut run = start(&filtered(&place, &[waves]));
        let steps: Vec<_> = (0..3)
            .map(|_| decided(run.step().expect("a step")))
            .collect();
        (steps, weights(&mut run))
    };
    let first = steps("filter_groups.max_waves=9");
    let waves: Vec<f64> = first
        .0
        .iter()
        .flatten()
        .filter(|(name, _)| name == "filter_groups/waves")
        .map(|(_, waves)| *waves)
        .collect();
    assert!(waves.iter().any(|waves| *waves > 1.0), "{waves:?}");
    assert_eq!(steps("filter_groups.max_waves=9"), first);
    assert_eq!(steps("filter_groups.max_waves=16"), first);

    let mut run = start(&filtered(&place, &["filter_groups.max_waves=9"]));
    run.step().expect("step 1");
    let snapshot = run.snapshot().expect("a snapshot");
    let second = decided(run.step().expect("step 2"));
    let third = decided(run.step().expect("step 3"));
    run.restore(&snapshot).expect("a snapshot of this run");
    assert_eq!(decided(run.step().expect("step 2 again")), second);
    assert_eq!(decided(run.step().expect("step 3 again")), third);
    assert_eq!(weights(&mut run), first.1);
}

#[test]
fn the_first_wave_is_the_step_without_a_filter() {
    let place = Place::new();
    let plain = place.grpo("run", &["steps=1"]);
    let all = [
        "filter_groups.max_waves=1",
        "filter_groups.max_mean=2",
        "steps=1",
    ];
    let (mut plain, mut kept) = (start(&plain), start(&filtered(&place, &all)));
    let (one, other) = (
        decided(plain.step().expect("a step")),
        decided(kept.step().expect("a step")),
    );
    // Sampling, rewards and lengths are of the same rows, independent of later stages.
    for name in [
        "response/length_mean",
        "prompt/length_mean",
        "reward/correct_share",
    ] {
        let of = |step: &[(String, f64)]| step.iter().find(|(n, _)| n == name).map(|(_, v)| *v);
        assert!(of(&one).is_some(), "{name}");
        assert_eq!(of(&one), of(&other), "{name}");
    }
}
