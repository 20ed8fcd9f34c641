//! What an update minimises: the keys that it reads and the objective that it builds, one file an algorithm.

pub mod grpo;
pub mod sft;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_algos::losses::Objective;
use verl_algos::{Aggregation, AlgoError};
use verl_pipe::field::{Field, Key, LogProbTag, Ragged};
use verl_pipe::stage::ConfigError;

pub use grpo::Grpo;
pub use sft::Sft;

/// What both a reward and a loss can do, and a pipeline usually does once.
pub(crate) const KL_PENALTY: &str = "a KL penalty to the reference";

/// An algorithm as the stage `update` sees it.
pub trait Algorithm {
    /// Key whose tokens are trained on.
    fn tokens(&self) -> Key<Ragged<u32>>;

    /// Keys that the objective needs besides prompts and tokens. `policy` is the distribution that ratios are over.
    fn reads(&self, policy: &LogProbTag) -> Vec<Field>;

    /// Keys that it uses where some stage writes them.
    fn reads_optional(&self, _policy: &LogProbTag) -> Vec<Field> {
        Vec::new()
    }

    /// Whether it holds the policy to the reference.
    fn penalises_kl(&self) -> bool {
        false
    }

    /// Whether the forward pass must give entropies.
    fn entropies(&self) -> bool {
        false
    }

    /// The objective.
    ///
    /// # Errors
    /// All settings that make no sense.
    fn objective(&self) -> Result<Objective, Vec<ConfigError>>;
}

/// The algorithms by name; a new one is a file beside this one, and a line here and in [`Loss::algorithm`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Loss {
    /// Clipped policy gradient on group-relative advantages.
    Grpo(Grpo),
    /// Negative log-likelihood of target tokens.
    Sft(Sft),
}

impl Loss {
    /// The algorithm behind the name.
    pub fn algorithm(&self) -> &dyn Algorithm {
        match self {
            Loss::Grpo(algorithm) => algorithm,
            Loss::Sft(algorithm) => algorithm,
        }
    }
}

impl Default for Loss {
    fn default() -> Self {
        Loss::Grpo(Grpo::default())
    }
}

/// Aggregation of token losses by name.
///
/// # Errors
/// An unknown name; a scale factor that is missing or not used.
fn aggregation(name: &str, scale: Option<f64>) -> Result<Aggregation, Vec<ConfigError>> {
    Aggregation::parse(name, scale).map_err(|error| vec![fault("aggregation", &error)])
}

/// A refusal of the maths, as one about a setting.
fn fault(setting: &str, error: &AlgoError) -> ConfigError {
    ConfigError::new(
        setting,
        format!("is refused: {error}"),
        "see the setting's documentation in `pipe schema`",
    )
}
