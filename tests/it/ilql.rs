//! Offline: a policy and its value heads learn from a log.

use verl::pipe::pipe::DataPipe;
use verl::pipe::run::runner::Run;
use verl::prelude::*;

use crate::distillation::example;
use crate::kit::{Place, start, trainer};

/// ILQL on one-digit sums, with a tiny model of random weights.
const ILQL: &str = r#"
name = "ilql_tiny"

[run]
seed = 5
steps = 40

[batch]
prompts = 32
micro_batch = 32

[data]
train = { kind = "addition_episodes", max = 9 }
eval = { kind = "addition", split = "heldout", max = 9 }

[models.actor]
kind = "ilql_lm"
path = "tiny"
init = "random"
beta = 2.0
optimizer = { learning_rate = 1e-2 }

[[stages]]
kind = "episodes"

[[stages]]
kind = "update_ilql"
beta = 0.5
target_alpha = 0.2
target_every = 1

[[stages]]
kind = "evaluate"
questions = 6
max_new_tokens = 8
"#;

fn tiny(place: &Place, more: &[&str]) -> DataPipe {
    place
        .parse(ILQL, "run", more)
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)))
}

#[track_caller]
fn metric(metrics: &verl::pipe::run::metrics::StepMetrics, name: &str) -> f64 {
    let value = metrics.get(name);
    value.unwrap_or_else(|| panic!("no {name} in {metrics:?}"))
}

#[test]
fn every_term_decreases() {
    let place = Place::new();
    let mut run = start(&tiny(&place, &[]));
    let steps: Vec<_> = (0..40)
        .map(|_| run.step().expect("a step").metrics)
        .collect();
    for name in ["ilql/cql_loss", "ilql/awac_loss", "ilql/q_loss"] {
        let [first, last] = [&steps[0], &steps[39]].map(|step| metric(step, name));
        assert!(last < 0.8 * first, "{name}: {first} became {last}");
    }
    // Fresh heads return 0 for everything.
    assert_eq!(metric(&steps[0], "ilql/value"), 0.0);
    assert_eq!(metric(&steps[0], "ilql/target_q"), 0.0);
    assert_ne!(metric(&steps[39], "ilql/target_q"), 0.0);
    for step in &steps {
        let reward = metric(step, "episodes/reward_mean");
        assert!((0.0..=1.0).contains(&reward), "{reward}");
        assert!(step.values.values().all(|value| value.is_finite()));
    }
}

#[test]
fn micro_batches_do_not_change_the_result() {
    let place = Place::new();
    let metrics = |micro: &str| {
        let mut run = start(&tiny(&place, &["batch.mini_batch=16", micro]));
        let steps = (0..2).map(|_| run.step().expect("a step").metrics);
        steps.collect::<Vec<_>>()
    };
    let (whole, cut) = (
        metrics("batch.micro_batch=16"),
        metrics("batch.micro_batch=4"),
    );
    for (whole, cut) in whole.iter().zip(&cut) {
        for (name, value) in whole
            .values
            .iter()
            .filter(|(name, _)| name.starts_with("ilql/"))
        {
            let other = metric(cut, name);
            assert!(
                (value - other).abs() < 1e-3 * (1.0 + value.abs()),
                "{name}: {value} or {other}"
            );
        }
    }
}

#[test]
fn what_is_saved_has_its_heads_again() {
    let place = Place::new();
    trainer(&tiny(&place, &["run.steps=3"]))
        .expect("a trainer")
        .train()
        .expect("a run");
    let saved = place.path("run/model/actor");
    assert!(saved.join("ilql_heads.safetensors").is_file());
    let path = format!("actor.path={}", saved.display());
    let text = ILQL.replace("init = \"random\"\n", "");
    let pipe = place.parse(&text, "again", &[&path]).map_err(Findings);
    let mut run = start(&pipe.expect("a pipeline"));
    let first = run.step().expect("a step").metrics;
    // Not the zeros of fresh heads.
    assert_ne!(metric(&first, "ilql/target_q"), 0.0);
    // The folder can also be loaded as an ordinary model.
    let plain = text
        .replace("kind = \"ilql_lm\"\n", "")
        .replace("beta = 2.0\n", "");
    let pipe = place.parse(&plain, "plain", &[&path]).map_err(Findings);
    let error = start(&pipe.expect("a pipeline")).step().err();
    let error = error.expect("a refusal").to_string();
    assert!(error.contains("kind = \"ilql_lm\""), "{error}");
}

#[test]
fn a_log_can_be_a_file_and_its_errors_are_reported() {
    let place = Place::new();
    let log = place.path("log.jsonl");
    let step = |lines: &str, more: &[&str]| {
        std::fs::write(&log, lines).expect("a file");
        let data = format!("data.train={}", log.display());
        let pipe = tiny(&place, &[&[data.as_str()], more].concat());
        let plan = pipe.plan().map_err(Findings).expect("a plan");
        let schedule = plan.schedule().expect("a schedule");
        let run = Run::start(schedule, Default::default());
        let step = run.map_err(|error| error.to_string())?.step();
        step.map(|step| step.metrics)
            .map_err(|error| error.to_string())
    };
    let good = "{\"prompt\": \"1+2\", \"response\": \"#### 3\", \"reward\": 1.5}\n{\"prompt\": \"1+2\", \"response\": \"#### 4\", \"reward\": -0.5}\n";
    let metrics = step(good, &[]).expect("a step");
    assert!((metric(&metrics, "episodes/reward_mean") - 0.5).abs() < 1e-6);
    let bad = good.replace("-0.5", "\"bad\"");
    let error = step(&bad, &[]).expect_err("a refusal");
    assert!(
        error.contains("row 2") && error.contains("`reward` contains \"bad\""),
        "{error}"
    );
    let error = step(good, &["episodes.reward=score"]).expect_err("a refusal");
    assert!(error.contains("no column `score`"), "{error}");
    let long = good.replace("#### 4", &"4".repeat(80));
    let metrics = step(&long, &["episodes.standardize=false"]).expect("a step without that row");
    assert!((metric(&metrics, "episodes/reward_mean") - 1.5).abs() < 1e-6);
    let error = step(&long, &["episodes.on_long=error"]).expect_err("a refusal");
    assert!(
        error.contains("row 2") && error.contains("context of 64"),
        "{error}"
    );
}

#[test]
fn settings_are_checked_with_the_plan() {
    let place = Place::new();
    let findings = |change: &str| {
        let plan = tiny(&place, &[change]).plan();
        Findings(plan.err().expect("a refusal")).to_string()
    };
    assert!(findings("actor.beta=-1").contains("`beta` is -1"));
    assert!(findings("update_ilql.tau=1").contains("`tau` is 1"));
    assert!(findings("episodes.reward=\"\"").contains("`reward` is empty"));
    assert!(findings("episodes.data=log").contains("no data set with this name"));
}

#[test]
fn the_example_runs() {
    let place = Place::new();
    let more = ["run.steps=3", "batch.prompts=16", "batch.micro_batch=16"];
    let mut trainer =
        trainer(&example("ilql_addition.toml", &place.path("run"), &more)).expect("a trainer");
    let first = trainer.step().expect("a step");
    assert!(metric(&first, "ilql/awac_loss") > 0.0);
    trainer.train().expect("an end");
    assert!(place.path("run/model/actor/model.safetensors").is_file());
}
