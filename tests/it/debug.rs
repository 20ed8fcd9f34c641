//! `pipe debug …` on the folders of real runs.

use std::path::Path;

use clap::Parser;
use serde_json::Value;
use verl::pipe::batch::arrow::ArrowBatch;
use verl::pipe::cli::debug::{Debug, debug};
use verl::pipe::registry::Registry;
use verl::pipe::trace::files::{SliceAt, TraceDir, TraceWriter, read_stage};
use verl::pipe::trace::format::Side;
use verl::prelude::*;

use crate::kit::{GRPO, Place, trainer};
use crate::planted::without_floats;
use crate::replayed::{EXAMPLES, example};

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Cli {
    #[command(subcommand)]
    debug: Debug,
}

/// The exit status of a command, and its output.
#[track_caller]
pub fn pipe_debug(line: &str) -> (u8, String) {
    pipe_debug_with(&verl::registry(), line)
}

/// The output of `first-bad` without the anomalies of the rules: the tiny model's responses reach the token limit.
pub fn without_rules(text: &str) -> &str {
    let at = text.find("but the run's rules reported ");
    &text[..at.unwrap_or(text.len())]
}

/// Like [`pipe_debug`], with another registry.
#[track_caller]
pub fn pipe_debug_with(registry: &Registry, line: &str) -> (u8, String) {
    let cli = Cli::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{error}"));
    let mut out = Vec::new();
    let code = debug(&cli.debug, registry, &mut out).expect("written");
    (code, String::from_utf8(out).expect("text"))
}

/// The exit status of a command line that is rejected before anything is read.
pub fn refused(line: &str) -> Option<i32> {
    let cli = Cli::try_parse_from(line.split(' '));
    cli.err().map(|error| error.exit_code())
}

/// The command's JSON, whatever its exit status.
#[track_caller]
pub fn json_of(line: &str) -> Value {
    let (_, text) = pipe_debug(line);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A run of three steps, all of them recorded in full. Returns its folder.
pub fn recorded(place: &Place, run: &str, more: &[&str]) -> String {
    let all = [&["trace.every=1"], more].concat();
    place.train(run, &all);
    place.path(run).display().to_string()
}

/// Changes the advantages of the step's row at `row`, in a stage's file.
pub fn corrupt(run: &str, step: u64, stage: &str, side: Side, row: usize, change: fn(f32) -> f32) {
    let run = Path::new(run);
    let trace = TraceDir::open(run).expect("a trace");
    let path = trace.layout().step(step).join(format!("{stage}.parquet"));
    let mut read = read_stage(&path).expect("a stage's file");
    let slices = match side {
        Side::Input => &mut read.inputs,
        Side::Output => &mut read.outputs,
    };
    let mut first = 0;
    for slice in slices {
        let view = slice.batch.get(&keys::ADVANTAGES).expect("the column");
        let rows = view.rows().enumerate().map(|(at, values)| {
            let change = |v: &f32| if first + at == row { change(*v) } else { *v };
            values.iter().map(change).collect::<Vec<f32>>()
        });
        let column = RaggedColumn::from_rows(rows.collect::<Vec<_>>());
        first += slice.batch.num_rows();
        slice.batch.put(&keys::ADVANTAGES, column).expect("rows");
    }
    let writer = TraceWriter::create(run, trace.format()).expect("the folder");
    let fields = |slices: &[verl::pipe::trace::files::SliceTrace]| {
        let schema = slices.first().map(|slice| slice.batch.record().schema());
        schema.map_or_else(Vec::new, |schema| {
            let fields = schema.fields().iter();
            fields.map(|field| field.as_ref().clone()).collect()
        })
    };
    let (inputs, outputs) = (fields(&read.inputs), fields(&read.outputs));
    let mut file = writer
        .stage(read.manifest.clone(), &inputs, &outputs)
        .expect("a file");
    for (side, slices) in [(Side::Input, &read.inputs), (Side::Output, &read.outputs)] {
        for slice in slices {
            let at = SliceAt {
                side,
                wave: slice.wave,
                slice: slice.slice,
                rows: slice.rows.clone(),
            };
            file.write(at, &slice.batch).expect("rows");
        }
    }
    file.finish().expect("a whole file");
}

#[test]
fn an_untouched_run_replays_to_the_bit_in_a_fresh_run() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    for line in [
        "--step 1",
        "--step 3",
        "--step 2 --stage generate",
        "--step 2 --stage update",
        "--step 2 --from old_log_probs",
        "--step 3 --stage advantages",
    ] {
        let (code, text) = pipe_debug(&format!("replay --run {run} {line}"));
        assert!(text.contains("\n0 differences\n"), "{line}: {text}");
        assert_eq!(code, 0, "{line}");
    }
    let (_, last) = pipe_debug(&format!("replay --run {run} --step 3"));
    let note =
        "note: the weights of `actor` after `update` are not compared: step 4 is not recorded";
    assert!(last.contains(note), "{last}");
    let (code, text) = pipe_debug(&format!("trace --run {run} --step 2 --replay"));
    assert_eq!(code, 0);
    insta::assert_snapshot!("debug_replay", text);
    let report = json_of(&format!("replay --run {run} --step 2 --json"));
    assert_eq!(report["stages"][6]["stage"], "update");
    assert_eq!(report["stages"][6]["weights"][0], "actor");
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    assert_eq!(
        (code, without_rules(&text)),
        (
            0,
            "nothing bad in 3 steps; the stages that were run again gave the same results\n"
        )
    );
    let (code, text) = pipe_debug(&format!("first-bad --run {run} --no-replay"));
    assert_eq!(
        (code, without_rules(&text)),
        (0, "nothing bad in 3 steps; nothing was run again\n")
    );
}

