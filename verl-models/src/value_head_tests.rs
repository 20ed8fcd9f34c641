use std::fs;
use std::path::PathBuf;

use verl_decoder::hf::SaveDType;
use verl_decoder::parameters::{named_parameters, visit_parameters};

use super::*;
use crate::critic::Critic;
use crate::model::{ModelInterface, PackedValues, ScoreRow, TrainedModel, ValueModel};
use crate::optim::OptimizerConfig;

const TIED: &str = "tiny-random-llama-tied";
const QWEN3: &str = "tiny-random-qwen3";

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/models")
        .join(name)
}

fn fresh(kind: HeadKind, init: HeadInit) -> Option<FreshHead> {
    Some(FreshHead { kind, init })
}

fn load(dir: &Path, fresh: Option<FreshHead>) -> ValueDecoder {
    ValueDecoder::load(dir, &Device::flex(), fresh).unwrap_or_else(|error| panic!("{error}"))
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter().collect()
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
}

/// Every parameter's name and bytes.
fn parameters(model: &ValueDecoder) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    visit_parameters(model, |name, _, read| {
        all.push((name.to_owned(), read().as_bytes().to_vec()));
    });
    all
}

#[test]
fn values_are_hidden_states_times_the_head() {
    for name in [TIED, QWEN3] {
        let decoder = Decoder::load(&folder(name), &Device::flex()).unwrap();
        let width = decoder.config.hidden_size;
        let weights: Vec<f32> = (0..width).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut model = ValueDecoder::on(
            decoder.clone(),
            FreshHead {
                kind: HeadKind::TokenClassification,
                init: HeadInit::Zeros,
            },
        );
        let data = TensorData::new(weights.clone(), [1, width]);
        model.score.weight = Param::from_data(data, &Device::flex());
        model.score.bias = Some(Param::from_data([0.25f32], &Device::flex()));
        let ids = Tensor::from_data([[5, 6, 7, 8], [1, 2, 3, 4]], &Device::flex());
        let hidden = numbers(decoder.hidden(ids.clone()));
        let values = numbers(model.values(ids));
        assert_eq!(values.len(), 8);
        for (value, hidden) in values.iter().zip(hidden.chunks(width)) {
            let products = hidden.iter().zip(&weights);
            let exact: f64 = products.map(|(h, w)| f64::from(*h) * f64::from(*w)).sum();
            let exact = exact as f32 + 0.25;
            assert!((value - exact).abs() < 1e-5 * (1.0 + exact.abs()));
        }
    }
}

#[test]
fn a_fresh_head_is_zero_or_depends_only_on_the_seed() {
    let head = |init| {
        numbers(
            load(
                &folder(QWEN3),
                fresh(HeadKind::SequenceClassification, init),
            )
            .score
            .weight
            .val(),
        )
    };
    assert_eq!(head(HeadInit::Zeros), vec![0.0; 64]);
    let seven = head(HeadInit::Normal { seed: 7 });
    assert_eq!(seven, head(HeadInit::Normal { seed: 7 }));
    assert_ne!(seven, head(HeadInit::Normal { seed: 8 }));
    // 640 draws of variance 1/65: the deviation is known within 4 / √(2 · 640) = 11 %.
    let draws: Vec<f32> = (0..10)
        .flat_map(|seed| head(HeadInit::Normal { seed }))
        .collect();
    let square = draws.iter().map(|x| x * x).sum::<f32>() / draws.len() as f32;
    assert!(((square * 65.0).sqrt() - 1.0).abs() < 0.11, "{square}");
}

#[test]
fn kinds_differ_in_the_bias_of_a_fresh_head() {
    for (kind, names) in [
        (HeadKind::SequenceClassification, &["score.weight"][..]),
        (
            HeadKind::TokenClassification,
            &["score.weight", "score.bias"],
        ),
    ] {
        let model = load(&folder(TIED), fresh(kind, HeadInit::Zeros));
        let all = named_parameters(&model);
        let head = all.iter().filter(|(name, _)| !name.starts_with("model."));
        let head: Vec<&str> = head.map(|(name, _)| name.as_str()).collect();
        assert_eq!(head, names);
    }
}

#[test]
fn a_saved_folder_loads_byte_for_byte() {
    let scratch = tempfile::tempdir().unwrap();
    for (name, stem) in [(TIED, "Llama"), (QWEN3, "Qwen3")] {
        for kind in HeadKind::ALL {
            for dtype in [SaveDType::F32, SaveDType::BF16] {
                let path = |at: &str| {
                    scratch
                        .path()
                        .join(format!("{name}-{kind:?}-{dtype:?}-{at}"))
                };
                let (once, twice) = (path("once"), path("twice"));
                let model = load(&folder(name), fresh(kind, HeadInit::Normal { seed: 3 }));
                model.save_as(&once, dtype).unwrap();
                // An existing head takes precedence over a fresh one.
                let loaded = load(&once, fresh(kind, HeadInit::Zeros));
                assert_eq!(loaded.kind, kind);
                assert_eq!(loaded.config, model.config);
                if dtype == SaveDType::F32 {
                    assert_eq!(parameters(&loaded), parameters(&model));
                }
                loaded.save_as(&twice, dtype).unwrap();
                for file in ["model.safetensors", "config.json", "generation_config.json"] {
                    let bytes = |dir: &Path| fs::read(dir.join(file)).unwrap();
                    assert!(bytes(&once) == bytes(&twice), "{name}: {file} differs");
                }
                let config = config(&once);
                let architecture = format!("{stem}{}", kind.suffix());
                assert_eq!(config["architectures"], json!([architecture]));
                assert_eq!(config["id2label"], json!({"0": "LABEL_0"}));
                assert_eq!(config["label2id"], json!({"LABEL_0": 0}));
                assert_eq!(config["dtype"], dtype.name());
            }
        }
    }
}

