//! Where two runs diverge: in the inputs of a stage, or in its outputs.

use std::fs;

use serde_json::{Value, json};

use crate::debug::{json_of, pipe_debug, recorded};
use crate::kit::Place;

#[test]
fn other_rows_of_data_are_inputs_that_differ() {
    let place = Place::new();
    let first = recorded(&place, "first", &[]);
    let second = recorded(&place, "second", &["seed=6"]);
    let (code, text) = pipe_debug(&format!("diff {first} {second}"));
    assert_eq!(code, 1, "{text}");
    assert!(text.starts_with("setting run.seed: 5 | 6\n"), "{text}");
    // Weights are also drawn from the seed.
    let expected = "the runs diverge in step 1, stage `prompts`, weights of `actor`\n";
    assert!(text.contains(expected), "{text}");
    assert!(
        text.contains("\n  inputs differ: the runs began with different weights\n"),
        "{text}"
    );

    // The same weights, and fewer prompts.
    let first = recorded(&place, "third", &[]);
    let second = recorded(&place, "fourth", &["batch.prompts=2"]);
    let (code, text) = pipe_debug(&format!("diff {first} {second}"));
    assert_eq!(code, 1, "{text}");
    assert!(text.starts_with("setting batch.prompts: 4 | 2\n"), "{text}");
    let expected = "\n  inputs differ: its rows come from outside, different rows were drawn; its settings differ\n";
    assert!(
        text.contains("stage `prompts`, key `sample_id`") && text.contains(expected),
        "{text}"
    );
    let found = json_of(&format!("diff {first} {second} --json"));
    assert_eq!(found["stats"]["cause"], "source");
}

#[test]
fn another_model_is_an_input_that_differs() {
    let place = Place::new();
    let first = recorded(&place, "first", &[]);
    let path = place.path("tiny/config.json");
    let text = fs::read_to_string(&path).expect("a file");
    let mut config: Value = serde_json::from_str(&text).expect("a document");
    config["initializer_range"] = json!(0.25);
    fs::write(&path, config.to_string()).expect("a file");
    let second = recorded(&place, "second", &[]);
    let (code, text) = pipe_debug(&format!("diff {first} {second}"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.starts_with("the runs diverge in step 1, stage `prompts`, weights of `actor`\n"),
        "{text}"
    );
    assert!(
        text.contains("\n  inputs differ: the runs began with different weights\n"),
        "{text}"
    );
    // The table follows the first key that differs.
    assert!(text.contains("  of generate.responses  "), "{text}");
    assert!(text.contains(" differ"), "{text}");
}

#[test]
fn different_outputs_are_distinguished_from_different_inputs() {
    let place = Place::new();
    let first = recorded(&place, "first", &[]);
    let second = recorded(&place, "second", &["advantages.estimator=rloo"]);
    let (code, text) = pipe_debug(&format!("diff {first} {second}"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("the runs diverge in step 1, stage `advantages`, key `advantages`"),
        "{text}"
    );
    assert!(
        text.contains("\n  same inputs, different outputs\n"),
        "{text}"
    );
    // If the writer is not recorded, the reader's input is the first difference.
    let only = |name: &str, estimator: &str| {
        let only = [
            "trace.stages=[\"update\"]",
            "trace.weights=hash",
            "trace.ring_steps=0",
        ];
        recorded(&place, name, &[&only[..], &[estimator]].concat())
    };
    let first = only("third", "advantages.estimator=grpo");
    let second = only("fourth", "advantages.estimator=rloo");
    let (_, text) = pipe_debug(&format!("diff {first} {second}"));
    assert!(
        text.contains("the runs diverge in step 1, stage `update`, input key `advantages`"),
        "{text}"
    );
    assert!(text.contains("\n  inputs differ\n"), "{text}");
}

#[test]
fn settings_and_machine_that_differ_come_first() {
    let place = Place::new();
    let first = recorded(&place, "first", &[]);
    let second = recorded(&place, "second", &["batch.micro_batch=4"]);
    let path = place.path("second/trace/conditions.json");
    let text = fs::read_to_string(&path).expect("a file");
    let mut conditions: Value = serde_json::from_str(&text).expect("a document");
    conditions["machine"]["threads"] = 99.into();
    fs::write(&path, conditions.to_string()).expect("a file");
    let (_, text) = pipe_debug(&format!("diff {first} {second}"));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "setting batch.micro_batch: 8 | 4", "{text}");
    assert!(
        lines[1].starts_with("machine threads: ") && lines[1].ends_with(" | 99"),
        "{text}"
    );
}

#[test]
fn one_step_is_one_step() {
    let place = Place::new();
    let first = recorded(&place, "first", &[]);
    let second = recorded(&place, "second", &["steps=2"]);
    let (_, text) = pipe_debug(&format!("diff {first} {second}"));
    assert!(
        text.contains("note: 1 step is recorded in one of the runs only\n"),
        "{text}"
    );
}

/// P3-9: token ids, masks and flags have no mean and no distance, so only the number of differences is reported.
#[test]
fn p3_9_identifiers_are_counted_and_not_averaged() {
    let place = Place::new();
    // Row by row: another temperature draws other tokens.
    let first = recorded(&place, "first", &[]);
    let other = [
        "generate.temperature=0.5",
        "update.temperature=0.5",
        "ref_log_probs.temperature=0.5",
        "old_log_probs.temperature=0.5",
    ];
    let second = recorded(&place, "second", &other);
    let (code, text) = pipe_debug(&format!("diff {first} {second}"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("the runs diverge in step 1, stage `generate`, key `responses`"),
        "{text}"
    );
    assert!(text.contains("  of generate.responses  "), "{text}");
    for wrong in ["mean |Δ|", "mean of generate.responses", "distance"] {
        assert!(!text.contains(wrong), "{wrong}: {text}");
    }
    let found = json_of(&format!("diff {first} {second} --json"));
    let stages = found["steps"][0]["stages"].as_array().expect("stages");
    let generate = stages.iter().find(|stage| stage["stage"] == "generate");
    let keys = generate.expect("the stage")["keys"]
        .as_array()
        .expect("keys");
    for key in keys {
        let name = key["key"].as_str().expect("a name");
        let is_identifier = !name.ends_with("log_probs");
        assert_eq!(key["is_identifier"], is_identifier, "{name}");
        assert_eq!(key["mean"].is_null(), is_identifier, "{name}");
    }

    // Only by their hashes.
    let lean = |name: &str, more: &[&str]| {
        place.train(name, &[&["trace.ring_steps=0"], more].concat());
        place.path(name).display().to_string()
    };
    let (first, second) = (lean("third", &[]), lean("fourth", &other));
    let (code, text) = pipe_debug(&format!("diff {first} {second}"));
    assert_eq!(code, 1, "{text}");
    let columns = "step  keys that differ  generate.responses  values in the first  in the second";
    assert!(text.contains(columns), "{text}");
    assert!(text.contains("  differs "), "{text}");
    assert!(!text.contains("mean"), "{text}");
}
