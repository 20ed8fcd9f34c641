//! The examples do what they claim.

#[path = "../../examples/custom_algorithm.rs"]
#[expect(dead_code, reason = "the example's main is not called")]
mod custom_algorithm;
#[path = "../../examples/custom_model.rs"]
#[expect(dead_code, reason = "the example's main is not called")]
mod custom_model;
#[path = "../../examples/custom_stage.rs"]
#[expect(dead_code, reason = "the example's main is not called")]
mod custom_stage;
#[path = "../../examples/grpo_addition.rs"]
#[expect(dead_code, reason = "the example's main is not called")]
mod grpo_addition;

use burn::tensor::Device;
use verl::models::conformance::{check_model, check_saving};
use verl::models::parameters::load_parameters;
use verl::pipe::config::{parse_pipeline, read_pipeline, to_toml};
use verl::prelude::*;

use crate::kit::{GRPO, Place, root, trainer};
use custom_model::{mixer, pipeline};
use grpo_addition::{addition, chained, stage_by_stage};

#[test]
fn the_run_in_rust_is_the_run_of_the_file() {
    let model = root().join("examples/models/addition-base");
    let file = root().join("examples/pipelines/grpo_addition.toml");
    let overrides = [
        format!("actor.path={}", model.display()),
        format!("ref.path={}", model.display()),
        "run.dir=runs/grpo_addition_rs".to_owned(),
    ];
    let of_file = read_pipeline(&file, &overrides, &verl::registry()).expect("a pipeline");
    let (builder, operator) = (
        stage_by_stage(addition(&model, of_file.run.steps)),
        chained(addition(&model, of_file.run.steps)),
    );
    let settings = |pipe: &DataPipe| to_toml(pipe).expect("a file");
    assert_eq!(settings(&builder), settings(&of_file));
    assert_eq!(settings(&operator), settings(&of_file));
    let plan = |pipe: &DataPipe| pipe.plan().map_err(Findings).expect("a plan").to_string();
    assert_eq!(plan(&builder), plan(&of_file));
    assert_eq!(plan(&operator), plan(&of_file));
}

