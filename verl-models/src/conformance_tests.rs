//! Every built-in model passes the checks, and the checks find each fault of a faulty model.

use std::path::PathBuf;

use burn::module::{Module, Param};
use burn::tensor::TensorData;
use serde_json::{Value, json};
use verl_decoder::hf::SaveDType;

use super::*;
use crate::model::ValueInterface;
use crate::value_head::{FreshHead, HeadInit, HeadKind};
use crate::{Decoder, FAMILIES, ValueDecoder, toy::Toy};

/// A folder with the config.json of a small decoder of this family.
fn folder(model_type: &str, dir: &Path) -> PathBuf {
    let mut config = json!({
        "model_type": model_type,
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.3,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    });
    config["tie_word_embeddings"] = Value::Bool(model_type != "qwen2");
    let family = FAMILIES
        .iter()
        .find(|family| family.model_type == model_type);
    config["architectures"] = json!([family.expect("a known family").architecture]);
    std::fs::write(dir.join("config.json"), config.to_string()).expect("a writable folder");
    dir.to_owned()
}

#[test]
fn decoders_of_every_family_conform() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let origin = verl_decoder::hf::Origin::read(&folder(family.model_type, dir.path()));
        let origin = origin.expect("a config.json");
        let config = origin.decoder_config().expect("a known family");
        let mut decoder = Decoder::random(config, 11, &Device::flex()).with_origin(origin);
        decoder.save_dtype = SaveDType::F32;
        let violations = check_model(&decoder);
        assert!(
            violations.is_empty(),
            "{}: {violations:#?}",
            family.model_type
        );
        let violations = check_saving(&decoder, &dir.path().join("saved"), |dir| {
            Decoder::load(dir, &Device::flex()).map_err(|error| ModelError::Load(error.to_string()))
        });
        assert!(
            violations.is_empty(),
            "{}: {violations:#?}",
            family.model_type
        );
    }
}

#[test]
fn the_toy_conforms() {
    assert_eq!(check_model(&Toy::new(11, 6, 24)), []);
    assert_eq!(check_model(&Toy::new(11, 6, 24).freezing("value")), []);
}

/// What is wrong with a model.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    SeesTheFuture,
    MixesRows,
    OtherForward,
    UnusedParameter,
    IgnoresLimit,
    IgnoresKey,
    DropsAnswers,
    WrongLogProbs,
    SavesNothing,
}

/// A toy with a fault.
#[derive(Module, Debug)]
struct Faulty {
    toy: Toy,
    unused: Param<Tensor<1>>,
    #[module(skip)]
    fault: Fault,
}

impl Faulty {
    fn new(fault: Fault) -> Self {
        Faulty {
            toy: Toy::new(11, 6, 24),
            unused: Param::from_tensor(Tensor::ones([2], &Device::flex())),
            fault,
        }
    }
}

impl ModelInterface for Faulty {
    fn vocab_size(&self) -> usize {
        self.toy.vocab_size()
    }

    fn max_tokens(&self) -> usize {
        self.toy.max_tokens()
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let hidden = self.toy.hidden(ids);
        let shape = hidden.dims();
        match self.fault {
            Fault::SeesTheFuture => hidden.clone() + hidden.mean_dim(1).expand(shape),
            Fault::MixesRows => hidden.clone() + hidden.mean_dim(0).expand(shape),
            Fault::UnusedParameter => hidden,
            _ => hidden * self.unused.val().mean().reshape([1, 1, 1]),
        }
    }

    fn head(&self) -> Tensor<2> {
        self.toy.head()
    }

    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let logits = self.toy.forward(ids);
        if self.fault == Fault::OtherForward {
            logits.clone() * logits
        } else {
            logits
        }
    }

    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        let mut requests = requests.to_vec();
        for request in &mut requests {
            match self.fault {
                Fault::IgnoresLimit => request.max_new_tokens += 1,
                Fault::IgnoresKey => request.key.row = 0,
                _ => {}
            }
        }
        verl_rollout::eager::generate(self, &requests, settings, &mut |at, mut output| {
            match self.fault {
                Fault::DropsAnswers if at == 1 => return Ok(()),
                Fault::WrongLogProbs => output.log_probs.iter_mut().for_each(|x| *x -= 0.01),
                _ => {}
            }
            on_done(at, output)
        })
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        std::fs::create_dir_all(dir).map_err(|error| ModelError::File {
            action: "create",
            path: dir.display().to_string(),
            reason: error.to_string(),
        })
    }
}

#[track_caller]
fn check(fault: Fault, rule: &str) {
    let violations = check_model(&Faulty::new(fault));
    assert!(
        violations
            .iter()
            .any(|v| v.rule == rule && !v.found.is_empty()),
        "{fault:?} should break \"{rule}\", but: {violations:#?}"
    );
}

