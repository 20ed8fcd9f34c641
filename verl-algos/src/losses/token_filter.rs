//! Rules for which tokens of a loss count.

use burn::tensor::{Bool, Tensor};

use super::{LossInput, OffPolicyRows, PreparedTokens, TopEntropyTokens};
use crate::batch::MiniBatch;
use crate::error::AlgoError;

/// Which tokens of a term count. The others cost nothing, but stay in the denominators and in what is reported.
///
/// Given to a term by [`Objective::with_filters`](super::Objective::with_filters).
pub trait TokenFilter: std::fmt::Debug + Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// What it reads beside the log-probs of the policy now.
    fn inputs(&self) -> &'static [LossInput];

    /// Refuses settings out of range.
    ///
    /// # Errors
    /// The first setting that is wrong.
    fn check(&self) -> Result<(), AlgoError> {
        Ok(())
    }

    /// Looks at the whole mini-batch before any micro-batch, as [`TokenLoss::prepare`](super::TokenLoss::prepare) does.
    ///
    /// # Errors
    /// Inputs that are missing.
    fn prepare(&self, _batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        Ok(Vec::new())
    }

    /// Whether each token counts, `[M]`.
    ///
    /// # Errors
    /// Inputs that are missing.
    fn keeps(&self, tokens: &PreparedTokens<'_>) -> Result<Tensor<1, Bool>, AlgoError>;
}

/// Name of a filter, and how to make it with its default settings.
pub type FilterEntry = (&'static str, fn() -> Box<dyn TokenFilter>);

/// All filters with their default settings, by name.
pub const TOKEN_FILTERS: &[FilterEntry] = &[
    ("off_policy_rows", || Box::new(OffPolicyRows::default())),
    ("top_entropy_tokens", || {
        Box::new(TopEntropyTokens::default())
    }),
];
