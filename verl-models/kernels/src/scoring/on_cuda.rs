//! The scores of tokens by CUDA kernels.

use burn::backend::Cube;
use burn::backend::tensor::FloatTensor;

use super::{Extras, Inputs, Saved, SavedScores, ScoringGradients, ScoringInputs, ScoringOps};
use crate::cuda::vocab;

/// Operands in the form that the kernels require.
fn operands(inputs: &Inputs<Cube>) -> vocab::Operands {
    vocab::Operands {
        hidden: inputs.hidden.clone(),
        head: inputs.head.clone(),
        targets: inputs.targets.clone(),
        temperature: inputs.temperature,
        chunk: inputs.chunk,
    }
}

impl ScoringOps for Cube {
    fn linear_scores(
        hidden: FloatTensor<Self>,
        head: FloatTensor<Self>,
        targets: burn::backend::tensor::IntTensor<Self>,
        temperature: f64,
        extras: Extras,
        chunk: usize,
    ) -> FloatTensor<Self> {
        let inputs = Inputs::new(hidden, head, targets, temperature, chunk);
        Self::linear_scores_saving(&ScoringInputs(inputs), extras).0
    }
}

impl ScoringGradients for Cube {
    fn linear_scores_saving(
        inputs: &ScoringInputs<Self>,
        extras: Extras,
    ) -> (FloatTensor<Self>, SavedScores<Self>) {
        let (scores, logits) = vocab::forward_saving(&operands(&inputs.0));
        let chosen = vocab::chosen(&scores, extras.entropies, extras.sum_pi_squared);
        let saved = Saved::Rows {
            scores,
            entropies: extras.entropies,
            logits,
        };
        (chosen, SavedScores(saved))
    }

    fn linear_scores_backward(
        inputs: &ScoringInputs<Self>,
        saved: SavedScores<Self>,
        gradient: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2] {
        let Saved::Rows {
            scores,
            entropies,
            logits,
        } = saved.0
        else {
            unreachable!("the forward pass saves rows");
        };
        let operands = operands(&inputs.0);
        vocab::backward(&operands, &scores, logits, entropies, gradient, wanted)
    }
}
