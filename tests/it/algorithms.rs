//! Every loss and every estimator that is registered trains the tiny model.

use std::sync::{Arc, Mutex};

use verl::algos::losses::POLICY_LOSSES;
use verl::pipe::diagnostic::Diagnostic;
use verl::prelude::*;

use crate::kit::{GRPO, Place, start};

/// Key of the rewards of a second reward function.
const FORM_REWARDS: Key<Scalar<f32>> =
    Key::new("form_rewards", "[B]", "reward", "reward of the form").nullable();

/// Names of the kinds of a slot.
fn kinds(slot: &str) -> Vec<&'static str> {
    let registry = verl::registry();
    let kinds = registry.slot(slot).expect("the slot");
    kinds.iter().map(|kind| kind.name).collect()
}

/// The tiny pipeline with the greedy responses of its prompts and their rewards.
fn with_baseline() -> String {
    let advantages = "[[stages]]\nkind = \"advantages\"";
    let baseline = r#"[[stages]]
kind = "baseline"
max_new_tokens = 10

[[stages]]
kind = "reward"
name = "baseline_reward"
rule = "length"
target_tokens = 4
rename = { responses = "baseline_responses", response_texts = "baseline_response_texts", rewards = "reward_baselines" }
"#;
    GRPO.replace(advantages, &format!("{baseline}\n{advantages}"))
}

/// The tiny pipeline with these overrides, the greedy responses, and a stand-in for what a critic writes.
fn pipeline(place: &Place, overrides: &[&str]) -> Result<DataPipe, Vec<Diagnostic>> {
    let values = StageSpec::new().reads(keys::RESPONSES).writes(keys::VALUES);
    let pipe = place.parse(&with_baseline(), "run", overrides)?;
    Ok(pipe.add_stage(
        "values",
        stage_fn(values, |batch, context| {
            let lengths = batch.get(&keys::RESPONSES)?;
            let rows = lengths.rows().map(|row| vec![0.25f32; row.len()]);
            let column = RaggedColumn::from_rows(rows);
            let mut output = batch.rows_only();
            output.put(&keys::VALUES, column)?;
            context.emit(output)
        }),
    ))
}

/// Runs two steps and checks by the metrics that the weights changed. Returns the norms of the gradient.
#[track_caller]
fn check_trains(pipe: &DataPipe, name: &str) -> Vec<f64> {
    let mut run = start(pipe);
    let mut norms = Vec::new();
    for _ in 0..2 {
        let metrics = run.step().expect("a step").metrics;
        let loss = metrics.get("actor/pg_loss").expect("a policy loss");
        let norm = metrics.get("actor/grad_norm").expect("a gradient");
        assert!(loss.is_finite() && norm.is_finite(), "{name}: {metrics:?}");
        norms.push(norm);
    }
    assert!(norms.iter().any(|norm| *norm > 0.0), "{name}: {norms:?}");
    norms
}

/// The findings of a plan.
fn findings(pipe: &DataPipe) -> Option<String> {
    let plan = pipe.plan();
    plan.err().map(|findings| Findings(findings).to_string())
}

#[test]
fn every_estimator_trains_with_and_without_a_penalty() {
    let place = Place::new();
    for kind in kinds("estimator") {
        let estimator = format!("advantages.estimator={kind}");
        for penalty in ["advantages.kl_coef=0", "advantages.kl_coef=0.1"] {
            let squares = "old_log_probs.sum_pi_squared=true";
            let overrides = [&estimator, penalty, squares, "update.loss.kl_coef=0"];
            let pipe = pipeline(&place, &overrides).map_err(Findings);
            let pipe = pipe.expect("a pipeline");
            if penalty.ends_with("0.1") && ["gdpo", "rloo_trl"].contains(&kind) {
                let text = findings(&pipe).expect("it has no place for the penalty");
                assert!(
                    text.contains("error[C005]: invalid setting `kl_coef`"),
                    "{text}"
                );
                continue;
            }
            check_trains(&pipe, kind);
        }
    }
}

/// Losses on responses, each with its defaults.
fn policy_losses(place: &Place) -> Vec<&'static str> {
    let mut trained = Vec::new();
    for kind in kinds("loss") {
        let loss = format!("update.loss={{ kind = \"{kind}\" }}");
        let pipe = pipeline(place, &[&loss, "batch.epochs=2"]);
        let pipe = pipe.map_err(Findings).expect("a pipeline");
        match findings(&pipe) {
            None => trained.push(kind),
            // A loss on data other than sampled responses lacks its keys here, or two rows per prompt.
            Some(text) => assert!(
                ["error[C005]", "error[P002]"]
                    .iter()
                    .any(|code| text.contains(code)),
                "{kind}: {text}"
            ),
        }
    }
    for (name, _) in POLICY_LOSSES {
        let name = if *name == "vanilla" { "grpo" } else { name };
        assert!(trained.contains(&name), "{name} is not in {trained:?}");
    }
    trained
}

