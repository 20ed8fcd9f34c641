//! verl: a typed dataflow engine for reinforcement-learning post-training of language models.
//!
//! This crate is the façade: it re-exports the four crates, offers a [`prelude`], and fills the registry of
//! built-ins ([`registry`]) that the executable `pipe` works with.

pub use verl_algos as algos;
pub use verl_models as models;
pub use verl_pipe as pipe;
pub use verl_stages as stages;

use verl_pipe::registry::Registry;

/// Every built-in stage, model kind and data set.
///
/// ```
/// let registry = verl::registry();
/// assert!(registry.stages().get("generate").is_some());
/// assert!(registry.duplicates().is_empty());
/// ```
pub fn registry() -> Registry {
    verl_stages::register(Registry::new())
}

/// What a pipeline in Rust needs.
pub mod prelude {
    pub use verl_models::model::{ModelError, ModelInterface, PolicyModel};
    pub use verl_models::optim::{OptimizerConfig, Schedule};
    pub use verl_models::policy::Policy;
    pub use verl_pipe::batch::{Batch, RaggedColumn, RowId};
    pub use verl_pipe::data::{DataError, DataLoaderInterface};
    pub use verl_pipe::diagnostic::Findings;
    pub use verl_pipe::field::{Field, Key, Ragged, Scalar, Text};
    pub use verl_pipe::keys;
    pub use verl_pipe::pipe::{DataPipe, IntoStage, RunConfig, stage_fn, stage_with};
    pub use verl_pipe::run::trainer::{Trainer, TrainerOptions};
    pub use verl_pipe::schedule::batching::BatchConfig;
    pub use verl_pipe::stage::{
        Access, BuildContext, Cardinality, ConfigError, Metric, Reduce, RowRule, Stage,
        StageConfig, StageContext, StageError, StageSpec,
    };
    pub use verl_stages::advantages::Advantages;
    pub use verl_stages::algorithms::{Grpo, Loss, Sft};
    pub use verl_stages::data::addition::{Addition, Split};
    pub use verl_stages::evaluate::Evaluate;
    pub use verl_stages::generate::Generate;
    pub use verl_stages::log_probs::{LogProbs, Role};
    pub use verl_stages::model::{CausalLm, Init, PolicyResource, policy_model};
    pub use verl_stages::prompts::Prompts;
    pub use verl_stages::reward::rule::{Reward, RuleKind};
    pub use verl_stages::update::Update;
}
