//! Input that must cause a clear error and leave no files.

use std::fs;

use verl::pipe::diagnostic::Findings;
use verl::pipe::plan::Plannable;

use crate::kit::{GRPO, Place, trainer};

#[track_caller]
fn check(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

/// The error for the pipeline with these overrides, before a run folder is created or after it was removed.
fn refused(place: &Place, overrides: &[&str]) -> String {
    let error = match place.parse(GRPO, "run", overrides) {
        Ok(pipe) => trainer(&pipe).err().expect("a refusal"),
        Err(findings) => Findings(findings).to_string(),
    };
    assert!(!place.path("run").exists(), "a run folder was left");
    error
}

#[test]
fn models_that_cannot_be_loaded() {
    let place = Place::new();
    check(
        &refused(&place, &["actor.path=nowhere"]),
        &["actor", "nowhere", "path"],
    );

    // A folder without weights.
    check(
        &refused(&place, &["actor.init=pretrained"]),
        &["actor", "safetensors", "tiny"],
    );

    let saved = place.train("whole", &["steps=1"]).dir.join("model/actor");
    let weights = saved.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    let path = format!("actor.path={}", saved.display());
    let broken = [path.as_str(), "actor.init=pretrained"];
    for length in [4, 200, bytes.len() - 10] {
        fs::write(&weights, &bytes[..length]).unwrap();
        check(
            &refused(&place, &broken),
            &["C005", "actor", "invalid setting", "model.safetensors"],
        );
    }

    fs::write(&weights, &bytes).unwrap();
    let config = saved.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"llama\"", "\"mamba\"")).unwrap();
    check(
        &refused(&place, &broken),
        &["mamba", "llama", "qwen2", "qwen3"],
    );
    fs::write(&config, &text[..text.len() / 2]).unwrap();
    check(&refused(&place, &broken), &["config.json"]);
}

#[test]
fn models_whose_names_are_not_valid_folder_names() {
    let place = Place::new();
    let long = "x".repeat(300);
    for name in [
        "",
        "a/b",
        "..",
        ".hidden",
        "/tmp/elsewhere",
        "a\\u0000b",
        &long,
    ] {
        let text = GRPO.replace("[models.ref]", &format!("[models.\"{name}\"]"));
        let pipe = place.parse(&text, "run", &["save=[]"]).expect("a pipeline");
        let refusal = trainer(&pipe).err().expect("a refusal");
        check(
            &refusal,
            &["error[C004]", "invalid model name", "[models]", "`path`"],
        );
        assert!(!place.path("run").exists(), "{name}");
    }
}

/// The exit status depends on the pipeline, not on whether the output is read.
#[cfg(unix)]
#[test]
fn a_closed_pipe_does_not_change_the_exit_status() {
    use std::process::{Command, Stdio};

    let place = Place::new();
    let file = place.path("grpo.toml");
    fs::write(&file, GRPO).unwrap();
    for (more, status) in [("steps=3", 0), ("reward.rule=nope", 1)] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_pipe"))
            .args(["check", "--json", &file.display().to_string(), more])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        assert_eq!(child.wait().unwrap().code(), Some(status), "{more}");
    }
}

#[test]
fn data_that_cannot_be_read() {
    let place = Place::new();
    let data = place.path("train.jsonl");
    let row = "{\"question\": \"1+1\", \"answer\": \"#### 2\"}\n";
    let refusal_of = |content: &str| {
        fs::write(&data, content).unwrap();
        refused(&place, &["data.train=train.jsonl"])
    };
    check(&refusal_of(""), &["train", "train.jsonl", "no row"]);
    check(
        &refusal_of(&format!("{row}\n{{\"question\": 1+1}}\n")),
        &["row 3", "malformed JSON"],
    );
    check(
        &refusal_of(&format!("{row}[1, 2]\n")),
        &["row 2", "a list, not an object"],
    );
    check(
        &refused(&place, &["data.train=none.jsonl"]),
        &["C005", "train", "none.jsonl", "cannot be read"],
    );
    fs::write(place.path("train.csv"), "question,answer\n1+1,2\n").unwrap();
    let table = refused(&place, &["data.train=train.csv"]);
    check(&table, &["C005", "train.csv", "comma-separated values"]);

    // Every row is checked before the first step, and the first few bad rows are reported together.
    let last = refusal_of(&(row.repeat(400) + "{\"question\": \"1+1\", \"answer\": null}\n"));
    check(&last, &["prompts", "row 401", "`answer` contains null"]);
    let several = refusal_of(&(row.repeat(2) + &"{\"question\": \"1+1\"}\n".repeat(9)));
    check(
        &several,
        &[
            "prompts",
            "row 3",
            "row 7",
            "no column `answer`",
            "question",
        ],
    );
    assert!(!several.contains("row 8"), "{several}");
}

