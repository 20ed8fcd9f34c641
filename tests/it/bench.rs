//! `pipe bench` on the CPU: small work, whole answers.

use std::process::{Command, Output};

use serde_json::Value;

use crate::kit::root;

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pipe"))
        .arg("bench")
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("the executable starts")
}

#[track_caller]
fn json(arguments: &[&str]) -> Value {
    let output = bench(arguments);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

#[test]
fn a_folder_on_the_cpu_agrees_with_itself() {
    let folder = "examples/models/addition-base";
    let answer = json(&["check", "--model", folder, "--dtype", "f32", "--json"]);
    assert_eq!(answer["holds"], true);
    let distances = answer["distances"].as_array().expect("a list");
    assert!(distances.len() >= 12);
    for distance in distances {
        assert_eq!(distance["subject"], "addition-base");
        assert_eq!(distance["holds"], true, "{distance}");
    }
}

#[test]
fn measurements_tell_their_figures() {
    let small = ["--runs", "1", "--json"];
    let train = [
        "train", "--rows", "2", "--tokens", "12", "--micro", "1", "--mixed",
    ];
    let rollout = [
        "rollout",
        "--sequences",
        "3",
        "--prompt",
        "4",
        "--new",
        "3",
        "--mixed",
    ];
    let step = [
        "step",
        "--prompts",
        "2",
        "--samples",
        "2",
        "--prompt",
        "3",
        "--new",
        "4",
        "--beta",
        "0.1",
    ];
    for work in [&train[..], &rollout, &step] {
        let answer = json(&[work, &small].concat());
        assert_eq!(answer["model"], "tiny");
        assert_eq!(answer["dtype"], "f32");
        assert_eq!(answer["device"]["name"], "CPU");
        assert!(answer["start"]["load_ms"].is_f64() && answer["start"]["kernels"].is_null());
        let figures = &answer["figures"];
        assert!(
            figures["tokens_per_s"].as_f64().is_some_and(|x| x > 0.0),
            "{answer}"
        );
        assert!(
            figures["ceilings"]["copy_gb_s"]
                .as_f64()
                .is_some_and(|x| x > 0.0)
        );
    }
}

#[test]
fn kernels_have_their_shares() {
    let small = "kernels --tokens 12 --sequence 4 --parameters 1000 --runs 1";
    let small: Vec<&str> = small.split(' ').collect();
    let answer = json(&[&small[..], &["--json"][..]].concat());
    let kernels = answer["figures"]["kernels"].as_array().expect("a list");
    let named = |name: &str| kernels.iter().find(|own| own["name"] == name);
    let product = named("product: gate, up").expect("there is one");
    assert!(product["matrix_share"].as_f64().is_some_and(|x| x > 0.0));
    let norm = named("norm").expect("there is one");
    assert!(norm["bandwidth_share"].as_f64().is_some_and(|x| x > 0.0));
    assert!(norm["matrix_share"].is_null());
    let output = bench(&small);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let lines = text.lines().filter(|line| line.contains(" ms "));
    assert_eq!(lines.count(), kernels.len(), "{text}");
}

#[test]
fn what_is_not_there_is_told() {
    let told = |arguments: &[&str]| {
        let output = bench(arguments);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    insta::assert_snapshot!(
        told(&["train", "--model", "huge"]),
        @"error: `huge` is neither a model folder nor a shape; shapes: tiny, smollm2-135m, qwen2.5-0.5b"
    );
    insta::assert_snapshot!(
        told(&["train", "--rows", "0"]),
        @"error: `rows` is 0, but must be at least 1"
    );
    insta::assert_snapshot!(
        told(&["kernels", "--dtype", "bf16"]),
        @"error: there are no fused operations in bf16 on this device; measure in f32"
    );
    assert!(told(&["check", "--device", "gpu"]).starts_with("error: device `gpu` is not known"));
}
