use burn::tensor::Device;

use super::*;
use crate::toy::Toy;

/// The numbers below come from the formula in f64; three steps in f32 stay within this distance.
const ROUNDING: f32 = 1e-6;

fn config() -> OptimizerConfig {
    OptimizerConfig {
        learning_rate: 0.1,
        betas: [0.9, 0.95],
        weight_decay: 0.1,
        max_grad_norm: None,
        ..OptimizerConfig::default()
    }
}

/// A toy whose embedding is these three numbers and whose gain is 1.
fn toy() -> Toy {
    let mut toy = Toy::new(3, 1, 8);
    let values = Tensor::from_data([[1.0], [-2.0], [0.5]], &Device::flex());
    toy.embedding = toy.embedding.map(|_| values);
    toy
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter().collect()
}

/// Gradients of the embedding and of the gain.
fn gradients(embedding: [f32; 3], gain: f32) -> Vec<Option<Tensor<1>>> {
    let tensor = |values: &[f32]| Some(Tensor::from_data(values, &Device::flex()));
    vec![tensor(&embedding), None, None, tensor(&[gain])]
}

#[track_caller]
fn close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() < ROUNDING, "{got:?} is not {expected:?}");
    }
}

fn step(optimizer: &mut AdamW, toy: Toy, gradients: Vec<Option<Tensor<1>>>) -> (Toy, StepReport) {
    let parameters = TrainableParameters::new(&toy);
    let (toy, report) = optimizer.step(toy, &parameters, gradients);
    (toy, report.expect("finite gradients"))
}

#[test]
fn three_steps_match_the_formula() {
    let mut optimizer = AdamW::new(config()).expect("valid settings");
    let mut toy = toy();
    let untouched = values(toy.query.val());
    // The embedding is a matrix and decays; the gain is a vector and does not.
    let steps = [
        ([0.5, -1.0, 2.0], 0.3, [0.89, -1.88, 0.395], 0.9),
        (
            [-0.25, 0.75, 1e-3],
            0.3,
            [0.8542631, -1.8522359, 0.3231475],
            0.8,
        ),
        (
            [1.5, 0.1, -3.0],
            -0.6,
            [0.7799601, -1.8319001, 0.3441198],
            0.8074709,
        ),
    ];
    for (embedding, gain, expected_embedding, expected_gain) in steps {
        (toy, _) = step(&mut optimizer, toy, gradients(embedding, gain));
        close(&values(toy.embedding.val()), &expected_embedding);
        close(&values(toy.gain.val()), &[expected_gain]);
    }
    assert_eq!(optimizer.steps(), 3);
    assert_eq!(values(toy.query.val()), untouched);
}

#[test]
fn the_reported_norm_is_the_one_before_clipping() {
    let clipping = |max_grad_norm| OptimizerConfig {
        max_grad_norm,
        weight_decay: 0.0,
        eps: 0.1,
        ..config()
    };
    let mut optimizer = AdamW::new(clipping(Some(1.0))).expect("valid settings");
    let (clipped, report) = step(&mut optimizer, toy(), gradients([3.0, 4.0, 0.0], 0.0));
    assert_eq!((report.grad_norm, report.clipped), (5.0, true));
    // For gradients 0.6 and 0.8, a step is 0.1 g / (g + 0.1).
    let expected = [1.0 - 0.06 / 0.7, -2.0 - 0.08 / 0.9, 0.5];
    close(&values(clipped.embedding.val()), &expected);

    let mut optimizer = AdamW::new(clipping(None)).expect("valid settings");
    let (free, report) = step(&mut optimizer, toy(), gradients([3.0, 4.0, 0.0], 0.0));
    assert_eq!((report.grad_norm, report.clipped), (5.0, false));
    let expected = [1.0 - 0.3 / 3.1, -2.0 - 0.4 / 4.1, 0.5];
    close(&values(free.embedding.val()), &expected);
}

#[test]
fn the_schedule_counts_optimiser_steps() {
    let schedule = Schedule::Linear {
        warmup_steps: 2,
        total_steps: None,
        final_share: 0.0,
    };
    let config = OptimizerConfig {
        schedule,
        ..config()
    };
    let refused = AdamW::new(config.clone()).expect_err("the length of the run is unknown");
    assert_eq!(refused.setting, "schedule.total_steps");
    let config = config.for_run(Some(4));
    let mut optimizer = AdamW::new(config).expect("valid settings");
    let mut toy = toy();
    let mut rates = Vec::new();
    for _ in 0..4 {
        let report;
        (toy, report) = step(&mut optimizer, toy, gradients([1.0; 3], 1.0));
        rates.push(report.learning_rate);
    }
    assert_eq!(rates, [0.05, 0.1, 0.05, 0.0]);
}

#[test]
fn a_non_finite_gradient_changes_nothing() {
    let mut optimizer = AdamW::new(config()).expect("valid settings");
    let toy = toy();
    let parameters = TrainableParameters::new(&toy);
    let (toy, report) = optimizer.step(toy, &parameters, gradients([1.0; 3], f32::NAN));
    let error = report.expect_err("a NaN").to_string();
    assert_eq!(
        error,
        "gradient of `gain` is not finite (NaN); the weights are unchanged"
    );
    assert_eq!(values(toy.embedding.val()), [1.0, -2.0, 0.5]);
    assert_eq!(optimizer.steps(), 0);
}

#[test]
fn a_parameter_used_twice_is_stepped_once() {
    let mut toy = toy();
    toy.query = toy.value.clone();
    let parameters = TrainableParameters::new(&toy);
    let names: Vec<_> = parameters.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["embedding", "query", "gain"]);
    let gradient = Tensor::from_data([1.0], &Device::flex());
    let mut optimizer = AdamW::new(config()).expect("valid settings");
    let before = values(toy.value.val());
    let (toy, _) = optimizer.step(toy, &parameters, vec![None, Some(gradient)]);
    assert_ne!(values(toy.value.val()), before);
    assert_eq!(values(toy.query.val()), values(toy.value.val()));
}

#[test]
fn settings_out_of_range_are_named() {
    let refused = |config: OptimizerConfig| {
        let error = config.validate().expect_err("out of range");
        error.to_string()
    };
    assert_eq!(OptimizerConfig::default().validate(), Ok(()));
    assert_eq!(
        refused(OptimizerConfig {
            betas: [0.9, 1.0],
            ..config()
        }),
        "optimiser setting `betas[1]` is 1, but must be >= 0 and < 1"
    );
    assert_eq!(
        refused(OptimizerConfig {
            learning_rate: f64::NAN,
            ..config()
        }),
        "optimiser setting `learning_rate` is NaN, but must be >= 0"
    );
    assert_eq!(
        refused(OptimizerConfig {
            max_grad_norm: Some(0.0),
            ..config()
        }),
        "optimiser setting `max_grad_norm` is 0, but must be > 0"
    );
}

#[test]
fn unknown_settings_are_refused() {
    let text = r#"{"learning_rate": 0.001, "weight_decy": 0.1}"#;
    assert!(serde_json::from_str::<OptimizerConfig>(text).is_err());
    let text = r#"{"learning_rate": 0.001}"#;
    let config: OptimizerConfig = serde_json::from_str(text).expect("defaults for the rest");
    assert_eq!(config.eps, 1e-8);
}
