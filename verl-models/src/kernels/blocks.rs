//! The two halves of a decoder layer, each as one operation with a backward pass of its own.
//!
//! A half reads its residual stream once and writes it once: norms, projections, what lies between them and the addition
//! to the stream are not operations of their own, so that no gradient is added up or copied between them. Queries, keys
//! and values are one product, gates and ups another. Sequences lie one after the other, without padding.
//!
//! Everything is composed here of what [`DecoderGradients`] offers, on any backend; a backend with faster kernels replaces
//! single steps.
//!
//! Dims: `N` tokens of a call, `D` width, `I` inner width, `H`/`K` query/key heads, `Dh` head width, `W = (H + 2K)·Dh`.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Device, Int, Shape, Slice, Tensor};

use super::{AttentionShape, DecoderGradients, attention_is_fused};
use crate::device::is_cpu;
use crate::rows::indices;

/// Whether the operations of this file are the fast ones for tensors of this device and dtype and heads of this width.
/// On the CPU single operations are, which work on one sequence at a time.
pub fn blocks_are_fused(device: &Device, dtype: DType, head_dim: usize) -> bool {
    !is_cpu(device) && attention_is_fused(device, dtype, head_dim)
}

/// Sequences of a call, one after the other.
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

    /// Tokens of the longest.
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }
}

/// What [`attention_block`] is told beside its tensors.
#[derive(Debug, Clone)]
pub struct AttentionBlock {
    /// Query heads, `H`.
    pub query_heads: usize,
    /// Key/value heads, `K`; a divisor of `H`.
    pub key_heads: usize,
    /// Width of a head, `Dh`, even.
    pub head_dim: usize,
    /// ε of the norm.
    pub epsilon: f64,
    /// Whether nothing is kept for the backward pass but the input, from which the rest is computed again.
    pub recompute: bool,
    /// Whether there is a bias; otherwise the tensor in its place is not looked at.
    biased: bool,
    lengths: Arc<[usize]>,
}

impl AttentionBlock {
    /// Sizes of the projections of queries, keys, values.
    pub(super) fn widths(&self) -> [usize; 3] {
        let [query, key] = [self.query_heads, self.key_heads].map(|heads| heads * self.head_dim);
        [query, key, key]
    }

    /// A call of `sequences` sequences, the longest of `tokens`.
    fn shape_of(&self, sequences: usize, tokens: usize) -> AttentionShape {
        AttentionShape {
            sequences,
            tokens,
            query_heads: self.query_heads,
            key_heads: self.key_heads,
            head_dim: self.head_dim,
        }
    }

    /// All sequences, and the lengths of each.
    #[cfg(feature = "cuda")]
    pub(super) fn call(&self) -> (AttentionShape, &[usize]) {
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        (self.shape_of(self.lengths.len(), longest), &self.lengths)
    }
}

/// Sizes of an attention half, without those of a call.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSizes {
    /// Query heads, `H`.
    pub query_heads: usize,
    /// Key/value heads, `K`; a divisor of `H`.
    pub key_heads: usize,
    /// Width of a head, `Dh`, even.
    pub head_dim: usize,
}

/// Parameters of [`attention_block`].
pub struct AttentionParameters {
    /// The norm's weight, `[D]`.
    pub gain: Tensor<1>,
    /// Projections of queries, keys, values: `[H·Dh, D]`, `[K·Dh, D]`, `[K·Dh, D]`.
    pub projections: [Tensor<2>; 3],
    /// Their biases, one after the other: `[W]`.
    pub bias: Option<Tensor<1>>,
    /// `[D, H·Dh]`.
    pub output: Tensor<2>,
}

/// x + W_o attention(W_qkv norm(x) + b): the first half of a decoder layer, causal, with rotary positions.
///
/// `recompute` says that only `x` is kept for the backward pass.
///
/// # Shapes
/// `x`, result: `[N, D]`; `cos`, `sin` (signed): `[S, Dh]` in f32, with `S` at least the longest sequence
pub fn attention_block(
    x: Tensor<2>,
    parameters: AttentionParameters,
    [cos, sin]: [Tensor<2>; 2],
    sequences: &Sequences,
    (sizes, epsilon, recompute): (AttentionSizes, f64, bool),
) -> Tensor<2> {
    let AttentionParameters {
        gain,
        projections: [queries, keys, values],
        bias,
        output,
    } = parameters;
    let block = AttentionBlock {
        query_heads: sizes.query_heads,
        key_heads: sizes.key_heads,
        head_dim: sizes.head_dim,
        epsilon,
        recompute,
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
/// `recompute` says that only `x` is kept for the backward pass.
///
/// # Shapes
/// `x`, result: `[N, D]`; `gain`: `[D]`; `gate`, `up`: `[I, D]`; `down`: `[D, I]`
pub fn mlp_block(
    x: Tensor<2>,
    gain: Tensor<1>,
    [gate, up, down]: [Tensor<2>; 3],
    (epsilon, recompute): (f64, bool),
) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as BlockOps>::mlp_block(
        x.into_dispatch(),
        gain.into_dispatch(),
        gate.into_dispatch(),
        up.into_dispatch(),
        down.into_dispatch(),
        epsilon,
        recompute,
    ))
}

