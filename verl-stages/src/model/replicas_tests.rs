//! Stages on replicas give the bits of a single model: weights, columns, metrics.

use std::path::{Path, PathBuf};

use verl_models::optim::OptimizerConfig;
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::field::{Key, Ragged};
use verl_words::keys::{
    ADVANTAGES, DESIRABLE, FINISH_REASONS, MASK_KINDS, OLD_LOG_PROBS, PROMPTS, REF_LOG_PROBS,
    RESPONSES, RETURNS, ROLLOUT_LOG_PROBS, VALUES,
};
use verl_words::stage::{BuildContext, ModelFactory, Models, Stage, StageConfig};

use super::*;
use crate::generate::Generate;
use crate::log_probs::LogProbs;
use crate::losses::{Dpo, Grpo, PolicyObjective};
use crate::model::{CausalLm, HeadInit, IlqlLm, ValueLm, policy_model};
use crate::sink::run_with;
use crate::update::Update;
use crate::update_critic::UpdateCritic;
use crate::update_reward_model::UpdateRewardModel;
use crate::values::Values;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-base")
}

fn optimizer() -> OptimizerConfig {
    OptimizerConfig {
        learning_rate: 3e-3,
        ..OptimizerConfig::default()
    }
}

fn policy(sharding: Sharding) -> CausalLm {
    CausalLm {
        sharding,
        ..CausalLm::trained(folder(), optimizer())
    }
}

fn value_model(sharding: Sharding) -> ValueLm {
    ValueLm {
        head_init: HeadInit::Normal,
        sharding,
        ..ValueLm::trained(folder(), optimizer())
    }
}

fn devices(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("cpu:{index}")).collect()
}

/// `count` replicas of a model, under `name`.
fn replicas(factory: &dyn ModelFactory, name: &str, count: usize) -> Models {
    let model = factory.load_replicas(name, &devices(count), &BuildContext::default());
    Models::from([(name.to_owned(), model.expect("a model"))])
}

/// Ten ragged responses, two to each of five prompts: micro-batches of two rows make five, so the last round of two, three or
/// four replicas is short. Pairs of a chosen and a rejected answer.
fn batch() -> Batch {
    let ids = [0, 1, 2, 3, 4].map(|row| RowId::prompt(0, row).unwrap());
    let mut batch = Batch::with_rows(&ids).repeat(2).unwrap();
    let prompt = |row: usize| {
        (0..2 + row / 2 % 3)
            .map(|i| (1 + row / 2 * 3 + i) as u32 % 32)
            .collect()
    };
    let prompts: Vec<Vec<u32>> = (0..10).map(prompt).collect();
    let response = |row: usize| {
        (0..1 + row * 7 % 6)
            .map(|i| (5 + row * 5 + i * 3) as u32 % 32)
            .collect()
    };
    let responses: Vec<Vec<u32>> = (0..10).map(response).collect();
    let numbers = |salt: usize| {
        let of_row = |(row, tokens): (usize, &Vec<u32>)| {
            let number =
                |token: usize| ((row * 31 + token * 17 + salt * 7) % 23) as f32 / 11.0 - 1.0;
            (0..tokens.len()).map(number).collect::<Vec<f32>>()
        };
        RaggedColumn::from_rows(responses.iter().enumerate().map(of_row))
    };
    // Some tokens are observations.
    let kinds = responses.iter().map(|tokens| {
        let kind = |token: usize| u8::from(token % 4 != 2);
        (0..tokens.len()).map(kind).collect::<Vec<u8>>()
    });
    let kinds = RaggedColumn::from_rows(kinds);
    batch
        .put(&PROMPTS, RaggedColumn::from_rows(&prompts))
        .unwrap();
    batch
        .put(&RESPONSES, RaggedColumn::from_rows(&responses))
        .unwrap();
    batch.put(&MASK_KINDS, kinds).unwrap();
    batch.put(&ADVANTAGES, numbers(1)).unwrap();
    batch.put(&REF_LOG_PROBS, numbers(2)).unwrap();
    batch.put(&VALUES, numbers(3)).unwrap();
    batch.put(&RETURNS, numbers(4)).unwrap();
    batch.put(&DESIRABLE, [1u8, 0].repeat(5)).unwrap();
    batch
}

fn context() -> BuildContext {
    let mut context = BuildContext::default();
    (context.batch.mini_rows, context.batch.micro_rows) = (10, 2);
    (context.batch.samples, context.batch.epochs) = (2, 1);
    context.batch.prompts = 5;
    context
}

