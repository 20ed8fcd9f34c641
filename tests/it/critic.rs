//! PPO with a critic and with a reward model, as in the example files, on a tiny model.

use std::sync::{Arc, Mutex};

use verl::models::ValueDecoder;
use verl::pipe::run::runner::{Run, StepOutput};
use verl::prelude::*;

use crate::kit::{Finished, Place, decided, root, start, trainer};

/// An example file with small steps and fresh tiny models; its run goes to folder `run`.
fn example(place: &Place, file: &str, models: &[&str], more: &[&str]) -> DataPipe {
    let tiny = place.path("tiny");
    let tiny = models.iter().flat_map(|model| {
        let path = format!("{model}.path={}", tiny.display());
        [path, format!("{model}.init=random")]
    });
    let small = ["steps=3", "console_every=0"].map(str::to_owned);
    let more = more.iter().map(|text| (*text).to_owned());
    let mut overrides: Vec<String> = tiny.chain(small).chain(more).collect();
    overrides.push(format!("run.dir={}", place.path("run").display()));
    let file = root().join("examples/pipelines").join(file);
    read_pipeline(&file, &overrides, &verl::registry())
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)))
}

/// Two optimiser steps for actor and critic in each step; rewards that a model with random weights can earn.
const SMALL: &[&str] = &[
    "batch.prompts=8",
    "batch.mini_batch=4",
    "batch.micro_batch=2",
    "evaluate.questions=4",
    "update.warmup_steps=0",
];

fn ppo(place: &Place, more: &[&str]) -> DataPipe {
    let length = ["reward.rule=length", "reward.target_tokens=4"];
    let overrides = [SMALL, &length, more].concat();
    example(
        place,
        "ppo_addition.toml",
        &["actor", "critic", "ref"],
        &overrides,
    )
}

/// PPO with all four models, against the reward model of folder `run`, which [`train_reward_model`] trains.
pub fn ppo_with_reward_model(place: &Place, more: &[&str]) -> DataPipe {
    let path = format!("reward.path={}", place.path("run/model/reward").display());
    let elsewhere = format!("run.dir={}", place.path("against").display());
    let overrides = [SMALL, &[path.as_str(), elsewhere.as_str()], more].concat();
    let file = "ppo_reward_model_addition.toml";
    example(place, file, &["actor", "critic", "ref"], &overrides)
}

/// Trains the reward-model example for a few steps in folder `run`.
pub fn train_reward_model(place: &Place) {
    let mut first = trainer(&reward_model(place, &["reward.save_as=f32"])).expect("a trainer");
    first.train().expect("a run that ends well");
}

/// 1 − Var(returns − values) / Var(returns) of pairs of a value and a return.
fn explained_variance(pairs: &[(f32, f32)]) -> f64 {
    let variance = |of: &dyn Fn(&(f32, f32)) -> f64| {
        let n = pairs.len() as f64;
        let mean = pairs.iter().map(of).sum::<f64>() / n;
        pairs
            .iter()
            .map(|pair| (of(pair) - mean).powi(2))
            .sum::<f64>()
            / n
    };
    let unexplained = variance(&|(value, back)| f64::from(*back) - f64::from(*value));
    1.0 - unexplained / variance(&|(_, back)| f64::from(*back))
}

#[test]
fn the_ppo_example_trains_actor_and_critic() {
    let place = Place::new();
    // The values of the critic for the tokens of a step, and their actual returns.
    let seen: Arc<Mutex<Vec<(f32, f32)>>> = Arc::default();
    let spec = StageSpec::new()
        .reads(keys::VALUES)
        .reads(keys::RETURNS)
        .rows(RowRule::Sink);
    let kept = seen.clone();
    let pipe = ppo(&place, &[]).add_stage(
        "seen",
        stage_fn(spec, move |batch, _| {
            let (values, returns) = (batch.get(&keys::VALUES)?, batch.get(&keys::RETURNS)?);
            let pairs = values.values().iter().copied();
            let pairs = pairs.zip(returns.values().iter().copied());
            let mut kept = kept.lock().map_err(|e| StageError::failed(e.to_string()))?;
            kept.extend(pairs);
            Ok(())
        }),
    );
    let mut trainer = trainer(&pipe).expect("a trainer");
    for step in 1..=3 {
        let metrics = trainer.step().expect("a step");
        let get = |name: &str| metrics.get(name).unwrap_or_else(|| panic!("{name}"));
        for name in ["actor/grad_norm", "critic/grad_norm", "critic/loss"] {
            assert!(get(name) > 0.0, "{name}");
        }
        assert!((0.0..=1.0).contains(&get("critic/clipfrac")));
        let pairs = std::mem::take(&mut *seen.lock().expect("no panic"));
        let explained = explained_variance(&pairs);
        assert!((get("critic/explained_variance") - explained).abs() < 1e-4);
        // A fresh head returns 0 until it is trained.
        assert_eq!(get("critic/values_mean") == 0.0, step == 1);
        // Initially the reference equals the policy; its log-probs come from a forward pass other than the rollout's.
        assert_eq!(get("reward/kl").abs() < 1e-5, step == 1);
    }
    trainer.train().expect("a run that ends well");
    let saved = place.path("run/model");
    let critic = ValueDecoder::load(&saved.join("critic"), &burn::tensor::Device::flex(), None);
    assert_eq!(critic.expect("a stored head").config.hidden_size, 16);
    assert!(saved.join("critic/tokenizer.json").is_file() && saved.join("actor").is_dir());
}

