//! Replays of incomplete recordings: stages that cannot be run, weights stored elsewhere;
//! and the exit status.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use verl::pipe::cli::debug::EXIT_STATUS;
use verl::pipe::pipe::StageDecl;
use verl::pipe::trace::files::RecordedStep;
use verl::pipe::trace::format::Side;
use verl::pipe::trace::replay::{ReplayError, ReplayReport, ReplayScope, Replayer};
use verl::pipe::trace::rules::{Hit, Rule, RuleSeverity, StepView};
use verl::prelude::*;

use crate::debug::{
    corrupt, json_of, pipe_debug, pipe_debug_with, recorded, refused, without_rules,
};
use crate::kit::{GRPO, Place, root, trainer};
use crate::replayed::record;

/// Copies rewards to shaped rewards, and counts its calls.
fn copy(spec: StageSpec, calls: Arc<AtomicUsize>) -> impl IntoStage {
    let spec = spec.reads(keys::REWARDS).writes(keys::SHAPED_REWARDS);
    stage_fn(spec, move |mut batch, context| {
        calls.fetch_add(1, Ordering::Relaxed);
        let rewards: Vec<Option<f32>> = batch.get(&keys::REWARDS)?.rows().collect();
        batch.put(&keys::SHAPED_REWARDS, rewards)?;
        context.emit(batch)
    })
}

/// The tiny pipeline with a stage `own` between rewards and advantages.
fn with_own_stage(mut pipe: DataPipe, stage: impl IntoStage) -> DataPipe {
    pipe = pipe.add_stage("own", stage);
    read_shaped(&mut pipe);
    pipe
}

/// Makes `advantages` read the output of stage `own`.
fn read_shaped(pipe: &mut DataPipe) {
    let mut stages = pipe.stages.iter_mut();
    let advantages = stages.find(|stage| stage.name == "advantages");
    let shaped = ("rewards".to_owned(), "shaped_rewards".to_owned());
    advantages.expect("the stage").rename.extend([shaped]);
}

fn names(report: &ReplayReport) -> (Vec<&str>, Vec<&str>) {
    let again = report.stages.iter().map(|stage| stage.stage.as_str());
    let skipped = report.skipped.iter().map(|stage| stage.stage.as_str());
    (again.collect(), skipped.collect())
}

#[test]
fn only_a_stage_of_another_program_is_skipped() {
    let place = Place::new();
    let calls = Arc::default();
    let pipe = place.grpo("run", &["trace.every=1"]);
    let pipe = with_own_stage(pipe, copy(StageSpec::new(), calls));
    trainer(&pipe).expect("a trainer").train().expect("a run");
    let run = place.path("run").display().to_string();
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert_eq!(code, 0, "{text}");
    let expected = "\nnot run again: stage `own` cannot be called again: this build has no stage kind `custom`\n";
    assert!(text.contains(expected), "{text}");
    assert!(text.ends_with("\n0 differences\n"), "{text}");
    assert!(
        !text.contains("another plan") && !text.contains("setting"),
        "{text}"
    );
    let report = json_of(&format!("replay --run {run} --step 2 --json"));
    assert_eq!(report["stages"].as_array().expect("stages").len(), 7);
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2 --stage own"));
    assert!(
        code == 3 && text.starts_with("error[T014]: stage `own`"),
        "{code}: {text}"
    );
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    let expected = "note: not run again in steps 1–3: stage `own` cannot be called again: this build has no stage kind `custom`\n\
                nothing bad in 3 steps; the stages that were run again gave the same results\n";
    assert_eq!((code, without_rules(&text)), (0, expected));
    // Its output is checked like that of any other stage.
    corrupt(&run, 2, "advantages", Side::Output, 5, |v| -v - 1.0);
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert!(
        code == 1 && text.contains("the first: stage `advantages`"),
        "{text}"
    );
    assert_eq!(
        pipe_debug(&format!("trace --run {run} --step 2 --stage own")).0,
        0
    );
}

