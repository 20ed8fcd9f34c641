//! Errors about settings of a wrong type, and about settings named as in other trainers, use a user's words.

use std::path::Path;

use serde_json::{Map, Value, json};
use verl_declare::chain::IntoStage;
use verl_declare::registry::Registry;
use verl_pipe::config::{parse_pipeline, read_pipeline};
use verl_pipe::plan::Plannable;
use verl_pipe::schema::pipeline_schema;
use verl_words::diagnostic::{Diagnostic, Findings};

use super::register;

/// Values of which at least one has the wrong type for any setting.
fn wrong() -> Vec<Value> {
    vec![
        json!("x"),
        json!(-1),
        json!(1.5),
        json!(1e30),
        json!(true),
        json!([]),
        json!(["x"]),
        json!([1, "x", 2.5]),
        json!({}),
        json!({ "x": 1 }),
        json!({ "kind": 3 }),
    ]
}

/// Every wrong value for what `schema` describes, and tables and lists that contain one.
fn cases(schema: &Value, root: &Value, depth: usize) -> Vec<Value> {
    let mut all = wrong();
    if depth == 0 {
        return all;
    }
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.trim_start_matches("#/$defs/");
        return cases(&root["$defs"][name], root, depth);
    }
    for choices in ["anyOf", "oneOf", "allOf"] {
        for choice in schema[choices].as_array().into_iter().flatten() {
            all.extend(cases(choice, root, depth));
        }
    }
    let kind = schema["properties"]["kind"]["const"].as_str();
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        for case in cases(property, root, depth - 1) {
            let mut table = Map::new();
            if let Some(kind) = kind {
                table.insert("kind".to_owned(), kind.into());
            }
            table.insert(name.clone(), case);
            all.push(Value::Object(table));
        }
    }
    if schema["items"].is_object() {
        let inner = cases(&schema["items"], root, depth - 1);
        all.extend(inner.into_iter().map(|case| json!([case])));
    }
    all
}

/// Words of the deserialiser and of Rust, which mean nothing to a user.
const JARGON: [&str; 22] = [
    "untagged",
    "tagged",
    "struct",
    "enum",
    "variant",
    "newtype",
    "tuple",
    "unit",
    "borrowed",
    "deserialize",
    "usize",
    "u64",
    "u32",
    "u8",
    "i64",
    "f64",
    "f32",
    "map",
    "sequence",
    "null",
    "Option",
    "serde",
];

/// The words of the deserialiser in a finding.
fn jargon(finding: &Diagnostic) -> Vec<&'static str> {
    let text = format!("{}\n{}", finding.what, finding.why);
    // Names and values of the file are between backticks.
    let plain: Vec<&str> = text.split('`').step_by(2).collect();
    let plain = plain.join(" ");
    let words: Vec<&str> = plain
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .collect();
    JARGON
        .into_iter()
        .filter(|word| words.contains(word))
        .collect()
}

/// The findings of a document with one wrong value.
fn findings(document: &Value, registry: &Registry) -> Vec<Diagnostic> {
    let text = toml::to_string(document).expect("TOML");
    let read = parse_pipeline::<&str>(&text, "file", &[], registry);
    read.err().unwrap_or_default()
}

#[test]
fn no_error_about_a_setting_uses_the_words_of_the_deserialiser() {
    let registry = register(Registry::new());
    let schema = pipeline_schema(&registry);
    let mut documents = Vec::new();
    for section in ["run", "batch", "devices", "trace"] {
        let cases = cases(&schema["properties"][section], &schema, 3);
        documents.extend(cases.into_iter().map(|case| json!({ section: case })));
    }
    let definitions = schema["$defs"].as_object().expect("definitions");
    for (definition, kind) in definitions {
        let Some((sort, _)) = definition.split_once('_') else {
            continue;
        };
        let Some(name) = kind["properties"]["kind"]["const"].as_str() else {
            continue;
        };
        for (setting, property) in kind["properties"].as_object().expect("settings") {
            for case in cases(property, &schema, 2) {
                let mut table = json!({ "kind": name, "path": "x" });
                if !kind["properties"]["path"].is_object() {
                    table = json!({ "kind": name });
                }
                table[setting] = case;
                documents.push(match sort {
                    "stage" => json!({ "stages": [table] }),
                    "model" => json!({ "models": { "actor": table } }),
                    "data" => json!({ "data": { "train": table } }),
                    _ => continue,
                });
            }
        }
    }
    assert!(documents.len() > 10_000, "{}", documents.len());
    let (mut unclear, mut refused) = (Vec::new(), 0);
    for document in &documents {
        let found = findings(document, &registry);
        refused += usize::from(!found.is_empty());
        for finding in found {
            let words = jargon(&finding);
            if !words.is_empty() && unclear.len() < 20 {
                unclear.push(format!("{document}: {words:?}\n{finding}"));
            }
        }
    }
    assert!(unclear.is_empty(), "{}", unclear.join("\n\n"));
    // Each setting takes values of one type, or of two.
    assert!(
        refused * 2 > documents.len(),
        "{refused} of {}",
        documents.len()
    );
}

