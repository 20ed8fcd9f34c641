//! Reads and writes the rotary settings of a config.json.

use serde_json::{Value, json};

use crate::blocks::rope::{RopeConfig, RopeScaling};
use crate::hf::LoadError;
use crate::hf::config::Settings;

/// Tokens that the model can read: the declared context, or the context to which YaRN extends that of pre-training,
/// which configs often do not include in `max_position_embeddings`.
pub(super) fn context(scaling: &RopeScaling, declared: usize) -> usize {
    match *scaling {
        RopeScaling::Yarn {
            factor,
            original_context,
            ..
        } => declared.max((original_context as f64 * factor) as usize),
        _ => declared,
    }
}

/// Rotary settings in either form: all in `rope_parameters`, or `rope_theta` next to `rope_scaling`.
pub(super) fn rope(settings: &Settings<'_>, max_tokens: usize) -> Result<RopeConfig, LoadError> {
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
        let original = match settings.optional_size("original_max_position_embeddings")? {
            Some(original) => Some(original),
            None => nested.optional_size("original_max_position_embeddings")?,
        };
        scaling = rope_scaling(nested, max_tokens, original.unwrap_or(max_tokens))?;
    }
    if let Some(partial) = partial.filter(|partial| *partial != 1.0) {
        return Err(settings.error(format!(
            "`partial_rotary_factor` is {partial}; only rotation of complete heads is supported"
        )));
    }
    Ok(RopeConfig { theta, scaling })
}

fn rope_scaling(
    rope: &Settings<'_>,
    max_tokens: usize,
    original_context: usize,
) -> Result<RopeScaling, LoadError> {
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
        "dynamic" => Ok(RopeScaling::Dynamic {
            factor: needed("factor")?,
            context: max_tokens,
        }),
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
            Ok(RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            })
        }
        "yarn" => yarn(rope, max_tokens, original_context),
        other => Err(rope.error(format!(
            "rotary scaling `{other}` is not supported; supported: default, dynamic, linear, llama3, yarn"
        ))),
    }
}

fn yarn(
    rope: &Settings<'_>,
    max_tokens: usize,
    original_context: usize,
) -> Result<RopeScaling, LoadError> {
    let stretched = max_tokens as f64 / original_context as f64;
    let factor = rope.positive("factor")?.unwrap_or(stretched);
    let beta_fast = rope.positive("beta_fast")?.unwrap_or(32.0);
    let beta_slow = rope.positive("beta_slow")?.unwrap_or(1.0);
    if beta_slow >= beta_fast {
        return Err(rope.error(format!(
            "`beta_slow` ({beta_slow}) must be less than `beta_fast` ({beta_fast})"
        )));
    }
    let length = |scale: f64| match factor > 1.0 {
        true => 0.1 * scale * libm::log(factor) + 1.0,
        false => 1.0,
    };
    let scales = (rope.positive("mscale")?, rope.positive("mscale_all_dim")?);
    let magnitude = match (rope.positive("attention_factor")?, scales) {
        (Some(given), _) => given,
        (None, (Some(scale), Some(of_all))) => length(scale) / length(of_all),
        _ => length(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        magnitude,
        beta_fast,
        beta_slow,
        original_context,
        truncate: rope.get("truncate").is_none() || rope.flag("truncate")?,
    })
}

/// The `rope_scaling` entry of a scaling.
pub(super) fn scaling_json(scaling: &RopeScaling) -> Value {
    match *scaling {
        RopeScaling::Default => Value::Null,
        RopeScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
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
        RopeScaling::Yarn {
            factor,
            magnitude,
            beta_fast,
            beta_slow,
            original_context,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": magnitude,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "original_max_position_embeddings": original_context,
            "truncate": truncate,
        }),
    }
}