#[test]
fn every_policy_loss_trains_with_all_its_terms() {
    let place = Place::new();
    for kind in policy_losses(&place) {
        for more in [
            "",
            ", kl_coef = 0.1, entropy_coef = 0.01",
            ", kl_coef = 0.1, kl_importance = \"token\", off_policy_rows = 0.5, top_entropy_tokens = 0.5, top_entropy_coef = 0.01",
        ] {
            let loss = format!("update.loss={{ kind = \"{kind}\"{more} }}");
            let pipe = pipeline(&place, &[&loss, "batch.epochs=2"]);
            check_trains(&pipe.map_err(Findings).expect("a pipeline"), kind);
        }
    }
}

#[test]
fn every_policy_loss_trains_on_policy_without_old_log_probs() {
    let place = Place::new();
    let old = "[[stages]]\nkind = \"log_probs\"\nname = \"old_log_probs\"\n";
    assert!(GRPO.contains(old));
    let text = GRPO.replace(old, "");
    for kind in policy_losses(&place) {
        let loss = format!("update.loss={{ kind = \"{kind}\", top_entropy_tokens = 0.9 }}");
        for loss in [&loss, &loss.replace(", top_entropy_tokens = 0.9", "")] {
            let pipe = place.parse(&text, "run", &[loss]).map_err(Findings);
            check_trains(&pipe.expect("a pipeline"), kind);
        }
    }
}

/// Rules that select among all tokens of a mini-batch do not depend on how it is split.
///
/// `kl_cov` selects in the same way, but the slope of its |d| on policy, where d is 0 up to rounding, is not comparable.
#[test]
fn what_is_selected_does_not_depend_on_the_micro_batch() {
    let place = Place::new();
    for loss in [
        "{ kind = \"clip_cov\", ratio = 0.2, lower = -9.0, upper = 9.0 }",
        "{ kind = \"gpg\", top_entropy_tokens = 0.3 }",
    ] {
        let loss = format!("update.loss={loss}");
        let norms = |rows: &str| {
            let rows = format!("batch.micro_batch={rows}");
            let more = [&loss, &rows, "batch.epochs=2", "batch.mini_batch=2"];
            let pipe = pipeline(&place, &more).map_err(Findings);
            check_trains(&pipe.expect("a pipeline"), &loss)
        };
        for (whole, cut) in norms("8").iter().zip(norms("2")) {
            assert!((whole - cut).abs() < 1e-3 * whole, "{loss}: {whole}, {cut}");
        }
    }
}

/// Each sample is compared with the one greedy response to its prompt.
#[test]
fn remax_compares_every_sample_with_the_baseline_of_its_prompt() {
    let place = Place::new();
    type Row = (u64, f32, f32, f32);
    let rows: Arc<Mutex<Vec<Row>>> = Arc::default();
    let seen = rows.clone();
    let compare = StageSpec::new()
        .reads(keys::REWARDS)
        .reads(keys::ADVANTAGES)
        .reads_broadcast(keys::REWARD_BASELINES)
        .rows(RowRule::Sink);
    let remax = ["advantages.estimator=remax", "update.loss.kl_coef=0"];
    let pipe = pipeline(&place, &remax).map_err(Findings);
    let pipe = pipe.expect("a pipeline").add_stage(
        "compare",
        stage_fn(compare, move |batch, _| {
            let (rewards, advantages) = (batch.get(&keys::REWARDS)?, batch.get(&keys::ADVANTAGES)?);
            let baselines = batch.get(&keys::REWARD_BASELINES)?;
            let mut seen = seen.lock().map_err(|e| StageError::failed(e.to_string()))?;
            for (row, group) in batch.groups().iter().enumerate() {
                let scores = (rewards.row(row), baselines.row(row));
                let (Some(reward), Some(baseline)) = scores else {
                    continue;
                };
                seen.push((*group, reward, baseline, advantages.row(row)[0]));
            }
            Ok(())
        }),
    );
    start(&pipe).step().expect("a step");
    let rows = rows.lock().expect("no panic");
    assert_eq!(rows.len(), 16);
    for (group, reward, baseline, advantage) in rows.iter() {
        assert!((reward - baseline - advantage).abs() < 1e-6);
        let of_group = rows.iter().filter(|(other, ..)| other == group);
        assert!(of_group.clone().all(|(_, _, other, _)| other == baseline));
        assert_eq!(of_group.count(), 4);
    }
}

