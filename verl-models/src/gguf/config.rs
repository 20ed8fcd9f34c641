//! Metadata into `config.json`.

use serde_json::{Map, Value, json};

use super::tokenizer::SpecialIds;
use super::{GgufError, Metadata, WeightType, object, refuse_above};
use crate::families::largest;
use crate::tokenizer::MAX_IDS;

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
    linear_rope_factor: Option<f64>,
}

const ARCHITECTURES: [(&str, &str); 3] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
];

/// The size of the vocabulary.
const ROWS: &str = "rows of token_embd.weight";

fn unsupported(what: &'static str, found: &str, known: &str) -> GgufError {
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
                "gives {heads} query heads, {kv_heads} key heads of width {head_width}, which do not fit each other"
            ),
        });
    }
    let rotated = metadata.count(&key("rope.dimension_count"))?;
    if let Some(rotated) = rotated.filter(|rotated| *rotated != head_width) {
        return Err(unsupported(
            "rotation",
            &format!("of {rotated} of {head_width} dims of a head"),
            "rotations of all of them",
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
            reason: format!("is {rope_theta}, and must be above 0"),
        });
    }
    let scaling = key("rope.scaling.type");
    let linear_rope_factor = match metadata.text(&scaling)? {
        None | Some("none") => None,
        Some("linear") => metadata.float(&key("rope.scaling.factor"))?,
        Some(other) => return Err(unsupported("rope scaling", other, "none, linear, llama3")),
    };
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
        context: metadata.needed_size(&key("context_length"), largest::CONTEXT)?,
        vocab_size,
        tied: !metadata.0.tensor_infos.contains_key("output.weight"),
        attention_bias: metadata.0.tensor_infos.contains_key("blk.0.attn_q.bias"),
        norm_eps: metadata
            .float(&eps)?
            .ok_or_else(|| Metadata::missing(&eps))?,
        rope_theta,
        linear_rope_factor,
        architecture,
    })
}

pub(super) fn to_json(
    model: &Model,
    special: &SpecialIds,
    weight_type: WeightType,
    rope_factors: Option<&[f32]>,
) -> Result<Map<String, Value>, GgufError> {
    let scaling = match (rope_factors, model.linear_rope_factor) {
        (Some(factors), _) => Some(llama3_scaling(model, factors)?),
        (None, Some(factor)) => Some(json!({"rope_type": "linear", "factor": factor})),
        (None, None) => None,
    };
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

/// The settings of Llama 3's rotary scaling whose factors a file holds instead of the settings themselves: all
/// published models have low and high frequency factors 1 and 4 on an original context of 8192, so the largest factor
/// tells the rest. A tensor that those settings do not reproduce is refused.
fn llama3_scaling(model: &Model, factors: &[f32]) -> Result<Value, GgufError> {
    let (low, high, original) = (1.0, 4.0, 8192.0);
    let factor = factors.iter().copied().fold(1.0f32, f32::max);
    let expected = (0..model.head_width / 2).map(|i| {
        let wavelength = std::f64::consts::TAU
            * model
                .rope_theta
                .powf(2.0 * i as f64 / model.head_width as f64);
        let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)
    });
    let agrees = factors.len() == model.head_width / 2
        && expected
            .zip(factors)
            .all(|(want, &have)| (want / f64::from(have) - 1.0).abs() < 1e-3);
    if !agrees {
        return Err(unsupported(
            "rope scaling",
            "rope_freqs.weight",
            "the factors of Llama 3 (low 1, high 4, original context 8192)",
        ));
    }
    Ok(json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": 8192
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_settings_come_back_from_their_factors() {
        let model = Model {
            architecture: "llama".to_owned(),
            width: 64,
            mlp_width: 1,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            head_width: 8,
            context: 131_072,
            vocab_size: 1,
            tied: true,
            attention_bias: false,
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            linear_rope_factor: None,
        };
        // Wavelengths 2π·500000^(i/4) are 6.3, 167, 4443, 118143: short, short, between 8192/4 and 8192, long.
        let smooth = (8192.0 / 4442.883 - 1.0) / 3.0;
        let factors = [1.0, 1.0, 1.0 / ((1.0 - smooth) / 32.0 + smooth), 32.0];
        let scaling = llama3_scaling(&model, &factors).unwrap();
        assert_eq!(scaling["factor"], 32.0);
        assert_eq!(scaling["rope_type"], "llama3");
        assert!(llama3_scaling(&model, &[1.0, 1.0, 2.0, 32.0]).is_err());
        assert!(llama3_scaling(&model, &factors[..3]).is_err());
    }
}
