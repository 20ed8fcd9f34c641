//! Rows of `samples.jsonl`.

use std::fs;

use serde_json::{Map, Value};

use crate::kit::{Finished, Place, trainer};

fn rows(run: &Finished, kind: &str) -> Vec<Map<String, Value>> {
    let rows = run.read("samples.jsonl");
    let rows = rows
        .lines()
        .map(|line| serde_json::from_str::<Map<String, Value>>(line).expect("an object"));
    rows.filter(|row| row["kind"] == kind).collect()
}

#[test]
fn each_step_writes_some_of_its_rows() {
    let place = Place::new();
    for (count, lines) in [(0, 0), (1, 3), (2, 6), (1000, 48)] {
        let run = place.train(
            &format!("run{count}"),
            &[&format!("samples_per_step={count}")],
        );
        assert_eq!(rows(&run, "training").len(), lines, "{count}");
        assert!(!rows(&run, "evaluation").is_empty());
    }
}

#[test]
fn a_row_has_prompt_response_answer_and_reward() {
    let place = Place::new();
    let run = place.train("run", &["samples_per_step=16"]);
    let rows = rows(&run, "training");
    for row in &rows {
        let names: Vec<&str> = row.keys().map(String::as_str).collect();
        let expected = [
            "step",
            "kind",
            "id",
            "prompt",
            "response",
            "answer",
            "reward",
            "advantage",
        ];
        assert_eq!(names, expected);
        for text in ["id", "prompt", "response", "answer"] {
            assert!(row[text].is_string(), "{row:?}");
        }
    }
    // All rows of a step are there: their mean is that of the metrics, and a group's advantages add up to 0.
    let metrics = run.metrics();
    for (step, rows) in rows.chunks(16).enumerate() {
        assert!(rows.iter().all(|row| row["step"] == step as u64 + 1));
        let mean = |rows: &[Map<String, Value>], name: &str| {
            let values = rows.iter().map(|row| row[name].as_f64().expect("a number"));
            values.sum::<f64>() / rows.len() as f64
        };
        let reward = metrics[step + 1]["reward/mean"].as_f64().expect("a number");
        assert!((mean(rows, "reward") - reward).abs() < 1e-6);
        for group in rows.chunks(4) {
            assert!(mean(group, "advantage").abs() < 1e-5, "{group:?}");
            assert!(group.iter().all(|row| row["prompt"] == group[0]["prompt"]));
        }
    }
}

/// Supervised examples and given answers have no response text, so the model's tokenizer decodes it.
#[test]
fn given_answers_are_written_as_text() {
    let place = Place::new();
    let text = r#"
name = "sft_tiny"
run.steps = 1
batch.prompts = 4
data.train = { kind = "addition", split = "sft" }
models.actor = { path = "tiny", init = "random", optimizer = { learning_rate = 1e-3 } }
stages = [{ kind = "prompts", with_targets = true }, { kind = "update", loss = { kind = "sft" } }]
"#;
    let pipe = place.parse(text, "run", &[]).expect("a pipeline");
    trainer(&pipe).expect("a trainer").train().expect("an end");
    let run = Finished {
        dir: place.path("run"),
    };
    let rows = rows(&run, "training");
    assert_eq!(rows.len(), 2);
    for row in &rows {
        let (response, answer) = (row["response"].as_str(), row["answer"].as_str());
        let answer = answer
            .and_then(|text| text.rsplit("####").next())
            .expect("an answer")
            .trim();
        assert!(
            response.is_some_and(|text| text.contains(answer)),
            "{row:?}"
        );
        assert_eq!((row.get("reward"), row.get("advantage")), (None, None));
    }
    assert!(fs::metadata(run.dir.join("samples.jsonl")).is_ok());
}
