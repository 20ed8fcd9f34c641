//! The stages of verl, the losses and estimators that they use, and the data sets that they read.
//!
//! | stage | reads | writes |
//! |---|---|---|
//! | [`prompts`] | rows of a data set | prompt tokens, answers |
//! | [`preferences`] | rows of a data set | prompts with labelled answers |
//! | [`pairs`] | chosen and rejected answers | both as responses to one prompt |
//! | [`generate`] | prompts | responses with log-probs |
//! | [`reward`] | responses, answers | rewards, by a rule or a reward model |
//! | [`shape_overlong`] | rewards, responses | rewards minus a penalty for length |
//! | [`shape_unended`] | rewards, responses | rewards changed where a response did not end |
//! | [`scale_rewards`] | rewards | rewards divided by a standard deviation and clipped |
//! | [`filter_groups`] | rewards | the rows of groups with a signal; has more prompts drawn |
//! | [`shuffle_rewards`] | rewards | the same rewards in another order, for control runs |
//! | [`baseline`] | prompts | one greedy response to each, whose score is a baseline |
//! | [`log_probs`] | prompts, responses | log-probs of policy or reference |
//! | [`correct_rollout`] | log-probs of policy and rollout engine | importance weights, and which tokens to train on |
//! | [`values`] | prompts, responses | a critic's values |
//! | [`advantages`] | rewards | advantages, by one of the [`estimators`] |
//! | [`update`] | all of the above | nothing: it trains a model to minimise one of the [`losses`] |
//! | [`episodes`] | rows of a log | prompts, responses, rewards |
//! | [`update_ilql`] | responses, rewards | nothing: it trains a policy and its value heads |
//! | [`teacher_top`] | prompts, responses | the tokens that a teacher finds most probable |
//! | [`teacher_advantages`] | log-probs of student and teacher | advantages |
//! | [`distill`] | responses, a teacher's tokens | nothing: it trains the student towards the teacher |
//! | [`update_critic`] | values, returns | nothing: it trains a critic |
//! | [`update_reward_model`] | pairs of responses | nothing: it trains a reward model |
//! | [`evaluate`] | evaluation rows | metrics and samples, between steps |
//! | [`evaluate_reward_model`] | evaluation pairs | metrics, between steps |

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests compare with the standard library's functions within a tolerance"
    )
)]

pub mod advantages;
pub mod baseline;
pub mod correct_rollout;
pub mod data;
pub mod distill;
pub mod engines;
pub mod episodes;
pub mod estimators;
pub mod evaluate;
pub mod evaluate_reward_model;
pub mod filter_groups;
pub mod generate;
pub mod log_probs;
pub mod losses;
pub mod model;
pub mod pairs;
pub mod preferences;
pub mod prompts;
mod refusals;
pub mod reward;
pub mod scale_rewards;
#[cfg(test)]
mod scripted;
mod settings;
pub mod shape_overlong;
pub mod shape_unended;
pub mod shuffle_rewards;
#[cfg(test)]
mod sink;
mod state;
pub mod steering;
mod synonyms;
pub mod teacher_advantages;
pub mod teacher_top;
mod training;
pub mod update;
pub mod update_critic;
pub mod update_ilql;
pub mod update_reward_model;
pub mod values;

use verl_declare::registry::Registry;

/// The list of everything that this crate registers; stages can also be chained with `>>`.
macro_rules! built_ins {
    (
        stages: $($stage:ty),+;
        policy_losses: $($policy_loss:ty),+;
        losses: $($loss:ty),+;
        estimators: $($estimator:ty),+;
        engines: $($engine:ty),+;
        models: $($model:ty),+;
        data: $($data:ty),+;
        files: $files:ty = $extensions:expr;
    ) => {
        /// Adds every stage, loss, estimator, engine, model kind and data set of this crate to `registry`.
        pub fn register(registry: Registry) -> Registry {
            registry
                $(.stage::<$stage>())+
                $(.part::<losses::PolicyObjective<$policy_loss>>())+
                $(.part::<$loss>())+
                $(.part::<$estimator>())+
                $(.part::<$engine>())+
                $(.model::<$model>())+
                $(.data::<$data>())+
                .data_files::<$files>($extensions)
                .synonyms(synonyms::SETTINGS)
        }

        verl_declare::chainable!($($stage),+);
    };
}

