//! Operations on tensors and numbers in memory, for the CPU and NVIDIA GPUs: the fused operations of decoders with their
//! own backward passes, scoring, the optimiser's updates, decoding steps, random draws, and the devices themselves.
//!
//! This crate knows no model: it gets tensors and sizes.
//!
//! [`are_fused`] says whether a device has fused operations for a dtype. Where it does not, the blocks of `verl-decoder`
//! compose the same result from plain operations. The CPU has them in f32, an NVIDIA GPU in f32 and bf16.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

mod allocation;
mod attention;
mod blocks;
pub mod compiled;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod heads;
pub mod host;
#[cfg(any(feature = "cuda", test))]
mod kernel_text;
pub mod lanes;
#[cfg(any(feature = "cuda", test))]
mod layer_units;
#[cfg(test)]
mod numbers;
pub mod optimizer;
#[cfg(any(feature = "cuda", test))]
pub mod pool;
pub mod prefixes;
mod product;
pub mod random;
pub mod registers;
pub mod scoring;
#[cfg(test)]
mod tests;
mod unset;
pub mod vector;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, Backend, BackendTensor, Dispatch, DispatchTensorKind, Flex, TensorMetadata,
    backend_extension,
};
use burn::tensor::{DType, Device, FloatDType, IndexingUpdateOp, Int, Shape, Tensor, TensorData};

pub use attention::AttentionShape;
pub use blocks::{
    AttentionParameters, BlockOps, HalfSettings, Sequences, attention_block, blocks_are_fused,
    mlp_block,
};
pub use heads::Heads;

use self::product::Matrix;
use crate::device::DeviceKind;

/// Maximum bytes of logits that GPU kernels have in memory at once, unless a single chunk of tokens takes more.
pub const LOGIT_BYTES: usize = 768 << 20;

/// Maximum bytes of logits that a GPU keeps from the forward for the backward pass.
pub const KEPT_LOGIT_BYTES: usize = 3 << 30;

/// Whether fused operations exist for tensors of this device and dtype. [`attention`] has further requirements; see
/// [`attention_is_fused`].
pub fn are_fused(device: &Device, dtype: DType) -> bool {
    DeviceKind::of(device).fused(dtype)
}

/// Whether [`attention`] exists for tensors of this device and dtype and heads of this width.
pub fn attention_is_fused(device: &Device, dtype: DType, head_dim: usize) -> bool {
    #[cfg(feature = "cuda")]
    let supported = DeviceKind::of(device).is_host() || cuda::attention::supports(head_dim);
    #[cfg(not(feature = "cuda"))]
    let supported = head_dim.is_multiple_of(2);
    supported && are_fused(device, dtype)
}

/// `w · x / sqrt(mean(x²) + ε)` over the last dim, fused.
///
/// # Shapes
/// `x`: `[N, D]`; `weight`: `[D]`; result: `[N, D]`
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as DecoderOps>::fused_rms_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        epsilon,
    ))
}

/// `silu(gate) · up`, fused.
///
/// # Shapes
/// `gate`, `up`, result: `[N, I]`
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as DecoderOps>::fused_swiglu(
        gate.into_dispatch(),
        up.into_dispatch(),
    ))
}

/// `x Wᵀ`; its backward pass computes the weight's gradient in the weight's own layout.
///
/// # Shapes
/// `x`: `[N, in]`; `weight`: `[out, in]`; result: `[N, out]`
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as DecoderOps>::fused_linear(
        x.into_dispatch(),
        weight.into_dispatch(),
    ))
}

/// x Wᵀ, with [`linear`] where the device has it. On the CPU, the bits of an element then depend only on its row of `x`
/// and its row of `weight`, whereas burn's product also depends on cache sizes.
///
/// # Shapes
/// `x`: `[N, in]`; `weight`: `[out, in]`; result: `[N, out]`
pub fn linear_or_composed(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    if are_fused(&x.device(), x.dtype()) {
        linear(x, weight)
    } else {
        x.matmul(weight.transpose())
    }
}

/// A list of indices or ids on the device.
pub fn indices(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), device)
}

/// Rows of `table` selected by `index`. The backward pass is faster with `ascending`, which says that the index
/// ascends.
///
/// # Shapes
/// `table`: `[R, D]`; `index`: `[N]`, each below `R`; result: `[N, D]`
pub fn take_rows(table: Tensor<2>, index: Tensor<1, Int>, ascending: bool) -> Tensor<2> {
    if !are_fused(&table.device(), table.dtype()) || DeviceKind::of(&table.device()).is_host() {
        return table.select(0, index);
    }
    Tensor::from_dispatch(<Dispatch as DecoderOps>::take_rows(
        table.into_dispatch(),
        index.into_dispatch(),
        ascending,
    ))
}

