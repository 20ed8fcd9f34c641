//! Families of models: config.json into a [`DecoderConfig`] and back.
//!
//! Both generations of spellings are read: `rope_theta` with `rope_scaling`, or `rope_parameters`; `torch_dtype` or
//! `dtype`. What a config asks for and the decoder cannot do is refused by name.

use serde_json::{Map, Value, json};

use crate::FAMILIES;
use crate::blocks::attention::Heads;
use crate::blocks::rope::{RopeConfig, RopeScaling};
use crate::decoder::DecoderConfig;
use crate::hf::config::Settings;
use crate::hf::{LoadError, SaveDType};

/// A family: what its config.json says beyond the settings that all share.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// `model_type` of its config.json.
    pub model_type: &'static str,
    /// `architectures` of its config.json.
    pub architecture: &'static str,
    traits: fn(&Settings<'_>) -> Result<Traits, LoadError>,
}

/// Where families differ.
#[derive(Debug, Clone, Copy)]
struct Traits {
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    /// Width of a head where the file gives none; `None` divides the width among the heads.
    head_dim: Option<usize>,
}

/// Llama 2 and 3, TinyLlama, SmolLM2.
pub const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    traits: llama,
};

/// Qwen2 and Qwen2.5: biases on queries, keys and values.
pub const QWEN2: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    traits: |_| {
        Ok(Traits {
            qkv_bias: true,
            output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            head_dim: None,
        })
    },
};

/// Qwen3: norms on query and key heads.
pub const QWEN3: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    traits: |settings| {
        let bias = settings.flag("attention_bias")?;
        Ok(Traits {
            qkv_bias: bias,
            output_bias: bias,
            mlp_bias: false,
            qk_norm: true,
            head_dim: Some(128),
        })
    },
};

/// SmolLM, where it goes by its own name.
pub const SMOLLM: Family = Family {
    model_type: "smollm",
    ..LLAMA
};

fn llama(settings: &Settings<'_>) -> Result<Traits, LoadError> {
    let bias = settings.flag("attention_bias")?;
    Ok(Traits {
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: settings.flag("mlp_bias")?,
        qk_norm: false,
        head_dim: None,
    })
}

/// The decoder that a config.json describes.
///
/// # Errors
/// A family that is not in [`FAMILIES`]; settings that are missing, make no sense, or ask for what the decoder does
/// not do.
pub fn decoder_config(settings: &Settings<'_>) -> Result<DecoderConfig, LoadError> {
    let traits = (family(settings)?.traits)(settings)?;
    refuse_unsupported(settings)?;
    let hidden_size = settings.size("hidden_size")?;
    let max_tokens = settings.size("max_position_embeddings")?;
    Ok(DecoderConfig {
        vocab_size: settings.size("vocab_size")?,
        hidden_size,
        intermediate_size: settings.size("intermediate_size")?,
        layers: settings.size("num_hidden_layers")?,
        heads: heads(settings, hidden_size, traits.head_dim)?,
        max_tokens,
        norm_epsilon: settings.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope: rope(settings, max_tokens)?,
        qkv_bias: traits.qkv_bias,
        output_bias: traits.output_bias,
        mlp_bias: traits.mlp_bias,
        qk_norm: traits.qk_norm,
        tied_head: settings.flag("tie_word_embeddings")?,
        initializer_range: settings.positive("initializer_range")?.unwrap_or(0.02),
    })
}

