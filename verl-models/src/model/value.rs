//! Models that give numbers: a critic's value of a state, a reward model's score of a response.

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::{ModelError, ParameterGroup, ScoreRow, TrainedModel};

/// A causal model with one number a position. Implement it for a `#[derive(Module)]` struct of your own to train it as
/// a critic or a reward model.
///
/// Dims: `B` rows, `S` tokens of a row (right-padded inside a call).
pub trait ValueInterface: Module + 'static {
    /// Size of the vocabulary, `V`.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens, prompt and response together.
    fn max_tokens(&self) -> usize;

    /// The number of every position. It is widened to f32 if it is narrower.
    ///
    /// Rows are right-padded with any id; position s must not depend on positions after s, and the same row in a call of
    /// the same shape must give the same bits wherever it lies.
    ///
    /// # Shapes
    /// `ids`: `[B, S]`; result: `[B, S]`
    fn values(&self, ids: Tensor<2, Int>) -> Tensor<2>;

    /// How the optimiser treats the parameter with this name and rank: by default vectors (norms, biases) do not decay.
    fn parameter_group(&self, _name: &str, rank: usize) -> ParameterGroup {
        ParameterGroup::of_rank(rank)
    }

    /// Writes the model into `dir`.
    ///
    /// # Errors
    /// When files cannot be written.
    fn save(&self, dir: &Path) -> Result<(), ModelError>;
}

/// Differentiable values of a micro-batch, packed: the selected response tokens of all rows one after the other.
pub struct PackedValues {
    /// Value of the state in which each token was chosen, `[N]`.
    pub values: Tensor<1>,
    /// Row of each token; `len = N`.
    pub rows: Vec<usize>,
}

/// A model of values with optimiser, as stages use it; object-safe. Implemented by [`Critic`](crate::critic::Critic).
///
/// The state in which response token t is chosen ends with the token before it: the prompt's last one for t = 0.
pub trait ValueModel: TrainedModel {
    /// V_t, the value of the state in which each response token was chosen, without gradient: one number a response
    /// token. The result of a row does not depend on the other rows, to the last bit.
    ///
    /// # Errors
    /// A row longer than the context or with an empty prompt; an id outside the vocabulary.
    fn values(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<Vec<f32>>, ModelError>;

    /// The value at each row's last token, prompt included where the response is empty, without gradient: what a reward
    /// model says about the response. The result of a row does not depend on the other rows, to the last bit.
    ///
    /// # Errors
    /// As [`ValueModel::values`].
    fn scores(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<f32>, ModelError>;

    /// Forward of `rows`, `loss` of the packed values of the tokens where `select(row, token)` holds, backward, and
    /// gradients added to the accumulators in f32. Returns the loss value; 0 where no token is selected.
    ///
    /// # Errors
    /// As [`ValueModel::values`]; a non-finite loss or gradient (accumulators are then as before); a frozen model.
    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        loss: &mut dyn FnMut(PackedValues) -> Tensor<1>,
    ) -> Result<f64, ModelError>;

    /// The same with the [scores](ValueModel::scores) of all rows, `[B]`.
    ///
    /// # Errors
    /// As [`ValueModel::accumulate`].
    fn accumulate_scores(
        &mut self,
        rows: &[ScoreRow<'_>],
        loss: &mut dyn FnMut(Tensor<1>) -> Tensor<1>,
    ) -> Result<f64, ModelError>;
}
