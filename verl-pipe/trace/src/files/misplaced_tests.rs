//! Misplaced and unreadable files are reported; the rest of the trace is still read.

use std::fs;
use std::path::PathBuf;

use verl_words::batch::RowId;

use super::tests::{fields, format, header, step_manifest};
use super::*;
use crate::files::documents::StageInfo;
use crate::files::trace_writer::{SliceAt, TraceWriter};

/// A trace of steps 1 to 3 with the stages `reward` and `advantages`.
struct Written {
    temp: tempfile::TempDir,
    layout: Layout,
}

impl Written {
    fn new() -> Written {
        let temp = tempfile::tempdir().expect("a folder");
        let stages = ["reward", "advantages"].map(|name| StageInfo {
            name: name.to_owned(),
            kind: name.to_owned(),
        });
        let format = TraceFormat {
            stages: stages.to_vec(),
            ..format()
        };
        let writer = TraceWriter::create(temp.path(), &format).expect("creates");
        let batch = Batch::with_rows(&[RowId::prompt(0, 7).expect("in range")]);
        for step in 1..=3 {
            let files = ["reward", "advantages"].map(|name| {
                let header = StageManifest {
                    stage: name.to_owned(),
                    kind: name.to_owned(),
                    ..header(step)
                };
                let mut stage = writer.stage(header, &[], &fields(&batch)).expect("begins");
                let at = SliceAt {
                    side: Side::Output,
                    wave: 0,
                    slice: 0,
                    rows: 0..1,
                };
                stage.write(at, &batch).expect("writes");
                stage.finish().expect("ends")
            });
            let manifest = step_manifest(step, files.to_vec());
            writer.end_step(&manifest).expect("ends");
        }
        Written {
            temp,
            layout: writer.layout().clone(),
        }
    }

    fn open(&self) -> TraceDir {
        TraceDir::open(self.temp.path()).expect("opens")
    }

    fn file(&self, step: u64, stage: &str) -> PathBuf {
        self.layout.step(step).join(stage_file(stage))
    }

    /// The error about a file of step 2; checks that the rest of the trace is read.
    #[track_caller]
    fn error_of(&self, stage: &str) -> String {
        let trace = self.open();
        assert_eq!((trace.steps(), trace.notes().len()), (vec![1, 2, 3], 0));
        let other = if stage == "reward" {
            "advantages"
        } else {
            "reward"
        };
        for (step, whole) in [(1, true), (2, false), (3, true)] {
            assert_eq!(trace.step(step).is_ok(), whole, "step {step}");
            trace.stage(step, other).expect("reads");
        }
        let error = trace.stage(2, stage).expect_err("misplaced");
        assert_eq!(error.code(), "T003");
        assert_eq!(trace.step(2).expect_err("one of its files"), error);
        let found = trace.step_as_found(2).expect("the other stage");
        assert_eq!(found.stages[0].manifest.stage, other);
        let damaged = DamagedFile {
            step: 2,
            stage: Some(stage.to_owned()),
            error: error.clone(),
        };
        assert_eq!(found.damaged, [damaged]);
        let message = error.to_string();
        message.replace(&self.temp.path().display().to_string(), "DIR")
    }
}

#[test]
fn a_file_of_another_stage_or_step_is_rejected() {
    let trace = Written::new();
    fs::copy(trace.file(2, "reward"), trace.file(2, "advantages")).expect("a copy");
    insta::assert_snapshot!(trace.error_of("advantages"), @"`DIR/trace/steps/00000002/advantages.parquet` is misplaced: it contains stage `reward` (kind `reward`) of step 2 of a run with seed 17, but its path is that of stage `advantages` (kind `advantages`) of step 2 of a run with seed 17");
    let trace = Written::new();
    fs::copy(trace.file(3, "reward"), trace.file(2, "reward")).expect("a copy");
    let message = trace.error_of("reward");
    assert!(
        message.contains("of step 3 of a run") && message.contains("of step 2 of a run"),
        "{message}"
    );
}

#[test]
fn the_other_stages_of_a_step_with_a_damaged_or_missing_file_are_read() {
    let trace = Written::new();
    fs::write(trace.file(2, "advantages"), "PAR1 and no more").expect("writes");
    assert!(trace.error_of("advantages").contains("is damaged"));
    fs::remove_file(trace.file(2, "advantages")).expect("removes");
    let read = trace.open().step_as_found(2).expect("the other stage");
    assert_eq!(read.damaged[0].error.code(), "T005");
    // If no stage of a step can be read, the step is an error.
    fs::write(trace.file(2, "reward"), "PAR1 and no more").expect("writes");
    let error = trace.open().step_as_found(2).expect_err("nothing left");
    assert_eq!(error.code(), "T003");
}

/// Checks the error about step 2 after a change of its step.json, and that the other steps are read.
#[track_caller]
fn check_manifest(change: impl Fn(&Written, &str) -> String, code: &str, expected: &str) {
    let trace = Written::new();
    let path = trace.layout.manifest(2);
    let text = fs::read_to_string(&path).expect("reads");
    fs::write(&path, change(&trace, &text)).expect("writes");
    let read = trace.open();
    assert_eq!(read.steps(), [1, 3]);
    let error = read.step(2).expect_err("misplaced");
    assert_eq!(error.code(), code, "{error}");
    assert!(error.to_string().contains(expected), "{error}");
    assert_eq!(read.notes(), [format!("step 2 is skipped: {error}")]);
    let damaged: Vec<DamagedFile> = read.damaged_steps().collect();
    assert_eq!((damaged[0].step, &damaged[0].error), (2, &error));
    for step in [1, 3] {
        assert_eq!(read.step(step).expect("reads").stages.len(), 2);
    }
}

#[test]
fn a_wrong_step_json_does_not_affect_the_other_steps() {
    let of_step_3 =
        |trace: &Written, _: &str| fs::read_to_string(trace.layout.manifest(3)).expect("reads");
    check_manifest(
        of_step_3,
        "T003",
        "it contains step 3, but its path is that of step 2",
    );
    check_manifest(|_, text| text[..40].to_owned(), "T003", "is damaged");
    check_manifest(
        |_, text| text.replace("\"format\": 1", "\"format\": 9"),
        "T002",
        "trace format 9",
    );
    check_manifest(
        |_, text| text.replace("\"stage\": \"reward\"", "\"stage\": \"critic\""),
        "T003",
        "it lists stage `critic`, but the stages of the run are `reward`, `advantages`",
    );
    check_manifest(
        |_, text| text.replace("\"stage\": \"advantages\"", "\"stage\": \"reward\""),
        "T003",
        "it lists stage `reward` twice",
    );
    check_manifest(
        |_, text| text.replace("\"advantages.parquet\"", "\"../1/reward.parquet\""),
        "T003",
        "it lists `../1/reward.parquet` as the file of stage `advantages` instead of `advantages.parquet`",
    );
}

#[test]
fn a_folder_under_another_name_is_skipped() {
    let trace = Written::new();
    fs::rename(trace.layout.step(2), trace.layout.steps().join("2")).expect("renames");
    let read = trace.open();
    assert_eq!(read.steps(), [1, 3]);
    assert_eq!(
        read.notes(),
        ["folder `2` is skipped: the folder of step 2 must be named `00000002`"]
    );
    // A complete folder under the number of another step.
    fs::rename(trace.layout.steps().join("2"), trace.layout.step(9)).expect("renames");
    let error = trace.open().step(9).expect_err("step 2");
    assert_eq!(error.code(), "T003");
    assert!(error.to_string().contains("it contains step 2"), "{error}");
}