/// What a backend offers: the halves of a layer.
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

/// [`BlockOps`] of a backend that has the steps.
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

/// Where the tokens of a call are.
#[derive(Debug, Clone)]
pub struct Places<B: Backend> {
    /// Cosines and signed sines of positions.
    pub tables: [FloatTensor<B>; 2],
    /// First token of each sequence, and the end.
    pub starts: IntTensor<B>,
    /// Position of each token.
    pub positions: IntTensor<B>,
}

/// The steps of a half, forward and backward.
pub trait BlockGradients: DecoderGradients {
    /// Matrices one below the other, or vectors one after the other.
    fn joined(parts: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        Self::float_cat(parts, 0)
    }

    /// The gradient of each part of [`BlockGradients::joined`] matrices of `rows` rows.
    fn parted(whole: FloatTensor<Self>, rows: &[usize]) -> Vec<FloatTensor<Self>> {
        let mut start = 0;
        let part = |rows: &usize| {
            let range = Slice::from(start..start + rows);
            start += rows;
            Self::float_slice(whole.clone(), &[range, Slice::full()])
        };
        rows.iter().map(part).collect()
    }

    /// x Wᵀ + b.
    fn product_and_bias(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let y = Self::product_with_rows(x, weight);
        match bias {
            Some(bias) => {
                let row = Shape::new([1, bias.shape()[0]]);
                Self::float_add(y, Self::float_reshape(bias, row))
            }
            None => y,
        }
    }

    /// sum + x Wᵀ.
    fn product_and_sum(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        sum: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::float_add(sum, Self::product_with_rows(x, weight))
    }

    /// The gradient of a bias: `[N, W]` -> `[W]`.
    fn column_sums(gradient: FloatTensor<Self>) -> FloatTensor<Self> {
        let width = gradient.shape()[1];
        Self::float_reshape(Self::float_sum_dim(gradient, 0), Shape::new([width]))
    }

    /// Gradients for `x` and the norm's weight, where `past` is the gradient that reaches `x` past the norm.
    fn rms_norm_backward_past(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        epsilon: f64,
        saved: Option<FloatTensor<Self>>,
        gradient: FloatTensor<Self>,
        past: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        let [dx, d_gain] = Self::rms_norm_backward(x, gain, epsilon, saved, gradient);
        [Self::float_add(dx, past), d_gain]
    }

    /// silu(gate) · up: `[N, 2I]`, gates first, -> `[N, I]`.
    fn swiglu_joined(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
        let [gate, up] = halves::<Self>(gate_up);
        Self::fused_swiglu(gate, up)
    }

    /// The gradient for gates and ups, `[N, 2I]`.
    fn swiglu_joined_backward(
        gate_up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let [gate, up] = halves::<Self>(gate_up);
        Self::float_cat(Self::swiglu_backward(gate, up, gradient).into(), 1)
    }

    /// Attention of joined queries, keys and values, `[N, W]` -> `[N, H·Dh]`, and what its backward pass needs.
    fn attention_joined(
        block: &AttentionBlock,
        joined: FloatTensor<Self>,
        places: &Places<Self>,
    ) -> (FloatTensor<Self>, Vec<Vec<FloatTensor<Self>>>) {
        let parts = columns::<Self>(&joined, &block.widths());
        let (mut mixed, mut saved) = (Vec::new(), Vec::new());
        let mut start = 0;
        for &tokens in &*block.lengths {
            let own = |x: &FloatTensor<Self>| rows::<Self>(x, start, tokens);
            let table = |x: &FloatTensor<Self>| rows::<Self>(x, 0, tokens);
            let [queries, keys, values] = [&parts[0], &parts[1], &parts[2]].map(own);
            let [cos, sin] = places.tables.each_ref().map(table);
            let shape = block.shape_of(1, tokens);
            let found = Self::attention_saving(shape, [queries, keys, values, cos, sin]);
            mixed.push(found.0);
            saved.push(found.1);
            start += tokens;
        }
        (Self::float_cat(mixed, 0), saved)
    }

