//! Training from judged answers: the example files, rejected variants, and that no split changes a step.

use std::fs;

use verl::pipe::config::read_pipeline;
use verl::pipe::diagnostic::{Diagnostic, Findings};
use verl::pipe::pipe::DataPipe;
use verl::pipe::plan::Plannable;
use verl::pipe::run::runner::StepOutput;

use crate::kit::{Place, root, start, trainer};

/// An example file with overrides, run in `place`.
fn read(place: &Place, file: &str, more: &[&str]) -> Result<DataPipe, Vec<Diagnostic>> {
    let mut overrides: Vec<String> = more.iter().map(|text| (*text).to_owned()).collect();
    overrides.push(format!("run.dir={}", place.path("run").display()));
    let file = root().join("examples/pipelines").join(file);
    read_pipeline(&file, &overrides, &verl::registry())
}

fn example(place: &Place, file: &str, more: &[&str]) -> DataPipe {
    read(place, file, more).unwrap_or_else(|findings| panic!("{file}: {}", Findings(findings)))
}

const SMALL: [&str; 4] = [
    "steps=3",
    "batch.prompts=8",
    "batch.micro_batch=8",
    "evaluate.questions=8",
];

/// The example of DPO with small steps.
pub fn dpo(place: &Place, more: &[&str]) -> DataPipe {
    example(place, "dpo_addition.toml", &[&SMALL[..], more].concat())
}

/// The metrics of a step that depend only on the seed.
fn decided(output: StepOutput) -> Vec<(String, f64)> {
    let values = output.metrics.values.into_iter();
    values
        .filter(|(name, _)| !name.starts_with("perf/"))
        .collect()
}

/// Three steps: the metrics of each, and the weights after them.
fn steps(pipe: &DataPipe) -> (Vec<Vec<(String, f64)>>, String) {
    let mut run = start(pipe);
    let steps = (0..3)
        .map(|_| decided(run.step().expect("a step")))
        .collect();
    let hash = run.versions().expect("a worker")["actor"].hash.clone();
    (steps, hash)
}

fn get(step: &[(String, f64)], name: &str) -> f64 {
    let found = step.iter().find(|(known, _)| known == name);
    found.unwrap_or_else(|| panic!("no {name} in {step:?}")).1
}

#[test]
fn the_examples_run_and_report() {
    let place = Place::new();
    for (file, pairs, more) in [
        ("dpo_addition.toml", true, &[][..]),
        ("kto_addition.toml", false, &["preference/kl"][..]),
        (
            "orpo_addition.toml",
            true,
            &["preference/chosen_nll", "preference/log_odds"],
        ),
        ("simpo_addition.toml", true, &[]),
    ] {
        let mut trainer = trainer(&example(&place, file, &SMALL)).expect("a trainer");
        for _ in 0..3 {
            let metrics = trainer.step().expect("a step");
            let both =
                pairs.then_some(["preference/reward_margins", "preference/reward_accuracies"]);
            let sides = ["chosen", "rejected"].map(|side| {
                ["rewards", "log_probs"].map(|what| format!("preference/{what}_{side}"))
            });
            let names = sides.concat().into_iter();
            let names = names.chain(
                both.into_iter()
                    .flatten()
                    .chain(more.iter().copied())
                    .map(str::to_owned),
            );
            for name in names.chain(["preference/loss".to_owned(), "actor/loss".to_owned()]) {
                let value = metrics
                    .get(&name)
                    .unwrap_or_else(|| panic!("{file}: no {name}"));
                assert!(value.is_finite(), "{file}: {name} is {value}");
            }
            assert!(
                metrics
                    .get("actor/grad_norm")
                    .is_some_and(|norm| norm > 0.0),
                "{file}"
            );
        }
        fs::remove_dir_all(place.path("run")).expect("the run's folder");
    }
}

