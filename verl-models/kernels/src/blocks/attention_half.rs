//! The first half of a layer: its operands, what it saves, and its passes.

use burn::backend::Backend;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;

use super::AttentionBlock;
use super::steps::{BlockGradients, Places, each, register};

/// Operands of the first half.
#[derive(Debug, Clone)]
pub(super) struct AttentionHalf<B: Backend> {
    pub(super) x: FloatTensor<B>,
    pub(super) gain: FloatTensor<B>,
    pub(super) projections: [FloatTensor<B>; 3],
    pub(super) bias: FloatTensor<B>,
    pub(super) output: FloatTensor<B>,
    pub(super) places: Places<B>,
    pub(super) block: AttentionBlock,
}

/// What its forward pass saves.
#[derive(Debug, Clone)]
pub(super) struct AttentionSaved<B: Backend> {
    normed: FloatTensor<B>,
    scale: Option<FloatTensor<B>>,
    joined_weight: FloatTensor<B>,
    mixed: FloatTensor<B>,
    attention: Vec<Vec<FloatTensor<B>>>,
}

impl<B: BlockGradients> AttentionHalf<B> {
    pub(super) fn forward(&self) -> (FloatTensor<B>, AttentionSaved<B>) {
        let kept = self.inside();
        let y = B::product_and_sum(kept.mixed.clone(), self.output.clone(), self.x.clone());
        (y, kept)
    }

    /// Everything up to the last product.
    fn inside(&self) -> AttentionSaved<B> {
        let block = &self.block;
        let epsilon = block.settings.epsilon;
        let (normed, scale) = B::rms_norm_saving(self.x.clone(), self.gain.clone(), epsilon);
        let joined_weight = B::joined(self.projections.to_vec());
        let bias = block.biased.then(|| self.bias.clone());
        let joined = B::product_and_bias(normed.clone(), joined_weight.clone(), bias);
        let (mixed, attention) = B::attention_joined(block, joined, &self.places);
        AttentionSaved {
            normed,
            scale,
            joined_weight,
            mixed,
            attention,
        }
    }

    /// Gradients for x, gain, queries, keys, values, bias and output, where `wanted`.
    fn backward(
        self,
        kept: Option<AttentionSaved<B>>,
        gradient: FloatTensor<B>,
        wanted: [bool; 7],
    ) -> [Option<FloatTensor<B>>; 7] {
        let AttentionSaved {
            normed,
            scale,
            joined_weight,
            mixed,
            attention,
        } = kept.unwrap_or_else(|| self.inside());
        let block = &self.block;
        let d_output = wanted[6].then(|| B::weight_gradient(gradient.clone(), mixed));
        let d_mixed = B::product_with_columns(gradient.clone(), self.output);
        let d_joined = B::attention_joined_backward(block, &self.places, attention, d_mixed);
        let d_bias = (block.biased && wanted[5]).then(|| B::column_sums(d_joined.clone()));
        let mut d_projections = if wanted[2..5].contains(&true) {
            let whole = B::weight_gradient(d_joined.clone(), normed);
            let parts = B::parted(whole, &block.widths());
            parts.into_iter().map(Some).collect()
        } else {
            vec![None; 3]
        };
        let epsilon = block.settings.epsilon;
        let [dx, d_gain] = each(wanted[..2].contains(&true).then(|| {
            let d_normed = B::product_with_columns(d_joined, joined_weight);
            B::rms_norm_backward_past(self.x, self.gain, epsilon, scale, d_normed, gradient)
        }));
        let mut next = || d_projections.remove(0);
        [dx, d_gain, next(), next(), next(), d_bias, d_output]
    }
}

#[derive(Debug)]
pub(super) struct AttentionHalfStep;

impl<B: BlockGradients> Backward<B, 7> for AttentionHalfStep {
    type State = (AttentionHalf<B>, Option<AttentionSaved<B>>);

    fn backward(self, ops: Ops<Self::State, 7>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let (half, kept) = ops.state;
        let parts = half.backward(kept, gradient, wanted);
        register!(ops.parents, parts, grads);
    }
}
