//! Steps that do not fit in memory: later writes do not lose what is already on disk.

use verl_rules::config::RuleSetting;
use verl_rules::{Hit, MetricsView, RuleSeverity};
use verl_words::batch::{RaggedColumn, RowId};
use verl_words::keys::RESPONSES;
use verl_words::stage::{MetricRoles, RowRule};

use super::*;
use crate::files::{ROWS_MISSING, StageInfo, StateRef, TraceDir, samples};
use crate::record::step_data::StepData;

/// Rows of a slice.
const ROWS: u64 = 8;
/// Slices of a step.
const SLICES: usize = 5;

fn batch(step: u64, slice: usize) -> Batch {
    let ids = (0..ROWS).map(|row| RowId::prompt(step, slice as u64 * ROWS + row));
    let ids: Vec<RowId> = ids.collect::<Result<_, _>>().expect("in range");
    let mut batch = Batch::with_rows(&ids);
    let rows = ids
        .iter()
        .map(|id| vec![id.row() as u32 + 100 * step as u32; 50]);
    batch
        .put(&RESPONSES, RaggedColumn::from_rows(rows))
        .expect("as many rows");
    batch
}

/// The output of a stage in one slice.
fn part(step: u64, stage: usize, slice: usize) -> Part {
    let first = slice * ROWS as usize;
    Part {
        stage,
        side: Side::Output,
        wave: 0,
        slice,
        rows: first..first + ROWS as usize,
        batch: batch(step, slice),
        refused: None,
    }
}

fn format() -> TraceFormat {
    let info = |name: &str| StageInfo {
        name: name.to_owned(),
        kind: "kind".to_owned(),
    };
    TraceFormat {
        stages: vec![info("kept"), info("other")],
        ..samples::format()
    }
}

/// A recording of the stages `kept` and `other`: the first is recorded in full at `steps`, and memory has room for
/// about three slices.
fn recording(run: &std::path::Path, steps: &[u64]) -> Recording {
    let about = |name: &str| StageAbout {
        name: name.to_owned(),
        kind: "kind".to_owned(),
        parameters: serde_json::Value::Null,
        rename: BTreeMap::new(),
        rule: RowRule::Same,
        debug: false,
        in_step: true,
        inputs: Vec::new(),
        outputs: samples::fields(&batch(1, 0)),
        metrics: Vec::new(),
        longest: None,
    };
    let writer = TraceWriter::create(run, &format()).expect("creates");
    let off = RuleSetting {
        severity: Some(RuleSeverity::Off),
        limit: None,
    };
    let config = TraceConfig {
        steps: steps.to_vec(),
        stages: vec!["kept".to_owned()],
        // The responses of these tests repeat one token.
        rules: BTreeMap::from([("looping_responses".to_owned(), off)]),
        ..TraceConfig::default()
    };
    let rule = Box::new(Warns) as Box<dyn Rule>;
    let stages = vec![about("kept"), about("other")];
    let shared = Shared::default();
    let recording = Recording::new(shared, writer, stages, config, format(), vec![rule], true);
    let mut data = StepData::new(1);
    data.add(part(1, 0, 0));
    Recording {
        spill_bytes: 3 * data.bytes,
        ..recording.expect("starts")
    }
}

/// Finds something in every step, once it has ended.
struct Warns;

impl Rule for Warns {
    fn name(&self) -> &str {
        "warns"
    }
    fn advice(&self) -> &str {
        "nothing"
    }
    fn after_step(&mut self, view: &MetricsView<'_>, _: f64) -> Vec<Hit> {
        vec![Hit {
            key: format!("of step {}", view.step),
            what: "it warns".to_owned(),
            ..Hit::default()
        }]
    }
}

/// The state at the start of a step.
fn state() -> StateRefs {
    let version = WeightsVersion {
        step: 0,
        hash: "ab".to_owned(),
    };
    let reference = StateRef {
        version,
        state: None,
    };
    StateRefs {
        models: BTreeMap::from([("actor".to_owned(), reference)]),
        stages: BTreeMap::new(),
    }
}

fn all_slices(recording: &mut Recording, step: u64) {
    recording.begin(step);
    for slice in 0..SLICES {
        recording.part(part(step, 0, slice));
        recording.part(part(step, 1, slice));
    }
}

/// The slices of a stage's output on disk; checks that their content is unchanged.
#[track_caller]
fn slices(trace: &TraceDir, step: u64, stage: &str) -> Vec<usize> {
    let read = trace.stage(step, stage).expect("reads");
    for slice in &read.outputs {
        assert_eq!(
            slice.batch,
            batch(step, slice.slice),
            "{stage}, slice {}",
            slice.slice
        );
    }
    read.outputs.iter().map(|slice| slice.slice).collect()
}

const EVERY: [usize; SLICES] = [0, 1, 2, 3, 4];