/// Hashes of the weights of actor and critic.
fn hashes(run: &mut Run) -> [String; 2] {
    let snapshot = run.snapshot().expect("a snapshot");
    ["actor", "critic"].map(|model| snapshot.models[model].hash.clone())
}

#[test]
fn the_actor_rests_while_the_critic_warms_up() {
    let place = Place::new();
    let mut run = start(&ppo(&place, &["update.warmup_steps=2"]));
    let mut before = hashes(&mut run);
    for step in 1..=3 {
        let output = run.step().expect("a step");
        let after = hashes(&mut run);
        let moved = [0, 1].map(|model| before[model] != after[model]);
        assert_eq!(moved, [step > 2, true], "step {step}");
        assert_eq!(output.metrics.get("actor/loss").is_some(), step > 2);
        assert!(output.metrics.get("critic/loss").is_some());
        before = after;
    }
}

#[test]
fn a_restored_run_repeats_its_step_with_its_critic_bit_by_bit() {
    let place = Place::new();
    let mut run = start(&ppo(&place, &[]));
    let numbers = |output: StepOutput| {
        let mut values = output.metrics.values;
        values.retain(|name, _| !name.starts_with("perf/"));
        values
    };
    run.step().expect("step 1");
    let before = run.snapshot().expect("a snapshot");
    let second = numbers(run.step().expect("step 2"));
    let after = hashes(&mut run);
    run.restore(&before).expect("a snapshot of this run");
    assert_eq!(numbers(run.step().expect("step 2 again")), second);
    assert_eq!(hashes(&mut run), after);
}

/// The reward-model example in folder `run`.
fn reward_model(place: &Place, more: &[&str]) -> DataPipe {
    let small = [
        "batch.prompts=8",
        "batch.micro_batch=4",
        "evaluate_reward_model.pairs=6",
    ];
    let overrides = [&small, more].concat();
    example(place, "reward_model_addition.toml", &["reward"], &overrides)
}

#[test]
fn a_reward_model_is_trained_saved_and_trained_against() {
    let place = Place::new();
    let mut first = trainer(&reward_model(&place, &["reward.save_as=f32"])).expect("a trainer");
    for _ in 0..3 {
        let metrics = first.step().expect("a step");
        let get = |name: &str| metrics.get(name).unwrap_or_else(|| panic!("{name}"));
        assert!(get("reward_model/grad_norm") > 0.0 && get("reward_model/loss") > 0.0);
        assert!((0.0..=1.0).contains(&get("reward_model/accuracy")));
        let margin = get("reward_model/chosen_mean") - get("reward_model/rejected_mean");
        assert!((margin - get("reward_model/margin")).abs() < 1e-5);
    }
    first.train().expect("a run that ends well");
    let run = Finished {
        dir: place.path("run"),
    };
    for line in run.metrics() {
        let accuracy = line
            .get("eval/pair_accuracy")
            .and_then(|share| share.as_f64());
        let evaluated = [0, 3].contains(&line["step"].as_u64().expect("a step"));
        assert_eq!(accuracy.is_some(), evaluated, "{line:?}");
        // Multiples of a sixth: there are six pairs.
        assert!(accuracy.is_none_or(|share| (6.0 * share).fract().abs() < 1e-9));
    }

    let against = ppo_with_reward_model(&place, &[]);
    let plan = against.plan().map_err(Findings).expect("a plan");
    assert!(plan.warnings().is_empty(), "{:?}", plan.warnings());
    let mut run = start(&against);
    let frozen = |run: &mut Run| {
        let snapshot = run.snapshot().expect("a snapshot");
        snapshot.models["reward"].hash.clone()
    };
    let before = frozen(&mut run);
    for _ in 0..2 {
        let metrics = run.step().expect("a step").metrics;
        let reward = metrics.reward().expect("a reward");
        assert!(reward.is_finite() && reward != 0.0);
        assert!(metrics.get("critic/loss").is_some());
    }
    assert_eq!(frozen(&mut run), before);
}

#[test]
fn the_same_seed_gives_the_same_reward_model() {
    let place = Place::new();
    let lines = |run: &str| {
        let mut pipe = reward_model(&place, &[]);
        pipe.run.dir = place.path(run);
        trainer(&pipe).expect("a trainer").train().expect("a run");
        let finished = Finished {
            dir: place.path(run),
        };
        finished.metrics().iter().map(decided).collect::<Vec<_>>()
    };
    let (one, two) = (lines("one"), lines("two"));
    assert_eq!(one.len(), 4);
    assert_eq!(one, two);
}