/// The warnings or errors of the addition example with an override.
fn report(change: &str) -> String {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/pipelines/grpo_addition.toml");
    let registry = register(Registry::new());
    match read_pipeline(&file, &[change], &registry).and_then(|pipe| pipe.plan()) {
        Ok(plan) => Findings(plan.warnings().to_vec()).to_string(),
        Err(findings) => Findings(findings).to_string(),
    }
}

/// Row A18, and item 13 of part 3, of the usability findings.
#[test]
fn names_from_other_trainers_suggest_the_setting() {
    for (change, expected) in [
        ("actor.optimizer.lr=1e-4", "did you mean `learning_rate`?"),
        (
            "lr=1e-4",
            "`lr` is called `learning_rate` here, in [models.NAME.optimizer]",
        ),
        (
            "learning_rate=1e-4",
            "`learning_rate` belongs in [models.NAME.optimizer]",
        ),
        (
            "actor.learning_rate=1e-4",
            "`learning_rate` belongs in [models.NAME.optimizer]",
        ),
        ("generate.temprature=1", "did you mean `temperature`?"),
        ("generate.max_length=9", "did you mean `max_new_tokens`?"),
        ("generate.max_tokens=9", "did you mean `max_new_tokens`?"),
        (
            "generate.num_generations=9",
            "`num_generations` is called `samples` here, in [batch]",
        ),
        ("batch.num_generations=9", "did you mean `samples`?"),
        (
            "batch.per_device_train_batch_size=9",
            "did you mean `prompts`?",
        ),
        (
            "batch.gradient_accumulation_steps=9",
            "did you mean `micro_batch`?",
        ),
        ("max_steps=9", "did you mean `steps`?"),
        ("run.output_dir=x", "did you mean `dir`?"),
        ("update.loss.beta=0.1", "did you mean `kl_coef`?"),
        ("update.loss.cliprange=0.1", "did you mean `clip_low`?"),
        (
            "actor.optimizer.warmup_ratio=0.1",
            "is called `warmup_steps` here, in the `schedule`",
        ),
        (
            "actor.optimizer.lr_scheduler_type=cosine",
            "did you mean `schedule`?",
        ),
        ("actor.torch_dtype=bf16", "did you mean `dtype`?"),
        (
            "actor.gradient_checkpointing=true",
            "did you mean `recompute`?",
        ),
    ] {
        let text = report(change);
        assert!(
            text.contains(expected),
            "`{change}`: `{expected}` is not in\n{text}"
        );
    }
}

#[test]
fn the_name_of_a_kind_selects_its_defaults() {
    for change in [
        "actor.optimizer.schedule=cosine",
        "actor.optimizer.schedule=constant",
        "actor.optimizer={ learning_rate = 1e-4, schedule = \"linear\" }",
        "advantages.estimator=rloo",
        "advantages.kl_control=fixed",
    ] {
        assert_eq!(report(change), "", "{change}");
    }
    for (change, expected) in [
        ("actor.optimizer.schedule=cosin", "did you mean `cosine`?"),
        (
            "actor.optimizer={ learning_rate = 1e-4, schedule = 7 }",
            "expected a table such as `{ kind = \"constant\" }`",
        ),
        (
            "actor.optimizer.schedule={ kind = \"linear\", warmup_steps = \"x\" }",
            "invalid value for `optimizer.schedule.warmup_steps`",
        ),
        (
            "actor.optimizer.schedule={ kind = \"linear\", warmup_steps = -1 }",
            "expected a non-negative integer",
        ),
        ("actor.optimizer.betas=0.9", "expected a list of 2 numbers"),
        (
            "actor.optimizer.betas=[0.9]",
            "expected a list of 2 numbers",
        ),
        ("actor.optimizer=adamw", "`optimizer` is a table"),
        ("generate.stop=x", "expected a list of strings"),
        ("reward.rule=3", "expected one of"),
    ] {
        let text = report(change);
        assert!(
            text.contains(expected),
            "`{change}`: `{expected}` is not in\n{text}"
        );
    }
}

