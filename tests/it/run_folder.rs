//! The files that a run writes.

use std::fs;

use serde_json::Value;
use verl::models::Decoder;
use verl::models::tokenizer::Tokenizer;

use crate::kit::Place;

#[test]
fn a_run_leaves_its_files_metrics_and_model() {
    let place = Place::new();
    let run = place.train("run", &[]);

    assert!(run.read("status.json").contains("\"finished\""));
    let start: Value = serde_json::from_str(&run.read("start.json")).expect("JSON");
    assert!(
        start["load_s"]
            .as_f64()
            .is_some_and(|seconds| seconds > 0.0)
    );
    // Observations before the first step are not part of it.
    assert!(start["observe_s"].as_f64() > start["stages"]["prompts"].as_f64());
    assert!(start["stages"]["update"].as_f64() <= start["first_step_s"].as_f64());
    assert!(run.read("plan.txt").contains("old_log_probs"));
    assert!(run.read("versions.json").contains("verl"));
    assert!(run.read("data.json").contains("fingerprint"));
    // The resolved configuration is itself a pipeline file with every setting.
    let config = run.read("config.toml");
    assert!(
        config.contains("clip_low") && config.contains("target_tokens = 4"),
        "{config}"
    );
    let again = place.parse(&config, "again", &[]).expect("a pipeline file");
    assert_eq!(again.stages.len(), 8);

    let lines = run.metrics();
    let steps: Vec<u64> = lines
        .iter()
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [0, 1, 2, 3]);
    for name in ["step", "epoch", "timestamp"] {
        assert!(lines.iter().all(|line| line[name].is_number()), "{name}");
    }
    for line in [&lines[0], &lines[3]] {
        let share = line["eval/exact_match"].as_f64().expect("a fraction");
        assert!((0.0..=1.0).contains(&share));
    }
    for name in [
        "reward/mean",
        "actor/loss",
        "actor/kl",
        "actor/grad_norm",
        "response/length_mean",
        "perf/tokens_per_s",
        "perf/step_s",
    ] {
        let finite = |line: &serde_json::Map<String, Value>| {
            line.get(name)
                .and_then(Value::as_f64)
                .is_some_and(f64::is_finite)
        };
        assert!(lines[1..].iter().all(finite), "{name}: {lines:#?}");
    }
    // The reference starts as the policy and does not change.
    assert_eq!(lines[1]["actor/kl"].as_f64(), Some(0.0));
    assert!(lines[3]["actor/kl"].as_f64().unwrap() > 0.0);
    assert!(lines[1]["actor/grad_norm"].as_f64().unwrap() > 0.0);

    let samples = run.read("samples.jsonl");
    let samples: Vec<Value> = samples
        .lines()
        .map(|line| serde_json::from_str(line).expect("an object"))
        .collect();
    let of_phase = |phase: &str| samples.iter().filter(|s| s["phase"] == phase).count();
    assert_eq!((of_phase("before"), of_phase("after")), (5, 5));

    let saved = run.dir.join("model/actor");
    let decoder = Decoder::load(&saved, &burn::tensor::Device::flex()).expect("a model folder");
    assert_eq!(decoder.config.hidden_size, 16);
    let tokenizer = Tokenizer::load(&saved).expect("its tokenizer");
    assert_eq!(tokenizer.vocab_size(), 32);
    // A later run starts where this one ended.
    let dir = format!("actor.path={}", saved.display());
    let next = place.train("next", &[&dir, "actor.init=pretrained", "steps=1"]);
    let (end, begin) = (&run.metrics()[3], &next.metrics()[0]);
    assert_eq!(
        end["eval/response_length_mean"],
        begin["eval/response_length_mean"]
    );
    assert!(!run.dir.join("model/ref").exists());
    assert!(fs::read_dir(&run.dir).unwrap().count() >= 8);
}