/// Like for steps in memory, but from disk: states of every kind of model are stored and restored.
#[test]
fn every_example_replays_from_the_folder_of_its_run() {
    let place = Place::new();
    for (file, more) in EXAMPLES {
        let run = place.path(file).display().to_string();
        let dir = format!("run.dir={run}");
        let pipe = example(
            &place,
            file,
            &[more, &["trace.every=1", dir.as_str()]].concat(),
        );
        trainer(&pipe).expect("a trainer").train().expect("a run");
        let (code, text) = pipe_debug(&format!("replay --run {run} --step 2"));
        assert_eq!(code, 0, "{file}: {text}");
        let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
        assert_eq!(code, 0, "{file}: {text}");
    }
}

#[test]
fn a_corrupted_stage_is_named() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    // As if `advantages` had computed the other sign: its output, and the inputs of its readers.
    corrupt(&run, 2, "advantages", Side::Output, 5, |v| -v - 1.0);
    corrupt(&run, 2, "update", Side::Input, 5, |v| -v - 1.0);
    let (code, text) = pipe_debug(&format!("replay --run {run} --step 2 --stage advantages"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("stage `advantages`, key `advantages`"),
        "{text}"
    );
    assert!(text.contains("(row 5), index 0"), "{text}");
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.starts_with("step 2, stage `advantages`, output key `advantages`"),
        "{text}"
    );
    assert!(
        text.contains("--step 2 --stage advantages --sample"),
        "{text}"
    );
    let found = json_of(&format!("first-bad --run {run} --json"));
    assert_eq!(found["found"]["fault"], "altered");
    assert_eq!(found["found"]["row"], 5);
    // Found without a replay if only the copy of the reader differs.
    corrupt(&run, 1, "update", Side::Input, 3, |v| v + 1.0);
    let (code, text) = pipe_debug(&format!("first-bad --run {run} --no-replay"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.starts_with("step 1, stage `update`, input key `advantages`"),
        "{text}"
    );
    assert!(text.contains("(row 3), index 0"), "{text}");
    let (_, table) = pipe_debug(&format!("trace --run {run} --step 1"));
    assert!(
        table.contains("! `update`: differs from what `advantages` wrote"),
        "{table}"
    );
}