#[test]
fn the_first_step_of_dpo_is_ln_2_and_later_ones_prefer() {
    let place = Place::new();
    // The same eight pairs in every step.
    let few = [
        "data.train={ kind = \"addition_pairs\", count = 8 }",
        "actor.optimizer.schedule={ kind = \"constant\" }",
    ];
    let pipe = example(&place, "dpo_addition.toml", &[&SMALL[..], &few].concat());
    let (steps, _) = steps(&pipe);
    let loss = get(&steps[0], "preference/loss");
    assert!((loss - 2f64.ln()).abs() < 1e-5, "{loss}");
    let margins: Vec<f64> = steps
        .iter()
        .map(|step| get(step, "preference/reward_margins"))
        .collect();
    assert!(margins[0].abs() < 1e-5, "{margins:?}");
    assert!(margins[1] > 0.0 && margins[2] > margins[1], "{margins:?}");
    let accuracy = |step: usize| get(&steps[step], "preference/reward_accuracies");
    assert!(accuracy(0) < 0.5 && accuracy(2) > 0.5, "{steps:?}");
}

#[test]
fn word_problems_are_read_from_a_file_of_pairs() {
    let place = Place::new();
    let rows: String = (1..7)
        .map(|n| {
            format!(
                "{{\"prompt\": \"{n}+{n}\", \"chosen\": [{{\"role\": \"assistant\", \"content\": \"#### {}\"}}], \"rejected\": \"{}\"}}\n",
                2 * n,
                2 * n + 1
            )
        })
        .collect();
    fs::write(place.path("pairs.jsonl"), rows).expect("a file");
    let model = root().join("examples/models/addition-base");
    let overrides = [
        format!("actor.path={}", model.display()),
        format!("ref.path={}", model.display()),
        format!("data.train={}", place.path("pairs.jsonl").display()),
        "steps=3".to_owned(),
        "batch.prompts=6".to_owned(),
        "preferences.max_prompt_tokens=16".to_owned(),
    ];
    let overrides = overrides.each_ref().map(String::as_str);
    let (steps, _) = steps(&example(&place, "dpo_gsm8k.toml", &overrides));
    // Each row once: "####", " ", the digits of 2n, and the end.
    let length = get(&steps[0], "preference/chosen_length");
    assert!((length - 26.0 / 6.0).abs() < 1e-9, "{length}");
}

#[test]
fn single_answers_train_kto() {
    let place = Place::new();
    let rows: String = (0..9)
        .map(|n| {
            format!(
                "{{\"prompt\": \"{n}+1\", \"completion\": \"#### {n}\", \"label\": {}}}\n",
                n % 3 == 0
            )
        })
        .collect();
    fs::write(place.path("rows.jsonl"), rows).expect("a file");
    let file = root().join("examples/pipelines/kto_addition.toml");
    let text = fs::read_to_string(file).expect("the example");
    let text = text.replace("[[stages]]\nkind = \"pairs\"\n", "");
    let models = root().join("examples/models/addition-base");
    let overrides = [
        format!("actor.path={}", models.display()),
        format!("ref.path={}", models.display()),
        format!("data.train={}", place.path("rows.jsonl").display()),
        "preferences.labels=label".to_owned(),
        "batch.samples=1".to_owned(),
    ];
    let overrides: Vec<&str> = overrides.iter().map(String::as_str).chain(SMALL).collect();
    let pipe = place
        .parse(&text, "run", &overrides)
        .map_err(Findings)
        .expect("a pipeline");
    let (steps, _) = steps(&pipe);
    for step in &steps {
        // It is clipped at 0, so only NaN could fail.
        assert!(get(step, "preference/kl").is_finite());
        assert!((0.0..1.0).contains(&get(step, "preference/desirable_share")));
    }
    // Policy and reference are the same at first.
    assert!(get(&steps[0], "preference/kl") < 1e-4, "{steps:?}");
}

