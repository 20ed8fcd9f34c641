//! A scalar head on a decoder: critics and reward models of Hugging Face folders.
//!
//! Fields are named as in checkpoints of `…ForSequenceClassification` and `…ForTokenClassification` with one label:
//! `model.*`, `score.weight`, and `score.bias` if it exists.

use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use verl_decoder::FAMILIES;
use verl_decoder::blocks::linear::{Linear, linear};
use verl_decoder::blocks::rope::Rope;
use verl_decoder::decoder::{Backbone, Decoder, DecoderConfig};
use verl_decoder::hf::weights::Checkpoint;
use verl_decoder::hf::{self, LoadError, LoadReport};
use verl_kernels::device::DeviceKind;
use verl_kernels::random;

use crate::model::{ModelError, ValueInterface};

/// The architecture that a folder declares for a model with a label head; here there is always one label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HeadKind {
    /// `…ForSequenceClassification`, usual for reward models. A fresh head has no bias.
    SequenceClassification,
    /// `…ForTokenClassification`, usual for critics. A fresh head has a bias.
    TokenClassification,
}

impl HeadKind {
    /// Both kinds.
    pub const ALL: [HeadKind; 2] = [
        HeadKind::SequenceClassification,
        HeadKind::TokenClassification,
    ];

    /// End of the architecture's name in config.json.
    pub fn suffix(self) -> &'static str {
        match self {
            HeadKind::SequenceClassification => "ForSequenceClassification",
            HeadKind::TokenClassification => "ForTokenClassification",
        }
    }
}

/// Weights of a fresh head; its bias is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadInit {
    /// Zeros: every value is initially 0.
    Zeros,
    /// Draws from N(0, 1 / (D + 1)), depending only on the seed.
    ///
    /// # Source
    /// Stiennon et al. 2020, arXiv:2009.01325, appendix B.1.
    Normal {
        /// Seed of the run.
        seed: u64,
    },
}

/// The head to use for a folder without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreshHead {
    /// The kind that a saved folder declares.
    pub kind: HeadKind,
    /// Its weights.
    pub init: HeadInit,
}

/// Whether the weights of a folder contain a value head.
///
/// # Errors
/// The folder does not exist, or its weights cannot be read.
pub fn has_head(dir: &Path) -> Result<bool, LoadError> {
    Ok(Checkpoint::open(dir)?.find(HEAD).is_some())
}

/// Name of the head's weights.
const HEAD: &str = "score.weight";

/// A decoder with one number per position instead of logits: score = hidden · wᵀ (+ b), in f32 or wider.
#[derive(Module, Debug)]
pub struct ValueDecoder {
    /// Everything below the head.
    pub model: Backbone,
    /// The head, `[1, D]`.
    pub score: Linear,
    /// The decoder's architecture.
    #[module(skip)]
    pub config: DecoderConfig,
    /// Rotary tables, shared by clones.
    #[module(skip)]
    pub rope: Rope,
    /// The kind that a saved folder declares.
    #[module(skip)]
    pub kind: HeadKind,
    /// The folder it was loaded from.
    #[module(skip)]
    origin: Option<Arc<hf::Origin>>,
    /// Type of the weights that [`ValueInterface::save`] writes.
    #[module(skip)]
    pub save_dtype: hf::SaveDType,
}

impl ValueDecoder {
    /// Adds a fresh head to a decoder, whose language-model head is dropped.
    pub fn on(decoder: Decoder, head: FreshHead) -> Self {
        let width = decoder.config.hidden_size;
        let biased = head.kind == HeadKind::TokenClassification;
        let weight = decoder.model.norm.weight.val();
        let (device, dtype) = (weight.device(), weight.dtype());
        let values = match head.init {
            HeadInit::Zeros => vec![0.0; width],
            HeadInit::Normal { seed } => {
                let scale = 1.0 / ((width + 1) as f32).sqrt();
                let draws = random::normals(seed, HEAD, width);
                draws.into_iter().map(|draw| draw * scale).collect()
            }
        };
        let data = TensorData::new(values, [1, width]);
        ValueDecoder {
            score: Linear {
                weight: Param::from_tensor(Tensor::from_data(data, (&device, dtype))),
                bias: biased.then(|| Param::from_tensor(Tensor::zeros([1], (&device, dtype)))),
            },
            model: decoder.model,
            config: decoder.config,
            rope: decoder.rope,
            kind: head.kind,
            origin: decoder.origin,
            save_dtype: decoder.save_dtype,
        }
    }

    /// Loads the model of a Hugging Face folder, in f32. A folder without a head gets `fresh`.
    ///
    /// # Errors
    /// The folder does not exist or is of an unknown family; its weights do not match its config; it has no head and
    /// `fresh` is `None`; its head has more than one label.
    pub fn load(dir: &Path, device: &Device, fresh: Option<FreshHead>) -> Result<Self, LoadError> {
        Ok(Self::load_as(dir, device, DType::F32, fresh)?.0)
    }

