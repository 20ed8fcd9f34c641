//! The two halves of a decoder layer, each as one operation with its own backward pass.
//!
//! A half reads its residual stream once and writes it once: norms, projections, the operations between them and the
//! addition to the stream are not separate operations, so no gradient is added up or copied between them. Queries, keys
//! and values are one product, gates and ups another. Sequences follow one another without padding.
//!
//! This file composes everything from the operations of [`DecoderGradients`], on any backend; a backend with faster
//! kernels replaces single steps.
//!
//! Dims: `N` tokens of a call, `D` width, `I` inner width, `H`/`K` query/key heads, `Dh` head width, `W = (H + 2K)·Dh`.

mod attention_half;
mod mlp_half;
mod steps;

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::ops::{Backward, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{DType, Device, Int, Tensor};

use self::attention_half::{AttentionHalf, AttentionHalfStep};
use self::mlp_half::{MlpHalf, MlpHalfStep};
use super::{AttentionShape, Heads, attention_is_fused, indices};
use crate::device::DeviceKind;

pub use self::steps::{BlockGradients, Places};

/// Whether the operations of this file are the fastest for tensors of this device and dtype and heads of this width.
pub fn blocks_are_fused(device: &Device, dtype: DType, head_dim: usize) -> bool {
    DeviceKind::of(device).fuses_halves() && attention_is_fused(device, dtype, head_dim)
}

/// The sequences of a call, one after another.
#[derive(Debug, Clone)]
pub struct Sequences {
    lengths: Arc<[usize]>,
    /// First token of each, and the end.
    starts: Tensor<1, Int>,
    /// Position of each token in its sequence.
    positions: Tensor<1, Int>,
}

impl Sequences {
    /// Sequences of these lengths, each at least 1.
    pub fn new(lengths: &[usize], device: &Device) -> Self {
        let mut starts = vec![0];
        let mut positions = Vec::new();
        for &length in lengths {
            positions.extend(0..length as i32);
            starts.push(positions.len() as i32);
        }
        Sequences {
            lengths: lengths.into(),
            starts: indices(starts, device),
            positions: indices(positions, device),
        }
    }

    /// Number of tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }
}

/// Settings of a half of a layer.
#[derive(Debug, Clone, Copy)]
pub struct HalfSettings {
    /// ε of the norm.
    pub epsilon: f64,
    /// Whether to keep only the input for the backward pass, which then recomputes the rest.
    pub recompute: bool,
}

/// What [`attention_block`] takes apart from its tensors.
#[derive(Debug, Clone)]
pub struct AttentionBlock {
    /// Heads, of an even width.
    pub heads: Heads,
    /// Settings of the half.
    pub settings: HalfSettings,
    /// Whether there is a bias; if not, the tensor in its place is ignored.
    biased: bool,
    lengths: Arc<[usize]>,
}

impl AttentionBlock {
    /// Widths of the projections of queries, keys and values.
    pub(super) fn widths(&self) -> [usize; 3] {
        let (query, key) = (self.heads.query_width(), self.heads.key_width());
        [query, key, key]
    }

    /// The shape of a call with `sequences` sequences, the longest of `tokens` tokens.
    fn shape_of(&self, sequences: usize, tokens: usize) -> AttentionShape {
        AttentionShape {
            sequences,
            tokens,
            heads: self.heads,
            segments: None,
        }
    }

    /// The shape of a call with all sequences, and the length of each.
    #[cfg(feature = "cuda")]
    pub(super) fn call(&self) -> (AttentionShape, &[usize]) {
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        (self.shape_of(self.lengths.len(), longest), &self.lengths)
    }
}

/// Parameters of [`attention_block`].
pub struct AttentionParameters {
    /// The norm's weight, `[D]`.
    pub gain: Tensor<1>,
    /// Projections of queries, keys, values: `[H·Dh, D]`, `[K·Dh, D]`, `[K·Dh, D]`.
    pub projections: [Tensor<2>; 3],
    /// Their biases, concatenated: `[W]`.
    pub bias: Option<Tensor<1>>,
    /// `[D, H·Dh]`.
    pub output: Tensor<2>,
}

/// x + W_o attention(W_qkv norm(x) + b): the first half of a decoder layer, causal, with rotary positions.
///
/// # Shapes
/// `x`, result: `[N, D]`; `cos`, `sin` (signed): `[S, Dh]` in f32, with `S` at least the longest sequence
pub fn attention_block(
    x: Tensor<2>,
    parameters: AttentionParameters,
    [cos, sin]: [Tensor<2>; 2],
    sequences: &Sequences,
    heads: Heads,
    settings: HalfSettings,
) -> Tensor<2> {
    let AttentionParameters {
        gain,
        projections: [queries, keys, values],
        bias,
        output,
    } = parameters;
    let block = AttentionBlock {
        heads,
        settings,
        biased: bias.is_some(),
        lengths: sequences.lengths.clone(),
    };
    let bias = bias.unwrap_or_else(|| gain.clone().detach());
    Tensor::from_dispatch(<Dispatch as BlockOps>::attention_block(
        x.into_dispatch(),
        gain.into_dispatch(),
        queries.into_dispatch(),
        keys.into_dispatch(),
        values.into_dispatch(),
        bias.into_dispatch(),
        output.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        sequences.starts.clone().into_dispatch(),
        sequences.positions.clone().into_dispatch(),
        block,
    ))
}

/// x + W_down (silu(W_gate n) ⊙ W_up n) with n = norm(x): the second half of a decoder layer.
///
/// # Shapes
/// `x`, result: `[N, D]`; `gain`: `[D]`; `gate`, `up`: `[I, D]`; `down`: `[D, I]`
pub fn mlp_block(
    x: Tensor<2>,
    gain: Tensor<1>,
    [gate, up, down]: [Tensor<2>; 3],
    settings: HalfSettings,
) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as BlockOps>::mlp_block(
        x.into_dispatch(),
        gain.into_dispatch(),
        gate.into_dispatch(),
        up.into_dispatch(),
        down.into_dispatch(),
        settings.epsilon,
        settings.recompute,
    ))
}