#[test]
fn each_fault_is_found() {
    check(Fault::SeesTheFuture, "later tokens change nothing");
    check(Fault::MixesRows, "other rows change nothing");
    check(Fault::OtherForward, "forward is hidden · headᵀ");
    check(
        Fault::UnusedParameter,
        "gradients reach every parameter that is trained",
    );
    check(
        Fault::IgnoresLimit,
        "responses respect the limit and the vocabulary",
    );
    check(Fault::IgnoresKey, "different keys give different draws");
    check(Fault::DropsAnswers, "each request is answered once");
    check(
        Fault::WrongLogProbs,
        "log-probs match those of a forward pass",
    );
}

#[test]
fn a_model_that_loses_its_weights_is_found() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let model = Faulty::new(Fault::SavesNothing);
    let violations = check_saving(&model, &dir.path().join("saved"), |_| {
        let mut other = Faulty::new(Fault::SavesNothing);
        other.toy.gain = Param::from_tensor(Tensor::zeros([6], &Device::flex()));
        Ok(other)
    });
    let messages: Vec<String> = violations.iter().map(ToString::to_string).collect();
    assert!(
        messages[0].contains("`toy.gain` changed (loaded as"),
        "{messages:?}"
    );
    assert!(
        messages[1].starts_with("a saved model computes the same"),
        "{messages:?}"
    );
}

#[test]
fn value_heads_of_every_family_conform() {
    for (family, kind) in FAMILIES.iter().zip(HeadKind::ALL.into_iter().cycle()) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let origin = verl_decoder::hf::Origin::read(&folder(family.model_type, dir.path()));
        let config = origin.and_then(|origin| origin.decoder_config());
        let decoder = Decoder::random(config.expect("a known family"), 11, &Device::flex());
        let init = HeadInit::Normal { seed: 11 };
        let violations = check_values(&ValueDecoder::on(decoder, FreshHead { kind, init }));
        assert!(
            violations.is_empty(),
            "{}: {violations:#?}",
            family.model_type
        );
    }
}

/// A toy with one number per position, and a fault.
#[derive(Module, Debug)]
struct FaultyValues {
    toy: Toy,
    unused: Param<Tensor<1>>,
    #[module(skip)]
    fault: Option<Fault>,
}

impl ValueInterface for FaultyValues {
    fn vocab_size(&self) -> usize {
        crate::model::ModelInterface::vocab_size(&self.toy)
    }

    fn max_tokens(&self) -> usize {
        crate::model::ModelInterface::max_tokens(&self.toy)
    }

    fn values(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let hidden = self.toy.hidden(ids);
        let [b, s, d] = hidden.dims();
        let slopes: Vec<f32> = (0..d).map(|i| 0.3 - 0.1 * i as f32).collect();
        let head = Tensor::<3>::from_data(TensorData::new(slopes, [1, 1, d]), &hidden.device());
        let values: Tensor<2> = (hidden * head).sum_dim(2).squeeze_dim(2);
        match self.fault {
            Some(Fault::SeesTheFuture) => values.clone() + values.mean_dim(1).expand([b, s]),
            Some(Fault::MixesRows) => values.clone() + values.mean_dim(0).expand([b, s]),
            Some(Fault::OtherForward) => values.slice([0..b, 0..s - 1]),
            Some(Fault::UnusedParameter) => values,
            _ => values * self.unused.val().mean().reshape([1, 1]),
        }
    }

    fn save(&self, _dir: &Path) -> Result<(), ModelError> {
        Ok(())
    }
}

#[track_caller]
fn check_faulty_values(fault: Option<Fault>, expected: Option<&str>) {
    let model = FaultyValues {
        toy: Toy::new(11, 6, 24),
        unused: Param::from_tensor(Tensor::ones([2], &Device::flex())),
        fault,
    };
    let violations = check_values(&model);
    match expected {
        None => assert_eq!(violations, []),
        Some(rule) => assert!(
            violations.iter().any(|violation| violation.rule == rule),
            "{fault:?} should break \"{rule}\", but: {violations:#?}"
        ),
    }
}

#[test]
fn each_fault_of_values_is_found() {
    check_faulty_values(None, None);
    check_faulty_values(
        Some(Fault::SeesTheFuture),
        Some("later tokens change nothing"),
    );
    check_faulty_values(Some(Fault::MixesRows), Some("other rows change nothing"));
    check_faulty_values(
        Some(Fault::OtherForward),
        Some("sizes and shapes are as declared"),
    );
    check_faulty_values(
        Some(Fault::UnusedParameter),
        Some("gradients reach every parameter that is trained"),
    );
}