    /// Loads the model of a Hugging Face folder with weights in `dtype`, and reports what was found there.
    ///
    /// # Errors
    /// See [`ValueDecoder::load`].
    pub fn load_as(
        dir: &Path,
        device: &Device,
        dtype: DType,
        fresh: Option<FreshHead>,
    ) -> Result<(Self, LoadReport), LoadError> {
        let origin = hf::Origin::read(dir)?;
        let config = origin.decoder_config()?;
        let stored = Checkpoint::open(dir)?;
        let has_head = stored.find(HEAD).is_some();
        // Without a separate language-model head, which is neither loaded nor kept.
        let bare = DecoderConfig {
            tied_head: true,
            ..config.clone()
        };
        let lazy = Decoder::lazy(bare, device);
        let (mut model, report) = match fresh {
            None if !has_head => {
                return Err(LoadError::NoHead {
                    dir: dir.to_path_buf(),
                });
            }
            Some(fresh) if !has_head => {
                let (decoder, report) = hf::weights::load(lazy, dir, dtype)?;
                (ValueDecoder::on(decoder, fresh), report)
            }
            _ => {
                let bias = stored.find("score.bias").is_some();
                let lazy = ValueDecoder {
                    score: Linear::lazy(1, config.hidden_size, bias, device),
                    model: lazy.model,
                    config: lazy.config,
                    rope: lazy.rope,
                    kind: kind(&origin, bias),
                    origin: None,
                    save_dtype: hf::SaveDType::default(),
                };
                hf::weights::load(lazy, dir, dtype)?
            }
        };
        model.config = config;
        model.origin = Some(Arc::new(origin));
        Ok((model, report))
    }

    /// Writes a Hugging Face folder with weights in `dtype`.
    ///
    /// # Errors
    /// The folder exists and is not empty, or files cannot be written.
    pub fn save_as(&self, dir: &Path, dtype: hf::SaveDType) -> Result<(), ModelError> {
        let origin = self.origin.as_deref();
        let config = hf::save::config_of(origin, &self.config, dtype);
        let config = with_head(config, self.kind);
        hf::save::write(self, config, origin, dir, dtype)
    }
}

/// The kind that a folder declares, else the kind that usually has such a head.
fn kind(origin: &hf::Origin, bias: bool) -> HeadKind {
    let declared = origin.config.get("architectures");
    let declared = declared.and_then(|names| names.get(0)?.as_str());
    let mut kinds = HeadKind::ALL.into_iter();
    let named = kinds.find(|kind| declared.is_some_and(|name| name.ends_with(kind.suffix())));
    named.unwrap_or(if bias {
        HeadKind::TokenClassification
    } else {
        HeadKind::SequenceClassification
    })
}

/// The config.json of a decoder with a one-label head.
fn with_head(mut config: Map<String, Value>, kind: HeadKind) -> Map<String, Value> {
    let model_type = config.get("model_type").and_then(Value::as_str);
    let mut families = FAMILIES.iter();
    let family = families.find(|family| Some(family.model_type) == model_type);
    let stem = family.and_then(|family| family.architecture.strip_suffix("ForCausalLM"));
    if let Some(stem) = stem {
        let name = format!("{stem}{}", kind.suffix());
        config.insert("architectures".to_owned(), json!([name]));
    }
    let labels = |name: &str| config.get(name).and_then(Value::as_object).map(Map::len);
    if labels("id2label") != Some(1) || labels("label2id") != Some(1) {
        config.insert("id2label".to_owned(), json!({"0": "LABEL_0"}));
        config.insert("label2id".to_owned(), json!({"LABEL_0": 0}));
    }
    config
}

/// x wᵀ + b for one output, in at least f32. One sum per row, in an order that does not depend on the other rows.
///
/// # Shapes
/// `x`: `[N, D]`; result: `[N]`
fn scores(x: Tensor<2>, head: &Linear) -> Tensor<1> {
    let dtype = match x.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let (x, weight) = (x.cast(dtype), head.weight.val().cast(dtype));
    let sums = match dtype == DType::F32 && DeviceKind::of(&x.device()).is_host() {
        true => linear(x, weight),
        false => (x * weight).sum_dim(1),
    };
    let sums: Tensor<1> = sums.squeeze_dim(1);
    match &head.bias {
        Some(bias) => sums + bias.val().cast(dtype),
        None => sums,
    }
}

impl ValueInterface for ValueDecoder {
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn max_tokens(&self) -> usize {
        self.config.max_tokens
    }

    fn values(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let hidden = self.model.forward(ids, &self.rope);
        let [b, s, d] = hidden.dims();
        scores(hidden.reshape([b * s, d]), &self.score).reshape([b, s])
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        self.save_as(dir, self.save_dtype)
    }
}

#[cfg(test)]
#[path = "value_head_tests.rs"]
mod tests;