built_ins! {
    stages:
        advantages::Advantages,
        baseline::Baseline,
        correct_rollout::CorrectRollout,
        distill::Distill,
        episodes::Episodes,
        evaluate::Evaluate,
        evaluate_reward_model::EvaluateRewardModel,
        filter_groups::FilterGroups,
        generate::Generate,
        log_probs::LogProbs,
        pairs::Pairs,
        preferences::Preferences,
        prompts::Prompts,
        reward::model::RewardModel,
        reward::rule::Reward,
        scale_rewards::ScaleRewards,
        shape_overlong::ShapeOverlong,
        shape_unended::ShapeUnended,
        shuffle_rewards::ShuffleRewards,
        teacher_advantages::TeacherAdvantages,
        teacher_top::TeacherTop,
        update::Update,
        update_critic::UpdateCritic,
        update_ilql::UpdateIlql,
        update_reward_model::UpdateRewardModel,
        values::Values;
    policy_losses:
        losses::Cispo,
        losses::ClipCov,
        losses::DppoKl,
        losses::DppoTv,
        losses::Dro,
        losses::Gmpo,
        losses::Gpg,
        losses::Grpo,
        losses::Gspo,
        losses::KlCov,
        losses::Reinforce,
        losses::Sapo,
        losses::TrlCispo,
        losses::TrlGrpo,
        losses::TrlGspo,
        losses::TrlRloo,
        losses::Vespo;
    losses:
        losses::Cpo,
        losses::Dpo,
        losses::Kto,
        losses::Orpo,
        losses::Sft,
        losses::SimPo;
    estimators:
        estimators::DrGrpo,
        estimators::Gae,
        estimators::Gdpo,
        estimators::Gpg,
        estimators::Grpo,
        estimators::GrpoPassK,
        estimators::GrpoTrl,
        estimators::Opo,
        estimators::Otb,
        estimators::ReinforcePlusPlus,
        estimators::ReinforcePlusPlusBaseline,
        estimators::ReMax,
        estimators::Rloo,
        estimators::RlooTrl,
        estimators::TirOtb;
    engines:
        engines::Native;
    models:
        model::CausalLm,
        model::IlqlLm,
        model::ValueLm;
    data:
        data::addition::Addition,
        data::addition_episodes::AdditionEpisodes,
        data::addition_pairs::AdditionPairs,
        data::jsonl::Jsonl,
        data::parquet::Parquet;
    files:
        data::file::DataFile = &["jsonl", "ndjson", "json", "parquet", "pq"];
}