#[test]
fn a_step_a_stage_and_a_sample_are_shown() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let (code, text) = pipe_debug(&format!("trace --run {run}"));
    assert_eq!((code, text.as_str()), (0, "recorded steps: 1, 2, 3\n"));
    let shown = |line: &str| {
        let (code, text) = pipe_debug(&format!("trace --run {run} --step 1 {line}"));
        assert_eq!(code, 0, "{text}");
        without_floats(&text)
    };
    let (_, whole) = pipe_debug(&format!("trace --run {run} --step 1"));
    insta::assert_snapshot!("debug_step", without_floats(&whole));
    insta::assert_snapshot!("debug_stage", shown("--stage generate"));
    insta::assert_snapshot!("debug_reward", shown("--stage reward"));

    let samples = json_of(&format!(
        "trace --run {run} --step 1 --stage generate --json"
    ));
    let samples = samples.as_array().expect("samples");
    assert_eq!(samples.len(), 16);
    let third = &samples[3];
    let id = third["sample"].as_str().expect("an identity");
    let one = json_of(&format!(
        "trace --run {run} --step 1 --stage update --sample {id} --json"
    ));
    assert_eq!(one["tokens"], third["tokens"]);
    assert_eq!(one["row_values"]["rewards"], third["row_values"]["rewards"]);
    for token in one["tokens"].as_array().expect("tokens") {
        for key in [
            "rollout_log_probs",
            "old_log_probs",
            "ref_log_probs",
            "advantages",
        ] {
            assert!(token[key].is_number(), "{token}");
        }
        assert!(
            token["token"].as_str().is_some_and(|text| !text.is_empty()),
            "{token}"
        );
    }
    let summary = json_of(&format!("trace --run {run} --step 1 --json"));
    assert_eq!(summary["stages"][1]["rows_out"], 16);
}

#[test]
fn unknown_names_are_reported_with_the_nearest() {
    let place = Place::new();
    let run = recorded(
        &place,
        "run-seen",
        &[
            "trace.every=2",
            "trace.stages=[\"generate\", \"reward\"]",
            "trace.ring_steps=0",
        ],
    );
    let mut texts = Vec::new();
    for line in [
        format!("trace --run {}", place.path("run-sen").display()),
        format!("trace --run {}", place.path("tiny").display()),
        format!("trace --run {run} --step 9"),
        format!("trace --run {run} --step 2 --stage genrate"),
        format!("trace --run {run} --step 2 --stage advantages"),
        format!("trace --run {run} --step 2 --stage evaluate"),
        format!("trace --run {run} --step 2 --stage generate --sample 0.1#99"),
        format!("replay --run {run} --step 2 --stage generate"),
        format!("replay --run {run} --step 2 --stage reward"),
    ] {
        let (code, text) = pipe_debug(&line);
        let text = text.replace(&place.path("").display().to_string(), "DIR/");
        texts.push(format!("{code}: {text}"));
    }
    let near = regexless(&texts.join("\n"));
    insta::assert_snapshot!("debug_refusals", near);
}

/// Names of samples depend only on the seed, but the nearest names do not, so the test does not fix them.
fn regexless(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| match line.split_once("; the nearest samples are ") {
            Some((before, _)) => format!("{before}; the nearest samples are …"),
            None => line.to_owned(),
        });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_run_without_trace_settings_still_reports_something() {
    let place = Place::new();
    place.train("quiet", &["trace.ring_steps=0"]);
    let run = place.path("quiet").display().to_string();
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    let expected = "note: there are only statistics for 3 steps: every value is finite, and every input equals what was written\n\
                nothing bad in 3 steps; nothing was run again\n";
    assert_eq!((code, without_rules(&text)), (0, expected));
    assert_eq!(pipe_debug(&format!("trace --run {run}")).0, 3);
}

#[test]
fn the_step_of_an_error_is_recorded_without_a_request() {
    let place = Place::new();
    let pipe = place.grpo("broken", &["actor.optimizer.learning_rate=1e30"]);
    let error = trainer(&pipe).expect("a trainer").train();
    let error = error.expect_err("weights without bounds");
    let run = place.path("broken").display().to_string();
    let (code, text) = pipe_debug(&format!("first-bad --run {run}"));
    assert_eq!(code, 1, "{error}: {text}");
    // The input of the update is correct; the update itself produces other weights.
    assert!(text.contains("step 2, stage `update`\n"), "{text}");
    assert!(text.contains("is not finite"), "{text}");
    let found = json_of(&format!("first-bad --run {run} --json"));
    assert_eq!(found["found"]["fault"], "failed");
    let (code, table) = pipe_debug(&format!("trace --run {run} --step 2"));
    assert_eq!(code, 0);
    assert!(table.contains("advantages"), "{table}");
}

