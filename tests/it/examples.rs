//! The examples do what they say.

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
use verl::pipe::config::{read_pipeline, to_toml};
use verl::prelude::*;

use crate::kit::{Place, root, trainer};
use custom_model::{mixer, pipeline};
use grpo_addition::{addition, chained, stage_by_stage};

#[test]
fn the_run_in_rust_is_the_run_of_the_file() {
    let model = root().join("examples/models/addition-init");
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
    // ln 32 = 3.47 for a guess; the form of an answer alone brings less than 1.5.
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
fn models_of_ones_own_are_told_in_the_plan() {
    let pipe = pipeline(&root().join("nowhere"), "run".into(), 1);
    let findings = pipe.plan().err().expect("no tokenizer");
    let text = Findings(findings).to_string();
    assert!(
        text.contains("tokenizer") && text.contains("nowhere"),
        "{text}"
    );
}
