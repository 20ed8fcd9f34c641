//! Anomaly rules in complete runs: planted errors are reported, and what is reported can be inspected.

use std::fs;
use std::path::Path;

use serde_json::Value;
use verl::pipe::run::console::Summary;
use verl::pipe::trace::rules::Anomaly;

use crate::debug::{json_of, pipe_debug};
use crate::kit::{Place, trainer};

/// Runs the tiny pipeline with overrides; its summary and what its rules reported.
fn run(place: &Place, name: &str, more: &[&str]) -> (Summary, Vec<Anomaly>) {
    let mut trainer = trainer(&place.grpo(name, more)).expect("a trainer");
    let summary = trainer.train().expect("a run that ends well");
    (summary, reported(&place.path(name)))
}

fn reported(dir: &Path) -> Vec<Anomaly> {
    let text = fs::read_to_string(dir.join("trace/anomalies.jsonl")).unwrap_or_default();
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("lines")
}

/// P2: all responses truncated, so no update, but no metric or event reported it.
#[test]
fn p2_a_step_whose_responses_are_all_truncated_is_reported() {
    let place = Place::new();
    let (_, found) = run(
        &place,
        "run",
        &[
            "update.mask_truncated=true",
            "generate.max_new_tokens=4",
            "generate.min_new_tokens=4",
        ],
    );
    let none = found.iter().find(|found| found.rule == "no_update");
    let none = none.unwrap_or_else(|| panic!("{found:?}"));
    assert_eq!((none.step, none.key.as_str()), (1, "actor/optimizer_steps"));
    assert!(
        none.what.contains("no token was left to train on"),
        "{none}"
    );
    assert!(
        none.what.contains("every response reached the token limit"),
        "{none}"
    );
    let metrics = fs::read_to_string(place.path("run/metrics.jsonl")).expect("metrics");
    let steps = metrics.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).expect("an object");
        line["actor/optimizer_steps"].as_f64()
    });
    assert_eq!(steps.collect::<Vec<_>>(), [0.0; 3]);
    let limit = found.iter().find(|found| found.rule == "length_limit");
    let limit = limit.expect("the rule of truncated responses");
    assert!(
        limit.what.contains("all by `max_new_tokens = 4`"),
        "{limit}"
    );
}

/// A5: if responses end at the model's context, no message advises raising `max_new_tokens`.
#[test]
fn a5_a_context_that_is_too_short_is_named() {
    let place = Place::new();
    let path = place.path("tiny/config.json");
    let text = fs::read_to_string(&path).expect("a file");
    let mut config: Value = serde_json::from_str(&text).expect("an object");
    // Prompts of the task have six tokens or a few more.
    config["max_position_embeddings"] = 12.into();
    fs::write(&path, config.to_string()).expect("a file");
    let (_, found) = run(&place, "run", &["generate.min_new_tokens=10"]);
    let limit = found.iter().find(|found| found.rule == "length_limit");
    let limit = limit.unwrap_or_else(|| panic!("{found:?}")).to_string();
    assert!(limit.contains("by the model's context"), "{limit}");
    assert!(!limit.contains("raise"), "{limit}");
}

/// P3-7: the summary at the end lists what fired, with a command that shows it.
#[test]
fn p3_7_the_summary_has_commands_that_work() {
    let place = Place::new();
    let limits = [
        "trace.rules.kl_blow_up.limit=0",
        "trace.rules.advantage_variance.limit=0",
    ];
    let (summary, found) = run(&place, "run", &limits);
    let rules: Vec<&str> = summary.anomalies.iter().map(|f| f.rule.as_str()).collect();
    for rule in ["kl_blow_up", "advantage_variance"] {
        assert!(rules.contains(&rule), "{rules:?}");
    }
    for fired in &summary.anomalies {
        let first = found.iter().find(|found| found.rule == fired.rule);
        let first = first.expect("an event");
        assert_eq!((fired.first_step, &fired.what), (first.step, &first.what));
        let command = fired
            .command
            .strip_prefix("pipe debug ")
            .expect("a command");
        let words = command.replace('\'', "");
        let (code, text) = pipe_debug(&words);
        assert_eq!(code, 0, "{command}: {text}");
    }
    let text = summary.to_string();
    assert!(
        text.contains("\nanomalies:\n  advantage_variance: "),
        "{text}"
    );
    // If no rows are recorded, the command refers to the page of the run.
    let lean = [&limits[..1], &["trace.ring_steps=0"]].concat();
    let (summary, _) = run(&place, "lean", &lean);
    let command = &summary.anomalies[0].command;
    assert!(command.starts_with("pipe debug view --run "), "{command}");
}

/// P3-7: `first-bad` said "nothing bad in 40 steps" despite 13 anomalies.
#[test]
fn p3_7_first_bad_mentions_what_rules_reported() {
    let place = Place::new();
    let (_, found) = run(&place, "run", &["trace.rules.kl_blow_up.limit=0"]);
    let dir = place.path("run").display().to_string();
    let (code, text) = pipe_debug(&format!("first-bad --run {dir} --no-replay"));
    assert_eq!(code, 0, "{text}");
    let first = found.iter().find(|found| found.rule == "kl_blow_up");
    let step = first.expect("an event").step;
    for part in [
        "nothing bad in 3 steps; nothing was run again\nbut the run's rules reported ",
        &format!("  kl_blow_up: in step {step}\n"),
        &format!("  look at them: pipe debug view --run {dir}\n"),
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json = json_of(&format!("first-bad --run {dir} --no-replay --json"));
    let rules = json["anomalies"].as_array().expect("rules");
    assert!(rules.iter().any(|rule| rule["rule"] == "kl_blow_up"));
    let clean = Place::new();
    run(&clean, "run", &["trace.stats=false", "trace.every=1"]);
    let dir = clean.path("run").display().to_string();
    let (_, text) = pipe_debug(&format!("first-bad --run {dir} --no-replay"));
    assert!(!text.contains("rules"), "{text}");
}
