//! Model families: converts config.json to a [`DecoderConfig`] and back.
//!
//! Both generations of names are read: `rope_theta` with `rope_scaling`, or `rope_parameters`; `torch_dtype` or
//! `dtype`. Settings that the decoder does not support are refused by name.

mod rotary;

use serde_json::{Map, Value, json};
use verl_text::tokenizer::MAX_IDS;

use self::rotary::{context, rope, scaling_json};
use crate::FAMILIES;
use crate::blocks::attention::Heads;
use crate::decoder::DecoderConfig;
use crate::hf::config::Settings;
use crate::hf::{LoadError, SaveDType};

/// Largest sizes accepted from a file: above those of any model, and small enough that no product of them used as a
/// memory size overflows 64 bits.
pub(crate) mod largest {
    pub(crate) const LAYERS: usize = 1 << 12;
    /// The model's width and the width inside the MLP.
    pub(crate) const WIDTH: usize = 1 << 20;
    pub(crate) const HEADS: usize = 1 << 12;
    pub(crate) const HEAD_DIM: usize = 1 << 12;
    pub(crate) const CONTEXT: usize = 1 << 30; // tokens
}

/// The sizes in a config.json, with their limits.
const SIZES: [(&str, usize); 8] = [
    ("num_hidden_layers", largest::LAYERS),
    ("hidden_size", largest::WIDTH),
    ("intermediate_size", largest::WIDTH),
    ("vocab_size", MAX_IDS),
    ("num_attention_heads", largest::HEADS),
    ("num_key_value_heads", largest::HEADS),
    ("head_dim", largest::HEAD_DIM),
    ("max_position_embeddings", largest::CONTEXT),
];

/// A family: how its config.json differs from the settings that all families share.
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
    /// Default width of a head; `None` divides the width among the heads.
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

