//! The pipeline file: reading it, writing it back, its schema, and the commands that read it.

use std::fs;

use crate::kit::*;
use serde_json::{Value, json};
use verl_pipe::cli::check::CheckArgs;
use verl_pipe::cli::schema::SchemaArgs;
use verl_pipe::cli::{self, PipelineArgs};
use verl_pipe::config::{parse_pipeline, read_pipeline, to_toml};
use verl_pipe::pipe::DataPipe;
use verl_pipe::plan::Plannable;
use verl_pipe::schema::pipeline_schema;

const GRPO: &str = r#"
name = "grpo"

[run]
seed = 3
steps = 20
dir = "runs/x"

[batch]
prompts = 4
samples = 2

[data]
train = "questions.jsonl"
another = { kind = "questions", path = "more.txt" }

[models.reference]
path = "base"

[models.actor]
kind = "decoder"
path = "base"
[models.actor.optimizer]
learning_rate = 1e-6

[[stages]]
kind = "update"

[[stages]]
kind = "prompts"

[[stages]]
kind = "generate"
max_new_tokens = 8

[[stages]]
kind = "reward"
rename = { rewards = "scores" }

[[stages]]
kind = "log_probs"
name = "old"

[[stages]]
kind = "advantages"
rename = { rewards = "scores" }
"#;

fn parse(text: &str, overrides: &[&str]) -> DataPipe {
    parse_pipeline(text, "grpo.toml", overrides, &registry()).expect("a pipeline")
}

fn config<'a>(pipe: &'a DataPipe, stage: &str) -> &'a Value {
    &pipe
        .stages
        .iter()
        .find(|decl| decl.name == stage)
        .expect("the stage")
        .config
}

#[test]
fn a_file_declares_a_pipeline() {
    let pipe = parse(GRPO, &[]);
    assert_eq!(
        (
            pipe.name.as_str(),
            pipe.run.seed,
            pipe.run.steps,
            pipe.batch.samples
        ),
        ("grpo", 3, 20, 2)
    );
    // In the order of the file.
    let models: Vec<&str> = pipe
        .models
        .iter()
        .map(|model| model.name.as_str())
        .collect();
    assert_eq!(models, ["reference", "actor"]);
    let data: Vec<(&str, &Value)> = pipe
        .data
        .iter()
        .map(|data| (data.name.as_str(), &data.config))
        .collect();
    assert_eq!(
        data,
        [
            ("train", &json!({"path": "questions.jsonl"})),
            ("another", &json!({"path": "more.txt"}))
        ]
    );
    assert_eq!(
        *config(&pipe, "generate"),
        json!({"model": "actor", "temperature": 1.0, "max_new_tokens": 8})
    );
    let plan = pipe.plan().expect("a plan");
    let names: Vec<&str> = plan.stages().iter().map(|stage| stage.name()).collect();
    assert_eq!(
        names,
        [
            "prompts",
            "generate",
            "reward",
            "old",
            "advantages",
            "update"
        ]
    );
    assert_eq!(
        plan.fields()["scores"].meaning,
        "one reward per response; null if it could not be scored"
    );
}

#[test]
fn overrides_reach_run_models_data_and_stages() {
    let pipe = parse(
        GRPO,
        &[
            "seed=5",
            "steps=10",
            "run.dir=elsewhere",
            "actor.path=DIR",
            "actor.optimizer.learning_rate=0.5",
            "data.train=other.jsonl",
            "generate.temperature=0.7",
            "old.temperature=0.7",
            "batch.prompts=16",
        ],
    );
    assert_eq!(
        (pipe.run.seed, pipe.run.steps, pipe.batch.prompts),
        (5, 10, 16)
    );
    assert_eq!(pipe.run.dir.to_str(), Some("elsewhere"));
    assert_eq!(
        pipe.models[1].config,
        json!({"path": "DIR", "optimizer": {"learning_rate": 0.5}})
    );
    assert_eq!(pipe.data[0].config, json!({"path": "other.jsonl"}));
    assert_eq!(config(&pipe, "generate")["temperature"], json!(0.7));
    assert_eq!(config(&pipe, "old")["temperature"], json!(0.7));
}

#[test]
fn the_resolved_file_gives_the_same_pipeline() {
    let pipe = parse(GRPO, &["generate.temperature=0.7"]);
    let text = to_toml(&pipe).expect("a file");
    insta::assert_snapshot!("resolved", text);
    let again = parse(&text, &[]);
    assert_eq!(to_toml(&again).expect("a file"), text);
    let whole = |pipe: &DataPipe| {
        let stages: Vec<_> = pipe
            .stages
            .iter()
            .map(|stage| {
                (
                    stage.name.clone(),
                    stage.config.clone(),
                    stage.rename.clone(),
                )
            })
            .collect();
        (
            pipe.run.clone(),
            pipe.batch.clone(),
            pipe.devices.clone(),
            stages,
        )
    };
    assert_eq!(whole(&again), whole(&pipe));
}

