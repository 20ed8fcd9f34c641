//! Launches of `mlp.cu`.

#![expect(
    unsafe_code,
    reason = "launches of kernels; each states why its arguments fit"
)]

use burn::backend::TensorMetadata;
use burn::tensor::DType;

use super::launch::{CudaKernel, Source};
use super::tensor::{CubeTensor, access, cast, dense, element, empty};

static SOURCE: Source = Source::with_prefix(include_str!("rowwise.cuh"), include_str!("mlp.cu"));

const THREADS: usize = 256;
/// Enough blocks to fill any GPU several times; they stride over the rest.
const MAX_BLOCKS: usize = 1 << 14;

/// Launches a kernel on `tensors`, in the order of its parameters.
///
/// # Safety
/// The tensors are those that the kernel expects, dense and of the element type of `like`, which is one of them: `[rows,
/// I]`, or `[rows, 2I]` where gates and ups are joined.
unsafe fn launch(entry: &'static str, like: &CubeTensor, tensors: &[&CubeTensor]) {
    let [rows, inner] = like.shape().dims();
    let dtype: DType = like.dtype();
    let pieces = rows * inner / access(dtype, inner);
    let grid = pieces.div_ceil(THREADS).clamp(1, MAX_BLOCKS);
    let handles: Vec<_> = tensors.iter().map(|tensor| &tensor.handle).collect();
    // SAFETY: the caller provides the kernel's tensors; INNER, rows and the grid are those of their shape.
    unsafe {
        CudaKernel::new(&SOURCE, entry, THREADS as u32)
            .define("ELEMENT", element(dtype))
            .define("INNER", inner)
            .launch(
                &like.client,
                [grid as u32, 1, 1],
                &handles,
                vec![rows as u64],
            );
    }
}

/// silu(gate) · up.
pub(crate) fn forward(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
    let (gate, up) = (dense(gate), dense(up));
    let y = empty(&gate, gate.shape(), gate.dtype());
    // SAFETY: burn has checked that gates and ups have the same shape, which is that of `y`.
    unsafe {
        launch("swiglu", &gate, &[&gate, &up, &y]);
    }
    y
}

/// silu(gate) · up of `[rows, 2I]`, gates first, into `[rows, I]`.
pub(crate) fn joined_into(gate_up: &CubeTensor, y: &CubeTensor) {
    // SAFETY: `gate_up` has twice the columns of `y`, as the callers state.
    unsafe {
        launch("swiglu_fused", y, &[gate_up, y]);
    }
}

/// [`joined_into`] a new buffer.
pub(crate) fn joined(gate_up: CubeTensor) -> CubeTensor {
    let gate_up = dense(gate_up);
    let [rows, width] = gate_up.shape().dims();
    let y = empty(&gate_up, [rows, width / 2], gate_up.dtype());
    joined_into(&gate_up, &y);
    y
}

/// The gradient for gates and ups, in place of gates and ups if nothing else uses their buffer.
pub(crate) fn joined_backward(gate_up: CubeTensor, gradient: CubeTensor) -> CubeTensor {
    let gate_up = dense(gate_up);
    let gradient = dense(cast(gradient, gate_up.dtype()));
    let target = if gate_up.handle.can_mut() {
        gate_up.clone()
    } else {
        empty(&gate_up, gate_up.shape(), gate_up.dtype())
    };
    let tensors = [&gate_up, &gradient, &target];
    // SAFETY: the gradient is that of half of the columns of `gate_up`, whose shape `target` has; the kernel may
    // write in place.
    unsafe {
        launch("swiglu_fused_backward", &gradient, &tensors);
    }
    target
}

/// Gradients for gate and up.
pub(crate) fn backward(gate: CubeTensor, up: CubeTensor, gradient: CubeTensor) -> [CubeTensor; 2] {
    let (gate, up) = (dense(gate), dense(up));
    let gradient = dense(cast(gradient, gate.dtype()));
    let d_gate = empty(&gate, gate.shape(), gate.dtype());
    let d_up = empty(&gate, gate.shape(), gate.dtype());
    let tensors = [&gate, &up, &gradient, &d_gate, &d_up];
    // SAFETY: gates, ups, their gradients and that of the result have the same shape.
    unsafe {
        launch("swiglu_backward", &gate, &tensors);
    }
    [d_gate, d_up]
}
