//! Grouped-query attention.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Tensor, TensorData};
use verl_kernels::prefixes::Segment;
use verl_kernels::{self as kernels, AttentionShape};

use super::linear::Linear;
use super::norm::{RmsNorm, to_dtype};
use super::rope::Rotation;

pub use verl_kernels::Heads;

/// Queries, keys and values of one call, normed and rotated.
#[derive(Debug, Clone)]
pub struct Projected {
    /// `[B, H, S, Dh]`.
    pub queries: Tensor<4>,
    /// `[B, K, S, Dh]`.
    pub keys: Tensor<4>,
    /// `[B, K, S, Dh]`.
    pub values: Tensor<4>,
}

/// How the rows of a call are divided into sequences.
#[derive(Debug, Clone)]
pub enum Rows {
    /// `B` sequences of `S` tokens.
    Equal([usize; 2]),
    /// Segments of sequences that share prefixes, for the CPU's fused kernel.
    Segments(Arc<[Segment]>),
}

/// Attention with rotary positions, grouped key/value heads, and norms on queries and keys where the model family has
/// them.
///
/// Ainslie et al., *GQA*, 2023.
#[derive(Module, Debug)]
pub struct Attention {
    /// `[H·Dh, D]`.
    pub q_proj: Linear,
    /// `[K·Dh, D]`.
    pub k_proj: Linear,
    /// `[K·Dh, D]`.
    pub v_proj: Linear,
    /// `[D, H·Dh]`.
    pub o_proj: Linear,
    /// Norm of each query head.
    pub q_norm: Option<RmsNorm>,
    /// Norm of each key head.
    pub k_norm: Option<RmsNorm>,
    /// Numbers and width of the heads.
    #[module(skip)]
    pub heads: Heads,
}

impl Attention {
    /// Queries, keys and values of `x`.
    ///
    /// # Shapes
    /// `x`: `[B·S, D]`
    pub fn project(&self, x: Tensor<2>, [b, s]: [usize; 2], rotation: &Rotation) -> Projected {
        let Heads {
            query,
            key_value,
            dim,
        } = self.heads;
        // [B·S, H·Dh] -> [B, S, H, Dh]
        let queries = self.q_proj.forward(x.clone()).reshape([b, s, query, dim]);
        let keys = self
            .k_proj
            .forward(x.clone())
            .reshape([b, s, key_value, dim]);
        let values = self.v_proj.forward(x).reshape([b, s, key_value, dim]);
        // [B, S, H, Dh] -> [B, H, S, Dh]
        Projected {
            queries: rotation.apply(normed(&self.q_norm, queries).swap_dims(1, 2)),
            keys: rotation.apply(normed(&self.k_norm, keys).swap_dims(1, 2)),
            values: values.swap_dims(1, 2),
        }
    }

    /// The attention block for sequences that start in this call.
    ///
    /// # Shapes
    /// `x`: `[B·S, D]`; `mask`: `[1 or B, 1, S, S]`, added to scores; result: `[B·S, D]`
    pub fn forward(
        &self,
        x: Tensor<2>,
        shape: [usize; 2],
        rotation: &Rotation,
        mask: &Tensor<4>,
    ) -> Tensor<2> {
        let Projected {
            queries,
            keys,
            values,
        } = self.project(x, shape, rotation);
        self.output(attend(queries, keys, values, mask))
    }

    /// [`Attention::forward`] with the fused causal kernel. `rotation` must be that of positions from 0.
    ///
    /// # Shapes
    /// `x`, result: `[N, D]`
    pub fn fused(&self, x: Tensor<2>, rows: &Rows, rotation: &Rotation) -> Tensor<2> {
        let n = x.dims()[0];
        let Heads {
            query,
            key_value,
            dim,
        } = self.heads;
        let heads = |norm: &Option<RmsNorm>, x: Tensor<2>, count: usize| match norm {
            // [N, H·Dh] -> [N·H, Dh]
            Some(norm) => norm
                .forward(x.reshape([n * count, dim]))
                .reshape([n, count * dim]),
            None => x,
        };
        let queries = heads(&self.q_norm, self.q_proj.forward(x.clone()), query);
        let keys = heads(&self.k_norm, self.k_proj.forward(x.clone()), key_value);
        let values = self.v_proj.forward(x);
        let (shape, segments) = match rows {
            Rows::Equal(shape) => (*shape, None),
            Rows::Segments(segments) => ([0, 0], Some(segments.clone())),
        };
        let shape = AttentionShape {
            sequences: shape[0],
            tokens: shape[1],
            heads: self.heads,
            segments,
        };
        let [cos, sin] = rotation.tables();
        self.o_proj
            .forward(kernels::attention(shape, queries, keys, values, cos, sin))
    }