fn family(settings: &Settings<'_>) -> Result<&'static Family, LoadError> {
    let found = settings
        .text("model_type")?
        .ok_or_else(|| settings.error("`model_type` is missing"))?;
    let family = FAMILIES.iter().find(|family| family.model_type == found);
    family.ok_or_else(|| LoadError::Family {
        path: settings.path.clone(),
        found: found.to_string(),
        known: FAMILIES.iter().map(|family| family.model_type).collect(),
    })
}

fn heads(
    settings: &Settings<'_>,
    hidden_size: usize,
    default_dim: Option<usize>,
) -> Result<Heads, LoadError> {
    let query = settings.size("num_attention_heads")?;
    let key_value = settings
        .optional_size("num_key_value_heads")?
        .unwrap_or(query);
    if !query.is_multiple_of(key_value) {
        return Err(settings.error(format!(
            "`num_attention_heads` ({query}) must be a multiple of `num_key_value_heads` ({key_value})"
        )));
    }
    let declared = settings.optional_size("head_dim")?;
    // A `head_dim` of null asks for the division, which is not the family's default.
    let default = default_dim.filter(|_| !settings.map.contains_key("head_dim"));
    let dim = match declared.or(default) {
        Some(dim) => dim,
        None if hidden_size.is_multiple_of(query) => hidden_size / query,
        None => {
            return Err(settings.error(format!(
                "`hidden_size` ({hidden_size}) must be a multiple of `num_attention_heads` ({query}) where `head_dim` \
                 is not given"
            )));
        }
    };
    if !dim.is_multiple_of(2) {
        return Err(settings.error(format!(
            "heads are {dim} wide; rotary embedding needs an even `head_dim`"
        )));
    }
    Ok(Heads {
        query,
        key_value,
        dim,
    })
}

fn refuse_unsupported(settings: &Settings<'_>) -> Result<(), LoadError> {
    if let Some(activation) = settings.text("hidden_act")?.filter(|act| *act != "silu") {
        return Err(settings.error(format!(
            "`hidden_act` is `{activation}`; only `silu` is supported"
        )));
    }
    if settings.get("quantization_config").is_some() {
        return Err(settings.error("`quantization_config`: quantised weights are not supported"));
    }
    if let Some(window) = sliding_window(settings)? {
        return Err(settings.error(format!(
            "layers attend to a sliding window of {window} tokens (`sliding_window`); only full attention is supported"
        )));
    }
    Ok(())
}

/// The sliding window, where one is in use and shorter than the context.
fn sliding_window(settings: &Settings<'_>) -> Result<Option<usize>, LoadError> {
    let declared = settings.flag("use_sliding_window")?;
    let listed = match settings.get("layer_types") {
        Some(Value::Array(kinds)) => Some(kinds.iter().any(|kind| kind != "full_attention")),
        _ => None,
    };
    let from = settings.optional_size("max_window_layers")?.unwrap_or(28);
    let slides = listed.unwrap_or(from < settings.size("num_hidden_layers")?);
    let window = settings.optional_size("sliding_window")?;
    let context = settings.size("max_position_embeddings")?;
    Ok(window.filter(|window| declared && slides && *window < context))
}

/// Rotary settings of either spelling: all in `rope_parameters`, or `rope_theta` beside `rope_scaling`.
fn rope(settings: &Settings<'_>, max_tokens: usize) -> Result<RopeConfig, LoadError> {
    let nested = match settings.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => settings.object("rope_scaling")?,
    };
    let theta = match &nested {
        Some(nested) => nested.positive("rope_theta")?,
        None => None,
    };
    let theta = match theta {
        Some(theta) => theta,
        None => settings.positive("rope_theta")?.unwrap_or(10_000.0),
    };
    let mut partial = settings.positive("partial_rotary_factor")?;
    let mut scaling = RopeScaling::Default;
    if let Some(nested) = &nested {
        partial = nested.positive("partial_rotary_factor")?.or(partial);
        scaling = rope_scaling(nested, max_tokens)?;
    }
    if let Some(partial) = partial.filter(|partial| *partial != 1.0) {
        return Err(settings.error(format!(
            "`partial_rotary_factor` is {partial}; only whole heads are rotated"
        )));
    }
    Ok(RopeConfig { theta, scaling })
}

fn rope_scaling(rope: &Settings<'_>, max_tokens: usize) -> Result<RopeScaling, LoadError> {
    let kind = match rope.text("rope_type")? {
        Some(kind) => kind,
        None => rope.text("type")?.unwrap_or("default"),
    };
    let needed = |name: &str| {
        rope.positive(name)?
            .ok_or_else(|| rope.error(format!("rotary scaling `{kind}` needs `{name}`")))
    };
    match kind {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear {
            factor: needed("factor")?,
        }),
        "llama3" => {
            let (low, high) = (needed("low_freq_factor")?, needed("high_freq_factor")?);
            if low >= high {
                return Err(rope.error(format!(
                    "`low_freq_factor` ({low}) must be less than `high_freq_factor` ({high})"
                )));
            }
            let original = rope.optional_size("original_max_position_embeddings")?;
            Ok(RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: original.unwrap_or(max_tokens),
            })
        }
        other => Err(rope.error(format!(
            "rotary scaling `{other}` is not supported; supported: default, linear, llama3"
        ))),
    }
}

/// A config.json for a decoder that was not loaded from one, in spellings that every version of `transformers` reads.
pub fn config_json(config: &DecoderConfig, dtype: SaveDType) -> Map<String, Value> {
    let family = family_of(config);
    let entries = [
        ("architectures", json!([family.architecture])),
        ("model_type", json!(family.model_type)),
        ("vocab_size", json!(config.vocab_size)),
        ("hidden_size", json!(config.hidden_size)),
        ("intermediate_size", json!(config.intermediate_size)),
        ("num_hidden_layers", json!(config.layers)),
        ("num_attention_heads", json!(config.heads.query)),
        ("num_key_value_heads", json!(config.heads.key_value)),
        ("head_dim", json!(config.heads.dim)),
        ("hidden_act", json!("silu")),
        ("max_position_embeddings", json!(config.max_tokens)),
        ("rms_norm_eps", json!(config.norm_epsilon)),
        ("rope_theta", json!(config.rope.theta)),
        ("rope_scaling", scaling_json(&config.rope.scaling)),
        (
            "attention_bias",
            json!(config.qkv_bias && config.output_bias),
        ),
        ("mlp_bias", json!(config.mlp_bias)),
        ("tie_word_embeddings", json!(config.tied_head)),
        ("initializer_range", json!(config.initializer_range)),
        ("torch_dtype", json!(dtype.name())),
    ];
    entries
        .into_iter()
        .map(|(name, value)| (name.to_string(), value))
        .collect()
}

/// The family that has what this decoder has.
fn family_of(config: &DecoderConfig) -> &'static Family {
    if config.qk_norm {
        &QWEN3
    } else if config.qkv_bias && !config.output_bias {
        &QWEN2
    } else {
        &LLAMA
    }
}

fn scaling_json(scaling: &RopeScaling) -> Value {
    match *scaling {
        RopeScaling::Default => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_context,
        }),
    }
}
