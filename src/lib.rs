//! verl: a typed dataflow engine for reinforcement-learning post-training of language models.
//!
//! This crate is the façade: it re-exports the crates that it is built on, provides a [`prelude`], and fills the registry of
//! built-ins ([`registry`]) that the executable `pipe` uses.
//!
//! A pipeline is declared, then checked as a whole; only what passed can be placed and run:
//!
//! ```
//! use verl::prelude::*;
//!
//! let optimizer = OptimizerConfig { learning_rate: 3e-4, ..OptimizerConfig::default() };
//! let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/addition-base");
//! let plan = DataPipe::new("grpo")
//!     .batch(BatchConfig { prompts: 32, samples: 8, ..BatchConfig::default() })
//!     .data("train", Addition::default())
//!     .model("actor", CausalLm::trained(folder, optimizer))
//!     .chain(
//!         Prompts::default()
//!             >> Generate { max_new_tokens: 12, ..Generate::default() }
//!             >> Reward::default()
//!             >> Advantages::default()
//!             >> Update::default(),
//!     )
//!     .plan()
//!     .map_err(Findings)?;
//! assert_eq!(plan.batch().rows, 256);
//! // Trainer::new(plan)?.train()? runs it.
//! # Ok::<(), Findings>(())
//! ```
//!
//! `examples/` has complete runs: `grpo_addition.rs`, a custom stage (`custom_stage.rs`), a custom loss and estimator
//! (`custom_algorithm.rs`), a custom model (`custom_model.rs`).

/// For deriving the schema of custom settings: `#[schemars(crate = "verl::schemars")]`.
pub use schemars;
/// For reading and writing custom settings: `#[serde(crate = "verl::serde")]`.
pub use serde;
pub use verl_algos as algos;
pub use verl_models as models;
pub use verl_pipe as pipe;
pub use verl_stages as stages;

use verl_pipe::registry::Registry;

/// Every built-in stage, loss, estimator, model kind and data set; custom kinds can be added.
///
/// ```
/// let registry = verl::registry();
/// assert!(registry.stages().get("generate").is_some());
/// assert!(registry.slot("loss").is_some_and(|losses| losses.get("grpo").is_some()));
/// assert!(registry.duplicates().is_empty());
/// ```
pub fn registry() -> Registry {
    verl_stages::register(Registry::new())
}

/// Makes this program able to serve as the worker processes of its runs. Call it first in `main`, with the registry of
/// every kind that the program's pipelines use.
///
/// In a process that a run started as a worker, this serves and then ends the process. Anywhere else it declares that this
/// executable can be started as a worker, and returns at once. A worker builds its pipeline from the settings, so stages,
/// models and data sets must be kinds of the registry, not closures.
///
/// ```
/// verl::worker_main(verl::registry);
/// // Only the run itself gets here.
/// assert!(verl::pipe::wire::child::program().is_some());
/// ```
pub fn worker_main(registry: impl FnOnce() -> Registry) {
    verl_pipe::run::worker::enter(registry);
}

/// What affects the bits of a result besides the code of a run: names and versions for `versions.json`
/// ([`TrainerOptions::versions`](verl_pipe::run::trainer::TrainerOptions::versions)).
///
/// ```
/// let versions = verl::versions();
/// let of = |name: &str| versions.iter().find(|(known, _)| known == name).map(|(_, version)| version.as_str());
/// assert!(of("rustc").is_some_and(|version| version.starts_with("rustc 1.")));
/// assert!(of("burn").is_some_and(|version| version.contains('.')));
/// ```
pub fn versions() -> Vec<(String, String)> {
    [
        ("verl", env!("CARGO_PKG_VERSION")),
        ("burn", env!("VERL_BURN")),
        ("cubecl", env!("VERL_CUBECL")),
        ("rustc", env!("VERL_RUSTC")),
    ]
    .map(|(name, version)| (name.to_owned(), version.to_owned()))
    .to_vec()
}

