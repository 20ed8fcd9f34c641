//! The stages and algorithms of verl, and the data sets they read.
//!
//! | stage | reads | writes |
//! |---|---|---|
//! | [`prompts`] | rows of a data set | prompt tokens, answers |
//! | [`generate`] | prompts | responses with log-probs |
//! | [`pairs`] | pairs of responses | both sides as rows of their own |
//! | [`reward`] | responses, answers | rewards, by a rule or a reward model |
//! | [`shuffle_rewards`] | rewards | the same in another order, for control runs |
//! | [`log_probs`] | prompts, responses | log-probs of policy or reference |
//! | [`values`] | prompts, responses | a critic's values |
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
pub mod pairs;
pub mod prompts;
pub mod reward;
pub mod shuffle_rewards;
pub mod update;
pub mod values;

use verl_pipe::registry::Registry;

/// The one list of what this crate offers: stages are registered and can be chained with `>>`, the rest is registered.
macro_rules! built_ins {
    (stages: $($stage:ty),+; models: $($model:ty),+; data: $($data:ty),+; files: $files:ty = $extensions:expr;) => {
        /// Puts every stage, model kind and data set of this crate into `registry`.
        pub fn register(registry: Registry) -> Registry {
            registry
                $(.stage::<$stage>())+
                $(.model::<$model>())+
                $(.data::<$data>())+
                .data_files::<$files>($extensions)
        }

        verl_pipe::chainable!($($stage),+);
    };
}

built_ins! {
    stages:
        advantages::Advantages,
        evaluate::Evaluate,
        generate::Generate,
        log_probs::LogProbs,
        pairs::Pairs,
        prompts::Prompts,
        reward::model::RewardModel,
        reward::rule::Reward,
        shuffle_rewards::ShuffleRewards,
        update::Update,
        values::Values;
    models:
        model::CausalLm,
        model::ValueLm;
    data:
        data::addition::Addition,
        data::addition_pairs::AdditionPairs,
        data::jsonl::Jsonl,
        data::parquet::Parquet;
    files:
        data::file::DataFile = &["jsonl", "ndjson", "json", "parquet", "pq"];
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use verl_pipe::config::read_pipeline;
    use verl_pipe::plan::Plan;
    use verl_pipe::stage::{BuildContext, StageConfig};

    use super::advantages::Advantages;
    use super::algorithms::{Grpo, Loss};
    use super::update::Update;
    use super::*;

    /// The plan of the addition example under `overrides`, or the codes of what is wrong with it.
    fn plan(overrides: &[&str]) -> Result<Plan, Vec<&'static str>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/pipelines");
        let fresh = ["actor", "ref"].map(|model| {
            [
                format!("{model}.path=../models/addition-init"),
                format!("{model}.init=random"),
            ]
        });
        let own = overrides.iter().map(|text| (*text).to_owned());
        let all: Vec<String> = fresh.into_iter().flatten().chain(own).collect();
        read_pipeline(
            &folder.join("grpo_addition.toml"),
            &all,
            &register(Registry::new()),
        )
        .and_then(|pipe| pipe.plan())
        .map_err(|findings| findings.iter().map(|finding| finding.code).collect())
    }

    /// Codes of all that is said about the example under `overrides`, each once.
    #[track_caller]
    fn check(overrides: &[&str], expected: &[&str]) {
        let mut found: Vec<&str> = match plan(overrides) {
            Ok(plan) => plan.warnings.iter().map(|finding| finding.code).collect(),
            Err(codes) => codes,
        };
        found.dedup();
        assert_eq!(found, expected, "{overrides:?}");
    }

    #[test]
    fn the_example_is_checked_as_a_whole() {
        check(&[], &[]);
        // Sampled at one temperature, scored or trained at another.
        check(&["generate.temperature=0.7"], &["P007"]);
        check(&["update.temperature=0.7"], &["P007"]);
        let cooler =
            ["generate", "ref_log_probs", "update"].map(|stage| format!("{stage}.temperature=0.7"));
        check(&cooler.each_ref().map(String::as_str), &[]);
        check(&["ref_log_probs.model=actor"], &["P018", "P011"]);
        // A penalty in the reward needs the log-probs of the policy too, and is one penalty more.
        check(&["advantages.kl_coef=0.01"], &["P002", "P020"]);
        let only_reward = ["advantages.kl_coef=0.01", "update.loss.kl_coef=0"];
        check(&only_reward, &["P002"]);
    }

    #[test]
    fn a_penalty_in_reward_and_loss_is_noticed() {
        let penalised = Advantages {
            kl_coef: 0.01,
            ..Advantages::default()
        };
        let context = BuildContext::default();
        let reward = StageConfig::build(&penalised, &context).unwrap().spec();
        let loss = |kl_coef| {
            let loss = Loss::Grpo(Grpo {
                kl_coef,
                ..Grpo::default()
            });
            let update = Update {
                loss,
                ..Update::default()
            };
            StageConfig::build(&update, &context).unwrap().spec().once
        };
        assert_eq!(reward.once, loss(0.001));
        assert_eq!(loss(0.0), [""; 0]);
    }

    #[test]
    fn a_data_set_that_is_a_path_is_a_file() {
        let file = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
        let path = file.path().display().to_string();
        let plan = plan(&[&format!("data.train={path}")]).unwrap();
        let train = plan
            .pipe
            .data
            .iter()
            .find(|data| data.name == "train")
            .unwrap();
        assert_eq!(
            (train.kind.as_str(), &train.config["path"]),
            ("file", &path.into())
        );
    }
}
