//! The model of `examples/custom_model.rs` keeps to the rules of models, trains and generates.

#[path = "../../examples/custom_model.rs"]
#[expect(dead_code, reason = "the example's main is not called")]
mod custom_model;

use burn::tensor::Device;
use verl::models::conformance::{check_model, check_saving};
use verl::models::parameters::load_parameters;
use verl::prelude::*;

use crate::kit::{root, trainer};
use custom_model::{mixer, pipeline};

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
