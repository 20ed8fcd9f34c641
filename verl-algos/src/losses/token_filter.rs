//! Rules that select which tokens of a loss count.

use burn::tensor::{Bool, Tensor};

use super::{LossInput, OffPolicyRows, PreparedTokens, TopEntropyTokens};
use crate::batch::MiniBatch;
use crate::error::AlgoError;

/// Selects the tokens of a term that count. The others have no loss, but stay in the denominators and in the metrics.
///
/// Passed to a term by [`Objective::with_filters`](super::Objective::with_filters).
pub trait TokenFilter: std::fmt::Debug + Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Its inputs besides the current log-probs of the policy.
    fn inputs(&self) -> &'static [LossInput];

    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    fn check(&self) -> Result<(), AlgoError> {
        Ok(())
    }

    /// Reads the entire mini-batch before any micro-batch, as [`TokenLoss::prepare`](super::TokenLoss::prepare) does.
    ///
    /// # Errors
    /// Missing inputs.
    fn prepare(&self, _batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        Ok(Vec::new())
    }

    /// Whether each token counts, `[M]`.
    ///
    /// # Errors
    /// Missing inputs.
    fn keeps(&self, tokens: &PreparedTokens<'_>) -> Result<Tensor<1, Bool>, AlgoError>;
}

/// Name of a filter, and its constructor with default settings.
pub type FilterEntry = (&'static str, fn() -> Box<dyn TokenFilter>);

/// All filters with their default settings, by name.
pub const TOKEN_FILTERS: &[FilterEntry] = &[
    ("off_policy_rows", || Box::new(OffPolicyRows::default())),
    ("top_entropy_tokens", || {
        Box::new(TopEntropyTokens::default())
    }),
];