#[test]
fn a_stage_with_external_effects_is_not_called_again() {
    let place = Place::new();
    let calls: Arc<AtomicUsize> = Arc::default();
    let spec = StageSpec::new().not_replayed("it pays for an answer of a service");
    let pipe = with_own_stage(place.grpo("none", &[]), copy(spec, calls.clone()));
    let (recorded, mut run) = record(&pipe, 2);
    let before = calls.load(Ordering::Relaxed);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    let report = replayer
        .replay(&recorded[1], &ReplayScope::Step)
        .expect("a replay");
    assert_eq!(calls.load(Ordering::Relaxed), before);
    assert_eq!((report.differences(), report.stages.len()), (0, 7));
    assert_eq!(names(&report).1, ["own"]);
    assert!(
        report.skipped[0]
            .why
            .ends_with("it pays for an answer of a service")
    );
    let error = replayer.replay(&recorded[1], &ReplayScope::Stage("own".to_owned()));
    assert_eq!(error.expect_err("refused").code(), "T014");
}

#[test]
fn only_a_stage_whose_input_is_missing_is_skipped() {
    let place = Place::new();
    let pipe = place.grpo("none", &[]);
    let (recorded, mut run) = record(&pipe, 2);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    let mut check = |change: fn(&mut RecordedStep), again: &[&str], skipped: &[&str]| {
        let mut step = recorded[1].clone();
        change(&mut step);
        let report = replayer
            .replay(&step, &ReplayScope::Step)
            .expect("a replay");
        assert_eq!(report.differences(), 0, "{report}");
        assert_eq!(
            names(&report),
            (again.to_vec(), skipped.to_vec()),
            "{report}"
        );
        report.to_string()
    };
    let gone = |step: &mut RecordedStep| {
        step.stages
            .get_mut("reward")
            .expect("the stage")
            .inputs
            .clear();
    };
    let rest = [
        "prompts",
        "generate",
        "old_log_probs",
        "ref_log_probs",
        "advantages",
        "update",
    ];
    let text = check(gone, &rest, &["reward"]);
    assert!(
        text.contains("the input of stage `reward` is incomplete: nothing is recorded"),
        "{text}"
    );
    let row = |step: &mut RecordedStep| {
        let stage = step.stages.get_mut("reward").expect("the stage");
        let batch = &mut stage.inputs[0].batch;
        *batch = batch.slice(1..batch.num_rows()).expect("rows");
    };
    let text = check(row, &rest, &["reward"]);
    assert!(
        text.contains("`reward` is incomplete: 1 row is not recorded"),
        "{text}"
    );
    // Nothing could be compared, which is not reported as equal.
    let all = |step: &mut RecordedStep| {
        step.stages
            .values_mut()
            .for_each(|stage| stage.inputs.clear())
    };
    let every = [
        "prompts",
        "generate",
        "reward",
        "old_log_probs",
        "ref_log_probs",
        "advantages",
        "update",
    ];
    let text = check(all, &[], &every);
    assert!(text.ends_with("\nnothing was run again\n"), "{text}");
}

#[test]
fn a_stage_after_one_that_cannot_change_its_model_is_skipped_too() {
    let place = Place::new();
    let again =
        "[[stages]]\nkind = \"update\"\nname = \"update_again\"\nloss = { kind = \"grpo\" }\n";
    let text = format!("{GRPO}\n{again}");
    let pipe = place.parse(&text, "none", &[]).map_err(Findings);
    let pipe = pipe.expect("a pipeline");
    let (mut recorded, mut run) = record(&pipe, 2);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    let whole = replayer.replay(&recorded[1], &ReplayScope::Step);
    let whole = whole.expect("a replay");
    assert_eq!((whole.differences(), whole.stages.len()), (0, 8), "{whole}");
    let last = whole.stages.last().expect("a stage").stage.clone();
    let first = match last.as_str() {
        "update" => "update_again",
        _ => "update",
    };
    let stage = recorded[1].stages.get_mut(first).expect("the stage");
    stage.inputs.clear();
    let report = replayer.replay(&recorded[1], &ReplayScope::Step);
    let report = report.expect("a replay");
    assert_eq!(names(&report).1, [first, last.as_str()], "{report}");
    let why = &report.skipped[1].why;
    let expected = format!("uses `actor` as left by `{first}`, but the input of");
    assert!(why.contains(&expected), "{why}");
    assert_eq!((report.differences(), report.stages.len()), (0, 6));
}

