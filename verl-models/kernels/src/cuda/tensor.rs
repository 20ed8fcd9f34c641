//! Tensors in the form that kernels require: dense, with an element type that exists in C++.

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    BackendTensor, Cube, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    TensorMetadata,
};
use burn::tensor::{DType, Shape, Tensor};

/// A tensor of burn's CUDA backend.
pub(crate) type CubeTensor = FloatTensor<Cube>;

/// The dense primitive of a tensor that is on a GPU and does not track gradients.
pub(crate) fn primitive<const D: usize>(tensor: Tensor<D>) -> CubeTensor {
    match tensor.into_dispatch().kind {
        DispatchTensorKind::Cube(tensor) => dense(tensor.float()),
        _ => unreachable!("the tensor is on a GPU"),
    }
}

/// Wraps a primitive in a tensor that tracks no gradients.
pub(crate) fn wrapped<const D: usize>(tensor: CubeTensor) -> Tensor<D> {
    Tensor::from_dispatch(DispatchTensor {
        kind: DispatchTensorKind::Cube(BackendTensor::Float(tensor)),
        autodiff: DispatchAutodiffContext::Disabled,
    })
}

/// The tensor in contiguous memory.
pub(crate) fn dense(tensor: CubeTensor) -> CubeTensor {
    if tensor.is_contiguous() {
        return tensor;
    }
    let shape = tensor.shape();
    // Views whose strides do not reduce to one dim are copied.
    let flat = Cube::float_reshape(tensor, Shape::new([shape.num_elements()]));
    Cube::float_reshape(flat, shape)
}

/// A tensor in `dtype`.
pub(crate) fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    if tensor.dtype() == dtype {
        return tensor;
    }
    Cube::float_cast(tensor, dtype.into())
}

/// An uninitialised tensor on the device of `like`; a kernel must write all of its values.
pub(crate) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let shape = shape.into();
    let handle = like.client.empty(shape.num_elements() * dtype.size());
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        handle,
        dtype,
    )
}

/// The first `rows` rows of a dense tensor, in the same memory.
pub(crate) fn leading(tensor: &CubeTensor, rows: usize) -> CubeTensor {
    let mut shape = tensor.shape();
    shape[0] = rows;
    CubeTensor::new_contiguous(
        tensor.client.clone(),
        tensor.device.clone(),
        shape,
        tensor.handle.clone(),
        tensor.dtype(),
    )
}

/// Integers on the device of `like`.
pub(crate) fn integers(like: &CubeTensor, values: &[i32]) -> cubecl::server::Handle {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    like.client.create_from_slice(&bytes)
}

/// The element type's name in the row-wise kernels.
pub(crate) fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "__nv_bfloat16",
        _ => "float",
    }
}

/// The element type's name in the attention kernels, which use it in preprocessor conditions.
pub(crate) fn short_element(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        _ => "float",
    }
}

/// Elements of a 16-byte access if they divide a row, else 1.
pub(crate) fn access(dtype: DType, width: usize) -> usize {
    let wide = 16 / dtype.size();
    if width.is_multiple_of(wide) { wide } else { 1 }
}
