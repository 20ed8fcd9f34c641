//! One optimiser step side by side with TRL: the same inputs, the loss, and every weight after the step.
//!
//! `tests/fixtures/trl/make.py` generated the numbers.

use std::cell::Cell;

use burn::tensor::{Device, Tensor};
use serde_json::Value;
use verl::algos::kl::{KlEstimator, KlEstimatorName};
use verl::algos::losses::{
    ClippedPolicyLoss, Dpo, ImportanceKlLoss, Objective, PreferenceLoss, RatioLevel,
};
use verl::algos::{Aggregation, MicroBatch, MiniBatch};
use verl::models::Decoder;
use verl::models::model::{PackedScores, ScoreRow};
use verl::models::parameters::{load_parameters, visit_parameters};
use verl::prelude::*;

use crate::kit::root;

/// Largest difference of the loss and of any weight; [`allowed`] is stricter for weights.
const TOLERANCE: f64 = 1e-5;

/// Share of the learning rate by which any weight may differ.
const OF_A_STEP: f64 = 0.01;

/// Rounding of a single gradient in f32, of gradients whose norm is 1.
const ROUNDING: f64 = 5e-10;

/// Allowed difference of a weight that the step of TRL moved by `moved`.
///
/// The first step of Adam is lr·g/(|g| + ε), which determines |g|. If |g| is near ε = 1e-8, a rounding of g by δ moves the
/// weight by lr·ε·δ/(|g| + ε)² = lr·(1 − |moved|/lr)²·δ/ε, up to lr/20; otherwise the effect is negligible.
fn allowed(moved: f64, learning_rate: f64) -> f64 {
    let short = 1.0 - (moved.abs() / learning_rate).min(1.0);
    let share = OF_A_STEP + short * short * ROUNDING / OptimizerConfig::default().eps;
    (learning_rate * share).min(TOLERANCE)
}

fn decoder() -> Decoder {
    let dir = root().join("verl-models/tests/models/tiny-random-llama-tied");
    Decoder::load(&dir, &Device::flex()).expect("the tiny model")
}

/// The inputs of a trainer.
struct Facts(Value);

impl Facts {
    fn read(name: &str) -> Facts {
        let path = root().join(format!("tests/fixtures/trl/{name}.json"));
        let text = std::fs::read_to_string(path).expect("a fixture");
        Facts(serde_json::from_str(&text).expect("JSON"))
    }

    fn get<T: serde::de::DeserializeOwned>(&self, name: &str) -> T {
        serde_json::from_value(self.0[name].clone()).unwrap_or_else(|e| panic!("{name}: {e}"))
    }
}

/// Row of each token.
fn rows_of(responses: &[Vec<u32>]) -> Vec<usize> {
    let each = responses.iter().enumerate();
    each.flat_map(|(row, tokens)| std::iter::repeat_n(row, tokens.len()))
        .collect()
}

/// Names, and the values of each parameter.
fn weights(decoder: &Decoder) -> Vec<(String, Vec<f32>)> {
    let mut weights = Vec::new();
    visit_parameters(decoder, |name, _, read| {
        weights.push((name.to_owned(), read().iter::<f32>().collect()));
    });
    weights
}