#[test]
fn prompts_that_are_too_long() {
    let place = Place::new();
    let question = "1+".repeat(50) + "1";
    let rows = format!("{{\"question\": \"{question}\", \"answer\": \"#### 51\"}}\n");
    fs::write(place.path("long.jsonl"), rows).unwrap();
    for on_long in ["error", "drop"] {
        let on_long = format!("prompts.on_long={on_long}");
        let pipe = place.grpo("run", &["data.train=long.jsonl", on_long.as_str()]);
        let error = trainer(&pipe).err().expect("too long");
        check(&error, &["row 1", "tokens", "on_long", "64"]);
    }
}

#[test]
fn a_prompt_that_leaves_little_room_ends_its_answer_at_the_context() {
    let place = Place::new();
    let question = "1+".repeat(28) + "1";
    let rows = format!("{{\"question\": \"{question}\", \"answer\": \"#### 29\"}}\n");
    fs::write(place.path("long.jsonl"), rows).unwrap();
    let run = place.train("run", &["data.train=long.jsonl", "steps=1"]);
    let metrics = run.read("metrics.jsonl");
    assert!(metrics.contains("response/length_mean"), "{metrics}");
    // More new tokens than fit into the context are rejected, whatever the prompts.
    check(
        &refused(&Place::new(), &["generate.max_new_tokens=64"]),
        &["C005", "generate", "max_new_tokens", "is 64 tokens"],
    );
}

#[test]
fn models_with_different_vocabularies() {
    let place = Place::new();
    let other = place.path("other");
    fs::create_dir(&other).unwrap();
    for entry in fs::read_dir(place.path("tiny")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
    }
    let file = other.join("tokenizer.json");
    let text = fs::read_to_string(&file).unwrap();
    let swapped = text
        .replace("\"+\": ", "\"~\": ")
        .replace("\"+\":", "\"~\":");
    assert_ne!(swapped, text);
    fs::write(&file, swapped).unwrap();
    let path = format!("ref.path={}", other.display());
    check(
        &refused(&place, &[path.as_str()]),
        &[
            "P025",
            "`ref` cannot read the tokens of `actor`",
            "is not the same token",
        ],
    );
}

#[test]
fn several_optimiser_steps_without_old_log_probs() {
    let place = Place::new();
    let stage = "[[stages]]\nkind = \"log_probs\"\nname = \"old_log_probs\"\n\n";
    let text = GRPO.replace(stage, "");
    assert_ne!(text, GRPO);
    let findings_of = |overrides: &[&str]| {
        let pipe = place.parse(&text, "run", overrides).expect("a pipeline");
        pipe.plan()
            .err()
            .map(|findings| Findings(findings).to_string())
    };
    assert_eq!(findings_of(&[]), None);
    for several in ["batch.epochs=2", "batch.mini_batch=2"] {
        let findings = findings_of(&[several]).expect("a refusal");
        check(
            &findings,
            &[
                "P002",
                "old_log_probs",
                "2 optimiser steps per step",
                "put a `log_probs`",
            ],
        );
    }
}

#[test]
fn settings_that_nothing_reads() {
    let place = Place::new();
    check(
        &refused(&place, &["generate.temprature=0.5"]),
        &["temprature", "did you mean `temperature`"],
    );
    check(&refused(&place, &["batch.prompts=0"]), &["prompts"]);
    check(
        &refused(&place, &["batch.mini_batch=3"]),
        &["mini_batch", "3"],
    );
    let text = GRPO.replace("[batch]", "[bacth]");
    let findings = place
        .parse(&text, "run", &[])
        .err()
        .expect("an unknown section");
    check(&Findings(findings).to_string(), &["bacth", "batch"]);
}

#[test]
fn a_run_is_never_overwritten() {
    let place = Place::new();
    let run = place.train("run", &["steps=1"]);
    let before = run.read("metrics.jsonl");
    let error = trainer(&place.grpo("run", &["steps=1"]))
        .err()
        .expect("a refusal");
    check(&error, &["already exists", "run.dir"]);
    assert_eq!(run.read("metrics.jsonl"), before);
}