/// Causal attention with rotary positions, from projections to mixed heads, without a buffer of scores.
///
/// # Shapes
/// `queries`: `[N, H·Dh]`; `keys`, `values`: `[N, K·Dh]`; `cos`, `sin` (signed): `[S, Dh]`; result: `[N, H·Dh]`; `N` is
/// `B·S` unless the shape has segments, in which case `S` is greater than the last position
pub fn attention(
    shape: AttentionShape,
    queries: Tensor<2>,
    keys: Tensor<2>,
    values: Tensor<2>,
    cos: Tensor<2>,
    sin: Tensor<2>,
) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as DecoderOps>::fused_attention(
        queries.into_dispatch(),
        keys.into_dispatch(),
        values.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        shape,
    ))
}

/// The fused operations of a backend.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub trait DecoderOps: Backend {
    /// See [`rms_norm`].
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
    /// See [`swiglu`].
    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`linear`].
    fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`take_rows`].
    fn take_rows(
        table: FloatTensor<Self>,
        index: IntTensor<Self>,
        _ascending: bool,
    ) -> FloatTensor<Self> {
        Self::float_select(table, 0, index)
    }
    /// See [`attention`].
    fn fused_attention(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        shape: AttentionShape,
    ) -> FloatTensor<Self>;
}

/// Matrix products in the layouts that a linear map and its backward pass use.
pub trait Products: Backend {
    /// x Wᵀ: `[N, in]`, `[out, in]` -> `[N, out]`.
    fn product_with_rows(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(x, Self::float_transpose(weight))
    }
    /// x W: `[N, out]`, `[out, in]` -> `[N, in]`.
    fn product_with_columns(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(x, weight)
    }
    /// xᵀ y: `[N, out]`, `[N, in]` -> `[out, in]`.
    fn product_of_columns(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(Self::float_transpose(x), y)
    }
    /// The gradient of a linear map's weight, in the dtype of `x` or a wider one: like [`Self::product_of_columns`].
    fn weight_gradient(gradient: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::product_of_columns(gradient, x)
    }
}

/// Products of f32 matrices use the module `product`; others use burn.
impl Products for Flex {
    fn product_with_rows(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        match multiplied(&x, &weight, |x, weight| (x, weight.transposed())) {
            Some(product) => product,
            None => Self::float_matmul(x, Self::float_transpose(weight)),
        }
    }

    fn product_with_columns(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        match multiplied(&x, &weight, |x, weight| (x, weight)) {
            Some(product) => product,
            None => Self::float_matmul(x, weight),
        }
    }

    fn product_of_columns(x: FlexTensor, y: FlexTensor) -> FlexTensor {
        match multiplied(&x, &y, |x, y| (x.transposed(), y)) {
            Some(product) => product,
            None => Self::float_matmul(Self::float_transpose(x), y),
        }
    }
}

/// The product of two f32 matrices that `arranged` lays out; `None` unless both are f32 matrices.
fn multiplied(
    a: &FlexTensor,
    b: &FlexTensor,
    arranged: impl for<'a> FnOnce(Matrix<'a>, Matrix<'a>) -> (Matrix<'a>, Matrix<'a>),
) -> Option<FlexTensor> {
    if a.dtype() != DType::F32 || b.dtype() != DType::F32 {
        return None;
    }
    let (a, b) = (dense(a.clone()), dense(b.clone()));
    let (&[a_rows, a_columns], &[b_rows, b_columns]) = (&*a.shape(), &*b.shape()) else {
        return None;
    };
    let (a, b) = arranged(
        Matrix::new(values(&a), a_rows, a_columns),
        Matrix::new(values(&b), b_rows, b_columns),
    );
    let shape = Shape::new([a.rows(), b.columns()]);
    Some(tensor(product::product(a, b), shape))
}

impl Products for Dispatch {}
impl<B: Backend, C: CheckpointStrategy> Products for Autodiff<B, C> {}

