//! Fused operations of a decoder, with backward passes of their own, for devices that have them.
//!
//! [`are_fused`] tells whether a device has them for a dtype; where it does not, the blocks compose the same result
//! from plain operations. Today the CPU in f32 has them; a GPU gets its own by implementing [`DecoderOps`].

mod attention;
mod cpu;
#[cfg(test)]
mod tests;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

pub use attention::AttentionShape;

/// Whether fused operations exist for tensors of this device and dtype.
pub fn are_fused(device: &Device, dtype: DType) -> bool {
    dtype == DType::F32 && device.clone().without_autodiff() == Device::flex()
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

/// `x Wᵀ`; its backward pass forms the weight's gradient in the weight's own layout.
///
/// # Shapes
/// `x`: `[N, in]`; `weight`: `[out, in]`; result: `[N, out]`
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as DecoderOps>::fused_linear(
        x.into_dispatch(),
        weight.into_dispatch(),
    ))
}

/// Causal attention with rotary positions, from projections to mixed heads, without a buffer of scores.
///
/// # Shapes
/// `queries`: `[B·S, H·Dh]`; `keys`, `values`: `[B·S, K·Dh]`; `cos`, `sin` (signed): `[S, Dh]`; result: `[B·S, H·Dh]`
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

/// What a backend with fused operations offers.
#[backend_extension(Flex, Autodiff)]
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

/// Backward passes of [`DecoderOps`].
pub trait DecoderGradients: Backend {
    /// Gradients for `x` and `weight`.
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
    /// Gradients for `gate` and `up`.
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2];
    /// Gradients for queries, keys and values; `output` is what the forward pass gave.
    fn attention_backward(
        shape: AttentionShape,
        inputs: [FloatTensor<Self>; 5],
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3];
}

type FlexTensor = FloatTensor<Flex>;

/// The tensor with its values one after the other.
fn dense(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

/// The values of a dense f32 tensor.
fn values(tensor: &FlexTensor) -> &[f32] {
    tensor
        .as_slice()
        .expect("are_fused admits f32 alone, and the tensor is dense")
}

fn tensor(values: Vec<f32>, shape: Shape) -> FlexTensor {
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
        Flex::float_matmul(x, Flex::float_transpose(weight))
    }

    fn fused_attention(
        queries: FlexTensor,
        keys: FlexTensor,
        content: FlexTensor,
        cos: FlexTensor,
        sin: FlexTensor,
        shape: AttentionShape,
    ) -> FlexTensor {
        let inputs = [queries, keys, content, cos, sin].map(dense);
        let mixed = attention::attention(shape, attention_inputs(&inputs));
        let [queries, ..] = inputs;
        tensor(mixed, queries.shape())
    }
}

impl DecoderGradients for Flex {
    fn rms_norm_backward(
        x: FlexTensor,
        weight: FlexTensor,
        epsilon: f64,
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

    fn attention_backward(
        shape: AttentionShape,
        inputs: [FlexTensor; 5],
        output: FlexTensor,
        gradient: FlexTensor,
    ) -> [FlexTensor; 3] {
        let inputs = inputs.map(dense);
        let [output, gradient] = [output, gradient].map(dense);
        let parts = attention::attention_backward(
            shape,
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

/// Hands each part to its parent, where that one wants a gradient.
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
    type State = (FloatTensor<B>, FloatTensor<B>, f64);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (x, weight, epsilon) = ops.state;
        let parts = B::rms_norm_backward(x, weight, epsilon, gradient);
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

impl<B: Backend> Backward<B, 2> for LinearStep {
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (x, weight) = ops.state;
        let [x_node, weight_node] = ops.parents;
        if let Some(node) = weight_node {
            // [out, N] · [N, in] -> [out, in]
            grads.register::<B>(
                node.id,
                B::float_matmul(B::float_transpose(gradient.clone()), x),
            );
        }
        if let Some(node) = x_node {
            grads.register::<B>(node.id, B::float_matmul(gradient, weight));
        }
    }
}

#[derive(Debug)]
struct AttentionStep;

impl<B: DecoderGradients> Backward<B, 3> for AttentionStep {
    type State = (AttentionShape, [FloatTensor<B>; 5], FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (shape, inputs, output) = ops.state;
        let parts = B::attention_backward(shape, inputs, output, gradient);
        register!(ops.parents, parts, grads);
    }
}

impl<B: DecoderOps + DecoderGradients, C: CheckpointStrategy> DecoderOps for Autodiff<B, C> {
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        let y = B::fused_rms_norm(x.clone(), weight.clone(), epsilon);
        match RmsNormStep
            .prepare::<C>([x_node, weight_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((x, weight, epsilon), y),
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
        let [queries, keys, values, cos, sin] = inputs.clone();
        let mixed = B::fused_attention(queries, keys, values, cos, sin, shape);
        match AttentionStep
            .prepare::<C>([query_node, key_node, value_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((shape, inputs, mixed.clone()), mixed),
            OpsKind::UnTracked(prep) => prep.finish(mixed),
        }
    }
}