#[test]
fn stages_that_were_not_run_again_are_not_called_equal() {
    let place = Place::new();
    let settings = [
        "trace.stages=[\"generate\"]",
        "trace.ring_steps=0",
        "trace.weights=hash",
    ];
    let run = recorded(&place, "run", &settings);
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    assert_eq!(code, 0, "{text}");
    // The first step starts with the loaded weights.
    assert!(
        text.contains("note: not run again in steps 2–3: stage `generate` uses"),
        "{text}"
    );
    assert!(
        without_rules(&text).ends_with("; the stages that were run again gave the same results\n"),
        "{text}"
    );
    fs::remove_dir_all(Path::new(&run).join("trace/steps/00000001")).expect("a step");
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    assert!(
        code == 0 && without_rules(&text).ends_with("; nothing was run again\n"),
        "{text}"
    );
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
    assert!(
        code == 3 && text.ends_with("\nnothing was run again\n"),
        "{code}: {text}"
    );
}

/// Fires in the third step, and stops there.
struct AtThree;

impl Rule for AtThree {
    fn name(&self) -> &str {
        "at_three"
    }
    fn severity(&self) -> RuleSeverity {
        RuleSeverity::Stop
    }
    fn advice(&self) -> &str {
        "nothing"
    }
    fn before_update(&mut self, view: &StepView<'_>, _: f64) -> Vec<Hit> {
        (view.step == 3).then(Hit::default).into_iter().collect()
    }
}

/// Changes a JSON file.
pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let text = fs::read_to_string(path).expect("a file");
    let mut value: Value = serde_json::from_str(&text).expect("a document");
    let before = value.clone();
    change(&mut value);
    assert_ne!(before, value);
    fs::write(path, value.to_string()).expect("a file");
}

fn manifest(run: &str, step: u64) -> std::path::PathBuf {
    Path::new(run).join(format!("trace/steps/{step:08}/step.json"))
}

#[test]
fn weights_after_a_step_of_the_flight_recorder_are_compared() {
    let place = Place::new();
    let pipe = place.grpo("run", &[]).rule(|| AtThree);
    let plan = pipe.plan().expect("a plan");
    let mut trainer = Trainer::with_options(plan, TrainerOptions::default()).expect("a trainer");
    trainer.train().expect_err("the rule stops it");
    let run = place.path("run").display().to_string();
    let line = format!("replay --run {run} --step 2 --stage update");
    let (code, text) = pipe_debug(&line);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("weights of actor  bit-equal"), "{text}");
    assert!(!text.contains("not compared"), "{text}");
    // As if the update had left the weights as they were.
    let before: Value =
        serde_json::from_str(&fs::read_to_string(manifest(&run, 2)).expect("a file"))
            .expect("a document");
    edit(&manifest(&run, 3), |step| {
        step["models"]["actor"]["state"] = before["models"]["actor"]["state"].clone();
    });
    let (code, text) = pipe_debug(&line);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("stage `update`, weights of `actor`"),
        "{text}"
    );
    // If nothing records them, that is reported.
    edit(&manifest(&run, 3), |step| {
        step["models"]["actor"]["state"] = Value::Null
    });
    let (code, text) = pipe_debug(&line);
    let expected = "the weights of `actor` after `update` are not compared: step 3 has neither their hash nor the weights";
    assert!(code == 3 && text.contains(expected), "{text}");
    assert!(text.ends_with("\nnothing was compared\n"), "{text}");
}

