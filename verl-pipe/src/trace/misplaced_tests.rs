//! Files that lie in the place of another one, and files that cannot be read, are told; the rest is read all the same.

use std::fs;
use std::path::PathBuf;

use super::tests::{fields, format, header, step_manifest};
use super::*;
use crate::batch::RowId;
use crate::trace::format::StageInfo;
use crate::trace::writer::{SliceAt, TraceWriter};

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

    /// What is said of a file of step 2, and that the rest of the trace is read.
    #[track_caller]
    fn says_of(&self, stage: &str) -> String {
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
        let error = trace.stage(2, stage).expect_err("not what belongs there");
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
        let told = error.to_string();
        told.replace(&self.temp.path().display().to_string(), "DIR")
    }
}

#[test]
fn a_file_of_another_stage_or_step_is_not_taken_for_the_right_one() {
    let trace = Written::new();
    fs::copy(trace.file(2, "reward"), trace.file(2, "advantages")).expect("a copy");
    insta::assert_snapshot!(trace.says_of("advantages"), @"`DIR/trace/steps/00000002/advantages.parquet` is not what belongs there: it holds stage `reward` (kind `reward`) of step 2 of a run with seed 17, its place is that of stage `advantages` (kind `advantages`) of step 2 of a run with seed 17");
    let trace = Written::new();
    fs::copy(trace.file(3, "reward"), trace.file(2, "reward")).expect("a copy");
    let told = trace.says_of("reward");
    assert!(
        told.contains("of step 3 of a run") && told.contains("of step 2 of a run"),
        "{told}"
    );
}

#[test]
fn a_damaged_or_missing_file_leaves_the_other_stages() {
    let trace = Written::new();
    fs::write(trace.file(2, "advantages"), "PAR1 and no more").expect("writes");
    assert!(trace.says_of("advantages").contains("is damaged"));
    fs::remove_file(trace.file(2, "advantages")).expect("removes");
    let read = trace.open().step_as_found(2).expect("the other stage");
    assert_eq!(read.damaged[0].error.code(), "T005");
    // Where nothing of a step can be read, there is no step.
    fs::write(trace.file(2, "reward"), "PAR1 and no more").expect("writes");
    let error = trace.open().step_as_found(2).expect_err("nothing left");
    assert_eq!(error.code(), "T003");
}

/// What is said of step 2 once its step.json was changed, and that the other steps are read.
#[track_caller]
fn check_manifest(change: impl Fn(&Written, &str) -> String, code: &str, expected: &str) {
    let trace = Written::new();
    let path = trace.layout.manifest(2);
    let text = fs::read_to_string(&path).expect("reads");
    fs::write(&path, change(&trace, &text)).expect("writes");
    let read = trace.open();
    assert_eq!(read.steps(), [1, 3]);
    let error = read.step(2).expect_err("not what belongs there");
    assert_eq!(error.code(), code, "{error}");
    assert!(error.to_string().contains(expected), "{error}");
    assert_eq!(read.notes(), [format!("step 2 is left out: {error}")]);
    let damaged: Vec<DamagedFile> = read.damaged_steps().collect();
    assert_eq!((damaged[0].step, &damaged[0].error), (2, &error));
    for step in [1, 3] {
        assert_eq!(read.step(step).expect("reads").stages.len(), 2);
    }
}

#[test]
fn a_step_json_that_is_not_that_of_its_folder_leaves_the_other_steps() {
    let of_step_3 =
        |trace: &Written, _: &str| fs::read_to_string(trace.layout.manifest(3)).expect("reads");
    check_manifest(
        of_step_3,
        "T003",
        "it holds step 3, its place is that of step 2",
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
        "it lists stage `critic`, which is none of the run's (`reward`, `advantages`)",
    );
    check_manifest(
        |_, text| text.replace("\"stage\": \"advantages\"", "\"stage\": \"reward\""),
        "T003",
        "it lists stage `reward` twice",
    );
    check_manifest(
        |_, text| text.replace("\"advantages.parquet\"", "\"../1/reward.parquet\""),
        "T003",
        "it lists `../1/reward.parquet` as the file of stage `advantages`, which is called `advantages.parquet`",
    );
}

#[test]
fn a_folder_under_another_name_is_left_out() {
    let trace = Written::new();
    fs::rename(trace.layout.step(2), trace.layout.steps().join("2")).expect("renames");
    let read = trace.open();
    assert_eq!(read.steps(), [1, 3]);
    assert_eq!(
        read.notes(),
        ["the folder `2` is left out: the folder of step 2 is called `00000002`"]
    );
    // Renamed as a whole: its step.json is that of another step.
    fs::rename(trace.layout.steps().join("2"), trace.layout.step(9)).expect("renames");
    let error = trace.open().step(9).expect_err("step 2");
    assert_eq!(error.code(), "T003");
    assert!(error.to_string().contains("it holds step 2"), "{error}");
}