/// One step on the rows; compares loss, gradient norm and weights with TRL.
fn check(
    name: &str,
    facts: &Facts,
    objective: &Objective,
    mini: &MiniBatch,
    rows: &[(&[u32], &[u32])],
) {
    let rate = facts.get("learning_rate");
    let optimizer = OptimizerConfig {
        learning_rate: rate,
        weight_decay: 0.0,
        max_grad_norm: Some(1.0),
        ..OptimizerConfig::default()
    };
    let mut policy = Policy::new(decoder(), Some(optimizer)).expect("settings");
    let prepared = objective.prepare(mini).expect("a mini-batch");
    let rows: Vec<ScoreRow<'_>> = rows
        .iter()
        .map(|&(prompt, response)| ScoreRow { prompt, response })
        .collect();
    let calls = Cell::new(0);
    let mut loss = |packed: PackedScores| -> Tensor<1> {
        calls.set(calls.get() + 1);
        assert_eq!(packed.rows, mini.rows);
        let micro = MicroBatch::new((0..mini.num_tokens()).collect(), packed.log_probs);
        prepared.loss(&micro).expect("a loss").loss
    };
    let value = policy
        .accumulate(&rows, &|_, _| true, 1.0, false, &mut loss)
        .expect("gradients");
    assert_eq!(calls.get(), 1);
    let report = policy.optimizer_step().expect("a step");

    let (expected, norm): (f64, f64) = (facts.get("loss"), facts.get("grad_norm"));
    assert!(
        (value - expected).abs() <= TOLERANCE,
        "loss {value}, TRL has {expected}"
    );
    let off = (report.grad_norm - norm).abs() / norm;
    assert!(
        report.clipped && off < 1e-4,
        "norm {}, TRL has {norm}",
        report.grad_norm
    );
    let after = root().join(format!("tests/fixtures/trl/{name}.safetensors"));
    let expected = weights(&load_parameters(decoder(), &after).expect("weights of TRL"));
    let (before, got) = (weights(&decoder()), weights(policy.module()));
    let mut moved = 0.0f64;
    for (((name, got), (_, expected)), (_, before)) in got.iter().zip(&expected).zip(&before) {
        assert_eq!(got.len(), expected.len(), "{name}");
        for ((got, expected), before) in got.iter().zip(expected).zip(before) {
            let difference = f64::from((got - expected).abs());
            let step = f64::from(expected - before);
            let allowed = allowed(step, rate);
            assert!(
                difference <= allowed,
                "{name}: differs by {difference:e}, above {allowed:e}; the step is {step:e}"
            );
            moved = moved.max(step.abs());
        }
    }
    // The step itself is far larger than the allowed difference.
    assert!(moved > 0.9 * rate, "{moved:e}");
}

#[test]
fn a_step_of_grpo_is_that_of_trl() {
    let facts = Facts::read("grpo");
    let (prompts, responses): (Vec<Vec<u32>>, Vec<Vec<u32>>) =
        (facts.get("prompts"), facts.get("responses"));
    let advantages: Vec<f64> = facts.get("advantages");
    let flat = |name: &str| Some(facts.get::<Vec<Vec<f64>>>(name).concat());
    let of_tokens = rows_of(&responses);
    let mini = MiniBatch {
        advantages: Some(of_tokens.iter().map(|row| advantages[*row]).collect()),
        old_log_probs: flat("old_log_probs"),
        ref_log_probs: flat("ref_log_probs"),
        ..MiniBatch::new(of_tokens)
    };
    // By default TRL weights the penalty with the ratio, and clamps nothing.
    let estimator = KlEstimator::from(KlEstimatorName::K3Unclamped);
    let objective = Objective::new(Aggregation::TokenMean)
        .with(
            1.0,
            ClippedPolicyLoss {
                clip_low: facts.get("clip_low"),
                clip_high: facts.get("clip_high"),
                dual_clip: None,
            },
        )
        .with(
            facts.get("beta"),
            ImportanceKlLoss {
                estimator,
                level: RatioLevel::Token,
            },
        );
    let rows: Vec<(&[u32], &[u32])> = prompts
        .iter()
        .zip(&responses)
        .map(|(prompt, response)| (&prompt[..], &response[..]))
        .collect();
    check("grpo", &facts, &objective, &mini, &rows);
}

#[test]
fn a_step_of_dpo_is_that_of_trl() {
    let facts = Facts::read("dpo");
    let side = |name: &str| facts.get::<Vec<Vec<u32>>>(name);
    let (prompts, chosen, rejected) = (side("prompts"), side("chosen"), side("rejected"));
    let (of_chosen, of_rejected): (Vec<f64>, Vec<f64>) =
        (facts.get("ref_chosen"), facts.get("ref_rejected"));
    let mut rows: Vec<(&[u32], &[u32])> = Vec::new();
    let mut reference = Vec::new();
    for pair in 0..prompts.len() {
        for (side, sum) in [
            (&chosen[pair], of_chosen[pair]),
            (&rejected[pair], of_rejected[pair]),
        ] {
            rows.push((&prompts[pair], side));
            // Only the sum over a row counts.
            reference.push(sum);
            reference.extend(vec![0.0; side.len() - 1]);
        }
    }
    let responses: Vec<Vec<u32>> = rows.iter().map(|(_, response)| response.to_vec()).collect();
    let mini = MiniBatch {
        ref_log_probs: Some(reference),
        ..MiniBatch::new(rows_of(&responses))
    };
    let dpo = Dpo {
        beta: facts.get("beta"),
        ..Dpo::new(PreferenceLoss::Sigmoid)
    };
    let objective = Objective::new(Aggregation::default()).with_rows(1.0, dpo);
    check("dpo", &facts, &objective, &mini, &rows);
}
