//! Steps that do not fit in memory: what is on disk of them is kept, whatever comes after.

use super::*;
use crate::batch::{RaggedColumn, RowId};
use crate::keys::RESPONSES;
use crate::stage::RowRule;
use crate::trace::config::RuleSetting;
use crate::trace::format::StageInfo;
use crate::trace::rules::Hit;
use crate::trace::store::tests::fields;
use crate::trace::store::{self, TraceDir};

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
        ..store::tests::format()
    }
}

/// A recording of the stages `kept` and `other`, of which the first is recorded in full at `steps`, with room in memory for
/// some three slices.
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
        outputs: fields(&batch(1, 0)),
        metrics: Vec::new(),
        longest: None,
    };
    let writer = TraceWriter::create(run, &format()).expect("creates");
    let off = RuleSetting {
        severity: Some(Severity::Off),
        limit: None,
    };
    let config = TraceConfig {
        steps: steps.to_vec(),
        stages: vec!["kept".to_owned()],
        // The responses of these tests are one token over and over.
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

fn all_slices(recording: &mut Recording, step: u64) {
    recording.begin(step);
    for slice in 0..SLICES {
        recording.part(part(step, 0, slice));
        recording.part(part(step, 1, slice));
    }
}

/// The slices of a stage's output that are on disk, and whether they are as they came.
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
fn a_warning_leaves_what_is_on_disk_of_a_step_that_was_too_large() {
    let temp = tempfile::tempdir().expect("a folder");
    let mut recording = recording(temp.path(), &[1]);
    let version = WeightsVersion {
        step: 0,
        hash: "ab".to_owned(),
    };
    let reference = StateRef {
        version,
        state: None,
    };
    let state = StepState {
        models: BTreeMap::from([("actor".to_owned(), reference.clone())]),
        stages: BTreeMap::new(),
    };
    recording.state = (1, state);
    all_slices(&mut recording, 1);
    recording.end(1);
    let trace = TraceDir::open(temp.path()).expect("opens");
    let before = trace.manifest(1).expect("recorded").clone();
    assert_eq!((before.stages.len(), before.reason), (1, Reason::Asked));
    assert_eq!(slices(&trace, 1, "kept"), EVERY);
    // The next step has begun when the metrics of this one are told.
    recording.begin(2);
    recording.metrics(1, BTreeMap::new());
    let trace = TraceDir::open(temp.path()).expect("opens");
    assert_eq!(slices(&trace, 1, "kept"), EVERY);
    let after = trace.manifest(1).expect("recorded");
    assert_eq!(after.reason, Reason::Anomaly);
    assert_eq!(after.stages[0], before.stages[0]);
    assert_eq!(
        after.models,
        BTreeMap::from([("actor".to_owned(), reference)])
    );
    // Of the other stage there is what memory still held, and a note that it is not all.
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
    assert_eq!(recording.used.load(Ordering::Relaxed), sizes);
}

#[test]
fn a_step_that_fails_has_its_own_rows_and_leaves_those_of_the_step_before() {
    let temp = tempfile::tempdir().expect("a folder");
    let mut recording = recording(temp.path(), &[2]);
    recording.ring.max_bytes = usize::MAX;
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
fn a_stage_of_which_nothing_was_recorded_is_told_with_the_reason() {
    let temp = tempfile::tempdir().expect("a folder");
    let begin = |name: &str| recording(&temp.path().join(name), &[2]);
    let told = |recording: &Recording, why: &str| {
        let told = format!(
            "trace: nothing is recorded of `kept`, which `trace.stages` or `debug` names: {why}"
        );
        assert_eq!(recording.told_of_unseen(), Some(told));
    };
    let mut ended = begin("ended");
    all_slices(&mut ended, 1);
    ended.end(1);
    told(
        &ended,
        "the run ended before a step that was to be recorded in full",
    );
    let mut empty = begin("empty");
    all_slices(&mut empty, 1);
    empty.end(1);
    empty.begin(2);
    empty.part(part(2, 1, 0));
    empty.end(2);
    told(
        &empty,
        "no row came to it in the steps that were to be recorded in full",
    );
    let mut seen = begin("seen");
    all_slices(&mut seen, 2);
    assert_eq!(seen.told_of_unseen(), None);
    // A step that the run has not was told before it.
    let never = recording(&temp.path().join("never"), &[99]);
    assert_eq!(never.told_of_unseen(), None);
    // What the flight recorder wrote is there too.
    ended.metrics(1, BTreeMap::new());
    assert_eq!(ended.told_of_unseen(), None);
}
