//! Decoders to measure: the shapes of real models, with random weights.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Distribution, Tensor};
use verl_decoder::blocks::attention::Heads;
use verl_decoder::blocks::rope::{RopeConfig, RopeScaling};
use verl_decoder::decoder::{Decoder, DecoderConfig};

use crate::weights;

/// A named shape.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    config: fn() -> DecoderConfig,
}

/// Every preset, the smallest first.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "tiny",
        config: tiny,
    },
    Preset {
        name: "smollm2-135m",
        config: smollm2_135m,
    },
    Preset {
        name: "qwen2.5-0.5b",
        config: qwen2_5_half_b,
    },
];

/// The shape called `name`.
pub fn preset(name: &str) -> Option<DecoderConfig> {
    let preset = PRESETS.iter().find(|preset| preset.name == name)?;
    Some((preset.config)())
}

fn tiny() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 512,
        hidden_size: 64,
        intermediate_size: 160,
        layers: 2,
        heads: Heads {
            query: 4,
            key_value: 2,
            dim: 16,
        },
        max_tokens: 512,
        norm_epsilon: 1e-5,
        rope: RopeConfig {
            theta: 10_000.0,
            scaling: RopeScaling::Default,
        },
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        tied_head: true,
        initializer_range: 0.02,
    }
}

fn smollm2_135m() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 49_152,
        hidden_size: 576,
        intermediate_size: 1536,
        layers: 30,
        heads: Heads {
            query: 9,
            key_value: 3,
            dim: 64,
        },
        max_tokens: 8192,
        rope: RopeConfig {
            theta: 100_000.0,
            scaling: RopeScaling::Default,
        },
        ..tiny()
    }
}

fn qwen2_5_half_b() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 151_936,
        hidden_size: 896,
        intermediate_size: 4864,
        layers: 24,
        heads: Heads {
            query: 14,
            key_value: 2,
            dim: 64,
        },
        max_tokens: 32_768,
        norm_epsilon: 1e-6,
        rope: RopeConfig {
            theta: 1_000_000.0,
            scaling: RopeScaling::Default,
        },
        qkv_bias: true,
        ..tiny()
    }
}

/// A decoder whose matrices are drawn on the device, in `dtype`; biases are zero, norms one. The draws are not seeded,
/// so use it only to measure speed.
pub fn random_decoder(config: DecoderConfig, device: &Device, dtype: DType) -> Decoder {
    let scale = config.initializer_range;
    weights::dense(Decoder::lazy(config, device).map(&mut Drawer { scale, dtype }))
}

struct Drawer {
    scale: f64,
    dtype: DType,
}

impl ModuleMapper for Drawer {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|weight| {
            if D < 2 {
                return weight.cast(self.dtype);
            }
            let normal = Distribution::Normal(0.0, self.scale);
            let device = weight.device();
            Tensor::<D>::random(weight.shape(), normal, (&device, DType::F32)).cast(self.dtype)
        })
    }
}

/// Elements of all matrices that a token is multiplied by, including the head; and of the head only.
pub(super) fn multiplied(config: &DecoderConfig) -> (f64, f64) {
    let (d, i) = (config.hidden_size as f64, config.intermediate_size as f64);
    let Heads {
        query,
        key_value,
        dim,
    } = config.heads;
    let (query, key) = ((query * dim) as f64, (key_value * dim) as f64);
    let layer = 2.0 * d * query + 2.0 * d * key + 3.0 * d * i;
    let head = config.vocab_size as f64 * d;
    (config.layers as f64 * layer + head, head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_match_the_published_configs() {
        let sizes: Vec<(&str, f64)> = PRESETS
            .iter()
            .map(|preset| (preset.name, multiplied(&(preset.config)()).0))
            .collect();
        // 494 million parameters of Qwen2.5-0.5B, 134.5 million of SmolLM2-135M; norms and biases are not matrices.
        assert_eq!(sizes[1].1, 134_479_872.0);
        assert_eq!(sizes[2].1, 493_961_216.0);
        assert!(preset("llama").is_none());
    }

    #[test]
    fn drawn_decoders_have_the_dtype_and_work() {
        let decoder = random_decoder(tiny(), &Device::flex(), DType::BF16);
        assert_eq!(decoder.head().dtype(), DType::BF16);
        assert_eq!(decoder.model.norm.weight.val().dtype(), DType::BF16);
        let spread = decoder
            .head()
            .cast(DType::F32)
            .var(0)
            .mean()
            .into_scalar::<f32>();
        assert!((spread.sqrt() - 0.02).abs() < 2e-3, "{spread}");
    }
}
