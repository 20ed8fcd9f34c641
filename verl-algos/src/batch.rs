//! Inputs of losses: a mini-batch in plain numbers, and its micro-batches with the model's outputs.

use burn::tensor::Tensor;

use crate::aggregate::{Counts, row_lengths};
use crate::error::{AlgoError, check_finite, check_len};
use crate::preferences::Preferences;

/// The rows of one optimiser step on this rank, packed: the action tokens of all rows, row after row.
///
/// There is no mask and no padding: tokens that are not trained on are not included. Everything in it is a constant.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MiniBatch {
    /// Row of each token, `[N]`. Rows without action tokens do not appear.
    pub rows: Vec<usize>,
    /// Sizes of the mini-batch over all ranks.
    pub counts: Counts,
    /// Log-probs at the start of the update, `[N]`, nats.
    pub old_log_probs: Option<Vec<f64>>,
    /// Advantages, `[N]`.
    pub advantages: Option<Vec<f64>>,
    /// Log-probs of the reference policy, `[N]`, nats.
    pub ref_log_probs: Option<Vec<f64>>,
    /// Importance weights against the sampler, `[N]`; they multiply the policy loss.
    pub rollout_weights: Option<Vec<f64>>,
    /// Log-probs reported by the sampler, `[N]`, nats.
    pub rollout_log_probs: Option<Vec<f64>>,
    /// Log-probs of the policy at the start of this optimiser step, `[N]`, nats.
    ///
    /// For rules that select among *all* tokens of the mini-batch, such as the largest covariances: a micro-batch does
    /// not contain the others' log-probs, so the caller scores the mini-batch once, without gradient, before its first
    /// micro-batch. In the first optimiser step after sampling these are the old log-probs.
    pub current_log_probs: Option<Vec<f64>>,
    /// Entropies of the policy at the same time, `[N]`, nats; filled in by the caller for the same reason.
    pub current_entropies: Option<Vec<f64>>,
    /// One number per token in [0, 1), `[N]`, for losses that select a random subset: the smallest are selected.
    ///
    /// Drawn by the caller as a function of seed, step and the token's identity, so that the subset depends neither on
    /// the order of rows nor on the division into micro-batches.
    pub draws: Option<Vec<f64>>,
    /// Values of the critic at the start of the update, `[N]`.
    pub old_values: Option<Vec<f64>>,
    /// Returns, the critic's targets, `[N]`.
    pub returns: Option<Vec<f64>>,
    /// Inputs of preference losses.
    pub preferences: Preferences,
}

impl MiniBatch {
    /// A mini-batch with only rows, and counts taken from them; set the fields that the losses need.
    pub fn new(rows: Vec<usize>) -> MiniBatch {
        MiniBatch {
            rows,
            ..MiniBatch::default()
        }
    }

    /// Number of action tokens, `N`.
    pub fn num_tokens(&self) -> usize {
        self.rows.len()
    }

    /// Number of tokens of each row.
    pub fn row_lengths(&self) -> Vec<usize> {
        row_lengths(&self.rows)
    }

    /// The entire mini-batch as one micro-batch.
    pub fn whole(&self, log_probs: Tensor<1>, entropies: Option<Tensor<1>>) -> MicroBatch {
        MicroBatch {
            entropies,
            ..MicroBatch::new((0..self.num_tokens()).collect(), log_probs)
        }
    }

    /// Rejects columns of the wrong length, and numbers that are not finite.
    ///
    /// # Errors
    /// The first invalid column.
    pub fn check(&self) -> Result<(), AlgoError> {
        let columns = [
            ("advantages", &self.advantages),
            ("current_entropies", &self.current_entropies),
            ("current_log_probs", &self.current_log_probs),
            ("draws", &self.draws),
            ("old_log_probs", &self.old_log_probs),
            ("old_values", &self.old_values),
            ("ref_log_probs", &self.ref_log_probs),
            ("returns", &self.returns),
            ("rollout_log_probs", &self.rollout_log_probs),
            ("rollout_weights", &self.rollout_weights),
        ];
        for (name, column) in columns {
            if let Some(values) = column {
                check_len(name, "tokens", values.len(), self.num_tokens())?;
                check_finite(name, values)?;
            }
        }
        self.preferences.check(self.row_lengths().len())
    }
}

/// A column that `algorithm` requires.
pub(crate) fn require<'a>(
    algorithm: &'static str,
    argument: &'static str,
    column: &'a Option<Vec<f64>>,
) -> Result<&'a [f64], AlgoError> {
    column.as_deref().ok_or(AlgoError::Missing {
        algorithm,
        argument,
    })
}

/// Some rows of a mini-batch, with the model's outputs for their tokens.
#[derive(Debug, Clone)]
pub struct MicroBatch {
    /// Positions of its tokens in the mini-batch, `[M]`. Rows must be complete.
    pub tokens: Vec<usize>,
    /// Current log-probs of the policy, `[M]`, nats; differentiable. A critic's values: see [`MicroBatch::of_values`].
    pub log_probs: Tensor<1>,
    /// Current entropies of the policy, `[M]`, nats; differentiable.
    pub entropies: Option<Tensor<1>>,
    /// Current log Σ_v π(v)² of the policy, `[M]`, nats; a constant.
    pub log_sum_sq_probs: Option<Tensor<1>>,
    /// Current outputs of a scalar head, `[M]`: values of a critic, scores of a reward model; differentiable.
    pub values: Option<Tensor<1>>,
}

impl MicroBatch {
    /// Tokens and their log-probs only; set the fields that the losses need.
    pub fn new(tokens: Vec<usize>, log_probs: Tensor<1>) -> MicroBatch {
        MicroBatch {
            tokens,
            log_probs,
            entropies: None,
            log_sum_sq_probs: None,
            values: None,
        }
    }

    /// Tokens with the values that a critic gives them, `[M]`, differentiable. A critic has no log-probs, and no loss
    /// that reads [`PreparedTokens::values`](crate::losses::PreparedTokens::values) needs them.
    pub fn of_values(tokens: Vec<usize>, values: Tensor<1>) -> MicroBatch {
        MicroBatch {
            values: Some(values.clone()),
            ..MicroBatch::new(tokens, values.zeros_like())
        }
    }

    /// Rejects positions outside the mini-batch, tensors of another length, and rows that were cut.
    pub(crate) fn check(&self, batch: &MiniBatch, lengths: &[usize]) -> Result<(), AlgoError> {
        let columns = [
            ("log_probs", Some(&self.log_probs)),
            ("entropies", self.entropies.as_ref()),
            ("log_sum_sq_probs", self.log_sum_sq_probs.as_ref()),
            ("values", self.values.as_ref()),
        ];
        for (name, column) in columns {
            if let Some(tensor) = column {
                check_len(name, "tokens", tensor.dims()[0], self.tokens.len())?;
            }
        }
        let mut own = vec![0; lengths.len()];
        for &position in &self.tokens {
            let row = *batch.rows.get(position).ok_or(AlgoError::OutOfRange {
                position,
                tokens: batch.num_tokens(),
            })?;
            own[row] += 1;
        }
        for (row, (&got, &expected)) in own.iter().zip(lengths).enumerate() {
            if got != 0 && got != expected {
                return Err(AlgoError::CutRow { row, got, expected });
            }
        }
        Ok(())
    }
}