/// The weights and all metrics after ten steps of a stage that trains.
type Trained = (String, Vec<(String, u64)>);

fn train(config: &impl StageConfig, model: &dyn ModelFactory, name: &str, count: usize) -> Trained {
    let mut models = replicas(model, name, count);
    let mut stage = config.build(&context()).unwrap();
    let start = models[name].version().hash;
    let mut metrics = Vec::new();
    for step in 1..=10 {
        let kept = run_with(stage.as_mut(), step, batch(), &mut models).expect("a step");
        metrics.extend(kept.recorded());
    }
    let version = models[name].version();
    assert_eq!(version.step, 10);
    assert_ne!(version.hash, start);
    (version.hash, metrics)
}

/// Ten optimiser steps of a stage on 2, 3 and 4 replicas, against a single model.
fn check(config: &impl StageConfig, model: impl Fn(Sharding) -> Box<dyn ModelFactory>, name: &str) {
    let expected = train(config, model(Sharding::Optimizer).as_ref(), name, 1);
    assert!(!expected.1.is_empty());
    for count in [2, 3, 4] {
        for sharding in [Sharding::Optimizer, Sharding::Gradients] {
            let found = train(config, model(sharding).as_ref(), name, count);
            assert_eq!(found, expected, "{count} replicas, {sharding:?}");
        }
    }
}

#[test]
fn policies_train_with_the_bits_of_one() {
    let grpo = Update {
        loss: PolicyObjective::<Grpo> {
            entropy_coef: 0.01,
            ..PolicyObjective::default()
        }
        .into(),
        ..Update::default()
    };
    check(&grpo, |sharding| Box::new(policy(sharding)), "actor");
    let dpo = Update {
        loss: Dpo::default().into(),
        ..Update::default()
    };
    check(&dpo, |sharding| Box::new(policy(sharding)), "actor");
}

#[test]
fn critics_train_with_the_bits_of_one() {
    let critic = UpdateCritic::default();
    check(
        &critic,
        |sharding| Box::new(value_model(sharding)),
        "critic",
    );
}

#[test]
fn reward_models_train_with_the_bits_of_one() {
    let reward = UpdateRewardModel::default();
    check(
        &reward,
        |sharding| Box::new(value_model(sharding)),
        "reward",
    );
}

/// What a stage that reads a model writes and records, rows in their order.
fn run(
    stage: &mut dyn Stage,
    models: &mut Models,
    rows: Batch,
) -> (Vec<Batch>, Vec<(String, u64)>) {
    let mut kept = run_with(stage, 1, rows, models).expect("a step");
    kept.batches.sort_by_key(|batch| batch.ids()[0].0);
    let recorded = kept.recorded();
    let mut order: Vec<(String, u64)> = recorded.clone();
    order.sort();
    // Only the entropies of responses have sums that depend on their order, and they are recorded in a fixed one.
    let mut entropies = recorded;
    entropies.retain(|(name, _)| name == crate::generate::SAMPLED_ENTROPY.name);
    (kept.batches, [order, entropies].concat())
}

#[test]
fn responses_log_probs_and_values_have_the_bits_of_one() {
    let generate = Generate {
        max_new_tokens: 6,
        ..Generate::default()
    };
    let old = LogProbs::default();
    let values = Values::default();
    let prompts = || {
        let ids = [0, 1, 2, 3, 4].map(|row| RowId::prompt(0, row).unwrap());
        let mut prompts = Batch::with_rows(&ids);
        let of_row = |row: u32| vec![1, 5 + row, 9];
        let column = RaggedColumn::from_rows((0..5).map(of_row));
        prompts.put(&PROMPTS, column).unwrap();
        prompts
    };
    let bits = |batches: &[Batch], key: &Key<Ragged<f32>>| {
        let each = batches.iter().map(|batch| {
            let column = batch.get(key).unwrap();
            column
                .rows()
                .map(|row| row.iter().map(|x| x.to_bits()).collect())
                .collect()
        });
        each.collect::<Vec<Vec<Vec<u32>>>>()
    };
    let results = |count| {
        let mut models = replicas(&policy(Sharding::Optimizer), "actor", count);
        let mut stage = generate.build(&context()).unwrap();
        let (sampled, metrics) = run(stage.as_mut(), &mut models, prompts());
        let tokens = sampled.iter().map(|batch| {
            let tokens = batch.get(&RESPONSES).unwrap();
            let reasons = batch.get(&FINISH_REASONS).unwrap().values().to_vec();
            (
                tokens.rows().map(<[u32]>::to_vec).collect::<Vec<_>>(),
                reasons,
            )
        });
        let tokens: Vec<_> = tokens.collect();
        let mut stage = old.build(&context()).unwrap();
        let (scored, _) = run(stage.as_mut(), &mut models, batch());
        let mut models = replicas(&value_model(Sharding::Optimizer), "critic", count);
        let mut stage = values.build(&context()).unwrap();
        let (valued, _) = run(stage.as_mut(), &mut models, batch());
        let numbers = [
            bits(&sampled, &ROLLOUT_LOG_PROBS),
            bits(&scored, &OLD_LOG_PROBS),
            bits(&valued, &VALUES),
        ];
        (tokens, metrics, numbers)
    };
    let expected = results(1);
    assert_eq!(expected.0.len(), 5);
    for count in [2, 3, 4] {
        assert_eq!(results(count), expected, "{count} replicas");
    }
}