#[test]
fn two_reward_functions_train_with_separate_metrics() {
    let place = Place::new();
    let advantages = "[[stages]]\nkind = \"advantages\"";
    let form = "[[stages]]\nkind = \"reward\"\nname = \"form\"\nrule = \"length\"\ntarget_tokens = 8\nrename = { rewards = \"form_rewards\" }";
    let text = GRPO.replace(advantages, &format!("{form}\n\n{advantages}"));
    for kind in ["gdpo", "grpo_trl"] {
        let estimator = format!(
            "advantages.estimator={{ kind = \"{kind}\", components = [\"rewards\", \"form_rewards\"], weights = [1.0, 0.5] }}"
        );
        // The reward of each response by both functions.
        let seen: Arc<Mutex<Vec<(f32, f32)>>> = Arc::default();
        let spec = StageSpec::new()
            .reads(keys::REWARDS)
            .reads(FORM_REWARDS)
            .rows(RowRule::Sink);
        let kept = seen.clone();
        let pipe = place.parse(&text, "run", &[&estimator]).map_err(Findings);
        let pipe = pipe.expect("a pipeline").add_stage(
            "seen",
            stage_fn(spec, move |batch, _| {
                let (rewards, form) = (batch.get(&keys::REWARDS)?, batch.get(&FORM_REWARDS)?);
                let both = rewards.rows().zip(form.rows());
                let mut kept = kept.lock().map_err(|e| StageError::failed(e.to_string()))?;
                kept.extend(both.filter_map(|(reward, form)| Some((reward?, form?))));
                Ok(())
            }),
        );
        check_trains(&pipe, kind);
        seen.lock().expect("no panic").clear();
        let metrics = start(&pipe).step().expect("a step").metrics;
        let get = |name: &str| metrics.get(name).unwrap_or_else(|| panic!("{name}"));
        assert!(get("form/correct_share") >= get("reward/correct_share"));
        let seen = seen.lock().expect("no panic");
        assert_eq!(seen.len(), 16);
        let total = seen
            .iter()
            .map(|(reward, form)| f64::from(*reward) + 0.5 * f64::from(*form));
        let mean = total.sum::<f64>() / 16.0;
        assert!(
            mean > 0.0 && (get("reward/mean") - mean).abs() < 1e-6,
            "{kind}: {mean}"
        );
    }
}

#[test]
fn every_correction_of_the_rollout_trains() {
    let place = Place::new();
    let advantages = "[[stages]]\nkind = \"advantages\"";
    let corrected = |setting: &str| {
        let stage = format!("[[stages]]\nkind = \"correct_rollout\"\n{setting}");
        let text = GRPO.replace(advantages, &format!("{stage}\n\n{advantages}"));
        place.parse(&text, "run", &[]).map_err(Findings)
    };
    for preset in verl::algos::rollout_correction::Preset::ALL {
        let preset = preset.as_str();
        let mut pipe = corrected(&format!("preset = \"{preset}\"")).expect("a pipeline");
        if preset.starts_with("bypass") {
            let update = pipe.stages.iter_mut().find(|stage| stage.kind == "update");
            let rename = &mut update.expect("an update").rename;
            rename.insert("old_log_probs".to_owned(), "rollout_log_probs".to_owned());
        }
        check_trains(&pipe, preset);
        let metrics = start(&pipe).step().expect("a step").metrics;
        // The engine and the trainer have the same weights and compute the same numbers.
        for name in ["kl", "chi2_token", "probs_diff_mean"] {
            let value = metrics.get(&format!("rollout_correction/{name}"));
            assert!(value.expect(name).abs() < 1e-3, "{preset}: {metrics:?}");
        }
    }
    let own = "weights = \"token\"\nbound = \"0.5_2.0\"\nnormalize = true\nrejection = [{ rule = \"seq_mean_k3\", bound = \"0.01\" }]";
    let pipe = corrected(own).expect("a pipeline");
    check_trains(&pipe, "rules");
    let metrics = start(&pipe).step().expect("a step").metrics;
    let ess = metrics.get("rollout_correction/rollout_is_eff_sample_size");
    assert!(ess.is_some_and(|share| share > 0.99), "{metrics:?}");
}
