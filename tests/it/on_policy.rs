//! Rollout and training agree on the policy.

use std::sync::{Arc, Mutex};

use verl::prelude::*;

use crate::kit::{GRPO, Place, start};

/// Differences between two forward passes with the same weights and other shapes, nats.
const TOLERANCE: f32 = 1e-4;

#[test]
fn recomputed_log_probs_are_those_of_the_rollout() {
    let place = Place::new();
    let pairs: Arc<Mutex<Vec<(f32, f32)>>> = Arc::default();
    let seen = pairs.clone();
    let compare = StageSpec::new()
        .reads(keys::ROLLOUT_LOG_PROBS)
        .reads(keys::OLD_LOG_PROBS)
        .rows(RowRule::Sink);
    // The scoring stages use the temperature of the sampling stage.
    let pipe = place
        .parse(GRPO, "run", &["generate.temperature=0.8"])
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)))
        .add_stage(
            "compare",
            stage_fn(compare, move |batch, _| {
                let rollout = batch.get(&keys::ROLLOUT_LOG_PROBS)?;
                let old = batch.get(&keys::OLD_LOG_PROBS)?;
                let mut pairs = seen.lock().map_err(|e| StageError::failed(e.to_string()))?;
                pairs.extend(
                    rollout
                        .values()
                        .iter()
                        .copied()
                        .zip(old.values().iter().copied()),
                );
                Ok(())
            }),
        );

    let mut run = start(&pipe);
    let first = run.step().expect("step 1").metrics;
    let pairs = pairs.lock().expect("no panic");
    assert!(pairs.len() > 40, "{}", pairs.len());
    for (rollout, old) in pairs.iter() {
        assert!((rollout - old).abs() <= TOLERANCE, "{rollout} is not {old}");
    }
    // The only update of the step starts from the weights that sampled: every ratio is 1.
    assert!(first.get("actor/ppo_kl").expect("recorded").abs() < 1e-6);
    assert_eq!(first.get("actor/pg_clipfrac"), Some(0.0));
    assert!(first.get("actor/grad_norm").expect("recorded") > 0.0);
}

#[test]
fn later_updates_of_a_step_are_off_policy() {
    let place = Place::new();
    let mut run = start(&place.grpo(
        "run",
        &["batch.epochs=3", "actor.optimizer.learning_rate=0.02"],
    ));
    let metrics = run.step().expect("step 1").metrics;
    assert!(metrics.get("actor/ppo_kl").expect("recorded").abs() > 1e-4);
}

#[test]
fn another_temperature_in_the_update_is_refused() {
    let place = Place::new();
    let refused = |change: &str| {
        let findings = place
            .grpo("run", &[change])
            .plan()
            .err()
            .expect("a refusal");
        Findings(findings).to_string()
    };
    let text = refused("old_log_probs.temperature=0.7");
    for word in ["temperature", "old_log_probs", "0.7", "1"] {
        assert!(text.contains(word), "`{word}` is not in {text}");
    }
    let text = refused("update.temperature=0.7");
    assert!(
        text.contains("update") && text.contains("temperature"),
        "{text}"
    );
}
