//! What is trained and what is dropped, in complete runs of the executable.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::kit::{Place, root};

/// Supervised training on conversations of the tiny model.
const SFT: &str = r#"
name = "sft"
[run]
seed = 5
steps = 2
[batch]
prompts = 4
[data]
train = "rows.jsonl"
[models.actor]
path = "tiny"
init = "random"
optimizer = { learning_rate = 1e-3 }
[[stages]]
kind = "prompts"
with_targets = true
[[stages]]
kind = "update"
loss = { kind = "sft" }
"#;

/// Runs a pipeline file of `place`; returns whether it succeeded, and what it printed.
fn train(place: &Place, text: &str, run: &str, more: &[&str]) -> (bool, String) {
    let file = place.path("pipeline.toml");
    fs::write(&file, text).expect("a file");
    let ran = Command::new(env!("CARGO_BIN_EXE_pipe"))
        .arg("train")
        .arg(&file)
        .arg(format!("run.dir={}", place.path(run).display()))
        .args(more)
        .output()
        .expect("the executable runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (ran.status.success(), text(&ran.stdout) + &text(&ran.stderr))
}

fn write_rows(place: &Place, rows: impl Iterator<Item = serde_json::Value>) {
    let lines: String = rows.map(|row| format!("{row}\n")).collect();
    fs::write(place.path("rows.jsonl"), lines).expect("a file");
}

/// `count` sums; those with the numbers `long` (from 1) do not fit into the model's context.
fn sums(place: &Place, count: usize, long: &[usize]) {
    write_rows(
        place,
        (1..=count).map(|row| {
            let question = match long.contains(&row) {
                true => "1+".repeat(50) + "1",
                false => "1+1".to_owned(),
            };
            json!({"question": question, "answer": "#### 2"})
        }),
    );
}

/// User report, part 2: "a long prompt with `on_long = "error"` in row 150".
#[test]
fn a_long_prompt_in_row_150_is_reported_before_the_first_step() {
    let place = Place::new();
    sums(&place, 160, &[150]);
    let (ended_well, log) = train(&place, SFT, "error", &["prompts.on_long=error"]);
    assert!(!ended_well);
    assert!(log.contains("row 150: the prompt has 104 tokens"), "{log}");
    let metrics = fs::read_to_string(place.path("error/metrics.jsonl"));
    assert_eq!(metrics.unwrap_or_default(), "");
    // By default the row is dropped, and the run reports it once.
    let (ended_well, log) = train(&place, SFT, "drop", &[]);
    assert!(ended_well, "{log}");
    let words = "1 of 160 rows are too long and left out, 159 are kept; in the longest, row 150, the prompt has 104 tokens";
    assert_eq!(log.matches(words).count(), 1, "{log}");
}

/// User report, part 1, rows A15: the usual form of supervised data, with several turns.
#[test]
fn conversations_that_end_with_the_answer_are_trained() {
    let place = Place::new();
    let talk = |answer: &str| {
        json!([
            {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2+2"}, {"role": "assistant", "content": answer},
        ])
    };
    write_rows(
        &place,
        ["4", "#### 4"]
            .into_iter()
            .map(|answer| json!({"messages": talk(answer)})),
    );
    let last = ["prompts.messages=messages"];
    let all = ["prompts.messages=messages", "prompts.train_on=all"];
    for (run, more) in [("last", &last[..]), ("all", &all[..])] {
        let (ended_well, log) = train(&place, SFT, run, more);
        assert!(ended_well, "{log}");
    }
    let loss = |run: &str| {
        let metrics = fs::read_to_string(place.path(run).join("metrics.jsonl")).expect("metrics");
        let first = metrics.lines().next().expect("a step");
        let first: serde_json::Value = serde_json::from_str(first).expect("JSON");
        first["actor/sft_loss"].as_f64().expect("a loss")
    };
    // The mean is over other tokens.
    assert!((loss("last") - loss("all")).abs() > 1e-6);
}

/// The path of the shared folders next to the workspace.
fn shared() -> Option<PathBuf> {
    let shared = root().join("../shared");
    let is_there = ["models/stories260K", "data/gsm8k/train.jsonl"];
    let is_there = is_there.iter().all(|path| shared.join(path).exists());
    is_there.then_some(shared)
}

/// User report, part 3, row 4: both failed in step 1, since some rows are longer than the model's context.
#[test]
fn sft_and_dpo_start_on_gsm8k() {
    let Some(shared) = shared() else { return };
    let place = Place::new();
    let quoted = |path: &str| format!("{:?}", shared.join(path).display().to_string());
    let model = quoted("models/stories260K");
    let sft = SFT
        .replace("\"rows.jsonl\"", &quoted("data/gsm8k/train.jsonl"))
        .replace("\"tiny\"\ninit = \"random\"", &model)
        .replace(
            "with_targets = true",
            "with_targets = true\ntemplate = \"none\"",
        )
        .replace("prompts = 4", "prompts = 2");
    let (ended_well, log) = train(&place, &sft, "sft", &["steps=1"]);
    assert!(ended_well, "{log}");
    assert!(
        log.contains("of 7473 rows are too long and left out"),
        "{log}"
    );
    let pairs = quoted("data/preference/gsm8k_pairs.jsonl");
    let dpo = format!(
        r#"
name = "dpo"
[run]
seed = 5
steps = 1
[batch]
prompts = 1
samples = 2
[data]
train = {pairs}
[models.actor]
path = {model}
optimizer = {{ learning_rate = 1e-4 }}
[models.ref]
path = {model}
[[stages]]
kind = "preferences"
template = "none"
[[stages]]
kind = "pairs"
[[stages]]
kind = "log_probs"
name = "ref_log_probs"
model = "ref"
role = "reference"
[[stages]]
kind = "update"
loss = {{ kind = "dpo" }}
"#
    );
    let (ended_well, log) = train(&place, &dpo, "dpo", &[]);
    assert!(ended_well, "{log}");
    assert!(Path::new(&place.path("dpo/model/actor")).exists());
}
