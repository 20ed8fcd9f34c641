//! A student learns from a teacher: from its list of tokens, and from its log-probs of sampled tokens.

use std::collections::BTreeMap;
use std::path::Path;

use verl::pipe::config::read_pipeline;
use verl::prelude::*;

use crate::kit::{GRPO, Place, root, start};

/// The tiny model as a student of another one, whose weights come from another initializer range.
fn student(place: &Place, stages: &str, more: &[&str]) -> DataPipe {
    parsed(place, stages, more).unwrap_or_else(|findings| panic!("{}", Findings(findings)))
}

/// [`student`], or the errors in its settings.
fn parsed(place: &Place, stages: &str, more: &[&str]) -> Result<DataPipe, Vec<Diagnostic>> {
    let kept = GRPO
        .find("[[stages]]\nkind = \"reward\"")
        .expect("the stage");
    let text = GRPO[..kept].replace(
        "[models.ref]\npath = \"tiny\"",
        "[models.teacher]\npath = \"other\"",
    );
    place.parse(&format!("{text}{stages}"), "run", more)
}

/// A folder `other` next to `tiny`, with the same shape and with weights of another scale.
fn with_teacher() -> Place {
    let place = Place::new();
    let other = place.path("other");
    std::fs::create_dir(&other).expect("a folder");
    for file in std::fs::read_dir(place.path("tiny")).expect("a folder") {
        let file = file.expect("a file");
        std::fs::copy(file.path(), other.join(file.file_name())).expect("a copy");
    }
    let config = std::fs::read_to_string(other.join("config.json")).expect("a config");
    let config = config.replace("\"initializer_range\":0.3", "\"initializer_range\":0.5");
    assert!(config.contains("0.5"), "{config}");
    std::fs::write(other.join("config.json"), config).expect("a file");
    place
}

const DISTILL: &str = "[[stages]]\nkind = \"teacher_top\"\n\n[[stages]]\nkind = \"distill\"\n";
const PLAIN: &str = r#"
[[stages]]
kind = "log_probs"
bypass = true

[[stages]]
kind = "log_probs"
name = "teacher_log_probs"
model = "teacher"
role = "reference"

[[stages]]
kind = "teacher_advantages"

[[stages]]
kind = "update"
loss = { kind = "grpo" }
"#;

/// The metric in the first and in the last steps of a run, each a mean of five.
#[track_caller]
fn learned(pipe: &DataPipe, metric: &str, steps: usize) -> [f64; 2] {
    let mut run = start(pipe);
    let values: Vec<f64> = (0..steps)
        .map(|_| {
            run.step()
                .expect("a step")
                .metrics
                .get(metric)
                .expect("the metric")
        })
        .collect();
    assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    [mean(&values[..5]), mean(&values[steps - 5..])]
}

#[test]
fn every_divergence_decreases() {
    let place = with_teacher();
    for (divergence, tail) in [
        ("forward_kl", "bucket"),
        ("forward_kl", "renormalize"),
        ("reverse_kl", "bucket"),
        ("jensen_shannon", "bucket"),
    ] {
        let divergence = format!("distill.divergence={divergence}");
        let tail = format!("distill.tail={tail}");
        let more = [
            "run.steps=30",
            "actor.optimizer.learning_rate=0.01",
            &divergence,
            &tail,
        ];
        let pipe = student(&place, DISTILL, &more);
        let [first, last] = learned(&pipe, "distill/divergence", 60);
        assert!(
            last < 0.8 * first,
            "{divergence}, {tail}: {first} became {last}"
        );
    }
}

#[test]
fn the_teacher_log_probs_of_sampled_tokens_reduce_the_reverse_kl() {
    let place = with_teacher();
    let more = [
        "run.steps=80",
        "actor.optimizer.learning_rate=0.01",
        "batch.prompts=16",
    ];
    let [first, last] = learned(&student(&place, PLAIN, &more), "distill/reverse_kl", 80);
    assert!(first > 0.05 && last < 0.8 * first, "{first} became {last}");
}

