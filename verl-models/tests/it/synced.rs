//! Weights that travel from a trained model to another: all of them or none.

use burn::tensor::{DType, Device};
use verl_models::Decoder;
use verl_models::ValueDecoder;
use verl_models::bench::preset;
use verl_models::critic::Critic;
use verl_models::model::{PackedScores, PolicyModel, ScoreRow, TrainedModel, ValueModel};
use verl_models::optim::OptimizerConfig;
use verl_models::parameters::cast;
use verl_models::policy::Policy;
use verl_models::reshard::{Bucket, SyncError, WeightSource, WeightsVersion, synchronise};
use verl_models::value_head::{FreshHead, HeadInit, HeadKind};

/// Smaller than the larger tensors, which are then cut.
const BUCKET: usize = 5000;

const ROWS: [ScoreRow<'_>; 2] = [
    ScoreRow {
        prompt: &[3, 4, 5],
        response: &[6, 7, 8, 9],
    },
    ScoreRow {
        prompt: &[11],
        response: &[12, 13],
    },
];

fn decoder(seed: u64, dtype: DType) -> Decoder {
    let config = preset("tiny").expect("a preset");
    cast(Decoder::random(config, seed, &Device::flex()), dtype)
}

fn settings(learning_rate: f64) -> Option<OptimizerConfig> {
    Some(OptimizerConfig {
        learning_rate,
        weight_decay: 0.0,
        ..OptimizerConfig::default()
    })
}

fn policy(seed: u64, dtype: DType, learning_rate: Option<f64>) -> Policy<Decoder> {
    let settings = learning_rate.and_then(settings);
    Policy::new(decoder(seed, dtype), settings).expect("valid settings")
}

fn critic(seed: u64, learning_rate: Option<f64>) -> Critic<ValueDecoder> {
    let head = FreshHead {
        kind: HeadKind::TokenClassification,
        init: HeadInit::Normal { seed },
    };
    let model = ValueDecoder::on(decoder(seed, DType::F32), head);
    Critic::new(model, learning_rate.and_then(settings)).expect("valid settings")
}

fn train(policy: &mut Policy<Decoder>) {
    let mut loss = |scores: PackedScores| -scores.log_probs.sum();
    let accumulated = policy.accumulate(&ROWS, &|_, _| true, 1.0, false, &mut loss);
    accumulated.expect("a finite loss");
    policy.optimizer_step().expect("finite gradients");
}

fn train_critic(critic: &mut Critic<ValueDecoder>) {
    let mut loss = |values: verl_models::model::PackedValues| values.values.powi_scalar(2).sum();
    let accumulated = critic.accumulate(&ROWS, &|_, _| true, &mut loss);
    accumulated.expect("a finite loss");
    critic.optimizer_step().expect("finite gradients");
}

fn source(model: &dyn TrainedModel) -> Box<dyn WeightSource> {
    let version = WeightsVersion {
        step: model.optimizer_steps(),
        hash: model.weights_hash(),
    };
    let source = model.weight_source(version, BUCKET);
    source.expect("f32 or bf16").expect("supported")
}

fn synced(from: &dyn WeightSource, to: &mut dyn TrainedModel) -> Result<WeightsVersion, SyncError> {
    synchronise(from, to.weight_sink().expect("supported"))
}

#[test]
fn a_policy_that_followed_another_has_its_weights_and_scores() {
    let mut trained = policy(1, DType::F32, Some(1e-2));
    let mut follower = policy(2, DType::F32, None);
    for step in 1..=3 {
        train(&mut trained);
        assert_ne!(follower.weights_hash(), trained.weights_hash());
        let version = synced(&*source(&trained), &mut follower).expect("a good transfer");
        assert_eq!(version.step, step);
        assert_eq!(version.hash, follower.weights_hash());
        assert_eq!(follower.weights_hash(), trained.weights_hash());
    }
    let scores = |policy: &Policy<Decoder>| {
        let extras = verl_models::model::Extras::NONE;
        policy.score(&ROWS, 1.0, extras).expect("valid rows")
    };
    assert_eq!(scores(&follower), scores(&trained));
    assert_eq!(follower.optimizer_steps(), 0);
}

#[test]
fn a_critic_that_followed_another_has_its_weights_and_values() {
    let mut trained = critic(1, Some(1e-2));
    let mut follower = critic(2, None);
    train_critic(&mut trained);
    let source = source(&trained);
    let names = source.manifest().tensors.iter().map(|own| own.name.clone());
    assert!(names.into_iter().any(|name| name == "score.bias"));
    synced(&*source, &mut follower).expect("a good transfer");
    assert_eq!(follower.weights_hash(), trained.weights_hash());
    let values = |critic: &Critic<ValueDecoder>| critic.values(&ROWS).expect("valid rows");
    assert_eq!(values(&follower), values(&trained));
}

#[test]
fn a_source_keeps_its_version_while_the_model_is_trained() {
    let mut trained = policy(1, DType::F32, Some(1e-2));
    train(&mut trained);
    let hash = trained.weights_hash();
    let source = source(&trained);
    let first = source.bucket(0).expect("a bucket");
    train(&mut trained);
    assert_ne!(trained.weights_hash(), hash);
    assert_eq!(source.bucket(0), Ok(first));
    let mut follower = policy(2, DType::F32, None);
    synced(&*source, &mut follower).expect("a good transfer");
    assert_eq!(follower.weights_hash(), hash);
}

