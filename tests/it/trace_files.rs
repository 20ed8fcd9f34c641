//! Run folders that were changed, damaged, moved or truncated afterwards, and runs that a rule ended.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::Value;
use verl::pipe::trace::format::Side;

use crate::debug::{corrupt, json_of, pipe_debug, recorded};
use crate::kit::{Place, trainer};

/// The output of a command, which must end with `code`.
#[track_caller]
fn said(line: &str, code: u8) -> String {
    let (found, text) = pipe_debug(line);
    assert_eq!(found, code, "{line}: {text}");
    text
}

#[track_caller]
fn contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
}

fn file(run: &str, step: u64, name: &str) -> PathBuf {
    Path::new(run).join(format!("trace/steps/{step:08}/{name}"))
}

#[test]
fn rows_that_were_changed_afterwards_are_named() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let untouched = recorded(&place, "untouched", &[]);
    // Only the output, not the inputs of its readers: the row is reported without a replay.
    corrupt(&run, 2, "advantages", Side::Output, 5, |v| v + 0.25);
    let altered = "rows of `advantages` differ from what the statistics recorded at step 2";
    let text = said(&format!("first-bad --run {run} --no-replay"), 1);
    assert!(
        text.starts_with("step 2, stage `advantages`, output key `advantages`, sample "),
        "{text}"
    );
    contains(
        &text,
        &[
            "(row 5), index 0",
            altered,
            "was changed after the run wrote it",
        ],
    );
    let found = json_of(&format!("first-bad --run {run} --no-replay --json"));
    assert_eq!(found["found"]["fault"], "altered");
    assert_eq!(found["found"]["row"], 5);
    let table = said(&format!("trace --run {run} --step 2"), 0);
    contains(&table, &[&format!("! `advantages`: output: {altered}")]);
    let stage = said(&format!("trace --run {run} --step 2 --stage advantages"), 0);
    contains(&stage, &[&format!("note: output: {altered}")]);
    let other = said(&format!("trace --run {run} --step 1"), 0);
    assert!(!other.contains("differ from what"), "{other}");
    // Also in the input of a stage.
    corrupt(&untouched, 3, "update", Side::Input, 2, |v| v - 1.0);
    let text = said(&format!("first-bad --run {untouched} --no-replay"), 1);
    assert!(
        text.starts_with("step 3, stage `update`, input key `advantages`, sample "),
        "{text}"
    );
    contains(&text, &["(row 2), index 0", "recorded at step 3"]);
}

#[test]
fn a_damaged_file_hides_nothing_else() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let same = recorded(&place, "same", &[]);
    let bad = file(&run, 2, "advantages.parquet");
    let whole = fs::read(&bad).expect("a file");
    fs::write(&bad, &whole[..whole.len() / 2]).expect("a shorter file");
    let about = "step 2, stage `advantages`: `";
    for line in [
        "--step 1",
        "--step 3 --stage advantages",
        "--step 2 --stage update",
    ] {
        said(&format!("trace --run {run} {line}"), 0);
    }
    let table = said(&format!("trace --run {run} --step 2"), 0);
    contains(
        &table,
        &["generate", &format!("! not shown, {about}"), "is damaged"],
    );
    for line in [
        "trace --run RUN --step 2 --stage advantages",
        "replay --run RUN --step 2 --stage advantages",
    ] {
        contains(
            &said(&line.replace("RUN", &run), 3),
            &["error[T003]", "advantages.parquet"],
        );
    }
    let replayed = said(&format!("replay --run {run} --step 2"), 0);
    contains(
        &replayed,
        &["0 differences", &format!("not replayed: {about}")],
    );
    let text = said(&format!("first-bad --run {run}"), 1);
    assert!(
        text.starts_with("step 2, the file of stage `advantages`\n"),
        "{text}"
    );
    contains(&text, &["is damaged"]);
    let compared = said(&format!("diff {run} {same}"), 0);
    contains(
        &compared,
        &[&format!("note: not compared, in the first run: {about}")],
    );

    // An error in the readable part is reported, with a note about the unreadable part.
    corrupt(&run, 3, "update", Side::Input, 2, |v| v - 1.0);
    let text = said(&format!("first-bad --run {run} --no-replay"), 1);
    contains(
        &text,
        &[
            &format!("note: not checked: {about}"),
            "step 3, stage `update`",
        ],
    );

    // The same applies to a step.json, to statistics, and to a state.
    fs::write(file(&same, 2, "step.json"), "{\"format\": 1, \"st").expect("a file");
    contains(
        &said(&format!("trace --run {same}"), 0),
        &["recorded steps: 1, 3\n", "note: step 2 is skipped: `"],
    );
    said(&format!("trace --run {same} --step 3"), 0);
    contains(
        &said(&format!("trace --run {same} --step 2"), 3),
        &["error[T003]"],
    );
    let text = said(&format!("first-bad --run {same}"), 1);
    assert!(text.starts_with("step 2, a file of the step\n"), "{text}");
    let stats = Path::new(&same).join("trace/stats/part-00000001.parquet");
    fs::write(stats, "PAR1 and no more").expect("a file");
    said(&format!("trace --run {same} --step 3"), 0);
    let text = said(&format!("first-bad --run {same} --no-replay"), 1);
    contains(&text, &["part-00000001.parquet` is damaged"]);
}