    /// Concatenates the heads and projects them to the model width.
    ///
    /// # Shapes
    /// `mixed`: `[B, H, S, Dh]`; result: `[B·S, D]`
    pub fn output(&self, mixed: Tensor<4>) -> Tensor<2> {
        let [b, h, s, dim] = mixed.dims();
        // [B, H, S, Dh] -> [B·S, H·Dh]
        self.o_proj
            .forward(mixed.swap_dims(1, 2).reshape([b * s, h * dim]))
    }
}

fn normed(norm: &Option<RmsNorm>, heads: Tensor<4>) -> Tensor<4> {
    match norm {
        Some(norm) => norm.forward(heads),
        None => heads,
    }
}

/// softmax(q kᵀ / √Dh + mask) v, in f32 inside the softmax.
///
/// The `G` query heads of a group are rows of a single product with their key/value head, so that keys and values are
/// never repeated in memory.
///
/// # Shapes
/// `queries`: `[B, H, S, Dh]`; `keys`, `values`: `[B, K, T, Dh]`; `mask`: `[1 or B, 1, S, T]`; result: `[B, H, S, Dh]`
pub fn attend(
    queries: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
    mask: &Tensor<4>,
) -> Tensor<4> {
    let [b, h, s, dim] = queries.dims();
    let [_, k, t, _] = keys.dims();
    let dtype = queries.dtype();
    // [B, H, S, Dh] -> [B, K, G·S, Dh]
    let grouped = (queries * (1.0 / (dim as f64).sqrt())).reshape([b, k, h / k * s, dim]);
    let scores = grouped.matmul(keys.transpose()).reshape([b, h, s, t]);
    let weights = softmax(to_dtype(scores, DType::F32) + mask.clone(), 3);
    to_dtype(weights, dtype)
        .reshape([b, k, h / k * s, t])
        .matmul(values)
        .reshape([b, h, s, dim])
}

/// The value added to the score of a masked position.
///
/// Finite, so that a fully masked row (a free slot while decoding) does not produce NaN.
pub const HIDDEN: f32 = -1e30;

/// Position s sees positions 0..=s. This suffices for right-padded rows, because the outputs of pads are never read.
///
/// # Shapes
/// result: `[1, 1, S, S]`, f32
pub fn causal_mask(s: usize, device: &Device) -> Tensor<4> {
    let mut mask = vec![0.0; s * s];
    for (row, values) in mask.chunks_exact_mut(s.max(1)).enumerate() {
        values[row + 1..].fill(HIDDEN);
    }
    Tensor::from_data(
        TensorData::new(mask, [1, 1, s, s]),
        (&device.clone().without_autodiff(), DType::F32),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<const N: usize>(values: [f32; N], shape: [usize; 4]) -> Tensor<4> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex())
    }

    fn values(tensor: Tensor<4>) -> Vec<f32> {
        tensor.into_data().as_slice::<f32>().unwrap().to_vec()
    }

    #[test]
    fn the_mask_hides_later_positions() {
        let mask = values(causal_mask(3, &Device::flex()));
        let h = HIDDEN;
        assert_eq!(mask, [0.0, h, h, 0.0, 0.0, h, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn weights_are_a_softmax_over_visible_positions() {
        // One head of width 1: scores of position 1 are q·k = (0, ln 3), so its weights are 1/4 and 3/4.
        let queries = tensor([5.0, 3f32.ln()], [1, 1, 2, 1]);
        let keys = tensor([0.0, 1.0], [1, 1, 2, 1]);
        let content = tensor([8.0, 4.0], [1, 1, 2, 1]);
        let mixed = values(attend(
            queries,
            keys,
            content,
            &causal_mask(2, &Device::flex()),
        ));
        assert_eq!(mixed[0], 8.0);
        assert!((mixed[1] - (8.0 / 4.0 + 4.0 * 3.0 / 4.0)).abs() < 1e-5);
    }

    #[test]
    fn query_heads_of_a_group_share_their_key_value_head() {
        // H = 4, K = 2, S = T = 1: every query head returns the value of its group, whatever the scores.
        let queries = tensor([1.0, 2.0, 3.0, 4.0], [1, 4, 1, 1]);
        let keys = tensor([1.0, 1.0], [1, 2, 1, 1]);
        let content = tensor([10.0, 20.0], [1, 2, 1, 1]);
        let mixed = attend(queries, keys, content, &causal_mask(1, &Device::flex()));
        assert_eq!(values(mixed), [10.0, 10.0, 20.0, 20.0]);
    }

    #[test]
    fn a_fully_masked_row_stays_finite() {
        let one = tensor([1.0], [1, 1, 1, 1]);
        let mask = tensor([HIDDEN], [1, 1, 1, 1]);
        let mixed = attend(one.clone(), one.clone(), one, &mask);
        assert!(values(mixed)[0].is_finite());
    }
}