/// The halves of a layer on a backend.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub trait BlockOps: Backend {
    /// See [`attention_block`].
    #[allow(clippy::too_many_arguments, reason = "the macro takes single tensors")]
    fn attention_block(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        output: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        starts: IntTensor<Self>,
        positions: IntTensor<Self>,
        block: AttentionBlock,
    ) -> FloatTensor<Self>;

    /// See [`mlp_block`].
    fn mlp_block(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        epsilon: f64,
        recompute: bool,
    ) -> FloatTensor<Self>;
}

/// Implements [`BlockOps`] for a backend that has the steps.
macro_rules! block_ops {
    ($backend:ty) => {
        impl BlockOps for $backend {
            fn attention_block(
                x: FloatTensor<Self>,
                gain: FloatTensor<Self>,
                queries: FloatTensor<Self>,
                keys: FloatTensor<Self>,
                values: FloatTensor<Self>,
                bias: FloatTensor<Self>,
                output: FloatTensor<Self>,
                cos: FloatTensor<Self>,
                sin: FloatTensor<Self>,
                starts: IntTensor<Self>,
                positions: IntTensor<Self>,
                block: AttentionBlock,
            ) -> FloatTensor<Self> {
                let half = AttentionHalf::<Self> {
                    x,
                    gain,
                    projections: [queries, keys, values],
                    bias,
                    output,
                    places: Places {
                        tables: [cos, sin],
                        starts,
                        positions,
                    },
                    block,
                };
                half.forward().0
            }

            fn mlp_block(
                x: FloatTensor<Self>,
                gain: FloatTensor<Self>,
                gate: FloatTensor<Self>,
                up: FloatTensor<Self>,
                down: FloatTensor<Self>,
                epsilon: f64,
                _recompute: bool,
            ) -> FloatTensor<Self> {
                let half = MlpHalf::<Self> {
                    x,
                    gain,
                    inner: [gate, up],
                    down,
                    epsilon,
                };
                half.forward().0
            }
        }
    };
}

block_ops!(Flex);
#[cfg(feature = "cuda")]
block_ops!(burn::backend::Cube);

impl<B: BlockGradients, C: CheckpointStrategy> BlockOps for Autodiff<B, C> {
    fn attention_block(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        output: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        starts: IntTensor<Self>,
        positions: IntTensor<Self>,
        block: AttentionBlock,
    ) -> FloatTensor<Self> {
        let (x, x_node) = x.into_parts();
        let (gain, gain_node) = gain.into_parts();
        let (queries, query_node) = queries.into_parts();
        let (keys, key_node) = keys.into_parts();
        let (values, value_node) = values.into_parts();
        let (bias, bias_node) = bias.into_parts();
        let (output, output_node) = output.into_parts();
        let half = AttentionHalf::<B> {
            x,
            gain,
            projections: [queries, keys, values],
            bias,
            output,
            places: Places {
                tables: [cos, sin].map(|table| table.into_parts().0),
                starts,
                positions,
            },
            block,
        };
        let (y, kept) = half.forward();
        let nodes = [
            x_node,
            gain_node,
            query_node,
            key_node,
            value_node,
            bias_node,
            output_node,
        ];
        let prepared = AttentionHalfStep.prepare::<C>(nodes);
        match prepared.compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let kept = (!half.block.settings.recompute).then_some(kept);
                prep.finish((half, kept), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn mlp_block(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        epsilon: f64,
        recompute: bool,
    ) -> FloatTensor<Self> {
        let (x, x_node) = x.into_parts();
        let (gain, gain_node) = gain.into_parts();
        let (gate, gate_node) = gate.into_parts();
        let (up, up_node) = up.into_parts();
        let (down, down_node) = down.into_parts();
        let half = MlpHalf::<B> {
            x,
            gain,
            inner: [gate, up],
            down,
            epsilon,
        };
        let (y, kept) = half.forward();
        let prepared = MlpHalfStep.prepare::<C>([x_node, gain_node, gate_node, up_node, down_node]);
        match prepared.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((half, (!recompute).then_some(kept)), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
