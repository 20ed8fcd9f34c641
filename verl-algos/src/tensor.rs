//! Plain numbers into tensors beside another tensor.

use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

/// A tensor of constants on the device and with the dtype of `like`.
pub(crate) fn constant_like<const D: usize>(values: Vec<f64>, like: &Tensor<D>) -> Tensor<1> {
    let len = values.len();
    let options = (&like.device(), like.dtype());
    Tensor::from_data(TensorData::new(values, [len]), options)
}

/// An index tensor on the device of `like`.
pub(crate) fn indices_like<const D: usize>(values: &[usize], like: &Tensor<D>) -> Tensor<1, Int> {
    let values: Vec<i64> = values.iter().map(|&v| v as i64).collect();
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), &like.device())
}

/// 1 where `mask` holds, else 0, with the dtype of `like`.
pub(crate) fn ones_where(mask: Tensor<1, Bool>, like: &Tensor<1>) -> Tensor<1> {
    like.zeros_like().mask_fill(mask, 1.0)
}

/// Half precision into f32, in which all losses are computed; wider types as they are.
pub(crate) fn at_least_f32<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F32 | DType::F64 => tensor,
        _ => tensor.cast(DType::F32),
    }
}

#[cfg(test)]
pub(crate) mod test {
    use burn::tensor::{DType, Device, Tensor, TensorData};

    /// An f64 tensor on the CPU.
    pub fn constant(values: &[f64]) -> Tensor<1> {
        let device = Device::flex();
        Tensor::from_data(
            TensorData::new(values.to_vec(), [values.len()]),
            (&device, DType::F64),
        )
    }

    /// Its numbers.
    pub fn read(tensor: Tensor<1>) -> Vec<f64> {
        tensor.try_into_vec_as::<f64>().unwrap()
    }

    /// Sum of `f(x)` and its gradient.
    pub fn gradient(x: &[f64], f: impl FnOnce(Tensor<1>) -> Tensor<1>) -> (f64, Vec<f64>) {
        let x = constant(x).autodiff().require_grad();
        let sum = f(x.clone()).sum();
        let grads = sum.backward();
        (read(sum)[0], read(x.grad(&grads).unwrap()))
    }
}
