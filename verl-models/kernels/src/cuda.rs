//! The fused operations on an NVIDIA GPU: kernels in CUDA C++, compiled when they are first launched.
//!
//! The kernels are in `cuda/*.cu`, each with its equations, shapes and limits at its head; the Rust files beside them
//! launch them. All sums have a fixed order, so the same inputs give the same bits.

pub(crate) mod attention;
mod blocks;
mod columns;
pub mod decode;
pub(crate) mod launch;
mod mlp;
pub(crate) mod norm;
pub(crate) mod probe;
pub(crate) mod product;
mod rows;
pub(crate) mod tensor;
pub(crate) mod update;
pub(crate) mod vocab;

use burn::backend::{Cube, TensorMetadata};
use burn::tensor::DType;

use self::product::{Operand, product};
use self::tensor::CubeTensor;
use super::{AttentionShape, DecoderGradients, DecoderOps, Products};

impl Products for Cube {
    fn product_with_rows(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        let dtype = x.dtype();
        product(Operand::rows(x), Operand::rows(weight), dtype)
    }

    fn product_with_columns(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        let dtype = x.dtype();
        product(Operand::rows(x), Operand::columns(weight), dtype)
    }

    fn product_of_columns(x: CubeTensor, y: CubeTensor) -> CubeTensor {
        let dtype = x.dtype();
        product(Operand::columns(x), Operand::columns(y), dtype)
    }

    /// In f32, the type in which it is summed.
    fn weight_gradient(gradient: CubeTensor, x: CubeTensor) -> CubeTensor {
        product(Operand::columns(gradient), Operand::columns(x), DType::F32)
    }
}

impl DecoderOps for Cube {
    fn fused_rms_norm(x: CubeTensor, weight: CubeTensor, epsilon: f64) -> CubeTensor {
        norm::forward(x, weight, epsilon).0
    }

    fn fused_swiglu(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        mlp::forward(gate, up)
    }

    fn fused_linear(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        Self::product_with_rows(x, weight)
    }

    fn take_rows(table: CubeTensor, index: CubeTensor, _ascending: bool) -> CubeTensor {
        rows::take(table, index)
    }

    fn fused_attention(
        queries: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        shape: AttentionShape,
    ) -> CubeTensor {
        attention::forward(shape, [queries, keys, values, cos, sin]).0
    }
}

impl DecoderGradients for Cube {
    fn rms_norm_saving(
        x: CubeTensor,
        weight: CubeTensor,
        epsilon: f64,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let (y, scale) = norm::forward(x, weight, epsilon);
        (y, Some(scale))
    }

    fn rms_norm_backward(
        x: CubeTensor,
        weight: CubeTensor,
        epsilon: f64,
        scale: Option<CubeTensor>,
        gradient: CubeTensor,
    ) -> [CubeTensor; 2] {
        let scale = scale.unwrap_or_else(|| norm::forward(x.clone(), weight.clone(), epsilon).1);
        norm::backward(x, weight, scale, gradient, None)
    }

    fn swiglu_backward(gate: CubeTensor, up: CubeTensor, gradient: CubeTensor) -> [CubeTensor; 2] {
        mlp::backward(gate, up, gradient)
    }

    fn take_rows_backward(
        table: CubeTensor,
        index: CubeTensor,
        ascending: bool,
        gradient: CubeTensor,
    ) -> CubeTensor {
        rows::take_backward(table.shape()[0], index, ascending, gradient, table.dtype())
    }

    fn attention_saving(
        shape: AttentionShape,
        inputs: [CubeTensor; 5],
    ) -> (CubeTensor, Vec<CubeTensor>) {
        attention::forward(shape, inputs)
    }

    fn attention_backward(
        shape: AttentionShape,
        saved: Vec<CubeTensor>,
        gradient: CubeTensor,
    ) -> [CubeTensor; 3] {
        attention::backward(shape, &saved, gradient)
    }
}
