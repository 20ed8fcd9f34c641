//! Losses on packed action tokens, as partial sums that do not depend on the division of a mini-batch.
//!
//! A [`TokenLoss`] computes the loss of one token. An [`Objective`] adds several of them with coefficients, as in PPO's
//! Agg(pg) − c_H·Agg(H) + β·Agg(KL). [`Objective::prepare`] reads the entire mini-batch once (aggregation weights,
//! selections); only the returned [`PreparedObjective`] has a [`loss`](PreparedObjective::loss), so no micro-batch can
//! be computed before. A new loss is a file here and a line in [`POLICY_LOSSES`].
//!
//! A [`RowLoss`] computes the loss of a row or a pair of rows, as preference losses do; an objective can have terms of
//! both forms. They are listed in [`PREFERENCE_LOSSES`].
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
mod clip_cov;
mod clip_shares;
mod clipped_policy;
mod covariance;
mod distillation;
mod dppo;
mod dro;
mod entropy_bonus;
mod gmpo;
mod gpg;
mod gspo;
mod importance_kl;
mod kl_cov;
mod kl_loss;
mod metric_id;
mod metrics;
mod needs;
mod objective;
mod off_policy_rows;
mod preference;
mod prepared_rows;
mod ratio_level;
mod reinforce;
mod row_loss;
mod sapo;
mod sft;
mod token_filter;
mod top_entropy;
mod trl_grpo;
mod units;
mod value;
mod vespo;

pub use cispo::CispoLoss;
pub use clip_cov::ClipCovLoss;
pub use clipped_policy::ClippedPolicyLoss;
pub use distillation::{
    DistillationBatch, DistillationLoss, DistillationMicroBatch, Divergence, DivergenceName,
    PreparedDistillation, Tail, teacher_advantages,
};
pub use dppo::{DppoDivergence, DppoLoss};
pub use dro::DroLoss;
pub use entropy_bonus::EntropyBonus;
pub use gmpo::GmpoLoss;
pub use gpg::GpgLoss;
pub use gspo::GspoLoss;
pub use importance_kl::ImportanceKlLoss;
pub use kl_cov::KlCovLoss;
pub use kl_loss::KlLoss;
pub use metric_id::MetricId;
pub use metrics::{Metric, MetricSum, Partial, Reduction, Share};
pub use needs::LossInput;
pub use objective::{Objective, PreparedObjective, PreparedTokens};
pub use off_policy_rows::OffPolicyRows;
pub use preference::{
    ChosenNll, Cpo, CpoLoss, CpoLossName, Dpo, FDivergence, FDivergenceName, Kto, KtoBaseline,
    OrpoOdds, PREFERENCE_LOSSES, PreferenceLoss, PreferenceLossName, RewardModelLoss, RowLossEntry,
    kl_baseline, mismatched_rows, orpo, preference_loss,
};
pub use prepared_rows::{PreparedRows, Sides};
pub use ratio_level::RatioLevel;
pub use reinforce::ReinforceLoss;
pub use row_loss::{Mean, PerRow, RowLoss};
pub use sapo::SapoLoss;
pub use sft::SftLoss;
pub use token_filter::{FilterEntry, TOKEN_FILTERS, TokenFilter};
pub use top_entropy::{TopEntropyBonus, TopEntropyTokens};
pub use trl_grpo::TrlGrpoLoss;
pub use value::ValueLoss;
pub use vespo::VespoLoss;

use burn::tensor::Tensor;

use crate::aggregate::Aggregation;
use crate::batch::MiniBatch;
use crate::cut::CutUnit;
use crate::error::AlgoError;

/// A loss with one number per token.
pub trait TokenLoss: std::fmt::Debug + Send + Sync {
    /// Identity of its aggregated value, which is reported.
    fn id(&self) -> MetricId;

