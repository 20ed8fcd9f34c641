//! Converts metadata to `config.json`.

use serde_json::{Map, Value, json};
use verl_text::tokenizer::MAX_IDS;

use super::rope::Scaling;
use super::tokenizer::SpecialIds;
use super::{GgufError, Metadata, WeightType, object, refuse_above};
use crate::families::largest;

/// The decoder that a file describes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Model {
    pub(super) architecture: String,
    pub(super) width: usize,
    pub(super) mlp_width: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_width: usize,
    pub(super) context: usize,
    pub(super) vocab_size: usize,
    pub(super) tied: bool,
    pub(super) attention_bias: bool,
    norm_eps: f64,
    rope_theta: f64,
    scaling: Scaling,
}

const ARCHITECTURES: [(&str, &str); 3] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
];

/// What defines the size of the vocabulary, for messages.
const ROWS: &str = "rows of token_embd.weight";

pub(super) fn unsupported(what: &'static str, found: &str, known: &str) -> GgufError {
    GgufError::Unsupported {
        what,
        found: found.to_owned(),
        known: known.to_owned(),
    }
}

pub(super) fn read(metadata: &Metadata<'_>) -> Result<Model, GgufError> {
    let key = "general.architecture";
    let architecture = metadata
        .text(key)?
        .ok_or_else(|| Metadata::missing(key))?
        .to_owned();
    if !ARCHITECTURES.iter().any(|(name, _)| *name == architecture) {
        return Err(unsupported(
            "architecture",
            &architecture,
            "llama, qwen2, qwen3",
        ));
    }
    if let Some(parts) = metadata.count("split.count")?.filter(|parts| *parts > 1) {
        return Err(unsupported(
            "file",
            &format!("one of {parts} parts"),
            "complete files; merge the parts first (`llama-gguf-split --merge`)",
        ));
    }
    let key = |name: &str| format!("{architecture}.{name}");
    if let Some(experts) = metadata.count(&key("expert_count"))?
        && experts > 0
    {
        return Err(unsupported(
            "architecture",
            &format!("{architecture} with {experts} experts"),
            "dense decoders",
        ));
    }
    let width = metadata.needed_size(&key("embedding_length"), largest::WIDTH)?;
    let heads = metadata.needed_size(&key("attention.head_count"), largest::HEADS)?;
    let kv_heads = metadata
        .size(&key("attention.head_count_kv"), largest::HEADS)?
        .unwrap_or(heads);
    let head_width = match metadata.size(&key("attention.key_length"), largest::HEAD_DIM)? {
        Some(head_width) => head_width,
        None => width / heads,
    };
    if kv_heads == 0 || heads % kv_heads != 0 || head_width == 0 || head_width % 2 != 0 {
        return Err(GgufError::Metadata {
            key: key("attention.head_count"),
            reason: format!(
                "gives {heads} query heads and {kv_heads} key heads of width {head_width}, which are incompatible"
            ),
        });
    }
    let rotated = metadata.count(&key("rope.dimension_count"))?;
    if let Some(rotated) = rotated.filter(|rotated| *rotated != head_width) {
        return Err(unsupported(
            "rotation",
            &format!("{rotated} of {head_width} dims of a head"),
            "all dims",
        ));
    }
    let layers = metadata.needed_size(&key("block_count"), largest::LAYERS)?;
    let tensors = metadata.0.tensor_infos.len();
    if layers > tensors {
        return Err(GgufError::Metadata {
            key: key("block_count"),
            reason: format!("gives {layers} layers, but the file has {tensors} tensors"),
        });
    }
    let base = key("rope.freq_base");
    let rope_theta = metadata.float(&base)?.unwrap_or(10_000.0);
    if !(rope_theta.is_finite() && rope_theta > 0.0) {
        return Err(GgufError::Metadata {
            key: base,
            reason: format!("is {rope_theta}, but must be above 0"),
        });
    }
    let context = metadata.needed_size(&key("context_length"), largest::CONTEXT)?;
    let scaling = Scaling::read(metadata, &architecture, context)?;
    let embedding = metadata.0.tensor_infos.get("token_embd.weight");
    let vocab_size = embedding.and_then(|t| t.shape.dims().first().copied());
    let vocab_size = vocab_size.unwrap_or(0);
    refuse_above(ROWS, vocab_size, MAX_IDS)?;
    if embedding.is_some() && vocab_size == 0 {
        return Err(Metadata::zero(ROWS));
    }
    let eps = key("attention.layer_norm_rms_epsilon");
    Ok(Model {
        width,
        mlp_width: metadata.needed_size(&key("feed_forward_length"), largest::WIDTH)?,
        layers,
        heads,
        kv_heads,
        head_width,
        context,
        vocab_size,
        tied: !metadata.0.tensor_infos.contains_key("output.weight"),
        attention_bias: metadata.0.tensor_infos.contains_key("blk.0.attn_q.bias"),
        norm_eps: metadata
            .float(&eps)?
            .ok_or_else(|| Metadata::missing(&eps))?,
        rope_theta,
        scaling,
        architecture,
    })
}

pub(super) fn to_json(
    model: &Model,
    special: &SpecialIds,
    weight_type: WeightType,
    rope_factors: Option<&[f32]>,
) -> Result<Map<String, Value>, GgufError> {
    let scaling = model
        .scaling
        .to_json(rope_factors, model.rope_theta, model.head_width)?;
    let class = ARCHITECTURES
        .iter()
        .find(|(name, _)| *name == model.architecture)
        .map_or("", |(_, class)| class);
    let dtype = match weight_type {
        WeightType::Bf16 => "bfloat16",
        WeightType::F16 => "float16",
        WeightType::F32 => "float32",
    };
    let bias = (model.architecture != "qwen2").then_some(Value::from(model.attention_bias));
    Ok(object([
        ("architectures", Some(json!([class]))),
        ("model_type", Some(model.architecture.as_str().into())),
        ("vocab_size", Some(model.vocab_size.into())),
        ("hidden_size", Some(model.width.into())),
        ("intermediate_size", Some(model.mlp_width.into())),
        ("num_hidden_layers", Some(model.layers.into())),
        ("num_attention_heads", Some(model.heads.into())),
        ("num_key_value_heads", Some(model.kv_heads.into())),
        ("head_dim", Some(model.head_width.into())),
        ("hidden_act", Some("silu".into())),
        ("max_position_embeddings", Some(model.context.into())),
        ("rms_norm_eps", Some(model.norm_eps.into())),
        ("rope_theta", Some(model.rope_theta.into())),
        ("rope_scaling", scaling),
        ("attention_bias", bias),
        ("tie_word_embeddings", Some(model.tied.into())),
        ("bos_token_id", special.bos.map(Value::from)),
        (
            "eos_token_id",
            special.eos.first().copied().map(Value::from),
        ),
        ("pad_token_id", special.pad.map(Value::from)),
        ("torch_dtype", Some(dtype.into())),
    ]))
}
