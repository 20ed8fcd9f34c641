//! What an update minimises: the slot `loss` of stage [`update`](crate::update).
//!
//! | kind | what | file |
//! |---|---|---|
//! | the policy losses | Agg(policy loss) + β·Agg(KL) − c·Agg(entropy) on advantages | [`policy_losses`], with the common terms of [`policy`] |
//! | `sft` | negative log-likelihood of targets | [`sft`] |
//! | `dpo` | DPO and its relatives, on pairs with a reference | [`dpo`] |
//! | `cpo`, `simpo` | contrast of a pair's log-probs, no reference | [`cpo`] |
//! | `orpo` | imitation and odds ratio of pairs, no reference | [`orpo`] |
//! | `kto` | answers that are good or bad, with a reference | [`kto`] |
//!
//! A policy loss is a [`PolicyLoss`], which is trained with as a [`PolicyObjective`]; any other loss is a
//! [`PartConfig`](verl_declare::part::PartConfig) that builds a [`Loss`].

pub mod clip_bounds;
pub mod cpo;
pub mod dpo;
mod judged;
#[cfg(test)]
mod judged_tests;
pub mod kto;
pub mod loss_state;
pub mod orpo;
pub mod policy;
pub mod policy_losses;
pub mod sft;

use verl_algos::Aggregation;
use verl_algos::losses::{LossInput, MetricId, Objective};
use verl_declare::part::Slot;
use verl_words::field::{Key, Ragged};
use verl_words::keys::RESPONSES;
use verl_words::stage::{ConfigError, Metric, Shown};

pub use clip_bounds::ClipBounds;
pub use cpo::{Cpo, SimPo};
pub use dpo::Dpo;
pub use kto::Kto;
pub use loss_state::LossState;
pub use orpo::Orpo;
pub use policy::{PolicyLoss, PolicyObjective};
pub use policy_losses::*;
pub use sft::Sft;
pub use verl_algos::AggregationName;
pub use verl_algos::kl::KlEstimatorName;
pub use verl_algos::losses::{CpoLossName, FDivergenceName, PreferenceLossName};

use crate::settings::refusal;

/// What both a reward and a loss can add, but a pipeline usually needs only once.
pub(crate) const KL_PENALTY: &str = "a KL penalty to the reference";

/// A loss, ready to be minimised. The keys that the update reads for it follow from what the objective reads.
#[derive(Debug)]
pub struct Loss {
    /// Key whose tokens are trained on.
    pub tokens: Key<Ragged<u32>>,
    /// What is minimised.
    pub objective: Objective,
    /// Whether it penalises the KL to the reference.
    pub penalises_kl: bool,
    /// Whether rows 2i and 2i + 1 are the chosen and the rejected answer of a pair.
    pub of_pairs: bool,
    /// Frozen model that scores answers to other prompts before each optimiser step, for a loss that reads
    /// [`LossInput::KlBaseline`]; the reference log-probs must come from the same model.
    pub reference: Option<String>,
    /// State that an update keeps for it between optimiser steps.
    pub state: LossState,
    /// Whether it reads log Σ π² of the policy at the start of an optimiser step.
    pub reads_sum_pi_squared: bool,
    /// What the objective reports, and the metrics as which it is recorded; other numbers are recorded as `actor/<name>`.
    pub metrics: Vec<(MetricId, Metric)>,
}

impl Slot for Loss {
    const NAME: &'static str = "loss";
}

impl Loss {
    /// An objective on the responses.
    pub fn new(objective: Objective) -> Self {
        Loss {
            tokens: RESPONSES,
            objective,
            penalises_kl: false,
            of_pairs: false,
            reference: None,
            state: LossState::default(),
            reads_sum_pi_squared: false,
            metrics: Vec::new(),
        }
    }

    /// Whether it reads `input`.
    pub fn reads(&self, input: LossInput) -> bool {
        self.objective.inputs().contains(&input)
    }

    /// The metrics that the console shows.
    pub(crate) fn shown(&self) -> Vec<Shown> {
        let all = self.metrics.iter().flat_map(|(_, metric)| {
            let shown = policy::SHOWN.iter().chain(&judged::SHOWN);
            shown.filter(|shown| shown.metric == metric.name)
        });
        all.copied().collect()
    }

    /// Whether it reads the labels of rows; a loss on pairs does, to check that rows are pairs.
    pub(crate) fn reads_labels(&self) -> bool {
        self.of_pairs || self.reads(LossInput::Desirable)
    }

    /// Whether it trains on responses, which have advantages, masks and log-probs.
    pub(crate) fn on_responses(&self) -> bool {
        self.tokens.name() == RESPONSES.name()
    }
}

/// Aggregation of token losses by name.
///
/// # Errors
/// A scale factor that is missing or not positive.
pub(crate) fn aggregation(
    name: AggregationName,
    scale: Option<f64>,
) -> Result<Aggregation, ConfigError> {
    Aggregation::named(name, scale).map_err(|error| refusal("aggregation", &error))
}
