//! Root-mean-square norm.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};
use verl_kernels as kernels;

/// y = w · x / sqrt(mean(x²) + ε), over the last dim.
///
/// The division is in f32; its result is cast back before the weight is applied, as in Llama.
/// Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[D]`.
    pub weight: Param<Tensor<1>>,
    /// ε, under the root.
    pub epsilon: f64,
}

impl RmsNorm {
    /// A norm with weight one, which is allocated only when first used or loaded.
    pub fn lazy(width: usize, epsilon: f64, device: &Device) -> Self {
        let weight = Param::uninitialized(
            ParamId::new(),
            move |device, require_grad| {
                Tensor::ones([width], device).set_require_grad(require_grad)
            },
            device.clone(),
            true,
            [width].into(),
        );
        RmsNorm { weight, epsilon }
    }

    /// # Shapes
    /// `x`: `[.., D]`; result: the same
    pub fn forward<const R: usize>(&self, x: Tensor<R>) -> Tensor<R> {
        let dtype = x.dtype();
        if kernels::are_fused(&x.device(), dtype) {
            let dims = x.dims();
            let rows = x.reshape([-1, dims[R - 1] as i64]);
            return kernels::rms_norm(rows, self.weight.val(), self.epsilon).reshape(dims);
        }
        let x = to_dtype(x, DType::F32);
        let mean_square = (x.clone() * x.clone()).mean_dim(R - 1);
        let normed = x / (mean_square + self.epsilon).sqrt();
        to_dtype(normed, dtype) * self.weight.val().unsqueeze()
    }
}

/// Casts `x` to `dtype`; does nothing if it already has that dtype.
pub(crate) fn to_dtype<const R: usize>(x: Tensor<R>, dtype: DType) -> Tensor<R> {
    if x.dtype() == dtype { x } else { x.cast(dtype) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divides_by_the_root_mean_square_and_scales() {
        let device = Device::flex();
        let norm = RmsNorm {
            weight: Param::from_data([1.0, 2.0], &device),
            epsilon: 0.5,
        };
        // mean(x²) = (1 + 49) / 2 = 25; 25 + 0.5 under the root.
        let y = norm.forward(Tensor::<2>::from_data([[1.0, 7.0]], &device));
        let root = 25.5f32.sqrt();
        let y = y.into_data();
        for (got, want) in y
            .as_slice::<f32>()
            .unwrap()
            .iter()
            .zip([1.0 / root, 14.0 / root])
        {
            assert!((got - want).abs() < 1e-6, "{got} is not {want}");
        }
    }

    #[test]
    fn half_precision_squares_in_f32() {
        let device = Device::flex();
        let norm = RmsNorm {
            weight: Param::from_tensor(Tensor::ones([2], (&device, DType::F16))),
            epsilon: 0.0,
        };
        // 300² overflows f16.
        let x = Tensor::<2>::from_data([[300.0, 300.0]], (&device, DType::F16));
        let y = norm.forward(x);
        assert_eq!(y.dtype(), DType::F16);
        let y = y.cast(DType::F32).into_data();
        assert_eq!(y.as_slice::<f32>().unwrap(), [1.0, 1.0]);
    }
}
