//! The decoders that are compared.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{DType, Device, TensorData};
use verl_decoder::blocks::attention::Heads;
use verl_decoder::blocks::rope::{RopeConfig, RopeScaling};
use verl_decoder::decoder::{Decoder, DecoderConfig};
use verl_decoder::hf::LoadError;
use verl_decoder::parameters::{fill_parameters, visit_parameters};

/// A decoder to compare, stored unchanged on the CPU.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its name in the output.
    pub name: String,
    decoder: Decoder,
}

/// Values of parameters by name, in f32.
pub(super) type Values = HashMap<String, TensorData>;

impl Subject {
    /// A decoder with random weights, biases and norms included, large enough that its distributions are neither flat
    /// nor deterministic.
    #[must_use]
    pub fn drawn(name: &str, config: DecoderConfig) -> Self {
        let scale = config.initializer_range as f32;
        let decoder = fill_parameters(
            Decoder::lazy(config, &Device::flex()),
            DType::F32,
            |name, shape| {
                let draws = verl_kernels::random::normals(11, name, shape.iter().product());
                let around = if name.ends_with("norm.weight") {
                    1.0
                } else {
                    0.0
                };
                let values: Vec<f32> = draws.iter().map(|x| around + scale * x).collect();
                Some(TensorData::new(values, shape.to_vec()))
            },
        );
        Subject {
            name: name.to_owned(),
            decoder,
        }
    }

    /// The decoder of a Hugging Face folder.
    ///
    /// # Errors
    /// See [`Decoder::load`].
    pub fn folder(dir: &Path) -> Result<Self, LoadError> {
        let name = dir.file_name().map_or_else(
            || dir.display().to_string(),
            |name| name.to_string_lossy().into_owned(),
        );
        Ok(Subject {
            name,
            decoder: Decoder::load(dir, &Device::flex())?,
        })
    }

    /// The decoder's sizes.
    pub fn config(&self) -> &DecoderConfig {
        &self.decoder.config
    }

    /// Its parameters, rounded to `dtype`, in f32.
    pub(super) fn values(&self, dtype: DType) -> Values {
        let mut values = Values::new();
        visit_parameters(&self.decoder, |name, _, read| {
            let value = read().convert_dtype(dtype).convert_dtype(DType::F32);
            values.insert(name.to_owned(), value);
        });
        values
    }

    /// A decoder with these parameters on a device.
    pub(super) fn decoder(&self, values: &Values, device: &Device, dtype: DType) -> Decoder {
        let lazy = Decoder::lazy(self.decoder.config.clone(), device);
        fill_parameters(lazy, dtype, |name, _| values.get(name).cloned())
    }
}

/// A decoder as wide as real models, with fewer layers and ids; too large for the CPU tests.
#[must_use]
pub fn wide() -> Subject {
    let config = DecoderConfig {
        vocab_size: 4096,
        hidden_size: 896,
        intermediate_size: 4864,
        layers: 2,
        heads: Heads {
            query: 14,
            key_value: 2,
            dim: 64,
        },
        max_tokens: 1024,
        initializer_range: 0.03,
        ..subjects()[1].config().clone()
    };
    Subject::drawn("wide", config)
}

/// The default subjects, used where no folder is given: each family's shape, a width that is not a multiple of a tile,
/// and heads as wide as those of real models.
#[must_use]
pub fn subjects() -> Vec<Subject> {
    let llama = DecoderConfig {
        vocab_size: 331,
        hidden_size: 72,
        intermediate_size: 136,
        layers: 2,
        heads: Heads {
            query: 6,
            key_value: 3,
            dim: 12,
        },
        max_tokens: 256,
        norm_epsilon: 1e-5,
        rope: RopeConfig {
            theta: 10_000.0,
            scaling: RopeScaling::Default,
        },
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        tied_head: false,
        initializer_range: 0.12,
    };
    let qwen2 = DecoderConfig {
        vocab_size: 1003,
        hidden_size: 128,
        intermediate_size: 320,
        heads: Heads {
            query: 4,
            key_value: 2,
            dim: 64,
        },
        norm_epsilon: 1e-6,
        qkv_bias: true,
        tied_head: true,
        initializer_range: 0.08,
        ..llama.clone()
    };
    let qwen3 = DecoderConfig {
        heads: Heads {
            query: 2,
            key_value: 1,
            dim: 128,
        },
        qkv_bias: false,
        qk_norm: true,
        ..qwen2.clone()
    };
    [("llama", llama), ("qwen2", qwen2), ("qwen3", qwen3)]
        .map(|(name, config)| Subject::drawn(name, config))
        .into()
}