    /// Its name in reports and errors.
    fn name(&self) -> &'static str {
        self.id().name()
    }

    /// The unit that micro-batches must not divide.
    fn cut_unit(&self) -> CutUnit {
        CutUnit::Row
    }

    /// Its inputs besides the current log-probs of the policy; by default those of a loss on a ratio.
    fn inputs(&self) -> &'static [LossInput] {
        &[LossInput::Advantages, LossInput::OldLogProbs]
    }

    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    fn check(&self) -> Result<(), AlgoError> {
        Ok(())
    }

    /// Its aggregation if the objective declares `declared`; some losses are defined for only one.
    fn aggregation(&self, declared: Aggregation) -> Aggregation {
        declared
    }

    /// Reads the entire mini-batch before any micro-batch: returns one number per token, which [`TokenLoss::tokens`]
    /// receives as [`PreparedTokens::marks`], such as which tokens a rule over the entire mini-batch selects. Empty for
    /// most losses.
    ///
    /// # Errors
    /// Missing inputs.
    fn prepare(&self, _batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        Ok(Vec::new())
    }

    /// How the numbers per token of `metric` are reduced to one.
    fn reduction(&self, _metric: MetricId) -> Reduction {
        Reduction::TokenMean
    }

    /// Loss of each token, differentiable, and its metrics.
    ///
    /// # Errors
    /// Missing inputs.
    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError>;
}

/// Loss of each token of a micro-batch.
#[derive(Debug, Clone)]
pub struct PerToken {
    /// `[M]`, differentiable.
    pub loss: Tensor<1>,
    /// Identities and numbers `[M]` of metrics over all micro-batches: reduced by their mean over tokens, unless
    /// [`TokenLoss::reduction`] says otherwise.
    pub metrics: Vec<(MetricId, Tensor<1>)>,
}

/// Name of a loss, and its constructor with default settings.
pub type LossEntry = (&'static str, fn() -> Box<dyn TokenLoss>);

/// All policy losses with their default settings, by name. β of `dro` has no default; here it is 1.
///
/// TRL's loss types are these, with an aggregation; `trl_grpo` in the table is [`TrlGrpoLoss`]:
///
/// | `loss_type` | loss | aggregation |
/// |---|---|---|
/// | `grpo` | `trl_grpo` | `seq-mean-token-mean` |
/// | `bnpo` | `trl_grpo` | `token-mean` |
/// | `dapo` | `trl_grpo` | `token-mean` with the declared tokens of the entire batch |
/// | `dr_grpo` | `trl_grpo` | `seq-mean-token-sum-norm` over the longest completion allowed |
/// | `grpo` with the ratio of the row | `trl_gspo` | `seq-mean-token-mean` |
/// | `luspo` | `trl_gspo`, usually with wider bounds | `seq-mean-token-sum` |
/// | `cispo`, `vespo` | `trl_cispo`, `vespo` | as `dapo` |
/// | `sapo` | `sapo` | its own |
/// | RLOO's loss | `trl_rloo` | its own |
///
/// TRL's KL term is [`KlLoss`] with `k3_unclamped`, or [`ImportanceKlLoss`] with it; its masks are
/// [`TOKEN_FILTERS`].
pub const POLICY_LOSSES: &[LossEntry] = &[
    ("cispo", || Box::new(CispoLoss::default())),
    ("clip_cov", || Box::new(ClipCovLoss::default())),
    ("dppo_kl", || Box::new(DppoLoss::kl())),
    ("dppo_tv", || Box::new(DppoLoss::tv())),
    ("dro", || Box::new(DroLoss { beta: 1.0 })),
    ("gmpo", || Box::new(GmpoLoss::default())),
    ("gpg", || Box::new(GpgLoss)),
    ("gspo", || Box::new(GspoLoss::default())),
    ("kl_cov", || Box::new(KlCovLoss::default())),
    ("reinforce", || Box::new(ReinforceLoss)),
    ("sapo", || Box::new(SapoLoss::default())),
    ("trl_cispo", || Box::new(CispoLoss::with_cap(5.0))),
    ("trl_grpo", || Box::new(TrlGrpoLoss::default())),
    ("trl_gspo", || Box::new(TrlGrpoLoss::gspo())),
    ("trl_rloo", || Box::new(TrlGrpoLoss::rloo())),
    ("vanilla", || Box::new(ClippedPolicyLoss::default())),
    ("vespo", || Box::new(VespoLoss::default())),
];

/// Losses that are added to a policy loss or used by themselves, with their default settings, by name.
pub const OTHER_LOSSES: &[LossEntry] = &[
    ("entropy", || Box::new(EntropyBonus)),
    ("importance_kl", || Box::new(ImportanceKlLoss::default())),
    ("kl", || Box::new(KlLoss::default())),
    ("sft", || Box::new(SftLoss)),
    ("top_entropy", || Box::new(TopEntropyBonus::default())),
    ("value", || Box::new(ValueLoss::default())),
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