/// Metrics of a few steps, without times.
fn metrics(pipe: &DataPipe) -> Vec<BTreeMap<String, f64>> {
    let mut run = start(pipe);
    let step = |_| {
        let values = run.step().expect("a step").metrics.values;
        values
            .into_iter()
            .filter(|(name, _)| !name.starts_with("perf/"))
            .collect()
    };
    (0..2).map(step).collect()
}

#[test]
fn micro_batches_do_not_change_the_result() {
    let place = with_teacher();
    let whole = metrics(&student(&place, DISTILL, &["batch.micro_batch=16"]));
    assert!(whole[1]["distill/grad_norm"] > 0.0);
    let cut = metrics(&student(&place, DISTILL, &["batch.micro_batch=4"]));
    for (whole, cut) in whole.iter().zip(&cut) {
        for (name, value) in whole {
            assert!(
                (value - cut[name]).abs() < 1e-3 * (1.0 + value.abs()),
                "{name}: {value} or {}",
                cut[name]
            );
        }
    }
}

#[test]
fn a_list_of_the_whole_vocabulary_has_all_mass_and_a_longer_one_is_refused() {
    let place = with_teacher();
    let whole = metrics(&student(&place, DISTILL, &["teacher_top.top_k=32"]));
    for name in [
        "teacher/top_mass",
        "distill/teacher_mass",
        "distill/student_mass",
    ] {
        assert!(
            (whole[0][name] - 1.0).abs() < 1e-4,
            "{name}: {:?}",
            whole[0]
        );
    }
    let mut run = start(&student(&place, DISTILL, &["teacher_top.top_k=33"]));
    let error = run.step().expect_err("a refusal").to_string();
    assert!(error.contains("vocabulary allows 1 to 32"), "{error}");
}

#[test]
fn mismatches_are_reported_by_the_plan() {
    let place = with_teacher();
    let findings = |stages: &str, more: &[&str]| {
        let plan = parsed(&place, stages, more).and_then(|pipe| pipe.plan());
        Findings(plan.err().expect("a refusal")).to_string()
    };
    let text = findings(DISTILL, &["distill.temperature=0.5"]);
    assert!(
        text.contains("P007") && text.contains("teacher_top_log_probs"),
        "{text}"
    );
    let text = findings("[[stages]]\nkind = \"distill\"\n", &[]);
    assert!(text.contains("add a `teacher_top` stage"), "{text}");
    let text = findings(DISTILL, &["teacher_top.top_k=0", "distill.divergence=kl"]);
    assert!(
        text.contains("no tokens would be listed") && text.contains("`kl`"),
        "{text}"
    );
    let text = findings(PLAIN, &["teacher_log_probs.temperature=0.5"]);
    assert!(text.contains("P007"), "{text}");
}

/// An example with its models, with a few steps and few questions.
pub(crate) fn example(file: &str, dir: &Path, more: &[&str]) -> DataPipe {
    let mut overrides: Vec<String> = more.iter().map(|text| (*text).to_owned()).collect();
    overrides.push(format!("run.dir={}", dir.display()));
    overrides.push("evaluate.questions=8".to_owned());
    let file = root().join("examples/pipelines").join(file);
    read_pipeline(&file, &overrides, &verl::registry())
        .unwrap_or_else(|findings| panic!("{}", Findings(findings)))
}

#[test]
fn the_example_runs() {
    let place = Place::new();
    let more = ["run.steps=3", "batch.prompts=8", "batch.micro_batch=8"];
    let pipe = example("distillation_addition.toml", &place.path("run"), &more);
    // The base model as its own teacher: nothing to learn.
    let metrics = metrics(&pipe);
    assert!(metrics[0]["distill/divergence"].abs() < 1e-4, "{metrics:?}");
    assert!(metrics[0]["distill/teacher_mass"] > 0.9, "{metrics:?}");
}