#[cfg(test)]
mod setting_tests;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use verl_pipe::plan::Plannable;

    use verl_declare::part::{Part, Slot};
    use verl_pipe::config::read_pipeline;
    use verl_pipe::plan::Plan;
    use verl_pipe::schema::pipeline_schema;
    use verl_words::diagnostic::{Diagnostic, Findings};
    use verl_words::stage::{BuildContext, StageConfig};

    use super::advantages::Advantages;
    use super::engines::Engine;
    use super::estimators::Estimator;
    use super::losses::{Grpo, Loss, PolicyObjective};
    use super::update::Update;
    use super::*;

    /// The plan of the addition example with `overrides`, or its findings.
    fn plan_or_findings(overrides: &[&str]) -> Result<Plan, Vec<Diagnostic>> {
        plan_of("grpo_addition.toml", overrides)
    }

    /// The plan of the example `file`, which has an actor and a reference, with `overrides`, or its findings.
    fn plan_of(file: &str, overrides: &[&str]) -> Result<Plan, Vec<Diagnostic>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/pipelines");
        let fresh = ["actor", "ref"].map(|model| {
            [
                format!("{model}.path=../models/addition-init"),
                format!("{model}.init=random"),
            ]
        });
        let own = overrides.iter().map(|text| (*text).to_owned());
        let all: Vec<String> = fresh.into_iter().flatten().chain(own).collect();
        read_pipeline(&folder.join(file), &all, &register(Registry::new()))
            .and_then(|pipe| pipe.plan())
    }

    /// Checks the codes of all findings of the addition example with `overrides`; repeated codes count once.
    #[track_caller]
    fn check(overrides: &[&str], expected: &[&str]) {
        let findings = match plan_or_findings(overrides) {
            Ok(plan) => plan.warnings().to_vec(),
            Err(findings) => findings,
        };
        let mut found: Vec<&str> = findings.iter().map(|finding| finding.code).collect();
        found.dedup();
        assert_eq!(found, expected, "{overrides:?}");
    }

    #[test]
    fn the_example_is_checked_as_a_whole() {
        check(&[], &[]);
        // One temperature is enough: the others follow it. Sampling and scoring or training must agree.
        check(&["generate.temperature=0.7"], &[]);
        check(&["update.temperature=0.7"], &["P007"]);
        check(
            &["generate.temperature=0.7", "ref_log_probs.temperature=1.0"],
            &["P007"],
        );
        let cooler =
            ["generate", "ref_log_probs", "update"].map(|stage| format!("{stage}.temperature=0.7"));
        check(&cooler.each_ref().map(String::as_str), &[]);
        // A missing data file is reported together with the other findings.
        let both = ["data.train=absent.jsonl", "update.temperature=0.7"];
        check(&both, &["C005", "P007"]);
        check(&["ref_log_probs.model=actor"], &["P018", "P011"]);
        check(&["generate.stop=[\"\"]"], &["C005"]);
        // A penalty in the reward also needs the policy's log-probs, and is a second penalty.
        check(&["advantages.kl_coef=0.01"], &["P002", "P020"]);
        let only_reward = ["advantages.kl_coef=0.01", "update.loss.kl_coef=0"];
        check(&only_reward, &["P002"]);
    }

    #[test]
    fn a_penalty_in_reward_and_loss_is_reported() {
        let penalised = Advantages {
            kl_coef: 0.01,
            ..Advantages::default()
        };
        let context = BuildContext::default();
        let reward = StageConfig::build(&penalised, &context).unwrap().spec();
        let loss = |kl_coef| {
            let loss = PolicyObjective::<Grpo> {
                kl_coef,
                ..PolicyObjective::default()
            };
            let update = Update {
                loss: loss.into(),
                ..Update::default()
            };
            StageConfig::build(&update, &context).unwrap().spec().once
        };
        assert_eq!(reward.once, loss(0.001));
        assert_eq!(loss(0.0), [""; 0]);
    }

    #[test]
    fn errors_are_reported_before_the_run() {
        let single = ["batch.samples=1", "batch.micro_batch=32"];
        let mut text = String::new();
        for (change, more) in [
            ("advantages.estimator=grpo", single.as_slice()),
            ("advantages.estimator=grpo_passk", &single),
            ("advantages.estimator=gae", &[]),
            ("advantages.estimator=gdpo", &["advantages.kl_coef=0.1"]),
            ("advantages.estimator=otb", &[]),
            ("advantages.estimator=rloo_trl", &[]),
            ("advantages.estimator=remax", &[]),
            ("advantages.estimator={ kind = \"gae\", gamma = 1.5 }", &[]),
            ("advantages.estimator={ kind = \"grpo\", epsilo = 1 }", &[]),
            (
                "advantages.estimator={ kind = \"gdpo\", components = [\"form\"] }",
                &[],
            ),
            ("update.loss.clip_low=1.5", &[]),
            ("update.loss.kl_importance=tokens", &[]),
            ("update.loss.top_entropy_coef=0.1", &[]),
            ("update.loss.aggregation=tokenmean", &[]),
            ("update.loss.kl_estimator=k4", &[]),
            ("update.loss.aggregation=seq-mean-token-sum-norm", &[]),
            ("update.loss.kl_coeff=0.1", &[]),
        ] {
            let findings = match plan_or_findings(&[&[change], more].concat()) {
                Ok(plan) => plan.warnings().to_vec(),
                Err(findings) => findings,
            };
            text += &format!("# {change}\n{}\n\n", Findings(findings));
        }
        insta::assert_snapshot!("refusals", text);
    }

    /// The findings of an example with each of the changes, as text.
    fn findings_of(file: &str, changes: &[&str]) -> String {
        let report = |change: &&str| {
            let findings = match plan_of(file, &change.split("; ").collect::<Vec<_>>()) {
                Ok(plan) => plan.warnings().to_vec(),
                Err(findings) => findings,
            };
            format!("# {change}\n{}\n\n", Findings(findings))
        };
        changes.iter().map(report).collect()
    }

    #[test]
    fn errors_with_a_critic_are_reported_before_the_run() {
        let changes = [
            "advantages.estimator={ kind = \"grpo\" }; batch.samples=2",
            "update_critic.model=actor",
            "values.model=ref",
            "update_critic.clip=-1; update_critic.epochs=0",
            "update.warmup_steps=150",
        ];
        insta::assert_snapshot!(
            "critic_refusals",
            findings_of("ppo_addition.toml", &changes)
        );
    }

    #[test]
    fn a_frozen_value_model_needs_a_head() {
        let reward = "reward.path=../models/addition-base";
        let critic = "models.critic={ kind = \"value_model\", path = \"../models/addition-base\" }";
        for (file, change, codes) in [
            (
                "ppo_reward_model_addition.toml",
                reward,
                ["C005"].as_slice(),
            ),
            ("ppo_addition.toml", critic, &["C005", "P010"]),
        ] {
            let findings = plan_of(file, &[change]).err().expect("no head");
            let found: Vec<&str> = findings.iter().map(|finding| finding.code).collect();
            assert_eq!(found, codes);
            let why = &findings[0].why;
            assert!(why.contains("has no value head (`score.weight`)"), "{why}");
        }
    }

    #[test]
    fn unknown_kinds_are_reported_with_the_known_ones() {
        for (change, what, nearest) in [
            ("advantages.estimator=grop", "estimator", "`grpo`"),
            ("advantages.estimator=rlo", "estimator", "`rloo`"),
            ("update.loss.kind=gsop", "loss", "`gspo`"),
            ("generate.engine=natve", "engine", "`native`"),
        ] {
            let findings = plan_or_findings(&[change]).err().expect("an unknown kind");
            let text = Findings(findings).to_string();
            for words in [
                format!("error[C003]: unknown {what} kind `"),
                format!("where: override `{change}`, [[stages]] `"),
                format!("did you mean {nearest}? known {what} kinds: "),
            ] {
                assert!(text.contains(&words), "`{words}` is not in:\n{text}");
            }
        }
    }

    #[test]
    fn a_single_response_is_reported_for_estimators_that_compare() {
        let single = ["batch.samples=1", "batch.micro_batch=32"];
        for (estimator, expected) in [
            ("dr_grpo", &["C008"][..]),
            ("gpg", &["C008"]),
            ("rloo", &["C008"]),
            ("reinforce_plus_plus_baseline", &["C008"]),
            ("reinforce_plus_plus", &[]),
        ] {
            let estimator = format!("advantages.estimator={estimator}");
            check(
                &[&[estimator.as_str()], single.as_slice()].concat(),
                expected,
            );
        }
    }

    /// The kinds of a slot, each with the part of its default settings.
    fn parts<S: Slot>(registry: &Registry) -> Vec<(&'static str, Part<S>)> {
        let kinds = registry.slot(S::NAME).expect("the slot").iter();
        kinds
            .map(|kind| {
                let read = || serde_json::from_value(kind.name.into());
                (kind.name, registry.reading(read).expect("defaults"))
            })
            .collect()
    }

    #[track_caller]
    fn check_parts<S: Slot>(registry: &Registry) {
        let mut context = BuildContext::default();
        context.batch.samples = 2;
        for (kind, part) in parts::<S>(registry) {
            assert!(part.build(S::NAME, &context).is_ok(), "{kind}");
            let written = serde_json::to_value(&part).expect("settings");
            let read = || serde_json::from_value::<Part<S>>(written.clone());
            assert_eq!(registry.reading(read).expect("the same"), part, "{kind}");
        }
        let schema = pipeline_schema(registry);
        let kinds = schema["$defs"][S::NAME]["oneOf"].as_array().expect("kinds");
        for kind in kinds.iter().filter(|kind| kind["type"] == "object") {
            let about = kind["description"].as_str().unwrap_or_default();
            assert!(about.len() > 10, "{kind}");
            for (name, setting) in kind["properties"].as_object().expect("settings") {
                let documented = name == "kind" || setting["description"].is_string();
                assert!(documented, "{}, {name}", kind["title"]);
            }
        }
    }

    #[test]
    fn every_part_has_defaults_round_trips_and_is_documented() {
        let registry = register(Registry::new());
        assert!(registry.duplicates().is_empty());
        check_parts::<Loss>(&registry);
        check_parts::<Estimator>(&registry);
        check_parts::<Engine>(&registry);
    }

    /// Every algorithm of `verl_algos` is registered, with the same defaults.
    #[test]
    fn every_algorithm_of_the_maths_is_registered() {
        let registry = register(Registry::new());
        let mut context = BuildContext::default();
        context.batch.samples = 2;
        let estimators = parts::<Estimator>(&registry);
        for (name, make) in verl_algos::advantages::ESTIMATORS {
            let part = estimators.iter().find(|(kind, _)| kind == name);
            let (_, part) = part.unwrap_or_else(|| panic!("no kind `{name}`"));
            let built = part.build("estimator", &context).expect("defaults");
            assert_eq!(format!("{:?}", &*built), format!("{:?}", make()), "{name}");
        }
        let losses = parts::<Loss>(&registry);
        for (name, make) in verl_algos::losses::POLICY_LOSSES {
            // PPO's loss has the name of the algorithm that uses it.
            let name = if *name == "vanilla" { "grpo" } else { name };
            let part = losses.iter().find(|(kind, _)| *kind == name);
            let (_, part) = part.unwrap_or_else(|| panic!("no kind `{name}`"));
            let built = part.build("loss", &context).expect("defaults");
            let (built, maths) = (format!("{:?}", built.objective), format!("{:?}", make()));
            assert!(built.contains(&maths), "{built} does not contain {maths}");
        }
    }

    #[test]
    fn a_data_set_given_as_a_path_is_a_file() {
        let file = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
        std::fs::write(file.path(), "{}\n").unwrap();
        let path = file.path().display().to_string();
        let plan = plan_or_findings(&[&format!("data.train={path}")]).unwrap();
        let train = plan
            .pipe()
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