/// What a pipeline in Rust needs: the settings of every built-in kind, and the traits and types of custom kinds.
///
/// Losses, estimators and engines are `losses::Dpo`, `estimators::Gae`, `engines::Native`: some have the same name.
///
/// A program that depends only on this crate derives settings through it:
///
/// ```
/// use verl::algos::losses::{MetricId, PerToken, PreparedTokens};
/// use verl::prelude::*;
///
/// /// −A log π, with the advantage cut off.
/// #[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
/// #[serde(crate = "verl::serde", default)]
/// #[schemars(crate = "verl::schemars")]
/// struct Cut {
///     /// Largest advantage.
///     most: f64,
/// }
///
/// impl Default for Cut {
///     fn default() -> Self {
///         Cut { most: 1.0 }
///     }
/// }
///
/// impl TokenLoss for Cut {
///     fn id(&self) -> MetricId {
///         MetricId::new(Self::KIND)
///     }
///     fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
///         let advantages = tokens.advantages(self.name())?.clamp_max(self.most);
///         Ok(PerToken { loss: -(advantages * tokens.log_probs()), metrics: Vec::new() })
///     }
/// }
///
/// impl PolicyLoss for Cut {
///     const KIND: &'static str = "cut";
///     const SUMMARY: &'static str = "the log-prob times an advantage that is cut off";
///     fn token_loss(&self) -> Box<dyn TokenLoss> {
///         Box::new(self.clone())
///     }
/// }
///
/// let registry = verl::registry().part::<PolicyObjective<Cut>>();
/// assert!(registry.slot("loss").is_some_and(|losses| losses.get("cut").is_some()));
/// let update = Update {
///     loss: PolicyObjective { policy: Cut { most: 2.0 }, ..PolicyObjective::default() }.into(),
///     ..Update::default()
/// };
/// assert_eq!(update.loss.settings()["most"], 2.0);
/// ```
pub mod prelude {
    pub use schemars::JsonSchema;
    pub use serde::{Deserialize, Serialize};
    pub use verl_algos::advantages::{AdvantageEstimator, AdvantageInputs, GroupScores};
    pub use verl_algos::losses::{MetricId, PerToken, PreparedTokens, TokenLoss};
    pub use verl_algos::{AlgoError, CutUnit};
    pub use verl_models::model::{
        ModelError, ModelInterface, PolicyModel, TrainedModel, ValueInterface, ValueModel,
    };
    pub use verl_models::optim::{OptimizerConfig, Schedule};
    pub use verl_models::policy::Policy;
    pub use verl_pipe::batch::{Batch, RaggedColumn, RowId};
    pub use verl_pipe::config::read_pipeline;
    pub use verl_pipe::data::{DataError, DataLoaderInterface};
    pub use verl_pipe::diagnostic::{Diagnostic, Findings};
    pub use verl_pipe::field::{Field, Key, LogProbTag, Ragged, Scalar, Support, Text, Weights};
    pub use verl_pipe::keys;
    pub use verl_pipe::part::{Part, PartConfig, Slot};
    pub use verl_pipe::pipe::{DataPipe, IntoStage, RunConfig, stage_fn, stage_with};
    pub use verl_pipe::plan::Plannable;
    pub use verl_pipe::registry::Registry;
    pub use verl_pipe::run::trainer::{Trainer, TrainerOptions};
    pub use verl_pipe::schedule::batching::{BatchConfig, DevicesConfig};
    pub use verl_pipe::stage::{
        Access, BuildContext, Cardinality, ConfigError, DataConfig, DeviceSupport, Metric,
        MetricRole, ModelConfig, ModelFactory, Reduce, RowRule, Stage, StageConfig, StageContext,
        StageError, StageSpec,
    };
    pub use verl_pipe::trace::config::TraceConfig;
    pub use verl_stages::advantages::Advantages;
    pub use verl_stages::baseline::Baseline;
    pub use verl_stages::correct_rollout::{
        CorrectRollout, Preset, Rejection, RejectionRuleName, SamplerRatio, SamplerRatioMode,
        WeightLevel,
    };
    pub use verl_stages::data::addition::{Addition, Split};
    pub use verl_stages::data::addition_episodes::AdditionEpisodes;
    pub use verl_stages::data::addition_pairs::AdditionPairs;
    pub use verl_stages::data::file::DataFile;
    pub use verl_stages::data::jsonl::Jsonl;
    pub use verl_stages::data::parquet::Parquet;
    pub use verl_stages::distill::{Distill, DivergenceName, Tail};
    pub use verl_stages::engines::{self, Engine};
    pub use verl_stages::episodes::Episodes;
    pub use verl_stages::estimators::{self, Estimator};
    pub use verl_stages::evaluate::Evaluate;
    pub use verl_stages::evaluate_reward_model::EvaluateRewardModel;
    pub use verl_stages::filter_groups::FilterGroups;
    pub use verl_stages::generate::Generate;
    pub use verl_stages::log_probs::{LogProbs, Role};
    pub use verl_stages::losses::{
        self, AggregationName, ClipBounds, CpoLossName, FDivergenceName, KlEstimatorName, Loss,
        PolicyLoss, PolicyObjective, PreferenceLossName,
    };
    pub use verl_stages::model::{
        CausalLm, HeadInit, IlqlLm, Init, PolicyResource, SaveAs, ValueLm, ValueResource,
        WeightsDType, policy_model, value_model,
    };
    pub use verl_stages::pairs::Pairs;
    pub use verl_stages::preferences::Preferences;
    pub use verl_stages::prompts::{OnLong, Prompts, Template};
    pub use verl_stages::reward::model::RewardModel;
    pub use verl_stages::reward::rule::{Reward, RuleKind};
    pub use verl_stages::scale_rewards::ScaleRewards;
    pub use verl_stages::shape_overlong::ShapeOverlong;
    pub use verl_stages::shape_unended::ShapeUnended;
    pub use verl_stages::shuffle_rewards::ShuffleRewards;
    pub use verl_stages::steering::{Control, EntropyControl, KlControl};
    pub use verl_stages::teacher_advantages::TeacherAdvantages;
    pub use verl_stages::teacher_top::TeacherTop;
    pub use verl_stages::update::Update;
    pub use verl_stages::update_critic::UpdateCritic;
    pub use verl_stages::update_ilql::UpdateIlql;
    pub use verl_stages::update_reward_model::UpdateRewardModel;
    pub use verl_stages::values::Values;
}
