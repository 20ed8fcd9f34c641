//! Input that must give a clear error and leave nothing behind.

use std::fs;

use verl::pipe::diagnostic::Findings;

use crate::kit::{GRPO, Place, trainer};

#[track_caller]
fn check(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

/// What the pipeline with these overrides is refused with, before a run folder is made or after it was removed.
fn refused(place: &Place, overrides: &[&str]) -> String {
    let error = match place.parse(GRPO, "run", overrides) {
        Ok(pipe) => trainer(&pipe).err().expect("a refusal"),
        Err(findings) => Findings(findings).to_string(),
    };
    assert!(!place.path("run").exists(), "a run folder was left behind");
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
            &["actor", "cannot be loaded", "model.safetensors"],
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
fn data_that_cannot_be_read() {
    let place = Place::new();
    let data = place.path("train.jsonl");
    let row = "{\"question\": \"1+1\", \"answer\": \"#### 2\"}\n";
    let told = |content: &str| {
        fs::write(&data, content).unwrap();
        refused(&place, &["data.train=train.jsonl"])
    };
    check(&told(""), &["train", "train.jsonl", "no row"]);
    check(
        &told(&format!("{row}\n{{\"question\": 1+1}}\n")),
        &["row 3", "malformed JSON"],
    );
    check(
        &told(&format!("{row}[1, 2]\n")),
        &["row 2", "a list, not an object"],
    );
    check(
        &refused(&place, &["data.train=none.jsonl"]),
        &["C005", "train", "none.jsonl", "cannot be read"],
    );
    fs::write(place.path("train.csv"), "question,answer\n1+1,2\n").unwrap();
    let table = refused(&place, &["data.train=train.csv"]);
    check(&table, &["train.csv", "row 1", "malformed JSON"]);

    // A row without the column is found when it is drawn; the run says which row it is.
    fs::write(&data, row.repeat(2) + "{\"question\": \"1+1\"}\n").unwrap();
    let pipe = place.parse(
        GRPO,
        "late",
        &["data.train=train.jsonl", "prompts.shuffle=false"],
    );
    let mut trainer = trainer(&pipe.expect("a pipeline")).expect("a start");
    let error = trainer
        .train()
        .expect_err("row 3 has no answer")
        .to_string();
    check(
        &error,
        &["step 1", "prompts", "row 3", "answer", "question"],
    );
    let status = fs::read_to_string(place.path("late/status.json")).unwrap();
    check(&status, &["failed", "row 3"]);
}

#[test]
fn prompts_that_are_too_long() {
    let place = Place::new();
    let question = "1+".repeat(50) + "1";
    let rows = format!("{{\"question\": \"{question}\", \"answer\": \"#### 51\"}}\n");
    fs::write(place.path("long.jsonl"), rows).unwrap();
    let pipe = place.grpo("run", &["data.train=long.jsonl"]);
    let error = trainer(&pipe)
        .expect("a start")
        .train()
        .expect_err("too long")
        .to_string();
    check(&error, &["row 1", "tokens", "on_long", "64"]);
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
    check(&error, &["exists already", "run.dir"]);
    assert_eq!(run.read("metrics.jsonl"), before);
}
