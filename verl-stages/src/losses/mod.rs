//! What an update minimises: the slot `loss` of stage [`update`](crate::update).
//!
//! | kind | what | file |
//! |---|---|---|
//! | the policy losses | Agg(policy loss) + β·Agg(KL) − c·Agg(entropy) on advantages | [`policy_losses`], with the common terms of [`policy`] |
//! | `sft` | negative log-likelihood of targets | [`sft`] |
//!
//! A loss of the policy is a [`PolicyLoss`], which [`PolicyObjective`] trains with; any other loss is a
//! [`PartConfig`](verl_pipe::part::PartConfig) that becomes a [`Loss`].

pub mod policy;
pub mod policy_losses;
pub mod sft;

use verl_algos::losses::{LossInput, Objective};
use verl_algos::{Aggregation, AlgoError};
use verl_pipe::field::{Key, Ragged};
use verl_pipe::keys::RESPONSES;
use verl_pipe::part::Slot;
use verl_pipe::stage::{ConfigError, Metric};

pub use policy::{PolicyLoss, PolicyObjective};
pub use policy_losses::*;
pub use sft::Sft;

use crate::settings::refusal;

/// What both a reward and a loss can do, and a pipeline usually does once.
pub(crate) const KL_PENALTY: &str = "a KL penalty to the reference";

/// A loss, ready to be minimised. The keys that the update reads for it follow from what the objective reads.
#[derive(Debug)]
pub struct Loss {
    /// Key whose tokens are trained on.
    pub tokens: Key<Ragged<u32>>,
    /// What is minimised.
    pub objective: Objective,
    /// Whether it holds the policy to the reference.
    pub penalises_kl: bool,
    /// Names of the maths and the metrics under which they are reported; what is not here is reported as
    /// `actor/<name>`.
    pub metrics: Vec<(&'static str, Metric)>,
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
            metrics: Vec::new(),
        }
    }

    /// Whether it reads `input`.
    pub fn reads(&self, input: LossInput) -> bool {
        self.objective.inputs().contains(&input)
    }

    /// Whether it trains on responses, which have advantages, masks and log-probs.
    pub(crate) fn on_responses(&self) -> bool {
        self.tokens.name() == RESPONSES.name()
    }
}

/// Aggregation of token losses by name.
///
/// # Errors
/// An unknown name; a scale factor that is missing or not positive.
pub(crate) fn aggregation(name: &str, scale: Option<f64>) -> Result<Aggregation, ConfigError> {
    let refused = |error: AlgoError| refusal("aggregation", &error);
    Aggregation::parse(name, scale).map_err(refused)
}