#[test]
fn weights_are_taken_from_where_they_are_the_same() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let line = format!("replay --run {run} --step 2 --stage generate");
    let read = |step| -> Value {
        serde_json::from_str(&fs::read_to_string(manifest(&run, step)).expect("a file"))
            .expect("a document")
    };
    let whole = read(2)["models"]["actor"].clone();
    edit(&manifest(&run, 2), |step| {
        step["models"]["actor"]["state"] = Value::Null
    });
    let (code, text) = pipe_debug(&line);
    assert!(code == 3 && text.starts_with("error[T013]"), "{text}");
    assert!(
        text.contains("neither the model as loaded nor another step has these weights"),
        "{text}"
    );
    // Another step with the same weights.
    edit(&manifest(&run, 3), |step| step["models"]["actor"] = whole);
    let (code, text) = pipe_debug(&line);
    assert_eq!(code, 0, "{text}");
    let expected = "note: the weights of `actor` at the start of step 2 are not stored; by their hash they are those of step 3\n";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn missing_weights_are_reported_once_for_all_steps() {
    let place = Place::new();
    let run = recorded(&place, "run", &["trace.weights=hash"]);
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    let expected =
        "note: not run again in steps 2–3: stage `generate` uses `actor`, which the run trains";
    assert!(code == 0 && text.contains(expected), "{text}");
    assert!(text.contains("`trace.budget_mb`"), "{text}");
    let stages = ["prompts", "generate", "old_log_probs", "update"];
    assert_eq!(
        text.matches("not run again").count(),
        stages.len(),
        "{text}"
    );
}

#[test]
fn weights_of_the_model_as_it_is_loaded_are_known_by_their_hash() {
    let place = Place::new();
    let (recorded, mut run) = record(&place.grpo("none", &[]), 1);
    let mut replayer = Replayer::new(&mut run).expect("a snapshot");
    // Log-probs do not depend on the step.
    let mut later = recorded[0].clone();
    (later.step, later.state) = (5, None);
    let scope = ReplayScope::Stage("old_log_probs".to_owned());
    let report = replayer.replay(&later, &scope).expect("a replay");
    assert_eq!(report.differences(), 0, "{report}");
    assert!(
        report.notes[0].contains("they are those of the model as loaded"),
        "{report}"
    );
    for stage in later.stages.values_mut() {
        stage.weights.clear();
    }
    let error = replayer
        .replay(&later, &scope)
        .expect_err("unknown weights");
    assert!(matches!(error, ReplayError::NoState { .. }));
}

/// Whether stage kind `copy_rewards` fails; only one test uses it.
static FAILS: AtomicBool = AtomicBool::new(false);

/// Copies rewards to shaped rewards, or fails.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
struct CopyRewards {}

impl StageConfig for CopyRewards {
    const KIND: &'static str = "copy_rewards";
    const SUMMARY: &'static str = "copies rewards";
    fn build(&self, _: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        Ok(Box::new(self.clone()))
    }
}

impl Stage for CopyRewards {
    fn spec(&self) -> StageSpec {
        StageSpec::new()
            .reads(keys::REWARDS)
            .writes(keys::SHAPED_REWARDS)
            .cardinality(Cardinality::Batch)
    }

    fn run(&mut self, mut batch: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        if FAILS.load(Ordering::Relaxed) {
            return Err(StageError::failed("the service is down"));
        }
        let rewards: Vec<Option<f32>> = batch.get(&keys::REWARDS)?.rows().collect();
        batch.put(&keys::SHAPED_REWARDS, rewards)?;
        context.emit(batch)
    }
}

#[test]
fn a_stage_that_fails_when_it_is_run_again_is_a_difference() {
    let place = Place::new();
    let mut pipe = place.grpo("run", &["trace.every=1"]);
    let own = StageDecl::new("own", CopyRewards {});
    pipe.stages.push(own);
    read_shaped(&mut pipe);
    trainer(&pipe).expect("a trainer").train().expect("a run");
    let run = place.path("run").display().to_string();
    let registry = verl::registry().stage::<CopyRewards>();
    let of = |line: &str| pipe_debug_with(&registry, &line.replace("RUN", &run));
    assert_eq!(of("replay --run RUN --step 2").0, 0);
    FAILS.store(true, Ordering::Relaxed);
    let (code, text) = of("replay --run RUN --step 2");
    assert_eq!(code, 1, "{text}");
    let expected = "`own` failed when it was run again: step 2, stage `own`, 16 rows";
    assert!(
        text.contains(expected) && text.contains("the service is down"),
        "{text}"
    );
    assert!(
        text.ends_with("\n0 differences, 1 stage failed\n"),
        "{text}"
    );
    // Later stages get its recorded output.
    assert!(
        text.contains("update") && !text.contains("not run again"),
        "{text}"
    );
    assert_eq!(of("replay --run RUN --step 2 --stage own").0, 1);
    assert_eq!(of("replay --run RUN --step 2 --stage advantages").0, 0);
    let (code, text) = of("first-bad --run RUN");
    let expected = "step 1, stage `own`\n  its input is correct, but it fails when run again: ";
    assert!(code == 1 && text.starts_with(expected), "{text}");
}

