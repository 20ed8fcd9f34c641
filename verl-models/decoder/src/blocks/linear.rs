//! Linear maps and embeddings in the checkpoint's layout.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Int, Tensor};
use verl_kernels as kernels;

pub use verl_kernels::linear_or_composed as linear;

/// y = x Wᵀ + b, with W stored as `[out, in]`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    /// A map whose parameters are allocated only when first used or loaded; zeros until then.
    pub fn lazy(out: usize, r#in: usize, bias: bool, device: &Device) -> Self {
        Linear {
            weight: lazy_zeros([out, r#in], device),
            bias: bias.then(|| lazy_zeros([out], device)),
        }
    }

    /// # Shapes
    /// `x`: `[N, in]`; result: `[N, out]`
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let y = linear(x, self.weight.val());
        match &self.bias {
            Some(bias) => y + bias.val().unsqueeze(),
            None => y,
        }
    }
}

/// A table with one row per token id.
#[derive(Module, Debug)]
pub struct Embedding {
    /// `[V, D]`.
    pub weight: Param<Tensor<2>>,
}

impl Embedding {
    /// A table that is allocated only when first used or loaded; zeros until then.
    pub fn lazy(vocab: usize, width: usize, device: &Device) -> Self {
        Embedding {
            weight: lazy_zeros([vocab, width], device),
        }
    }

    /// # Shapes
    /// `ids`: `[N]`; result: `[N, D]`
    pub fn forward(&self, ids: Tensor<1, Int>) -> Tensor<2> {
        kernels::take_rows(self.weight.val(), ids, false)
    }
}

/// A parameter of zeros that is allocated only when first used.
fn lazy_zeros<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    Param::uninitialized(
        ParamId::new(),
        move |device, require_grad| Tensor::zeros(shape, device).set_require_grad(require_grad),
        device.clone(),
        true,
        shape.into(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_multiplies_by_the_transposed_weight_and_adds_the_bias() {
        let device = Device::flex();
        let linear = Linear {
            weight: Param::from_data([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device),
            bias: Some(Param::from_data([0.5, 0.0, -0.5], &device)),
        };
        let y = linear.forward(Tensor::from_data([[1.0, -1.0]], &device));
        assert_eq!(y.into_data().as_slice::<f32>().unwrap(), [-0.5, -1.0, -1.5]);
    }

    #[test]
    fn embedding_takes_rows() {
        let device = Device::flex();
        let table = Embedding {
            weight: Param::from_data([[1.0, 2.0], [3.0, 4.0]], &device),
        };
        let rows = table.forward(Tensor::from_data([1, 0, 1], &device));
        assert_eq!(
            rows.into_data().as_slice::<f32>().unwrap(),
            [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]
        );
    }
}