/// Backward passes of [`DecoderOps`].
pub trait DecoderGradients: DecoderOps + Products {
    /// [`rms_norm`], and what its backward pass can reuse, if anything.
    fn rms_norm_saving(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        (Self::fused_rms_norm(x, weight, epsilon), None)
    }
    /// Gradients for `x` and `weight`; `saved` is what [`Self::rms_norm_saving`] kept.
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        saved: Option<FloatTensor<Self>>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
    /// Gradients for `gate` and `up`.
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
    /// The gradient for `table`.
    fn take_rows_backward(
        table: FloatTensor<Self>,
        index: IntTensor<Self>,
        _ascending: bool,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let dtype = FloatDType::from(table.dtype());
        let zeros = Self::float_zeros(table.shape(), &table.device(), dtype);
        Self::float_select_assign(zeros, 0, index, gradient, IndexingUpdateOp::Add)
    }
    /// [`attention`] of queries, keys, values, cosines and sines, and what its backward pass needs.
    fn attention_saving(
        shape: AttentionShape,
        inputs: [FloatTensor<Self>; 5],
    ) -> (FloatTensor<Self>, Vec<FloatTensor<Self>>);
    /// Gradients for queries, keys and values; `saved` is what [`Self::attention_saving`] kept.
    fn attention_backward(
        shape: AttentionShape,
        saved: Vec<FloatTensor<Self>>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3];
}

/// A tensor on the CPU.
pub type FlexTensor = FloatTensor<Flex>;

/// The tensor in contiguous memory.
pub(crate) fn dense(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

/// The values of a dense f32 tensor.
pub fn values(tensor: &FlexTensor) -> &[f32] {
    tensor
        .as_slice()
        .expect("are_fused admits only f32, and the tensor is dense")
}

/// A tensor outside of any autodiff graph, in f32 and contiguous; `None` if it is not on the CPU.
pub fn on_cpu<const D: usize>(tensor: Tensor<D>) -> Option<FlexTensor> {
    match tensor.cast(DType::F32).into_dispatch().kind {
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => Some(dense(tensor)),
        _ => None,
    }
}

/// A tensor on the CPU with these values.
pub fn tensor(values: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

/// Queries, keys, values, cosines and sines of an attention call.
fn attention_inputs(tensors: &[FlexTensor; 5]) -> attention::Inputs<'_> {
    let [queries, keys, content, cos, sin] = tensors.each_ref().map(values);
    attention::Inputs {
        queries,
        keys,
        values: content,
        tables: attention::Tables { cos, sin },
    }
}

impl DecoderOps for Flex {
    fn fused_rms_norm(x: FlexTensor, weight: FlexTensor, epsilon: f64) -> FlexTensor {
        let (x, weight) = (dense(x), dense(weight));
        tensor(
            cpu::rms_norm(values(&x), values(&weight), epsilon),
            x.shape(),
        )
    }

    fn fused_swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        let (gate, up) = (dense(gate), dense(up));
        tensor(cpu::swiglu(values(&gate), values(&up)), gate.shape())
    }

    fn fused_linear(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        Flex::product_with_rows(x, weight)
    }

    fn fused_attention(
        queries: FlexTensor,
        keys: FlexTensor,
        content: FlexTensor,
        cos: FlexTensor,
        sin: FlexTensor,
        shape: AttentionShape,
    ) -> FlexTensor {
        Self::attention_saving(shape, [queries, keys, content, cos, sin]).0
    }
}

impl DecoderGradients for Flex {
    fn rms_norm_backward(
        x: FlexTensor,
        weight: FlexTensor,
        epsilon: f64,
        _saved: Option<FlexTensor>,
        gradient: FlexTensor,
    ) -> [FlexTensor; 2] {
        let [x, weight, gradient] = [x, weight, gradient].map(dense);
        let (dx, dw) =
            cpu::rms_norm_backward(values(&x), values(&weight), epsilon, values(&gradient));
        [tensor(dx, x.shape()), tensor(dw, weight.shape())]
    }

    fn swiglu_backward(gate: FlexTensor, up: FlexTensor, gradient: FlexTensor) -> [FlexTensor; 2] {
        let [gate, up, gradient] = [gate, up, gradient].map(dense);
        let (d_gate, d_up) = cpu::swiglu_backward(values(&gate), values(&up), values(&gradient));
        [tensor(d_gate, gate.shape()), tensor(d_up, gate.shape())]
    }

    fn attention_saving(
        shape: AttentionShape,
        inputs: [FlexTensor; 5],
    ) -> (FlexTensor, Vec<FlexTensor>) {
        let inputs = inputs.map(dense);
        let mixed = attention::attention(&shape, attention_inputs(&inputs));
        let mixed = tensor(mixed, inputs[0].shape());
        let saved = inputs.into_iter().chain([mixed.clone()]).collect();
        (mixed, saved)
    }