#[test]
fn the_custom_algorithm_runs_by_name() {
    let place = Place::new();
    let file = root().join("examples/pipelines/grpo_addition.toml");
    let pipe = custom_algorithm::pipeline(&file, &place.path("tiny"), &place.path("run"));
    let pipe = pipe.map_err(Findings).expect("a pipeline");
    let mut trainer = trainer(&pipe).expect("a trainer");
    for _ in 0..5 {
        let metrics = trainer.step().expect("a step");
        let finite = |name: &str| metrics.get(name).is_some_and(f64::is_finite);
        assert!(finite("actor/pg_loss") && finite("actor/kl"), "{metrics:?}");
        // Off-policy from the second pass on, so the penalty is not 0.
        let pull = metrics
            .get("actor/spo_pull")
            .expect("the loss's own metric");
        assert!(pull > 0.0 && pull.is_finite(), "{metrics:?}");
    }
    trainer.train().expect("an end");

    let config = |pipe: &DataPipe, stage: &str| {
        let mut stages = pipe.stages.iter();
        let stage = stages.find(|decl| decl.name == stage).expect("the stage");
        stage.config.clone()
    };
    let (advantages, update) = custom_algorithm::stages();
    let in_rust = DataPipe::new("in_rust").chain(advantages >> update);
    for stage in ["advantages", "update"] {
        assert_eq!(config(&pipe, stage), config(&in_rust, stage));
    }
    let written = std::fs::read_to_string(place.path("run/config.toml")).expect("a file");
    let again = parse_pipeline::<&str>(&written, "again", &[], &custom_algorithm::registry());
    let again = again.map_err(Findings).expect("a pipeline");
    assert_eq!(config(&again, "update"), config(&pipe, "update"));
    // An unknown kind is reported with the known kinds.
    let unknown = parse_pipeline::<&str>(&written, "again", &[], &verl::registry());
    let text = Findings(unknown.err().expect("unknown kinds")).to_string();
    for words in [
        "unknown loss kind `spo`",
        "unknown estimator kind `median_baseline`",
    ] {
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn parts_that_nobody_registered_run_in_rust() {
    let place = Place::new();
    let (advantages, update) = custom_algorithm::stages();
    let mut pipe = custom_stage::pipeline(&place.path("tiny"), place.path("run"));
    pipe = pipe.model(
        "ref",
        CausalLm {
            init: Init::Random,
            ..CausalLm::frozen(place.path("tiny"))
        },
    );
    pipe.stages
        .retain(|stage| !["advantages", "update"].contains(&stage.name.as_str()));
    let reference = LogProbs {
        model: "ref".to_owned(),
        role: Role::Reference,
        ..LogProbs::default()
    };
    let pipe = pipe.chain(reference >> advantages >> update);
    let mut trainer = trainer(&pipe).expect("a trainer");
    let metrics = trainer.step().expect("a step");
    assert!(
        metrics
            .get("actor/grad_norm")
            .is_some_and(|norm| norm > 0.0)
    );
    // On policy the ratio is 1, and the penalty is 0.
    assert_eq!(metrics.get("actor/spo_pull"), Some(0.0));
    let written = std::fs::read_to_string(place.path("run/config.toml")).expect("a file");
    assert!(
        written.contains("kind = \"spo\"") && written.contains("epsilon = 0.1"),
        "{written}"
    );
}

#[test]
fn settings_of_the_custom_loss_are_checked() {
    let place = Place::new();
    let text = GRPO.replace("kind = \"grpo\"", "kind = \"spo\", epsilon = 0.0");
    let pipe = parse_pipeline::<&str>(&text, "tiny.toml", &[], &custom_algorithm::registry());
    let mut pipe = pipe.map_err(Findings).expect("a pipeline");
    pipe.base = place.path("");
    let findings = pipe.plan().err().expect("a refusal");
    let text = Findings(findings).to_string();
    assert!(
        text.contains("`loss.epsilon` is 0, but it must be positive"),
        "{text}"
    );
}

#[test]
fn the_custom_stage_makes_responses_shorter() {
    let place = Place::new();
    let pipe = custom_stage::pipeline(&place.path("tiny"), place.path("run"));
    let mut trainer = trainer(&pipe).expect("a trainer");
    let mut rewards = Vec::new();
    for _ in 0..5 {
        let metrics = trainer.step().expect("a step");
        let (reward, penalty) = (
            metrics.reward().expect("a reward"),
            metrics
                .get("length/penalty_mean")
                .expect("the stage's metric"),
        );
        let correct = metrics
            .get("reward/correct_share")
            .expect("the rule's metric");
        assert!((reward - (correct - penalty)).abs() < 1e-6, "{metrics:?}");
        rewards.push(reward);
    }
    assert!(rewards[4] > rewards[0], "{rewards:?}");
}

#[test]
fn the_custom_model_conforms() {
    let model = mixer(&Device::flex(), 1).expect("a model");
    assert_eq!(check_model(&model), []);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let violations = check_saving(&model, &dir.path().join("mixer"), |dir| {
        load_parameters(mixer(&Device::flex(), 2)?, &dir.join("mixer.safetensors"))
    });
    assert_eq!(violations, []);
}

#[test]
fn the_custom_model_learns() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = root().join("examples/models/addition-init");
    let pipe = pipeline(&tokenizer, dir.path().join("run"), 40);
    let mut trainer = trainer(&pipe).expect("a trainer");
    let first = trainer.step().expect("step 1");
    let mut last = first.clone();
    while trainer.run().steps_done() < 40 {
        last = trainer.step().expect("a step");
    }
    // ln 32 = 3.47 for a uniform guess; knowing only the form of an answer gives less than 1.5.
    let (first, loss) = (first.loss().expect("a loss"), last.loss().expect("a loss"));
    assert!(first > 3.0 && loss < 1.5, "{first} became {loss}");
    let well_formed = last
        .get("eval/well_formed")
        .expect("the last step is evaluated");
    assert!(well_formed > 0.8, "{well_formed}");
    trainer.train().expect("the model is saved");
    assert!(
        dir.path()
            .join("run/model/actor/mixer.safetensors")
            .is_file()
    );
}

#[test]
fn custom_models_are_listed_in_the_plan() {
    let pipe = pipeline(&root().join("nowhere"), "run".into(), 1);
    let findings = pipe.plan().err().expect("no tokenizer");
    let text = Findings(findings).to_string();
    assert!(
        text.contains("tokenizer") && text.contains("nowhere"),
        "{text}"
    );
}

/// The built-ins with the kinds of `examples/custom_algorithm.rs`.
pub fn registry_of_the_custom_algorithm() -> verl::pipe::registry::Registry {
    custom_algorithm::registry()
}
