//! Gated feed-forward block.

use burn::module::Module;
use burn::tensor::activation::silu;
use burn::tensor::{Device, Tensor};
use verl_kernels as kernels;

use super::linear::Linear;

/// y = W_down (silu(W_gate x) ⊙ W_up x): SwiGLU.
///
/// Shazeer, *GLU Variants Improve Transformer*, 2020.
#[derive(Module, Debug)]
pub struct Mlp {
    /// `[I, D]`.
    pub gate_proj: Linear,
    /// `[I, D]`.
    pub up_proj: Linear,
    /// `[D, I]`.
    pub down_proj: Linear,
}

impl Mlp {
    /// A block whose parameters are allocated only when first used or loaded.
    pub fn lazy(width: usize, intermediate: usize, bias: bool, device: &Device) -> Self {
        Mlp {
            gate_proj: Linear::lazy(intermediate, width, bias, device),
            up_proj: Linear::lazy(intermediate, width, bias, device),
            down_proj: Linear::lazy(width, intermediate, bias, device),
        }
    }

    /// # Shapes
    /// `x`: `[N, D]`; result: the same
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let gate = self.gate_proj.forward(x.clone());
        let up = self.up_proj.forward(x);
        let inner = if kernels::are_fused(&gate.device(), gate.dtype()) {
            kernels::swiglu(gate, up)
        } else {
            silu(gate) * up
        };
        self.down_proj.forward(inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::module::Param;

    #[test]
    fn gate_is_the_activated_side() {
        let device = Device::flex();
        let scalar = |value: f64| Linear {
            weight: Param::from_data([[value]], &device),
            bias: None,
        };
        let mlp = Mlp {
            gate_proj: scalar(1.0),
            up_proj: scalar(3.0),
            down_proj: scalar(2.0),
        };
        // silu(2) · (3 · 2) · 2, with silu(2) = 2 / (1 + e⁻²).
        let want = 2.0 / (1.0 + (-2.0f32).exp()) * 12.0;
        let y = mlp
            .forward(Tensor::from_data([[2.0]], &device))
            .into_scalar::<f32>();
        assert!((y - want).abs() < 1e-5, "{y} is not {want}");
    }
}