/// What can happen to the buckets of a version on their way, and how the sink answers.
type Fault = (&'static str, fn(Vec<Bucket>) -> Vec<Bucket>);

#[test]
fn a_transfer_that_fails_leaves_every_bit_and_a_good_one_follows() {
    let mut trained = policy(1, DType::F32, Some(1e-2));
    train(&mut trained);
    let mut follower = policy(2, DType::F32, None);
    let before = follower.weights_hash();
    let source = source(&trained);
    let manifest = source.manifest();
    assert!(manifest.buckets > 20);
    let buckets = || (0..manifest.buckets).map(|at| source.bucket(at).expect("a bucket"));
    let faults: [Fault; 5] = [
        ("buckets are missing, the first is 4", |mut all| {
            all.remove(4);
            all
        }),
        ("buckets are missing, the first is 7", |mut all| {
            all.truncate(7);
            all
        }),
        ("bucket 3 of version 1@", |mut all| {
            all[3].bytes[17] ^= 1;
            all
        }),
        ("has arrived before; send each once", |mut all| {
            all.insert(6, all[5].clone());
            all
        }),
        ("bucket 2 is of version 2@", |mut all| {
            all[2].version.step = 2;
            all[2].checksum = all[2].sum();
            all
        }),
    ];
    for (expected, fault) in faults {
        let sink = follower.weight_sink().expect("supported");
        sink.begin(manifest).expect("its own manifest");
        let mut sent = fault(buckets().collect()).into_iter();
        let refused = sent.try_for_each(|bucket| sink.accept(&bucket));
        let error = refused.and_then(|()| sink.finish().map(drop));
        let error = error.expect_err("a fault").to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(follower.weights_hash(), before);
    }
    // Nothing is half applied between the buckets of a good transfer either.
    let sink = follower.weight_sink().expect("supported");
    sink.begin(manifest).expect("its own manifest");
    for bucket in buckets() {
        let sink = follower.weight_sink().expect("supported");
        sink.accept(&bucket).expect("a good bucket");
        assert_eq!(follower.weights_hash(), before);
    }
    let sink = follower.weight_sink().expect("supported");
    sink.finish().expect("all buckets");
    assert_eq!(follower.weights_hash(), trained.weights_hash());
    let again = follower.weight_sink().expect("supported").finish();
    assert_eq!(again, Err(SyncError::NotBegun));
}

#[test]
fn weights_of_another_model_or_type_are_refused() {
    let mut follower = policy(2, DType::BF16, None);
    let before = follower.weights_hash();
    let error = synced(&*source(&policy(1, DType::F32, None)), &mut follower);
    assert_eq!(
        error
            .expect_err("f32 into bf16")
            .to_string()
            .split_once("does not fit")
            .map(|(_, b)| b),
        Some(
            " this model: `model.embed_tokens.weight` is F32 [512, 64], but this model has Bf16 [512, 64]; \
             send weights of the same model"
        )
    );
    let error = synced(&*source(&critic(1, None)), &mut follower);
    assert!(
        matches!(error, Err(SyncError::OtherModel { .. })),
        "{error:?}"
    );
    assert_eq!(follower.weights_hash(), before);
    let small = follower.weight_source(
        WeightsVersion {
            step: 0,
            hash: before,
        },
        1,
    );
    assert!(matches!(
        small.err(),
        Some(SyncError::BucketSize { bytes: 1, .. })
    ));
}

/// A trained model that switches trains the new weights, not its own f32 copies of the old ones.
#[test]
fn an_optimiser_continues_from_the_weights_that_arrived() {
    for dtype in [DType::F32, DType::BF16] {
        let mut leader = policy(1, dtype, Some(1e-2));
        // Too small a learning rate to change a weight.
        let mut follower = policy(2, dtype, Some(1e-30));
        train(&mut leader);
        train(&mut follower);
        let mut loss = |scores: PackedScores| -scores.log_probs.sum();
        let pending = follower.accumulate(&ROWS, &|_, _| true, 1.0, false, &mut loss);
        pending.expect("a finite loss");
        synced(&*source(&leader), &mut follower).expect("a good transfer");
        // Gradients of the old weights are gone.
        let report = follower.optimizer_step().expect("no gradients");
        assert_eq!(report.grad_norm, 0.0);
        train(&mut follower);
        assert_eq!(follower.weights_hash(), leader.weights_hash(), "{dtype:?}");
        assert_eq!(follower.optimizer_steps(), 3);
    }
}

#[test]
fn a_tied_weight_travels_once() {
    let model = policy(1, DType::F32, None);
    let source = source(&model);
    let bytes: usize = source
        .manifest()
        .tensors
        .iter()
        .map(|own| own.bytes())
        .sum();
    assert_eq!(bytes as u64, 4 * model.module().config.num_parameters());
    let buckets = (0..source.manifest().buckets).map(|at| source.bucket(at).expect("a bucket"));
    assert_eq!(buckets.map(|own| own.bytes.len()).sum::<usize>(), bytes);
}