#[test]
fn no_split_into_micro_batches_changes_a_step() {
    let place = Place::new();
    for (file, change) in [
        ("dpo_addition.toml", "update.loss.variant=sigmoid"),
        ("dpo_addition.toml", "update.loss.variant=aot"),
        ("dpo_addition.toml", "update.loss={ kind = \"cpo\" }"),
        ("kto_addition.toml", "update.loss.beta=0.2"),
        ("orpo_addition.toml", "update.loss.beta=0.2"),
        ("simpo_addition.toml", "update.loss.beta=1.5"),
    ] {
        let with = |micro: &str| {
            let own = [change, "batch.mini_batch=4", micro];
            let pipe = read(&place, file, &[&SMALL[..], &own].concat());
            steps(&pipe.map_err(Findings).expect("a pipeline")).0
        };
        let (whole, parts) = (with("batch.micro_batch=8"), with("batch.micro_batch=2"));
        for (whole, parts) in whole.iter().zip(&parts) {
            for (name, value) in whole {
                let other = get(parts, name);
                let scale = value.abs().max(1.0);
                assert!(
                    (value - other).abs() < 2e-3 * scale,
                    "{change}, {name}: {value} and {other}"
                );
            }
        }
    }
}

#[test]
fn cached_reference_log_probs_are_the_same_bits() {
    let place = Place::new();
    // Two steps per epoch, so the third finds what the first computed.
    let few = ["data.train={ kind = \"addition_pairs\", count = 16 }"];
    let with = |cache: &str| {
        let pipe = example(
            &place,
            "dpo_addition.toml",
            &[&SMALL[..], &few, &[cache]].concat(),
        );
        let mut run = start(&pipe);
        let mut shares = Vec::new();
        let steps: Vec<_> = (0..3)
            .map(|_| {
                let output = run.step().expect("a step");
                shares.extend(output.metrics.get("perf/log_probs_cached_share"));
                decided(output)
            })
            .collect();
        let hash = run.versions().expect("a worker")["actor"].hash.clone();
        (steps, hash, shares)
    };
    let (steps, hash, shares) = with("ref_log_probs.cache=true");
    assert_eq!(shares, [0.0, 0.0, 1.0]);
    let (fresh_steps, fresh_hash, none) = with("ref_log_probs.cache=false");
    assert_eq!((fresh_steps, fresh_hash), (steps, hash));
    assert_eq!(none, [0.0; 0]);
}

#[test]
fn invalid_settings_are_reported_before_the_run() {
    let place = Place::new();
    let mut text = String::new();
    for (file, changes) in [
        ("dpo_addition.toml", &["update.temperature=0.7"][..]),
        ("dpo_addition.toml", &["batch.samples=1"]),
        (
            "dpo_addition.toml",
            &["batch.samples=3", "batch.micro_batch=3"],
        ),
        ("dpo_addition.toml", &["ref_log_probs.role=old"]),
        ("dpo_addition.toml", &["update.loss.label_smoothing=0.1"]),
        (
            "kto_addition.toml",
            &["batch.mini_batch=1", "batch.micro_batch=2"],
        ),
        ("kto_addition.toml", &["update.loss.reference=actor"]),
        ("kto_addition.toml", &["batch.samples=1"]),
        ("orpo_addition.toml", &["preferences.labels=label"]),
    ] {
        let findings = match read(&place, file, changes).and_then(|pipe| pipe.plan()) {
            Ok(plan) => plan.warnings().to_vec(),
            Err(findings) => findings,
        };
        text += &format!(
            "# {file}: {}\n{}\n\n",
            changes.join(", "),
            Findings(findings)
        );
    }
    insta::assert_snapshot!("preference_refusals", text);
}

#[test]
fn sampled_responses_are_no_pairs() {
    let place = Place::new();
    let changes = [
        "update.loss={ kind = \"orpo\" }",
        "batch.samples=2",
        "batch.micro_batch=8",
    ];
    let file = "grpo_addition.toml";
    let findings = read(&place, file, &changes)
        .and_then(|pipe| pipe.plan())
        .err();
    let text = Findings(findings.expect("no labels")).to_string();
    assert!(
        text.contains("error[P002]") && text.contains("add a stage `pairs`"),
        "{text}"
    );
}