    /// The gradient for joined queries, keys and values.
    fn attention_joined_backward(
        block: &AttentionBlock,
        _places: &Places<Self>,
        saved: Vec<Vec<FloatTensor<Self>>>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let mut start = 0;
        let parts = saved
            .into_iter()
            .zip(&*block.lengths)
            .map(|(saved, &tokens)| {
                let own = rows::<Self>(&gradient, start, tokens);
                start += tokens;
                let parts = Self::attention_backward(block.shape_of(1, tokens), saved, own);
                Self::float_cat(parts.into(), 1)
            });
        Self::float_cat(parts.collect(), 0)
    }
}

impl BlockGradients for Flex {}

fn rows<B: Backend>(x: &FloatTensor<B>, start: usize, count: usize) -> FloatTensor<B> {
    let range = Slice::from(start..start + count);
    B::float_slice(x.clone(), &[range, Slice::full()])
}

/// Columns of these widths.
fn columns<B: Backend>(x: &FloatTensor<B>, widths: &[usize]) -> Vec<FloatTensor<B>> {
    let mut start = 0;
    let part = |width: &usize| {
        let range = Slice::from(start..start + width);
        start += width;
        B::float_slice(x.clone(), &[Slice::full(), range])
    };
    widths.iter().map(part).collect()
}

fn halves<B: Backend>(x: FloatTensor<B>) -> [FloatTensor<B>; 2] {
    let inner = x.shape()[1] / 2;
    let mut parts = columns::<B>(&x, &[inner, inner]);
    let last = parts.remove(1);
    [parts.remove(0), last]
}

/// Operands of the first half.
#[derive(Debug, Clone)]
struct AttentionHalf<B: Backend> {
    x: FloatTensor<B>,
    gain: FloatTensor<B>,
    projections: [FloatTensor<B>; 3],
    bias: FloatTensor<B>,
    output: FloatTensor<B>,
    places: Places<B>,
    block: AttentionBlock,
}

/// What its forward pass keeps.
#[derive(Debug, Clone)]
struct AttentionKept<B: Backend> {
    normed: FloatTensor<B>,
    scale: Option<FloatTensor<B>>,
    joined_weight: FloatTensor<B>,
    mixed: FloatTensor<B>,
    attention: Vec<Vec<FloatTensor<B>>>,
}

impl<B: BlockGradients> AttentionHalf<B> {
    fn forward(&self) -> (FloatTensor<B>, AttentionKept<B>) {
        let kept = self.inside();
        let y = B::product_and_sum(kept.mixed.clone(), self.output.clone(), self.x.clone());
        (y, kept)
    }

    /// All but the last product.
    fn inside(&self) -> AttentionKept<B> {
        let block = &self.block;
        let (normed, scale) = B::rms_norm_saving(self.x.clone(), self.gain.clone(), block.epsilon);
        let joined_weight = B::joined(self.projections.to_vec());
        let bias = block.biased.then(|| self.bias.clone());
        let joined = B::product_and_bias(normed.clone(), joined_weight.clone(), bias);
        let (mixed, attention) = B::attention_joined(block, joined, &self.places);
        AttentionKept {
            normed,
            scale,
            joined_weight,
            mixed,
            attention,
        }
    }

    /// Gradients for x, gain, queries, keys, values, bias and output, where they are wanted.
    fn backward(
        self,
        kept: Option<AttentionKept<B>>,
        gradient: FloatTensor<B>,
        wanted: [bool; 7],
    ) -> [Option<FloatTensor<B>>; 7] {
        let AttentionKept {
            normed,
            scale,
            joined_weight,
            mixed,
            attention,
        } = kept.unwrap_or_else(|| self.inside());
        let block = &self.block;
        let d_output = wanted[6].then(|| B::weight_gradient(gradient.clone(), mixed));
        let d_mixed = B::product_with_columns(gradient.clone(), self.output);
        let d_joined = B::attention_joined_backward(block, &self.places, attention, d_mixed);
        let d_bias = (block.biased && wanted[5]).then(|| B::column_sums(d_joined.clone()));
        let mut d_projections = if wanted[2..5].contains(&true) {
            let whole = B::weight_gradient(d_joined.clone(), normed);
            let parts = B::parted(whole, &block.widths());
            parts.into_iter().map(Some).collect()
        } else {
            vec![None; 3]
        };
        let (dx, d_gain) = if wanted[0] || wanted[1] {
            let d_normed = B::product_with_columns(d_joined, joined_weight);
            let epsilon = block.epsilon;
            let [dx, d_gain] =
                B::rms_norm_backward_past(self.x, self.gain, epsilon, scale, d_normed, gradient);
            (Some(dx), Some(d_gain))
        } else {
            (None, None)
        };
        let mut next = || d_projections.remove(0);
        [dx, d_gain, next(), next(), next(), d_bias, d_output]
    }
}