#[test]
fn a_model_without_a_folder_can_be_saved() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("fresh");
    let config = load(
        &folder(QWEN3),
        fresh(HeadKind::TokenClassification, HeadInit::Zeros),
    )
    .config;
    // A separate output head is not kept.
    let config = DecoderConfig {
        tied_head: false,
        ..config
    };
    let decoder = Decoder::random(config, 5, &Device::flex());
    assert!(decoder.lm_head.is_some());
    let head = fresh(
        HeadKind::SequenceClassification,
        HeadInit::Normal { seed: 5 },
    );
    let model = ValueDecoder::on(decoder, head.unwrap());
    model.save(&dir).unwrap();
    assert!(has_head(&dir).unwrap() && !has_head(&folder(QWEN3)).unwrap());
    assert!(has_head(&dir.join("nowhere")).is_err());
    let loaded = load(&dir, None);
    assert_eq!(parameters(&loaded), parameters(&model));
    assert_eq!(loaded.kind, HeadKind::SequenceClassification);
    let names = named_parameters(&loaded);
    assert!(names.iter().all(|(name, _)| !name.contains("lm_head")));
}

#[test]
fn a_language_model_head_is_dropped() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("causal");
    let config = load(
        &folder(QWEN3),
        fresh(HeadKind::TokenClassification, HeadInit::Zeros),
    )
    .config;
    let config = DecoderConfig {
        tied_head: false,
        ..config
    };
    let decoder = Decoder::random(config, 5, &Device::flex());
    ModelInterface::save(&decoder, &dir).unwrap();
    let head = fresh(HeadKind::TokenClassification, HeadInit::Zeros);
    let (model, report) = ValueDecoder::load_as(&dir, &Device::flex(), DType::F32, head).unwrap();
    assert_eq!(report.ignored, ["lm_head.weight"]);
    assert!(report.unused.is_empty());
    assert!(!model.config.tied_head);
    let ids = Tensor::from_data([[5, 6, 7]], &Device::flex());
    let (own, other) = (
        model.model.forward(ids.clone(), &model.rope),
        decoder.hidden(ids),
    );
    assert_eq!(numbers(own), numbers(other));
}

#[test]
fn missing_heads_and_heads_with_several_labels_are_refused() {
    let refusal = |dir: &Path| {
        let error = ValueDecoder::load(dir, &Device::flex(), None).unwrap_err();
        error.to_string().replace(&dir.display().to_string(), "DIR")
    };
    insta::assert_snapshot!(
        refusal(&folder(TIED)),
        @"model folder `DIR` has no value head (`score.weight`): a critic can start with a new one, but a reward model must be trained first"
    );

    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("two");
    let mut model = load(
        &folder(TIED),
        fresh(HeadKind::SequenceClassification, HeadInit::Zeros),
    );
    let width = model.config.hidden_size;
    model.score = Linear::lazy(2, width, false, &Device::flex());
    model.save(&dir).unwrap();
    insta::assert_snapshot!(refusal(&dir), @"
    weights in `DIR` do not match the model:
      mismatched `score.weight`: the file has [2, 64], the model needs [1, 64]
      20 tensors match
    ");
}

#[test]
fn a_critic_learns_from_a_zero_head() {
    let head = fresh(HeadKind::TokenClassification, HeadInit::Zeros);
    let optimizer = OptimizerConfig {
        learning_rate: 1e-2,
        ..OptimizerConfig::default()
    };
    let mut critic = Critic::new(load(&folder(QWEN3), head), Some(optimizer)).unwrap();
    let rows = [
        ScoreRow {
            prompt: &[5, 6],
            response: &[7, 8, 9],
        },
        ScoreRow {
            prompt: &[9],
            response: &[3, 4],
        },
    ];
    let mut loss = |packed: PackedValues| {
        let targets: Vec<f32> = packed
            .rows
            .iter()
            .map(|row| 1.0 - 2.0 * *row as f32)
            .collect();
        let targets = Tensor::<1>::from_data(targets.as_slice(), &packed.values.device());
        let error = packed.values - targets;
        (error.clone() * error).mean()
    };
    let mut losses = Vec::new();
    for _ in 0..30 {
        let value = critic.accumulate(&rows, &|_, _| true, &mut loss).unwrap();
        losses.push(value);
        critic.optimizer_step().unwrap();
    }
    assert_eq!(losses[0], 1.0);
    assert!(losses[29] < 0.1, "{losses:?}");
    let values = critic.values(&rows).unwrap();
    assert!(values[0].iter().all(|v| *v > 0.0) && values[1].iter().all(|v| *v < 0.0));
}