#[test]
fn a_damaged_state_prevents_only_the_replay_of_its_step() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let states = fs::read_dir(Path::new(&run).join("trace/state")).expect("states");
    for state in states.flatten().map(|entry| entry.path()) {
        if state.extension().is_some_and(|end| end == "safetensors") {
            fs::write(state, "no tensors").expect("a file");
        }
    }
    said(&format!("trace --run {run} --step 2"), 0);
    contains(
        &said(&format!("replay --run {run} --step 2"), 3),
        &["error[T003]"],
    );
    let text = said(&format!("first-bad --run {run}"), 1);
    contains(&text, &["was not run again: `", "is damaged"]);
    said(&format!("first-bad --run {run} --no-replay"), 0);
}

#[test]
fn a_file_in_the_place_of_another_is_reported() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    fs::copy(
        file(&run, 3, "reward.parquet"),
        file(&run, 2, "reward.parquet"),
    )
    .expect("a copy");
    let output = said(&format!("trace --run {run} --step 2 --stage reward"), 3);
    contains(
        &output,
        &[
            "error[T003]",
            "it contains stage `reward`",
            "of step 3",
            "of step 2",
        ],
    );
    let text = said(&format!("first-bad --run {run} --no-replay"), 1);
    assert!(
        text.starts_with("step 2, the file of stage `reward`\n"),
        "{text}"
    );
}

#[test]
fn a_run_whose_model_and_data_are_gone_can_be_looked_at() {
    let place = Place::new();
    let question = "{\"question\": \"1+1\", \"answer\": \"#### 2\"}\n".repeat(8);
    fs::write(place.path("rows.jsonl"), question).expect("a file");
    let run = recorded(&place, "run", &["data.train=rows.jsonl"]);
    let other = recorded(&place, "other", &["data.train=rows.jsonl"]);
    let shown = format!("trace --run {run} --step 2 --stage generate");
    let note =
        "note: tokens are shown as ids because no tokenizer of the run's models can be read\n";
    assert!(!said(&shown, 0).contains(note));
    fs::rename(place.path("tiny"), place.path("moved")).expect("a folder");
    fs::remove_file(place.path("rows.jsonl")).expect("a file");

    contains(
        &said(&format!("trace --run {run}"), 0),
        &["recorded steps: 1, 2, 3\n"],
    );
    contains(
        &said(&format!("trace --run {run} --step 2"), 0),
        &["generate"],
    );
    contains(&said(&shown, 0), &[note]);
    contains(&said(&format!("diff {run} {other}"), 0), &["no difference"]);
    said(&format!("stall --run {run}"), 0);
    said(&format!("first-bad --run {run} --no-replay"), 0);
    let text = said(&format!("first-bad --run {run}"), 0);
    contains(
        &text,
        &[
            "note: nothing can be run again, because models or data of the run are missing",
            "[models.actor]",
            "nothing bad in 3 steps; nothing was run again\n",
        ],
    );
    let refused = said(&format!("replay --run {run} --step 2"), 3);
    contains(
        &refused,
        &[
            "error[T011]",
            "[models.actor]",
            "[models.ref]",
            "rows.jsonl",
        ],
    );
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder").flatten() {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).expect("a copy")),
        }
    }
}