/// SmolLM, where config.json uses its own `model_type`.
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
/// A family that is not in [`FAMILIES`]; settings that are missing, invalid or not supported by the decoder.
pub fn decoder_config(settings: &Settings<'_>) -> Result<DecoderConfig, LoadError> {
    let traits = (family(settings)?.traits)(settings)?;
    refuse_oversized(settings)?;
    refuse_unsupported(settings)?;
    let hidden_size = settings.size("hidden_size")?;
    let declared = settings.size("max_position_embeddings")?;
    let rope = rope(settings, declared)?;
    let max_tokens = context(&rope.scaling, declared);
    if max_tokens > largest::CONTEXT {
        return Err(settings.error(format!(
            "the `factor` of rotary scaling extends the context to {max_tokens} tokens, but the limit is {}",
            largest::CONTEXT
        )));
    }
    Ok(DecoderConfig {
        vocab_size: settings.size("vocab_size")?,
        hidden_size,
        intermediate_size: settings.size("intermediate_size")?,
        layers: settings.size("num_hidden_layers")?,
        heads: heads(settings, hidden_size, traits.head_dim)?,
        max_tokens,
        norm_epsilon: settings.positive("rms_norm_eps")?.unwrap_or(1e-6),
        rope,
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
    // A `head_dim` of null requests the division instead of the family's default.
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

/// Refuses sizes that no model has, before memory is allocated from them.
fn refuse_oversized(settings: &Settings<'_>) -> Result<(), LoadError> {
    for (name, largest) in SIZES {
        let above = |value: &&Value| value.as_f64().is_some_and(|size| size > largest as f64);
        if let Some(size) = settings.get(name).filter(above) {
            return Err(settings.error(format!(
                "`{name}` is {size}, but the limit is {largest}: no model is that large, so the file is probably \
                 damaged"
            )));
        }
    }
    Ok(())
}

fn refuse_unsupported(settings: &Settings<'_>) -> Result<(), LoadError> {
    if let Some(activation) = settings.text("hidden_act")?.filter(|act| *act != "silu") {
        return Err(settings.error(format!(
            "`hidden_act` is `{activation}`; only `silu` is supported"
        )));
    }
    refuse_quantised(settings)?;
    if let Some(window) = sliding_window(settings)? {
        return Err(settings.error(format!(
            "layers attend to a sliding window of {window} tokens (`sliding_window`); only full attention is supported"
        )));
    }
    Ok(())
}

/// Refuses quantised weights, declared by `quantization_config` (GPTQ, AWQ, bitsandbytes and others) or `quantization`
/// (MLX).
fn refuse_quantised(settings: &Settings<'_>) -> Result<(), LoadError> {
    for (name, default) in [
        ("quantization", "MLX"),
        ("quantization_config", "an unnamed method"),
    ] {
        let Some(config) = settings.get(name) else {
            continue;
        };
        let method = config.get("quant_method").and_then(Value::as_str);
        let method = method.map_or_else(|| default.to_owned(), |method| format!("`{method}`"));
        return Err(settings.error(format!(
            "`{name}`: weights quantised by {method} are not supported; use the unquantised model"
        )));
    }
    Ok(())
}

/// The sliding window, if one is used and shorter than the context.
fn sliding_window(settings: &Settings<'_>) -> Result<Option<usize>, LoadError> {
    let declared = settings.flag("use_sliding_window")?;
    let listed = match settings.get("layer_types") {
        Some(Value::Array(kinds)) => Some(kinds.iter().any(|kind| kind != "full_attention")),
        _ => None,
    };
    let from = settings.count("max_window_layers")?.unwrap_or(28);
    let slides = listed.unwrap_or(from < settings.size("num_hidden_layers")?);
    let window = settings.optional_size("sliding_window")?;
    let context = settings.size("max_position_embeddings")?;
    Ok(window.filter(|window| declared && slides && *window < context))
}

/// A config.json for a decoder that was not loaded from one, with names that every version of `transformers` reads.
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

/// The family whose architecture matches this decoder.
fn family_of(config: &DecoderConfig) -> &'static Family {
    if config.qk_norm {
        &QWEN3
    } else if config.qkv_bias && !config.output_bias {
        &QWEN2
    } else {
        &LLAMA
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::rope::RopeScaling;

    fn base() -> Value {
        json!({
            "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        })
    }

    fn read(changes: Value) -> Result<DecoderConfig, String> {
        let mut config = base();
        let (Value::Object(map), Value::Object(changes)) = (&mut config, changes) else {
            panic!("the test passes objects")
        };
        map.extend(changes);
        let settings = Settings {
            path: "config.json".into(),
            map,
        };
        decoder_config(&settings).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn check_refused(changes: Value, reason: &str) {
        let error = read(changes).unwrap_err();
        assert_eq!(error, format!("`config.json`: {reason}"));
    }

    #[test]
    fn absent_settings_have_the_defaults_of_transformers() {
        let config = read(json!({})).unwrap();
        assert_eq!(config.heads.key_value, 4);
        assert_eq!(config.heads.dim, 4);
        assert_eq!(config.rope.theta, 10_000.0);
        assert_eq!(config.norm_epsilon, 1e-6);
        assert!(!config.tied_head && !config.qkv_bias && !config.mlp_bias);
        assert_eq!(read(json!({"model_type": "qwen3"})).unwrap().heads.dim, 128);
    }

    #[test]
    fn families_differ_in_biases_and_norms() {
        let traits = |changes| {
            let c = read(changes).unwrap();
            (c.qkv_bias, c.output_bias, c.mlp_bias, c.qk_norm)
        };
        assert_eq!(
            traits(json!({"model_type": "smollm"})),
            (false, false, false, false)
        );
        assert_eq!(
            traits(json!({"attention_bias": true, "mlp_bias": true})),
            (true, true, true, false)
        );
        assert_eq!(
            traits(json!({"model_type": "qwen2"})),
            (true, false, false, false)
        );
        assert_eq!(
            traits(json!({"model_type": "qwen3"})),
            (false, false, false, true)
        );
    }

    #[test]
    fn old_and_new_names_of_rotary_settings_agree() {
        let old = json!({
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        });
        let new = json!({
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0},
        });
        let rope = read(old).unwrap().rope;
        assert_eq!(rope, read(new).unwrap().rope);
        assert_eq!(rope.theta, 500_000.0);
        assert_eq!(rope.scaling, RopeScaling::Linear { factor: 4.0 });
    }

    #[test]
    fn llama3_scaling_is_read_and_written_back() {
        let scaling = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        });
        let config = read(json!({"rope_scaling": scaling})).unwrap();
        let written = config_json(&config, SaveDType::BF16);
        assert_eq!(written["rope_scaling"], scaling);
        assert_eq!(written["torch_dtype"], "bfloat16");
        let settings = Settings {
            path: "config.json".into(),
            map: &written,
        };
        assert_eq!(decoder_config(&settings).unwrap(), config);
    }

    #[test]
    fn yarn_is_read_as_transformers_reads_it() {
        // As in the model cards of Qwen2.5 and Qwen3.
        let card = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        let config = read(json!({"rope_scaling": card})).unwrap();
        let yarn = |factor: f64, magnitude, original_context| RopeScaling::Yarn {
            factor,
            magnitude,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context,
            truncate: true,
        };
        let magnitude = 0.1 * 4f64.ln() + 1.0;
        assert_eq!(config.rope.scaling, yarn(4.0, magnitude, 32));
        assert_eq!(config.max_tokens, 128);
        let explicit = json!({
            "rope_type": "yarn", "factor": 2.0, "attention_factor": 0.5, "mscale": 2.0, "truncate": true,
        });
        let scaling = read(json!({"rope_parameters": explicit}))
            .unwrap()
            .rope
            .scaling;
        assert_eq!(scaling, yarn(2.0, 0.5, 64));
        let scales =
            json!({"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 1.0});
        let scaling = read(json!({"rope_parameters": scales}))
            .unwrap()
            .rope
            .scaling;
        assert_eq!(scaling.magnitude(), (0.05 * 4f64.ln() + 1.0) / magnitude);
    }

    #[test]
    fn scalings_are_written_back() {
        for scaling in [
            json!({"rope_type": "yarn", "factor": 4.0, "truncate": false, "beta_fast": 16.0}),
            json!({"rope_type": "dynamic", "factor": 4.0}),
        ] {
            let config = read(json!({"rope_scaling": scaling})).unwrap();
            let written = config_json(&config, SaveDType::F32);
            let settings = Settings {
                path: "config.json".into(),
                map: &written,
            };
            assert_eq!(decoder_config(&settings).unwrap(), config);
        }
    }

    #[test]
    fn a_declared_but_unused_sliding_window_is_accepted() {
        let window = |changes: Value| read(changes).map(|_| ());
        let declared = json!({"sliding_window": 8, "use_sliding_window": false});
        assert_eq!(window(declared), Ok(()));
        let above_the_layers =
            json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 2});
        assert_eq!(window(above_the_layers), Ok(()));
        let whole_context =
            json!({"sliding_window": 64, "use_sliding_window": true, "max_window_layers": 0});
        assert_eq!(window(whole_context), Ok(()));
    }

    #[test]
    fn unsupported_settings_are_refused() {
        check_refused(
            json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1}),
            "layers attend to a sliding window of 8 tokens (`sliding_window`); only full attention is supported",
        );
        check_refused(
            json!({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}),
            "rotary scaling `longrope` is not supported; supported: default, dynamic, linear, llama3, yarn",
        );
        check_refused(
            json!({"hidden_act": "gelu"}),
            "`hidden_act` is `gelu`; only `silu` is supported",
        );
        check_refused(
            json!({"quantization_config": {"bits": 4}}),
            "`quantization_config`: weights quantised by an unnamed method are not supported; use the unquantised model",
        );
        check_refused(
            json!({"quantization_config": {"quant_method": "gptq"}}),
            "`quantization_config`: weights quantised by `gptq` are not supported; use the unquantised model",
        );
        check_refused(
            json!({"quantization": {"group_size": 64, "bits": 4}}),
            "`quantization`: weights quantised by MLX are not supported; use the unquantised model",
        );
        check_refused(
            json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
            "`partial_rotary_factor` is 0.5; only rotation of complete heads is supported",
        );
    }

    #[test]
    fn invalid_settings_are_refused_by_name() {
        check_refused(
            json!({"num_key_value_heads": 3}),
            "`num_attention_heads` (4) must be a multiple of `num_key_value_heads` (3)",
        );
        check_refused(
            json!({"hidden_size": 18}),
            "`hidden_size` (18) must be a multiple of `num_attention_heads` (4) where `head_dim` is not given",
        );
        check_refused(
            json!({"head_dim": 5}),
            "heads are 5 wide; rotary embedding needs an even `head_dim`",
        );
        check_refused(
            json!({"num_hidden_layers": 0}),
            "`num_hidden_layers` must be a whole number of at least 1, got 0",
        );
        check_refused(json!({"vocab_size": null}), "`vocab_size` is missing");
        check_refused(
            json!({"rope_scaling": {"type": "yarn", "factor": 1e30}}),
            "the `factor` of rotary scaling extends the context to 18446744073709551615 tokens, but the limit is 1073741824",
        );
        check_refused(
            json!({"rope_scaling": {"type": "linear"}}),
            "rotary scaling `linear` needs `factor`",
        );
        check_refused(
            json!({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0}}),
            "`beta_slow` (1) must be less than `beta_fast` (1)",
        );
    }

    #[test]
    fn oversized_values_are_refused() {
        for (name, most) in SIZES {
            for size in [most as u64 + 1, u64::MAX] {
                let reason = format!(
                    "`{name}` is {size}, but the limit is {most}: no model is that large, so the file is probably damaged"
                );
                check_refused(json!({ name: size }), &reason);
            }
        }
        check_refused(
            serde_json::from_str(r#"{"num_hidden_layers": 18446744073709551616}"#).unwrap(),
            "`num_hidden_layers` is 1.8446744073709552e+19, but the limit is 4096: no model is that large, so the file is \
             probably damaged",
        );
        let all = SIZES.map(|(name, most)| (name.to_owned(), json!(most)));
        assert!(read(Value::Object(all.into_iter().collect())).is_ok());
    }

    #[test]
    fn unknown_families_are_refused_with_the_supported_ones() {
        insta::assert_snapshot!(
            read(json!({"model_type": "mistral"})).unwrap_err(),
            @"`config.json`: model_type `mistral` is not supported; supported: llama, qwen2, qwen3, smollm"
        );
    }
}
