//! The stages and algorithms of verl, and the data sets they read.
//!
//! | stage | reads | writes |
//! |---|---|---|
//! | [`prompts`] | rows of a data set | prompt tokens, answers |
//! | [`generate`] | prompts | responses with log-probs |
//! | [`reward`] | responses, answers | rewards |
//! | [`log_probs`] | prompts, responses | log-probs of policy or reference |
//! | [`advantages`] | rewards | advantages |
//! | [`update`] | all of it | nothing: it moves the weights |
//! | [`evaluate`] | held-out rows | metrics and samples, between steps |

pub mod advantages;
pub mod algorithms;
pub mod data;
pub mod evaluate;
pub mod generate;
pub mod log_probs;
pub mod model;
pub mod prompts;
pub mod reward;
pub mod update;

use verl_pipe::registry::Registry;

/// Puts every stage, model kind and data set of this crate into `registry`, in the order of their names.
pub fn register(registry: Registry) -> Registry {
    registry
        .stage::<advantages::Advantages>()
        .stage::<evaluate::Evaluate>()
        .stage::<generate::Generate>()
        .stage::<log_probs::LogProbs>()
        .stage::<prompts::Prompts>()
        .stage::<reward::rule::Reward>()
        .stage::<update::Update>()
        .model::<model::CausalLm>()
        .data::<data::addition::Addition>()
        .data::<data::jsonl::Jsonl>()
        .data::<data::parquet::Parquet>()
        .data_files::<data::file::DataFile>(&["jsonl", "ndjson", "json", "parquet", "pq"])
}

verl_pipe::chainable!(
    advantages::Advantages,
    evaluate::Evaluate,
    generate::Generate,
    log_probs::LogProbs,
    prompts::Prompts,
    reward::rule::Reward,
    update::Update,
);
