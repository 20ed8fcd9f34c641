//! Every loss and every estimator that is registered trains the tiny model.

use verl::pipe::diagnostic::Diagnostic;
use verl::prelude::*;

use crate::kit::{GRPO, Place, start};

/// Names of the kinds of a slot.
fn kinds(slot: &str) -> Vec<&'static str> {
    let registry = verl::registry();
    let kinds = registry.slot(slot).expect("the slot");
    kinds.iter().map(|kind| kind.name).collect()
}

/// The tiny pipeline with these overrides, and with stand-ins for what a critic and a greedy rollout write.
fn pipeline(place: &Place, overrides: &[&str]) -> Result<DataPipe, Vec<Diagnostic>> {
    let values = StageSpec::new().reads(keys::RESPONSES).writes(keys::VALUES);
    let baselines = StageSpec::new()
        .reads(keys::RESPONSES)
        .writes(keys::REWARD_BASELINES);
    let pipe = place.parse(GRPO, "run", overrides)?;
    Ok(pipe
        .add_stage(
            "values",
            stage_fn(values, |batch, context| {
                let lengths = batch.get(&keys::RESPONSES)?;
                let rows = lengths.rows().map(|row| vec![0.25f32; row.len()]);
                let column = RaggedColumn::from_rows(rows);
                let mut output = batch.rows_only();
                output.put(&keys::VALUES, column)?;
                context.emit(output)
            }),
        )
        .add_stage(
            "baselines",
            stage_fn(baselines, |batch, context| {
                let mut output = batch.rows_only();
                output.put(&keys::REWARD_BASELINES, vec![0.5f32; batch.num_rows()])?;
                context.emit(output)
            }),
        ))
}

/// Two steps of two passes each; told by its metrics that the weights were moved.
#[track_caller]
fn check_trains(pipe: &DataPipe, name: &str) {
    let mut run = start(pipe);
    let mut norms = Vec::new();
    for _ in 0..2 {
        let metrics = run.step().expect("a step").metrics;
        let loss = metrics.get("actor/pg_loss").expect("a policy loss");
        let norm = metrics.get("actor/grad_norm").expect("a gradient");
        assert!(loss.is_finite() && norm.is_finite(), "{name}: {metrics:?}");
        norms.push(norm);
    }
    assert!(norms.iter().any(|norm| *norm > 0.0), "{name}: {norms:?}");
}

#[test]
fn every_estimator_trains_with_and_without_a_penalty() {
    let place = Place::new();
    for kind in kinds("estimator") {
        let estimator = format!("advantages.estimator={kind}");
        for penalty in ["advantages.kl_coef=0", "advantages.kl_coef=0.1"] {
            let pipe = pipeline(&place, &[&estimator, penalty, "update.loss.kl_coef=0"]);
            check_trains(&pipe.map_err(Findings).expect("a pipeline"), kind);
        }
    }
}

#[test]
fn every_policy_loss_trains_with_all_its_terms() {
    let place = Place::new();
    let mut trained = Vec::new();
    for kind in kinds("loss") {
        let loss = format!("update.loss={{ kind = \"{kind}\" }}");
        let plain = pipeline(&place, &[&loss, "batch.epochs=2"]);
        let plain = plain.map_err(Findings).expect("a pipeline");
        // A loss on other data than responses misses its keys here.
        if let Err(findings) = plain.plan() {
            let misses = findings.iter().any(|finding| finding.code == "P002");
            assert!(misses, "{kind}: {}", Findings(findings));
            continue;
        }
        check_trains(&plain, kind);
        let loss =
            format!("update.loss={{ kind = \"{kind}\", kl_coef = 0.1, entropy_coef = 0.01 }}");
        let whole = pipeline(&place, &[&loss, "batch.epochs=2"]);
        check_trains(&whole.map_err(Findings).expect("a pipeline"), kind);
        trained.push(kind);
    }
    for kind in ["cispo", "gpg", "grpo", "gspo"] {
        assert!(trained.contains(&kind), "{trained:?}");
    }
}