#[test]
fn paths_are_resolved_against_the_folder_of_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("grpo.toml");
    fs::write(&path, GRPO).expect("a file");
    let pipe = read_pipeline::<&str>(&path, &[], &registry()).expect("a pipeline");
    assert_eq!(pipe.base, folder.path());
    assert_eq!(pipe.plan().expect("a plan").context().base, folder.path());
}

#[test]
fn the_schema_agrees_with_the_reader() {
    let schema = pipeline_schema(&registry());
    let validator = jsonschema::draft202012::new(&schema).expect("a schema");
    assert!(jsonschema::meta::is_valid(&schema));
    let value = |text: &str| -> Value {
        toml::from_str::<toml::Table>(text)
            .map(|table| json!(table))
            .expect("TOML")
    };
    let good = value(GRPO);
    assert!(
        validator.is_valid(&good),
        "{:?}",
        validator
            .iter_errors(&good)
            .map(|e| e.to_string())
            .collect::<Vec<_>>()
    );
    assert!(validator.is_valid(&value(&to_toml(&parse(GRPO, &[])).expect("a file"))));
    for (from, to) in [
        ("seed = 3", "sede = 3"),
        ("steps = 20", "steps = \"20\""),
        ("max_new_tokens", "max_new_tokns"),
        ("kind = \"prompts\"", "kind = \"prompt\""),
        ("learning_rate", "rate"),
        ("{ rewards = \"scores\" }", "{ rewards = 3 }"),
        ("[data]", "[dta]"),
    ] {
        let text = GRPO.replacen(from, to, 1);
        assert_ne!(text, GRPO);
        assert!(!validator.is_valid(&value(&text)), "{from} -> {to}");
        assert!(
            parse_pipeline::<&str>(&text, "grpo.toml", &[], &registry()).is_err(),
            "{from} -> {to}"
        );
    }
}

fn run(command: impl FnOnce(&mut Vec<u8>) -> std::io::Result<u8>) -> (u8, String) {
    let mut out = Vec::new();
    let code = command(&mut out).expect("writes");
    (code, String::from_utf8(out).expect("text"))
}

#[test]
fn commands_print_and_set_the_exit_code() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("grpo.toml");
    fs::write(&file, GRPO).expect("a file");
    let args = |overrides: &[&str]| PipelineArgs {
        file: file.clone(),
        overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
    };
    let registry = registry();
    let checked = |overrides: &[&str], json| CheckArgs {
        pipeline: args(overrides),
        rows: 0,
        json,
    };

    let (code, text) = run(|out| cli::check::check(&checked(&[], false), &registry, out));
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("warning[P011]: no stage uses the model `reference`"),
        "{text}"
    );
    assert!(
        text.ends_with(
            "0 errors, 1 warning\ngrpo: 6 stages, 8 samples a step, 1 optimiser step a step\n"
        ),
        "{text}"
    );

    let (code, text) = run(|out| {
        cli::check::check(
            &checked(&["old.temperature=0.7", "batch.micro_batch=3"], false),
            &registry,
            out,
        )
    });
    assert_eq!(code, 1);
    assert!(
        text.contains("error[P007]") && text.contains("error[S001]"),
        "{text}"
    );
    assert!(text.ends_with("2 errors, 1 warning\n"), "{text}");

    let (code, text) = run(|out| cli::check::check(&checked(&[], true), &registry, out));
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((code, &answer["samples_a_step"]), (0, &Value::from(8)));
    assert_eq!(answer["warnings"][0]["code"], "P011");

    let plan = |dot| cli::plan::PlanArgs {
        pipeline: args(&[]),
        dot,
        json: false,
    };
    let as_json = cli::plan::PlanArgs {
        json: true,
        ..plan(false)
    };
    let (code, text) = run(|out| cli::plan::plan(&as_json, &registry, out));
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((code, &answer["batch"]["rows"]), (0, &Value::from(8)));
    assert_eq!(answer["stages"].as_array().map(Vec::len), Some(6));
    let (code, text) = run(|out| cli::plan::plan(&plan(false), &registry, out));
    assert_eq!(code, 0);
    assert!(
        text.starts_with("pipeline grpo: 6 stages, 2 models, 2 data sets, 20 steps\n"),
        "{text}"
    );
    let (_, text) = run(|out| cli::plan::plan(&plan(true), &registry, out));
    assert!(
        text.starts_with("digraph \"grpo\" {") && text.contains("[label=\"scores\"]"),
        "{text}"
    );

    let (code, text) = run(|out| cli::schema::schema(&SchemaArgs::default(), &registry, out));
    assert_eq!(code, 0);
    let schema: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        schema["$schema"],
        "https://json-schema.org/draft/2020-12/schema"
    );
}
