//! Tensors from plain numbers, on the device of another tensor.

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

/// Converts half precision to f32, in which all losses are computed; keeps wider types.
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

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    /// The order of a sum on the CPU must not depend on the width of its registers; burn's feature "simd" would make it
    /// so.
    #[test]
    fn sums_on_the_cpu_add_in_ascending_order() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0
        };
        let rows: Vec<Vec<f32>> = (0..8)
            .map(|_| (0..1000).map(|_| next()).collect())
            .collect();
        let ascending = |row: &Vec<f32>| row.iter().fold(0.0, |sum, x| sum + x);
        let by_lanes = |row: &Vec<f32>, lanes: usize| {
            let of = |lane: usize| row.iter().skip(lane).step_by(lanes).sum::<f32>();
            (0..lanes).map(of).sum::<f32>()
        };
        let want: Vec<f32> = rows.iter().map(ascending).collect();
        for lanes in [4, 8, 16] {
            let other: Vec<f32> = rows.iter().map(|row| by_lanes(row, lanes)).collect();
            assert_ne!(want, other, "the numbers must distinguish the orders");
        }
        let device = Device::flex();
        let flat = rows.concat();
        let matrix = Tensor::<1>::from_floats(flat.as_slice(), &device).reshape([8, 1000]);
        let read = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        assert_eq!(read(matrix.clone().sum_dim(1)), want);
        assert_eq!(read(matrix.transpose().sum_dim(0)), want);
        let sums = rows.iter().map(|row| {
            let row = Tensor::<1>::from_floats(row.as_slice(), &device);
            row.sum().into_data().iter::<f32>().collect::<Vec<_>>()[0]
        });
        assert_eq!(sums.collect::<Vec<_>>(), want);
    }
}