#[test]
fn two_runs_diverge_where_a_setting_differs() {
    let place = Place::new();
    let first = recorded(&place, "first", &[]);
    let same = recorded(&place, "same", &[]);
    let (code, text) = pipe_debug(&format!("diff {first} {same}"));
    assert_eq!(
        (code, text.as_str()),
        (
            0,
            "no difference; 3 steps compared row by row, 3 steps by their hashes\n"
        )
    );

    // Another learning rate shows in the weights after the first update.
    let faster = recorded(&place, "faster", &["actor.optimizer.learning_rate=1e-2"]);
    let (code, text) = pipe_debug(&format!("diff {first} {faster}"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.starts_with("setting models.actor.optimizer.learning_rate: 0.001 | 0.01\n"),
        "{text}"
    );
    assert!(
        text.contains("the runs diverge in step 1, stage `update`, weights of `actor`\n"),
        "{text}"
    );
    assert!(
        text.contains("\n  same inputs, different outputs\n"),
        "{text}"
    );
    let found = json_of(&format!("diff {first} {faster} --json"));
    let share = |step: usize| {
        let stages = found["steps"][step]["stages"].as_array().expect("stages");
        let keys = stages
            .iter()
            .flat_map(|stage| stage["keys"].as_array().expect("keys"));
        keys.map(|key| key["differences"].as_u64().expect("a count"))
            .sum::<u64>()
    };
    assert_eq!(share(0), 0);
    assert_eq!(found["stats"]["parting"][0], 2);
    assert_eq!(found["stats"]["parting"][1], "generate");
    assert!(share(1) > 0 && share(2) > 0);
}

#[test]
fn runs_without_recorded_rows_are_compared_by_their_hashes() {
    let place = Place::new();
    let run = |name: &str, more: &[&str]| {
        place.train(name, &[&["trace.ring_steps=0"], more].concat());
        place.path(name).display().to_string()
    };
    let (first, same) = (run("first", &[]), run("same", &[]));
    let (code, text) = pipe_debug(&format!("diff {first} {same}"));
    assert_eq!(
        (code, text.as_str()),
        (0, "no difference; 3 steps compared by their hashes\n")
    );
    let other = run("other", &["advantages.estimator=rloo"]);
    let (code, text) = pipe_debug(&format!("diff {first} {other}"));
    assert_eq!(code, 1, "{text}");
    insta::assert_snapshot!("debug_diff_by_hashes", without_floats(&text));
}

#[test]
#[cfg_attr(not(unix), ignore = "no lock shows whether the process is alive")]
fn a_run_that_waits_for_nothing_says_so() {
    let place = Place::new();
    let pipe = place
        .parse(GRPO, "run", &["steps=1"])
        .map_err(Findings)
        .expect("a pipeline");
    trainer(&pipe).expect("a trainer").train().expect("a run");
    let dir = place.path("run").display().to_string();
    let (code, text) = pipe_debug(&format!("stall --run {dir}"));
    assert_eq!((code, text.as_str()), (0, "the run is not stalled\n"));
    // As left by a process that was killed.
    let status = place.path("run").join("status.json");
    let text = std::fs::read_to_string(&status).expect("a status");
    std::fs::write(&status, text.replace("\"finished\"", "\"running\"")).expect("a status");
    let (code, text) = pipe_debug(&format!("stall --run {dir}"));
    assert!(
        code == 1 && text.starts_with("no process has this folder locked"),
        "{text}"
    );
    let found = json_of(&format!("stall --run {dir} --json"));
    assert_eq!(found, serde_json::json!({"abandoned": true}));
    // Without the file that the process locks, or with an invalid status, the state is unknown.
    std::fs::remove_file(place.path("run").join("metrics.jsonl")).expect("removed");
    let (code, text) = pipe_debug(&format!("stall --run {dir}"));
    assert!(
        code == 3 && text.starts_with("it is unknown whether the run is in progress"),
        "{code}: {text}"
    );
    let found = json_of(&format!("stall --run {dir} --json"));
    assert_eq!(found, serde_json::json!({"abandoned": null}));
    std::fs::write(&status, "{\"status\": ").expect("a status");
    let (code, text) = pipe_debug(&format!("stall --run {dir}"));
    assert!(
        code == 3 && text.starts_with("error[T003]") && text.contains("status.json` is damaged"),
        "{code}: {text}"
    );
    assert_eq!(pipe_debug(&format!("stall --run {dir}x")).0, 3);
    let no_run = env!("CARGO_MANIFEST_DIR");
    assert_eq!(pipe_debug(&format!("stall --run {no_run}")).0, 3);
}