#[test]
fn a_state_moves_between_numbers_of_replicas() {
    let config = Update::default();
    let mut one = replicas(&policy(Sharding::Optimizer), "actor", 1);
    let mut stage = config.build(&context()).unwrap();
    run_with(stage.as_mut(), 1, batch(), &mut one).expect("a step");
    let model = one.get_mut("actor").unwrap();
    let snapshot = model.snapshot().unwrap();
    let stored = model.store(&snapshot).unwrap().expect("a stored state");
    run_with(stage.as_mut(), 2, batch(), &mut one).expect("a step");
    for count in [2, 3] {
        let mut many = replicas(&policy(Sharding::Gradients), "actor", count);
        let model = many.get_mut("actor").unwrap();
        let recalled = model.recall(&snapshot.version, &stored).unwrap();
        model.restore(&recalled).unwrap();
        assert_eq!(model.version(), snapshot.version);
        run_with(stage.as_mut(), 2, batch(), &mut many).expect("a step");
        assert_eq!(many["actor"].version(), one["actor"].version());
    }
}

#[test]
fn saved_folders_are_those_of_one() {
    let saved = |count| {
        let mut models = replicas(&policy(Sharding::Gradients), "actor", count);
        let mut stage = Update::default().build(&context()).unwrap();
        run_with(stage.as_mut(), 1, batch(), &mut models).expect("a step");
        let folder = tempfile::tempdir().unwrap();
        models
            .get_mut("actor")
            .unwrap()
            .save(folder.path())
            .unwrap();
        std::fs::read(folder.path().join("model.safetensors")).unwrap()
    };
    let expected = saved(1);
    assert!(saved(3) == expected);
}

#[test]
fn devices_that_cannot_have_replicas_are_refused() {
    let load = |factory: &dyn ModelFactory, devices: &[&str]| {
        let devices: Vec<String> = devices.iter().map(|device| (*device).to_owned()).collect();
        match factory.load_replicas("actor", &devices, &BuildContext::default()) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    };
    let policy = policy(Sharding::Optimizer);
    assert_eq!(load(&policy, &["cpu"]), "");
    assert_eq!(load(&policy, &["cpu:3"]), "");
    assert!(load(&policy, &["gpu"]).contains("unknown device `gpu`"));
    assert!(load(&policy, &[]).contains("no device"));
    let gpus = load(&policy, &["cuda:0", "cuda:1"]);
    assert!(
        gpus.contains("its group has cuda:0, cuda:1; use one GPU"),
        "{gpus}"
    );
    // A kind without replicas.
    let ilql: IlqlLm = serde_json::from_value(serde_json::json!({ "path": folder() })).unwrap();
    let several = load(&ilql, &["cpu:0", "cpu:1"]);
    assert!(
        several.contains("model `actor` cannot have replicas"),
        "{several}"
    );
    // A custom model has.
    let custom = policy_model(|device, _| verl_models::Decoder::load(&folder(), device));
    assert_eq!(load(&custom, &["cpu:0", "cpu:1"]), "");
}

#[test]
fn the_setting_is_only_written_if_it_is_set() {
    let written = |sharding| serde_json::to_value(policy(sharding)).unwrap();
    assert_eq!(written(Sharding::Optimizer).get("sharding"), None);
    assert_eq!(written(Sharding::Gradients)["sharding"], "gradients");
}
