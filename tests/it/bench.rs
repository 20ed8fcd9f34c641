//! `pipe bench` on the CPU: small work, complete output.

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
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
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
fn measurements_report_their_figures() {
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

/// The error of a command that cannot measure; it is the same with `--json`.
#[track_caller]
fn refusal(words: &str) -> String {
    let words: Vec<&str> = words.split(' ').collect();
    let output = bench(&words);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let output = bench(&[&words[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let part = |name: &str| json["error"][name].as_str().unwrap_or_default();
    assert_eq!(
        text,
        format!("error: {}\n  help: {}\n", part("message"), part("help"))
    );
    text
}

#[test]
fn unknown_names_are_reported() {
    insta::assert_snapshot!(refusal("train --model huge"), @r"
    error: `huge` is neither a model folder nor a shape
      help: set `--model` to a folder or to one of tiny, smollm2-135m, qwen2.5-0.5b
    ");
    insta::assert_snapshot!(refusal("check --model huge"), @"
    error: model folder `huge` does not exist
      help: set `--model` to a Hugging Face folder with the config.json of a supported family and all weights in safetensors
    ");
    insta::assert_snapshot!(refusal("train --model src"), @"
    error: cannot read `src/config.json`: No such file or directory (os error 2)
      help: set `--model` to a Hugging Face folder with the config.json of a supported family and all weights in safetensors
    ");
    insta::assert_snapshot!(refusal("kernels --dtype bf16"), @r"
    error: there are no fused operations in bf16 on this device
      help: measure with `--dtype f32`
    ");
    let error = refusal("check --device gpu");
    assert!(
        error.starts_with("error: unknown device `gpu`; use "),
        "{error}"
    );
    assert!(error.ends_with("help: set `--device` to an available device\n"));
}

#[test]
fn sizes_of_nothing_are_refused() {
    for words in [
        "rollout --sequences",
        "rollout --prompt",
        "rollout --new",
        "rollout --samples",
        "rollout --runs",
        "train --rows",
        "train --tokens",
        "train --micro",
        "train --runs",
        "step --prompts",
        "step --samples",
        "step --prompt",
        "step --new",
        "step --micro",
        "step --runs",
        "kernels --tokens",
        "kernels --sequence",
        "kernels --parameters",
        "kernels --runs",
    ] {
        let option = words.split(' ').next_back().unwrap_or_default();
        let error = refusal(&format!("{words} 0"));
        assert!(
            error.starts_with(&format!("error: `{option}` is 0, but")),
            "{error}"
        );
    }
    insta::assert_snapshot!(refusal("train --rows 0"), @"
    error: `--rows` is 0, but must be at least 1
      help: set `--rows` to 1 or more
    ");
    insta::assert_snapshot!(refusal("step --beta NaN"), @"
    error: `--beta` is NaN, but must be from 0 to 1000000
      help: set `--beta` to 0 for a step without a reference, or to a weight such as 0.04
    ");
}

#[test]
fn lengths_beyond_the_context_are_refused() {
    insta::assert_snapshot!(refusal("rollout --prompt 500 --new 13"), @"
    error: a prompt of 500 and a response of 13 are 513 tokens, but the model's context is limited to 512
      help: reduce `--prompt` or `--new`, or measure a model with a longer context
    ");
    insta::assert_snapshot!(refusal("train --tokens 512"), @"
    error: a row of 512 and the token before it are 513 tokens, but the model's context is limited to 512
      help: reduce `--tokens`, or measure a model with a longer context
    ");
    for most in ["1000000000", "18446744073709551615"] {
        for words in [
            "rollout --prompt",
            "rollout --mixed --new",
            "step --prompt",
            "step --new",
            "train --mixed --tokens",
        ] {
            let error = refusal(&format!("{words} {most}"));
            assert!(
                error.contains("but the model's context is limited to 512"),
                "{error}"
            );
        }
    }
}

// On other systems the size of the memory is unknown.
#[cfg(target_os = "linux")]
#[test]
fn work_that_does_not_fit_into_memory_is_rejected() {
    // More than any machine has.
    for (words, option) in [
        ("rollout --mixed --sequences", "--sequences"),
        ("train --mixed --rows", "--rows"),
        ("train --rows 18446744073709551615 --micro", "--rows"),
        ("train --rows 1000000 --tokens 500 --micro", "--micro"),
        ("step --prompts", "--prompts` or `--samples"),
        ("step --samples", "--prompts` or `--samples"),
        ("kernels --tokens", "--tokens"),
        ("kernels --sequence", "--sequence"),
        ("kernels --parameters", "--parameters"),
    ] {
        for most in ["1000000000000", "18446744073709551615"] {
            let error = refusal(&format!("{words} {most}"));
            assert!(error.contains(" would need at least "), "{error}");
            assert!(
                error.ends_with(&format!("help: reduce `{option}`\n")),
                "{error}"
            );
        }
    }
}