#[test]
fn the_exit_status_is_that_of_the_table() {
    let page = fs::read_to_string(root().join("docs/replay.md")).expect("the page");
    for (status, when) in EXIT_STATUS {
        assert!(
            page.contains(&format!("\n| {status} | {when} |\n")),
            "{status}: {when}"
        );
    }
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let same = recorded(&place, "same", &[]);
    let other = recorded(&place, "other", &["seed=6"]);
    corrupt(&other, 2, "advantages", Side::Output, 5, |v| v + 1.0);
    place.train("quiet", &["trace.ring_steps=0"]);
    let quiet = place.path("quiet").display().to_string();
    let none = place.path("none").display().to_string();
    for (status, line) in [
        (0, format!("trace --run {run} --step 1")),
        (0, format!("replay --run {run} --step 1")),
        (0, format!("first-bad --run {run}")),
        (0, format!("diff {run} {same}")),
        (0, format!("stall --run {run}")),
        (1, format!("replay --run {other} --step 2")),
        (1, format!("trace --run {other} --step 2 --replay")),
        (1, format!("first-bad --run {other}")),
        (1, format!("diff {run} {other}")),
        (2, format!("trace --run {run} --step 1 --stage genrate")),
        (
            2,
            format!("trace --run {run} --step 1 --stage genrate --replay"),
        ),
        (2, format!("replay --run {run} --step 1 --stage genrate")),
        (2, format!("replay --run {run} --step 1 --from genrate")),
        (3, format!("trace --run {quiet} --step 1")),
        (
            3,
            format!("trace --run {run} --step 1 --stage generate --sample 7.7#7"),
        ),
        (3, format!("replay --run {run} --step 9")),
        (3, format!("replay --run {run} --step 1 --stage evaluate")),
        (3, format!("replay --run {none} --step 1")),
        (3, format!("first-bad --run {none}")),
        (3, format!("diff {run} {none}")),
        (3, format!("stall --run {none}")),
    ] {
        let (code, text) = pipe_debug(&line);
        assert_eq!(code, status, "{line}: {text}");
    }
    let waits =
        r#"{"step":1,"timestamp":0.0,"quiet_s":60.0,"error":null,"running":[],"waiting":[]}"#;
    fs::write(place.path("run/stall.json"), waits).expect("a file");
    assert_eq!(pipe_debug(&format!("stall --run {run}")).0, 1);
    for line in [
        "replay --run x",
        "trace --stage generate --run x",
        "diff x",
        "stall",
        "first-bad --runn x",
    ] {
        assert_eq!(refused(line), Some(2), "{line}");
    }
}

#[test]
fn an_unknown_stage_or_step_is_reported_with_the_recorded_ones() {
    let place = Place::new();
    let settings = [
        "trace.every=2",
        "trace.stages=[\"generate\", \"reward\"]",
        "trace.ring_steps=0",
    ];
    let run = recorded(&place, "run", &settings);
    for flag in ["--stage", "--from"] {
        let replay = |step: u64, name: &str| {
            pipe_debug(&format!("replay --run {run} --step {step} {flag} {name}"))
        };
        let (code, text) = replay(2, "advantage");
        assert_eq!(code, 2, "{text}");
        assert!(
            text.contains(
                "there is no stage `advantage` in this pipeline; did you mean `advantages`?"
            ),
            "{text}"
        );
        let (code, text) = replay(2, "advantages");
        assert_eq!(code, 3, "{text}");
        assert!(
            text.contains(
                "stage `advantages` is not recorded in step 2; recorded stages: `generate`, `reward`"
            ),
            "{text}"
        );
        let (code, text) = replay(2, "evaluate");
        assert!(code == 3 && text.contains("runs between steps"), "{text}");
        let (code, text) = replay(7, "generate");
        assert_eq!(code, 3, "{text}");
        assert!(
            text.contains("step 7 is not in") && text.contains("the nearest is step 2"),
            "{text}"
        );
    }
}
