//! Tensors as kernels take them: dense, with an element type that C++ knows.

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

/// The tensor of a primitive, which tracks no gradients.
pub(crate) fn wrapped<const D: usize>(tensor: CubeTensor) -> Tensor<D> {
    Tensor::from_dispatch(DispatchTensor {
        kind: DispatchTensorKind::Cube(BackendTensor::Float(tensor)),
        autodiff: DispatchAutodiffContext::Disabled,
    })
}

/// The tensor with its values one after the other.
pub(crate) fn dense(tensor: CubeTensor) -> CubeTensor {
    if tensor.is_contiguous() {
        return tensor;
    }
    let shape = tensor.shape();
    // Views that no strides of one dim describe are copied.
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

/// A tensor beside `like` whose values are whatever lies there; a kernel writes all of them.
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

/// Integers beside `like`.
pub(crate) fn integers(like: &CubeTensor, values: &[i32]) -> cubecl::server::Handle {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    like.client.create_from_slice(&bytes)
}

/// The name of the element's type in the kernels of rows.
pub(crate) fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "__nv_bfloat16",
        _ => "float",
    }
}

/// The name of the element's type in the kernels of attention, which look at it in conditions.
pub(crate) fn short_element(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        _ => "float",
    }
}

/// Elements of a 16-byte access where rows are made of whole ones, else 1.
pub(crate) fn access(dtype: DType, width: usize) -> usize {
    let wide = 16 / dtype.size();
    if width.is_multiple_of(wide) { wide } else { 1 }
}