    fn attention_backward(
        shape: AttentionShape,
        saved: Vec<FlexTensor>,
        gradient: FlexTensor,
    ) -> [FlexTensor; 3] {
        let Ok([queries, keys, content, cos, sin, output]) = <[FlexTensor; 6]>::try_from(saved)
        else {
            unreachable!("the forward pass saves six tensors");
        };
        let inputs = [queries, keys, content, cos, sin];
        let gradient = dense(gradient);
        let parts = attention::attention_backward(
            &shape,
            attention_inputs(&inputs),
            values(&output),
            values(&gradient),
        );
        let [queries, keys, content, ..] = inputs;
        let [dq, dk, dv] = parts;
        [
            tensor(dq, queries.shape()),
            tensor(dk, keys.shape()),
            tensor(dv, content.shape()),
        ]
    }
}

/// Registers each gradient with its parent, if the parent requires one.
macro_rules! register {
    ($ops_parents:expr, $parts:expr, $grads:expr) => {
        for (node, part) in $ops_parents.into_iter().zip($parts) {
            if let Some(node) = node {
                $grads.register::<B>(node.id, part);
            }
        }
    };
}

#[derive(Debug)]
struct RmsNormStep;

impl<B: DecoderGradients> Backward<B, 2> for RmsNormStep {
    type State = (FloatTensor<B>, FloatTensor<B>, f64, Option<FloatTensor<B>>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (x, weight, epsilon, saved) = ops.state;
        let parts = B::rms_norm_backward(x, weight, epsilon, saved, gradient);
        register!(ops.parents, parts, grads);
    }
}

#[derive(Debug)]
struct SwigluStep;

impl<B: DecoderGradients> Backward<B, 2> for SwigluStep {
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (gate, up) = ops.state;
        let parts = B::swiglu_backward(gate, up, gradient);
        register!(ops.parents, parts, grads);
    }
}

#[derive(Debug)]
struct LinearStep;

impl<B: Products> Backward<B, 2> for LinearStep {
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (x, weight) = ops.state;
        let [x_node, weight_node] = ops.parents;
        if let Some(node) = weight_node {
            // [out, N] · [N, in] -> [out, in]
            grads.register::<B>(node.id, B::weight_gradient(gradient.clone(), x));
        }
        if let Some(node) = x_node {
            grads.register::<B>(node.id, B::product_with_columns(gradient, weight));
        }
    }
}

#[derive(Debug)]
struct TakeRowsStep;

impl<B: DecoderGradients> Backward<B, 1> for TakeRowsStep {
    type State = (FloatTensor<B>, IntTensor<B>, bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (table, index, ascending) = ops.state;
        let part = B::take_rows_backward(table, index, ascending, gradient);
        register!(ops.parents, [part], grads);
    }
}

#[derive(Debug)]
struct AttentionStep;

impl<B: DecoderGradients> Backward<B, 3> for AttentionStep {
    type State = (AttentionShape, Vec<FloatTensor<B>>);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (shape, saved) = ops.state;
        let parts = B::attention_backward(shape, saved, gradient);
        register!(ops.parents, parts, grads);
    }
}

impl<B: DecoderGradients, C: CheckpointStrategy> DecoderOps for Autodiff<B, C> {
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        let (y, saved) = B::rms_norm_saving(x.clone(), weight.clone(), epsilon);
        match RmsNormStep
            .prepare::<C>([x_node, weight_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((x, weight, epsilon, saved), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let ((gate, gate_node), (up, up_node)) = (gate.into_parts(), up.into_parts());
        let y = B::fused_swiglu(gate.clone(), up.clone());
        match SwigluStep
            .prepare::<C>([gate_node, up_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((gate, up), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        let y = B::fused_linear(x.clone(), weight.clone());
        match LinearStep
            .prepare::<C>([x_node, weight_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((x, weight), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn take_rows(
        table: FloatTensor<Self>,
        index: IntTensor<Self>,
        ascending: bool,
    ) -> FloatTensor<Self> {
        let (table, node) = table.into_parts();
        let y = B::take_rows(table.clone(), index.clone(), ascending);
        match TakeRowsStep.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((table, index, ascending), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn fused_attention(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        shape: AttentionShape,
    ) -> FloatTensor<Self> {
        let (queries, query_node) = queries.into_parts();
        let (keys, key_node) = keys.into_parts();
        let (values, value_node) = values.into_parts();
        let inputs = [
            queries,
            keys,
            values,
            cos.into_parts().0,
            sin.into_parts().0,
        ];
        let (mixed, saved) = B::attention_saving(shape.clone(), inputs);
        match AttentionStep
            .prepare::<C>([query_node, key_node, value_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((shape, saved), mixed),
            OpsKind::UnTracked(prep) => prep.finish(mixed),
        }
    }
}
