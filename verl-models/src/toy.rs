//! A small causal model for tests: tied embedding, one attention head, a gain.

use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::model::{ModelError, ModelInterface, ParameterGroup, ScoreRow};

#[derive(Module, Debug)]
pub(crate) struct Toy {
    pub(crate) embedding: Param<Tensor<2>>,
    pub(crate) query: Param<Tensor<2>>,
    pub(crate) value: Param<Tensor<2>>,
    pub(crate) gain: Param<Tensor<1>>,
    max_tokens: usize,
    frozen: Option<String>,
}

impl Toy {
    pub(crate) fn new(vocab: usize, width: usize, max_tokens: usize) -> Self {
        let matrix = |rows: usize, columns: usize, salt: u64| {
            Param::from_tensor(Tensor::from_data(
                TensorData::new(numbers(rows * columns, salt), [rows, columns]),
                &Device::flex(),
            ))
        };
        Toy {
            embedding: matrix(vocab, width, 1),
            query: matrix(width, width, 2),
            value: matrix(width, width, 3),
            gain: Param::from_tensor(Tensor::ones([width], &Device::flex())),
            max_tokens,
            frozen: None,
        }
    }

    /// The same model with the parameter `name` frozen by its group.
    pub(crate) fn freezing(mut self, name: &str) -> Self {
        self.frozen = Some(name.to_owned());
        self
    }

    pub(crate) fn cast(self, dtype: DType) -> Self {
        Toy {
            embedding: self.embedding.map(|weight| weight.cast(dtype)),
            query: self.query.map(|weight| weight.cast(dtype)),
            value: self.value.map(|weight| weight.cast(dtype)),
            gain: self.gain.map(|weight| weight.cast(dtype)),
            ..self
        }
    }
}

/// Pseudo-random numbers in [−0.5, 0.5), from a multiplicative hash.
pub(crate) fn numbers(count: usize, salt: u64) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let x = (i + 1 + salt * 1_000_003).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        })
        .collect()
}

impl ModelInterface for Toy {
    fn vocab_size(&self) -> usize {
        self.embedding.dims()[0]
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn hidden(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [b, s] = ids.dims();
        let d = self.gain.dims()[0];
        let flat = self.embedding.val().select(0, ids.reshape([b * s]));
        let queries = flat.clone().matmul(self.query.val()).reshape([b, s, d]);
        let values = flat.clone().matmul(self.value.val()).reshape([b, s, d]);
        let flat = flat.reshape([b, s, d]);
        let scores = queries.matmul(flat.clone().swap_dims(1, 2)); // [B, S, S]
        let future = Tensor::<2, burn::tensor::Bool>::tril_mask([s, s], 0, &scores.device());
        let scores = scores.mask_fill(future.unsqueeze::<3>().expand([b, s, s]), -1e9);
        let mixed = softmax(scores, 2).matmul(values);
        (flat + mixed) * self.gain.val().unsqueeze::<3>()
    }

    fn head(&self) -> Tensor<2> {
        self.embedding.val()
    }

    fn parameter_group(&self, name: &str, rank: usize) -> ParameterGroup {
        let frozen = self.frozen.as_deref() == Some(name);
        ParameterGroup {
            decays: rank >= 2,
            learning_rate_scale: if frozen { 0.0 } else { 1.0 },
        }
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        Err(ModelError::File {
            action: "write",
            path: dir.display().to_string(),
            reason: "a toy has no files".to_owned(),
        })
    }
}

/// Prompts and responses of the given lengths, with ids below `vocab`.
pub(crate) fn sequences(lengths: &[(usize, usize)], vocab: u32) -> Vec<(Vec<u32>, Vec<u32>)> {
    let ids = |count: usize, salt: u32| {
        let id = |i: u32| (i * 7919 + salt * 104_729 + i * i * 31) % vocab;
        (0..count as u32).map(id).collect()
    };
    let pair = |(i, &(prompt, response)): (usize, &(usize, usize))| {
        let salt = i as u32 * 2;
        (ids(prompt, salt), ids(response, salt + 1))
    };
    lengths.iter().enumerate().map(pair).collect()
}

pub(crate) fn rows(sequences: &[(Vec<u32>, Vec<u32>)]) -> Vec<ScoreRow<'_>> {
    sequences
        .iter()
        .map(|(prompt, response)| ScoreRow { prompt, response })
        .collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[track_caller]
pub(crate) fn close(got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance, "{i}: {g} is not {e}");
    }
}
