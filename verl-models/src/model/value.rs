//! Models that output numbers: a critic's value of a state, a reward model's score of a response.

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::round::one_by_one;
use super::{ModelError, ParameterGroup, Round, RoundError, ScoreRow, SelectInRound, TrainedModel};

/// A causal model with one number per position. Implement it for your own `#[derive(Module)]` struct to train it as a
/// critic or a reward model.
///
/// Dims: `B` rows, `S` tokens per row (right-padded inside a call).
pub trait ValueInterface: Module + 'static {
    /// Size of the vocabulary, `V`.
    fn vocab_size(&self) -> usize;

    /// Longest sequence in tokens, prompt and response together.
    fn max_tokens(&self) -> usize;

    /// The value at every position. Narrower types are widened to f32.
    ///
    /// Rows are right-padded with any id. Position s must not depend on positions after s, and the same row must give
    /// the same bits at any place in a call of the same shape.
    ///
    /// # Shapes
    /// `ids`: `[B, S]`; result: `[B, S]`
    fn values(&self, ids: Tensor<2, Int>) -> Tensor<2>;

    /// How the optimiser treats the parameter with this name and rank. By default vectors (norms, biases) do not decay.
    fn parameter_group(&self, _name: &str, rank: usize) -> ParameterGroup {
        ParameterGroup::of_rank(rank)
    }

    /// Writes the model to `dir`.
    ///
    /// # Errors
    /// Files cannot be written.
    fn save(&self, dir: &Path) -> Result<(), ModelError>;
}

/// Differentiable values of a micro-batch, packed: the selected response tokens of all rows, concatenated.
pub struct PackedValues {
    /// Value of the state in which each token was chosen, `[N]`.
    pub values: Tensor<1>,
    /// Row of each token; `len = N`.
    pub rows: Vec<usize>,
}

/// A value model with its optimiser, as stages use it; object-safe. Implemented by [`Critic`](crate::critic::Critic).
///
/// The state in which response token t is chosen ends with the token before it: the prompt's last one for t = 0.
pub trait ValueModel: TrainedModel {
    /// V_t, the value of the state in which each response token was chosen, without gradient: one number per response
    /// token. The result of a row is bit-identical whatever the other rows are.
    ///
    /// # Errors
    /// A row longer than the context or with an empty prompt; an id outside the vocabulary.
    fn values(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<Vec<f32>>, ModelError>;

    /// The value at each row's last token (the prompt's last token if the response is empty), without gradient: a
    /// reward model's score of the response. The result of a row is bit-identical whatever the other rows are.
    ///
    /// # Errors
    /// As [`ValueModel::values`].
    fn scores(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<f32>, ModelError>;

    /// Runs `rows` forward, computes `loss` on the packed values of the tokens for which `select(row, token)` is true,
    /// runs backward, and adds the gradients to the f32 accumulators. Returns the loss; 0 if no token is selected.
    ///
    /// # Errors
    /// As [`ValueModel::values`]; a non-finite loss or gradient (the accumulators are then unchanged); a frozen model.
    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        loss: &mut dyn FnMut(PackedValues) -> Tensor<1>,
    ) -> Result<f64, ModelError>;

    /// [`ValueModel::accumulate`] with the [scores](ValueModel::scores) of all rows, `[B]`.
    ///
    /// # Errors
    /// As [`ValueModel::accumulate`].
    fn accumulate_scores(
        &mut self,
        rows: &[ScoreRow<'_>],
        loss: &mut dyn FnMut(Tensor<1>) -> Tensor<1>,
    ) -> Result<f64, ModelError>;

    /// [`ValueModel::accumulate`] for each micro-batch of a round, which a model with replicas computes at the same time.
    /// `loss` is called with the position of the micro-batch. Returns the losses in the order of the round.
    ///
    /// # Errors
    /// As [`ValueModel::accumulate`]: the first one in the order of the round.
    fn accumulate_round(
        &mut self,
        round: &Round<'_>,
        select: &SelectInRound<'_>,
        loss: &(dyn Fn(usize, PackedValues) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        one_by_one(round.len(), |micro| {
            let select = |row, token| select(micro, row, token);
            self.accumulate(&round[micro], &select, &mut |packed| loss(micro, packed))
        })
    }

    /// [`ValueModel::accumulate_scores`] for each micro-batch of a round, as [`ValueModel::accumulate_round`].
    ///
    /// # Errors
    /// As [`ValueModel::accumulate_scores`]: the first one in the order of the round.
    fn accumulate_scores_round(
        &mut self,
        round: &Round<'_>,
        loss: &(dyn Fn(usize, Tensor<1>) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        one_by_one(round.len(), |micro| {
            self.accumulate_scores(&round[micro], &mut |scores| loss(micro, scores))
        })
    }
}
