//! The second half of a layer: its operands, what it saves, and its passes.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};

use super::steps::{BlockGradients, each, register};

/// Operands of the second half.
#[derive(Debug, Clone)]
pub(super) struct MlpHalf<B: Backend> {
    pub(super) x: FloatTensor<B>,
    pub(super) gain: FloatTensor<B>,
    /// Gate, up.
    pub(super) inner: [FloatTensor<B>; 2],
    pub(super) down: FloatTensor<B>,
    pub(super) epsilon: f64,
}

/// What its forward pass saves.
#[derive(Debug, Clone)]
pub(super) struct MlpSaved<B: Backend> {
    normed: FloatTensor<B>,
    scale: Option<FloatTensor<B>>,
    joined_weight: FloatTensor<B>,
    gate_up: FloatTensor<B>,
    inner: FloatTensor<B>,
}

impl<B: BlockGradients> MlpHalf<B> {
    pub(super) fn forward(&self) -> (FloatTensor<B>, MlpSaved<B>) {
        let kept = self.inside();
        let y = B::product_and_sum(kept.inner.clone(), self.down.clone(), self.x.clone());
        (y, kept)
    }

    /// Everything up to the last product.
    fn inside(&self) -> MlpSaved<B> {
        let (normed, scale) = B::rms_norm_saving(self.x.clone(), self.gain.clone(), self.epsilon);
        let joined_weight = B::joined(self.inner.to_vec());
        let gate_up = B::product_with_rows(normed.clone(), joined_weight.clone());
        let inner = B::swiglu_joined(gate_up.clone());
        MlpSaved {
            normed,
            scale,
            joined_weight,
            gate_up,
            inner,
        }
    }

    /// Gradients for x, gain, gate, up and down, where `wanted`.
    fn backward(
        self,
        kept: Option<MlpSaved<B>>,
        gradient: FloatTensor<B>,
        wanted: [bool; 5],
    ) -> [Option<FloatTensor<B>>; 5] {
        let MlpSaved {
            normed,
            scale,
            joined_weight,
            gate_up,
            inner,
        } = kept.unwrap_or_else(|| self.inside());
        let rows = self.inner[0].shape()[0];
        let d_down = wanted[4].then(|| B::weight_gradient(gradient.clone(), inner));
        let d_inner = B::product_with_columns(gradient.clone(), self.down);
        let d_gate_up = B::swiglu_joined_backward(gate_up, d_inner);
        let mut parts = if wanted[2] || wanted[3] {
            let whole = B::weight_gradient(d_gate_up.clone(), normed);
            let parts = B::parted(whole, &[rows, rows]);
            parts.into_iter().map(Some).collect()
        } else {
            vec![None; 2]
        };
        let epsilon = self.epsilon;
        let [dx, d_gain] = each(wanted[..2].contains(&true).then(|| {
            let d_normed = B::product_with_columns(d_gate_up, joined_weight);
            B::rms_norm_backward_past(self.x, self.gain, epsilon, scale, d_normed, gradient)
        }));
        let mut next = || parts.remove(0);
        [dx, d_gain, next(), next(), d_down]
    }
}

#[derive(Debug)]
pub(super) struct MlpHalfStep;

impl<B: BlockGradients> Backward<B, 5> for MlpHalfStep {
    type State = (MlpHalf<B>, Option<MlpSaved<B>>);

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let (half, kept) = ops.state;
        let parts = half.backward(kept, gradient, wanted);
        register!(ops.parents, parts, grads);
    }
}