#[test]
fn a_run_folder_that_was_copied_elsewhere_is_looked_at_as_it_was() {
    let place = Place::new();
    let run = recorded(&place, "run", &[]);
    let lines = [
        "trace --run RUN",
        "trace --run RUN --step 2",
        "trace --run RUN --step 2 --stage generate",
        "replay --run RUN --step 2",
        "first-bad --run RUN",
        "stall --run RUN",
        "diff RUN RUN",
    ];
    // The output of a command depends on the folder only by its name.
    let all = |run: &str| {
        let output_of = |line: &str| said(&line.replace("RUN", run), 0);
        lines.map(|line| output_of(line).replace(run, "RUN"))
    };
    let before = all(&run);
    let elsewhere = tempfile::tempdir().expect("a folder");
    let copy = elsewhere.path().join("below/copy");
    copy_folder(Path::new(&run), &copy);
    fs::remove_dir_all(&run).expect("a folder");
    assert_eq!(all(&copy.display().to_string()), before);
}

/// A run that a rule ended; its folder.
fn stopped(place: &Place, run: &str, more: &[&str]) -> String {
    let error = trainer(&place.grpo(run, more)).expect("a trainer").train();
    let error = error.expect_err("a rule stops it");
    assert_eq!(error.code(), "R017", "{error}");
    place.path(run).display().to_string()
}

#[test]
fn a_rule_that_ended_the_run_is_the_first_bad_result() {
    let place = Place::new();
    let always = |rule: &str, more: &[&str]| -> Vec<String> {
        let severity = format!("trace.rules.{rule}.severity=stop");
        let limit = format!("trace.rules.{rule}.limit=0");
        let more = more.iter().map(|more| (*more).to_owned());
        [severity, limit].into_iter().chain(more).collect()
    };
    // With the rows of the step, and with only its statistics.
    for (run, rule, stage, key, more) in [
        ("rows", "constant_reward", "reward", "rewards", &[][..]),
        (
            "stats",
            "length_limit",
            "generate",
            "finish_reasons",
            &["trace.ring_steps=0"][..],
        ),
    ] {
        let settings = always(rule, more);
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let run = stopped(&place, run, &settings);
        let text = said(&format!("first-bad --run {run} --no-replay"), 1);
        let begins = format!("step 1, stage `{stage}`, output key `{key}`");
        assert!(text.starts_with(&begins), "{text}");
        contains(&text, &[&format!("the rule `{rule}` ended the run: ")]);
        let found = json_of(&format!("first-bad --run {run} --no-replay --json"));
        let place = ["step", "stage", "key", "fault"].map(|name| found["found"][name].clone());
        let expected: [Value; 4] = [1.into(), stage.into(), key.into(), "failed".into()];
        assert_eq!(place, expected);
        let path = Path::new(&run).join("trace/anomalies.jsonl");
        let lines = fs::read_to_string(path).expect("a file");
        let mut anomalies = lines
            .lines()
            .map(|line| -> Value { serde_json::from_str(line).expect("an object a line") });
        let anomaly = anomalies.find(|anomaly| anomaly["severity"] == "stop");
        let anomaly = anomaly.expect("what ended the run");
        assert_eq!(found["found"]["sample"], anomaly["samples"][0]);
    }
    // A rule on metrics runs after a step; the run ends in the next step.
    let metrics = [
        "trace.rules.kl_blow_up.severity=stop",
        "trace.rules.kl_blow_up.limit=0",
    ];
    let run = stopped(&place, "metrics", &metrics);
    let text = said(&format!("first-bad --run {run}"), 1);
    assert!(text.starts_with("step 2, stage `actor`, "), "{text}");
    contains(
        &text,
        &["`actor/kl`", "the rule `kl_blow_up` ended the run: "],
    );
    assert!(text.ends_with("--step 2\n"), "{text}");
}

/// Log lines in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("a log").write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_state_that_cannot_be_written_is_reported_once() {
    let place = Place::new();
    let mut trainer = trainer(&place.grpo("run", &["trace.every=1"])).expect("a trainer");
    // A file in the place of the folder of states.
    fs::write(place.path("run/trace/state"), "").expect("a file");
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
    let ended = tracing::subscriber::with_default(subscriber.finish(), || trainer.train());
    ended.expect("a run that goes on");
    let text = String::from_utf8(log.0.lock().expect("a log").clone()).expect("text");
    let warnings = text.matches("cannot write a state that replay needs");
    assert_eq!(warnings.count(), 1, "{text}");
}
