//! Rotary scaling in the metadata, as llama.cpp reads it (`load_hparams`, `llama_context`, `rope_yarn`).
//!
//! - The type defaults to `linear`. The factor is `rope.scaling.factor`, else `rope.scale_linear`, the key's old name;
//!   0 or no factor means 1.
//! - `none` scales nothing, whatever the factor.
//! - `yarn` lengthens rotated vectors by 0.1 ln(factor) + 1, times `rope.scaling.attn_factor`. The original context is
//!   `rope.scaling.original_context_length`, else the context. The ramp covers 32 turns to 1 turn.
//! - `rope_freqs.weight` divides single frequencies: Llama 3.
//!
//! `finetuned` has no effect. For the supported architectures, `yarn_log_multiplier`, `yarn_ext_factor`,
//! `yarn_attn_factor`, `yarn_beta_fast` and `yarn_beta_slow` are not read.

use serde_json::{Value, json};

use super::{GgufError, Metadata, config::unsupported};
use crate::families::largest;

/// The rotary scaling settings of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scaling {
    kind: Kind,
    factor: f64,
    /// `rope.scaling.attn_factor`.
    length: f64,
    original_context: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    None,
    Linear,
    Yarn,
}

impl Scaling {
    /// Reads the settings of an architecture whose context is `context`.
    ///
    /// # Errors
    /// An unsupported kind of scaling; invalid numbers.
    pub(super) fn read(
        metadata: &Metadata<'_>,
        architecture: &str,
        context: usize,
    ) -> Result<Self, GgufError> {
        let key = |name: &str| format!("{architecture}.rope.{name}");
        let kind = match metadata.text(&key("scaling.type"))? {
            None | Some("linear") => Kind::Linear,
            Some("none") => Kind::None,
            Some("yarn") => Kind::Yarn,
            Some(other) => {
                return Err(unsupported(
                    "rope scaling",
                    other,
                    "none, linear, yarn, llama3",
                ));
            }
        };
        let positive = |key: String| -> Result<Option<f64>, GgufError> {
            match metadata.float(&key)? {
                Some(value) if value < 0.0 => Err(GgufError::Metadata {
                    key,
                    reason: format!("is {value}, but must not be negative"),
                }),
                value => Ok(value),
            }
        };
        let factor = match positive(key("scaling.factor"))? {
            Some(factor) => Some(factor),
            None => positive(key("scale_linear"))?,
        };
        let name = key("scaling.original_context_length");
        let original = metadata.size(&name, largest::CONTEXT)?;
        Ok(Scaling {
            kind,
            factor: factor.filter(|factor| *factor != 0.0).unwrap_or(1.0),
            length: positive(key("scaling.attn_factor"))?.unwrap_or(1.0),
            original_context: original.filter(|tokens| *tokens > 0).unwrap_or(context),
        })
    }

    /// `rope_scaling` of config.json; `factors` are the values of `rope_freqs.weight`, if the file has it.
    ///
    /// # Errors
    /// Settings that config.json cannot express: factors that are not those of Llama 3, two scalings at once, or a
    /// factor on the length of rotated vectors without YaRN.
    pub(super) fn to_json(
        self,
        factors: Option<&[f32]>,
        theta: f64,
        head_width: usize,
    ) -> Result<Option<Value>, GgufError> {
        let Scaling {
            kind,
            factor,
            length,
            original_context,
        } = self;
        let is_scaled = kind != Kind::None && factor != 1.0;
        // Factors of 1 change nothing.
        let factors = factors.filter(|factors| factors.iter().any(|factor| *factor != 1.0));
        if factors.is_some() && is_scaled {
            let found = format!("rope_freqs.weight and `rope.scaling.factor` {factor}");
            return Err(unsupported("rope scaling", &found, "one of the two"));
        }
        if kind == Kind::Yarn && is_scaled {
            let longer = 0.1 * libm::log(factor.max(1.0)) + 1.0;
            return Ok(Some(json!({
                "rope_type": "yarn", "factor": factor, "attention_factor": longer * length,
                "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": original_context
            })));
        }
        if length != 1.0 {
            let found = format!("`rope.scaling.attn_factor` {length} without yarn");
            return Err(unsupported("rope scaling", &found, "1, or any with yarn"));
        }
        match factors {
            Some(factors) => llama3(factors, theta, head_width).map(Some),
            None if is_scaled => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
            None => Ok(None),
        }
    }
}

/// The settings of Llama 3's rotary scaling, recovered from the factors that a file contains instead of the settings.
/// All published models have low and high frequency factors 1 and 4 on an original context of 8192, so the largest
/// factor determines the rest. A tensor that those settings do not reproduce is refused.
fn llama3(factors: &[f32], theta: f64, head_width: usize) -> Result<Value, GgufError> {
    let (low, high, original) = (1.0, 4.0, 8192.0);
    let factor = factors.iter().copied().fold(1.0f32, f32::max);
    let expected = (0..head_width / 2).map(|i| {
        let turns = libm::pow(theta, 2.0 * i as f64 / head_width as f64);
        let wavelength = std::f64::consts::TAU * turns;
        let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)
    });
    let agrees = factors.len() == head_width / 2
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
    fn llama3_settings_are_recovered_from_their_factors() {
        // Wavelengths 2π·500000^(i/4) are 6.3, 167, 4443, 118143: short, short, between 8192/4 and 8192, long.
        let smooth = (8192.0 / 4442.883 - 1.0) / 3.0;
        let factors = [1.0, 1.0, 1.0 / ((1.0 - smooth) / 32.0 + smooth), 32.0];
        let scaling = llama3(&factors, 500_000.0, 8).unwrap();
        assert_eq!(scaling["factor"], 32.0);
        assert_eq!(scaling["rope_type"], "llama3");
        assert!(llama3(&[1.0, 1.0, 2.0, 32.0], 500_000.0, 8).is_err());
        assert!(llama3(&factors[..3], 500_000.0, 8).is_err());
    }
}
