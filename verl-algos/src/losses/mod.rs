//! Losses on packed action tokens, as partial sums that do not depend on how a mini-batch is cut.
//!
//! A [`TokenLoss`] says what one token costs. An [`Objective`] adds several of them up with coefficients, as in PPO's
//! Agg(pg) − c_H·Agg(H) + β·Agg(KL). [`Objective::prepare`] looks at the whole mini-batch once (aggregation weights,
//! selections); the [`PreparedObjective`] that comes back is the only thing with a [`loss`](PreparedObjective::loss), so
//! no micro-batch can be computed before. A new loss is a file here and a line in [`POLICY_LOSSES`].
//!
//! A [`RowLoss`] says what a row or a pair of rows costs, as preference losses do; an objective holds terms of both
//! forms. They are listed in [`PREFERENCE_LOSSES`].
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use verl_algos::losses::{ClippedPolicyLoss, Objective};
//! use verl_algos::{Aggregation, MiniBatch};
//!
//! let objective = Objective::new(Aggregation::TokenMean).with(1.0, ClippedPolicyLoss::default());
//! let mut batch = MiniBatch::new(vec![0, 0, 1]);
//! batch.old_log_probs = Some(vec![-1.0, -2.0, -0.5]);
//! batch.advantages = Some(vec![1.0, 1.0, -2.0]);
//! let prepared = objective.prepare(&batch)?;
//! let log_probs = Tensor::<1>::from_floats([-1.0, -2.0, -0.5], &Device::flex().autodiff()).require_grad();
//! let partial = prepared.loss(&batch.whole(log_probs, None))?;
//! assert_eq!(partial.loss.into_scalar::<f32>(), 0.0);
//! # Ok::<(), verl_algos::AlgoError>(())
//! ```

mod cispo;
mod clipped_policy;
mod distillation;
mod entropy_bonus;
mod gpg;
mod gspo;
mod kl_loss;
mod objective;
mod preference;
mod prepared_rows;
mod row_loss;
mod sft;
mod units;

pub use cispo::CispoLoss;
pub use clipped_policy::ClippedPolicyLoss;
pub use distillation::{
    DistillationBatch, DistillationLoss, DistillationMicroBatch, Divergence, PreparedDistillation,
    Tail, teacher_advantages,
};
pub use entropy_bonus::EntropyBonus;
pub use gpg::GpgLoss;
pub use gspo::GspoLoss;
pub use kl_loss::KlLoss;
pub use objective::{Metric, MetricSum, Objective, Partial, PreparedObjective, PreparedTokens};
pub use preference::{
    ChosenNll, Cpo, CpoLoss, Divergence, Dpo, Kto, KtoBaseline, OrpoOdds, PREFERENCE_LOSSES,
    PreferenceLoss, RewardModelLoss, RowLossEntry, kl_baseline, mismatched_rows, orpo,
    preference_loss,
};
pub use prepared_rows::{PreparedRows, Sides};
pub use row_loss::{Mean, PerRow, RowLoss};
pub use sft::SftLoss;

use burn::tensor::Tensor;

use crate::aggregate::Aggregation;
use crate::batch::MiniBatch;
use crate::cut::CutUnit;
use crate::error::AlgoError;

/// A loss that is a number a token.
pub trait TokenLoss: std::fmt::Debug + Send + Sync {
    /// The name under which its aggregated value is reported.
    fn name(&self) -> &'static str;

    /// What micro-batches must hold whole.
    fn cut_unit(&self) -> CutUnit {
        CutUnit::Row
    }

    /// Refuses settings out of range.
    ///
    /// # Errors
    /// The first setting that is wrong.
    fn check(&self) -> Result<(), AlgoError> {
        Ok(())
    }

    /// How it is aggregated where the objective declares `declared`; some losses are defined with one way only.
    fn aggregation(&self, declared: Aggregation) -> Aggregation {
        declared
    }

    /// Looks at the whole mini-batch before any micro-batch: one number a token that [`TokenLoss::tokens`] gets back as
    /// [`PreparedTokens::marks`], such as which tokens a rule over the whole mini-batch selects. Empty for most losses.
    ///
    /// # Errors
    /// Inputs that are missing.
    fn prepare(&self, _batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        Ok(Vec::new())
    }

    /// Loss of each token, differentiable, and what is reported about each.
    ///
    /// # Errors
    /// Inputs that are missing.
    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError>;
}

/// Loss of each token of a micro-batch.
#[derive(Debug, Clone)]
pub struct PerToken {
    /// `[M]`, differentiable.
    pub loss: Tensor<1>,
    /// Names and numbers `[M]` whose mean over the tokens of all micro-batches is reported.
    pub metrics: Vec<(&'static str, Tensor<1>)>,
}

/// Name of a loss, and how to make it with its default settings.
pub type LossEntry = (&'static str, fn() -> Box<dyn TokenLoss>);

/// All policy losses with their default settings, by name.
pub const POLICY_LOSSES: &[LossEntry] = &[
    ("cispo", || Box::new(CispoLoss::default())),
    ("gpg", || Box::new(GpgLoss)),
    ("gspo", || Box::new(GspoLoss::default())),
    ("vanilla", || Box::new(ClippedPolicyLoss::default())),
];

/// Losses that are added to a policy loss or stand alone, with their default settings, by name.
pub const OTHER_LOSSES: &[LossEntry] = &[
    ("entropy", || Box::new(EntropyBonus)),
    ("kl", || Box::new(KlLoss::default())),
    ("sft", || Box::new(SftLoss)),
];

/// The policy loss with this name and its default settings.
///
/// # Errors
/// An unknown name.
pub fn policy_loss(name: &str) -> Result<Box<dyn TokenLoss>, AlgoError> {
    match POLICY_LOSSES.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(make()),
        None => Err(AlgoError::UnknownName {
            what: "policy loss",
            name: name.to_owned(),
            known: POLICY_LOSSES.iter().map(|(known, _)| *known).collect(),
        }),
    }
}