#[test]
fn a_warning_does_not_lose_rows_of_a_large_step_on_disk() {
    let temp = tempfile::tempdir().expect("a folder");
    let mut recording = recording(temp.path(), &[1]);
    recording.step.state = (1, state());
    all_slices(&mut recording, 1);
    recording.end(1);
    let trace = TraceDir::open(temp.path()).expect("opens");
    let before = trace.manifest(1).expect("recorded").clone();
    assert_eq!((before.stages.len(), before.reason), (1, Reason::Asked));
    assert_eq!(slices(&trace, 1, "kept"), EVERY);
    // The next step has begun when the metrics of this one arrive.
    recording.begin(2);
    recording.metrics(1, BTreeMap::new(), &MetricRoles::default());
    let trace = TraceDir::open(temp.path()).expect("opens");
    assert_eq!(slices(&trace, 1, "kept"), EVERY);
    let after = trace.manifest(1).expect("recorded");
    assert_eq!(after.reason, Reason::Anomaly);
    assert_eq!(after.stages[0], before.stages[0]);
    assert_eq!(after.models, state().models);
    // The other stage has the rows that were still in memory, and a note says that rows are missing.
    let names: Vec<&str> = after
        .stages
        .iter()
        .map(|file| file.stage.as_str())
        .collect();
    assert_eq!(names, ["kept", "other"]);
    let others = slices(&trace, 1, "other");
    assert!(
        others.len() < SLICES && others.ends_with(&[4]),
        "{others:?}"
    );
    assert_eq!(after.notes, [ROWS_MISSING]);
    let sizes: u64 = after.stages.iter().map(|file| file.bytes).sum();
    assert_eq!(recording.archive.used(), sizes);
}

#[test]
fn rows_that_could_not_be_written_are_reported_as_missing() {
    let temp = tempfile::tempdir().expect("a folder");
    let mut recording = recording(temp.path(), &[1]);
    recording.begin(1);
    // As on a full disk, nothing can be written: a file is in place of the step's folder.
    let dir = crate::files::Layout::of_run(temp.path()).step(1);
    std::fs::create_dir_all(dir.parent().expect("a parent")).expect("a folder");
    std::fs::write(&dir, "").expect("a file");
    // One slice more than memory has room for.
    for slice in 0..4 {
        recording.part(part(1, 0, slice));
    }
    std::fs::remove_file(&dir).expect("removes");
    recording.part(part(1, 0, 4));
    recording.end(1);
    let trace = TraceDir::open(temp.path()).expect("opens");
    let manifest = trace.manifest(1).expect("recorded");
    assert_eq!(manifest.reason, Reason::Asked);
    assert_eq!(slices(&trace, 1, "kept"), [4]);
    assert_eq!(manifest.notes, [ROWS_MISSING]);
}

#[test]
fn the_flight_recorder_writes_the_state_of_each_step_that_has_one() {
    let temp = tempfile::tempdir().expect("a folder");
    let mut recording = recording(temp.path(), &[]);
    recording.flight_recorder.ring.max_bytes = usize::MAX;
    all_slices(&mut recording, 1);
    recording.end(1);
    recording.step.state = (2, state());
    all_slices(&mut recording, 2);
    recording.rules.has_fired = true;
    recording.end(2);
    let trace = TraceDir::open(temp.path()).expect("opens");
    let models = |step| trace.manifest(step).expect("recorded").models.clone();
    assert_eq!(models(1), BTreeMap::new());
    assert_eq!(models(2), state().models);
    // Only the other one is still wanted.
    let wanted = recording.archive.wanted.lock().expect("no panic");
    assert_eq!(*wanted, [1]);
}

#[test]
fn a_failed_step_is_written_without_changing_the_step_before() {
    let temp = tempfile::tempdir().expect("a folder");
    let mut recording = recording(temp.path(), &[2]);
    recording.flight_recorder.ring.max_bytes = usize::MAX;
    all_slices(&mut recording, 1);
    recording.end(1);
    all_slices(&mut recording, 2);
    recording.failed(false, "an error");
    let trace = TraceDir::open(temp.path()).expect("opens");
    assert_eq!(trace.steps(), [1, 2]);
    assert_eq!(slices(&trace, 1, "kept"), EVERY);
    assert_eq!(slices(&trace, 1, "other"), EVERY);
    assert_eq!(slices(&trace, 2, "kept"), EVERY);
    let left = std::fs::read_dir(trace.layout().step(2)).expect("a folder");
    let partial = left
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".partial"));
    assert_eq!(partial.count(), 0);
}

#[test]
fn a_stage_without_recorded_rows_is_reported_with_the_reason() {
    let temp = tempfile::tempdir().expect("a folder");
    let begin = |name: &str| recording(&temp.path().join(name), &[2]);
    let check = |recording: &Recording, why: &str| {
        let warning = format!(
            "trace: nothing is recorded for `kept`, selected by `trace.stages` or `debug`: {why}"
        );
        assert_eq!(recording.archive.unrecorded_warning(), Some(warning));
    };
    let mut ended = begin("ended");
    all_slices(&mut ended, 1);
    ended.end(1);
    check(&ended, "the run ended before a step to record in full");
    let mut empty = begin("empty");
    all_slices(&mut empty, 1);
    empty.end(1);
    empty.begin(2);
    empty.part(part(2, 1, 0));
    empty.end(2);
    check(&empty, "no rows arrived in the steps to record in full");
    let mut seen = begin("seen");
    all_slices(&mut seen, 2);
    assert_eq!(seen.archive.unrecorded_warning(), None);
    // A step beyond the end of the run was reported before it started.
    let never = recording(&temp.path().join("never"), &[99]);
    assert_eq!(never.archive.unrecorded_warning(), None);
    // Stages that the flight recorder wrote count as recorded.
    ended.metrics(1, BTreeMap::new(), &MetricRoles::default());
    assert_eq!(ended.archive.unrecorded_warning(), None);
}