/// Row 8: batch sizes that give four optimiser steps per step, and a schedule that assumes one.
#[test]
fn a_schedule_covers_the_optimiser_steps_of_the_run() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/pipelines/grpo_addition.toml");
    let plan = |more: &[&str]| {
        let small = [
            "steps=4",
            "batch.prompts=4",
            "batch.mini_batch=1",
            "batch.micro_batch=8",
        ];
        let overrides = [&small, more].concat();
        let registry = register(Registry::new());
        let pipe = read_pipeline(&file, &overrides, &registry).expect("a pipeline");
        // Without old log-probs only the first of the four would be on policy.
        let pipe = pipe.add_stage("old_log_probs", super::log_probs::LogProbs::default());
        pipe.plan().map_err(Findings).expect("a plan")
    };
    let found = plan(&["actor.optimizer.schedule={ kind = \"linear\", total_steps = 4 }"]);
    let text = Findings(found.warnings().to_vec()).to_string();
    for words in [
        "warning[C008]: setting `optimizer.schedule.total_steps`",
        "is 4,",
        "takes 16 optimiser steps",
        "set it to 16",
    ] {
        assert!(text.contains(words), "`{words}` is not in\n{text}");
    }
    let found = plan(&["actor.optimizer.schedule=linear"]);
    assert_eq!(Findings(found.warnings().to_vec()).to_string(), "");
    let schedule = &found.pipe().models[0].config["optimizer"]["schedule"];
    assert_eq!(schedule["total_steps"], 16);
    assert!(
        found.to_string().contains("linear over 16 steps"),
        "{found}"
    );
    let more = [
        "actor.optimizer.schedule=linear",
        "batch.epochs=2",
        "update.warmup_steps=1",
    ];
    assert_eq!(plan(&more).context().optimizer_steps["actor"], 3 * 4 * 2);
}

/// With two sampling stages, each scoring stage uses the temperature of the one whose responses it reads.
#[test]
fn a_stage_uses_the_temperature_of_its_own_responses() {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/pipelines/grpo_addition.toml");
    let registry = register(Registry::new());
    let pipe = read_pipeline(&file, &["generate.temperature=0.7"], &registry);
    let keys = [
        "responses",
        "response_texts",
        "mask_kinds",
        "finish_reasons",
        "sampling_log_probs",
        "rollout_log_probs",
    ];
    let warmer = super::generate::Generate {
        temperature: 1.3,
        max_new_tokens: 12,
        ..super::generate::Generate::default()
    };
    let warmer = keys.iter().fold(warmer.named("warmer"), |stage, key| {
        stage.writing(*key, format!("warm_{key}"))
    });
    let reference = super::log_probs::LogProbs {
        model: "ref".to_owned(),
        role: super::log_probs::Role::Reference,
        ..super::log_probs::LogProbs::default()
    };
    let scores = reference
        .named("warm_scores")
        .reading("responses", "warm_responses")
        .writing("ref_log_probs", "warm_ref_log_probs");
    let pipe = pipe.map_err(Findings).expect("a pipeline");
    let plan = pipe
        .add_stage("warmer", warmer)
        .add_stage("warm_scores", scores)
        .plan()
        .map_err(Findings)
        .expect("a plan");
    let temperature = |key: &str| {
        let tag = plan.fields()[key].tag.as_ref().expect("a tag");
        tag.temperature.expect("a temperature")
    };
    assert_eq!(temperature("ref_log_probs"), 0.7);
    assert_eq!(temperature("warm_ref_log_probs"), 1.3);
}