/// Operands of the second half.
#[derive(Debug, Clone)]
struct MlpHalf<B: Backend> {
    x: FloatTensor<B>,
    gain: FloatTensor<B>,
    /// Gate, up.
    inner: [FloatTensor<B>; 2],
    down: FloatTensor<B>,
    epsilon: f64,
}

/// What its forward pass keeps.
#[derive(Debug, Clone)]
struct MlpKept<B: Backend> {
    normed: FloatTensor<B>,
    scale: Option<FloatTensor<B>>,
    joined_weight: FloatTensor<B>,
    gate_up: FloatTensor<B>,
    inner: FloatTensor<B>,
}

impl<B: BlockGradients> MlpHalf<B> {
    fn forward(&self) -> (FloatTensor<B>, MlpKept<B>) {
        let kept = self.inside();
        let y = B::product_and_sum(kept.inner.clone(), self.down.clone(), self.x.clone());
        (y, kept)
    }

    /// All but the last product.
    fn inside(&self) -> MlpKept<B> {
        let (normed, scale) = B::rms_norm_saving(self.x.clone(), self.gain.clone(), self.epsilon);
        let joined_weight = B::joined(self.inner.to_vec());
        let gate_up = B::product_with_rows(normed.clone(), joined_weight.clone());
        let inner = B::swiglu_joined(gate_up.clone());
        MlpKept {
            normed,
            scale,
            joined_weight,
            gate_up,
            inner,
        }
    }

    /// Gradients for x, gain, gate, up and down, where they are wanted.
    fn backward(
        self,
        kept: Option<MlpKept<B>>,
        gradient: FloatTensor<B>,
        wanted: [bool; 5],
    ) -> [Option<FloatTensor<B>>; 5] {
        let MlpKept {
            normed,
            scale,
            joined_weight,
            gate_up,
            inner,
        } = kept.unwrap_or_else(|| self.inside());
        let rows = self.inner[0].shape()[0];
        let d_down = wanted[4].then(|| B::weight_gradient(gradient.clone(), inner));
        let d_inner = B::product_with_columns(gradient.clone(), self.down);
        let d_gate_up = B::swiglu_joined_backward(gate_up, d_inner);
        let mut parts = if wanted[2] || wanted[3] {
            let whole = B::weight_gradient(d_gate_up.clone(), normed);
            let parts = B::parted(whole, &[rows, rows]);
            parts.into_iter().map(Some).collect()
        } else {
            vec![None; 2]
        };
        let (dx, d_gain) = if wanted[0] || wanted[1] {
            let d_normed = B::product_with_columns(d_gate_up, joined_weight);
            let (x, gain, epsilon) = (self.x, self.gain, self.epsilon);
            let [dx, d_gain] =
                B::rms_norm_backward_past(x, gain, epsilon, scale, d_normed, gradient);
            (Some(dx), Some(d_gain))
        } else {
            (None, None)
        };
        let mut next = || parts.remove(0);
        [dx, d_gain, next(), next(), d_down]
    }
}

/// Hands each part to its parent.
macro_rules! register {
    ($parents:expr, $parts:expr, $grads:expr) => {
        for (node, part) in $parents.into_iter().zip($parts) {
            if let (Some(node), Some(part)) = (node, part) {
                $grads.register::<B>(node.id, part);
            }
        }
    };
}

#[derive(Debug)]
struct AttentionHalfStep;

impl<B: BlockGradients> Backward<B, 7> for AttentionHalfStep {
    type State = (AttentionHalf<B>, Option<AttentionKept<B>>);

    fn backward(self, ops: Ops<Self::State, 7>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let (half, kept) = ops.state;
        let parts = half.backward(kept, gradient, wanted);
        register!(ops.parents, parts, grads);
    }
}

#[derive(Debug)]
struct MlpHalfStep;

impl<B: BlockGradients> Backward<B, 5> for MlpHalfStep {
    type State = (MlpHalf<B>, Option<MlpKept<B>>);

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let (half, kept) = ops.state;
        let parts = half.backward(kept, gradient, wanted);
        register!(ops.parents, parts, grads);
    }
}

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
                let kept = (!half.block.recompute).then_some(kept);
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
