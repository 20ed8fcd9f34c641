use std::sync::Arc;

use super::fakes::*;
use super::streaming::Count;
use crate::run::error::RunError;
use crate::run::runner::RunOptions;
use crate::run::stall::StallReport;

/// Times as they differ from run to run.
fn without_times(text: &str) -> String {
    let mut words = Vec::new();
    for word in text.split(' ') {
        let number = word.trim_end_matches(';').parse::<f64>().is_ok() && word.contains('.');
        words.push(if number { "TIME" } else { word });
    }
    words.join(" ")
}

#[test]
fn a_deadline_leaves_behind_what_was_pending() {
    let temp = tempfile::tempdir().unwrap();
    let release = Arc::new(Count::default());
    let held = release.clone();
    let generate = single("generate", generate_spec(), move |input, context| {
        let first = respond(&input.split(1)[0], context)?;
        context.emit(first)?;
        held.reaches(1)
    });
    let mut pipe = pipeline(vec![generate]);
    pipe.run.stage_deadline_s = 0.4;
    let with_folder = RunOptions {
        run_dir: Some(temp.path().to_owned()),
        ..options()
    };
    let mut run = start_with(&pipe, with_folder);
    assert_eq!(StallReport::read(temp.path()).unwrap(), None);
    let error = run.step().unwrap_err();
    assert!(matches!(error, RunError::Deadline { .. }), "{error}");
    let report = StallReport::read(temp.path()).unwrap().expect("a file");
    assert!(report.running[0].waited_s >= 0.4);
    assert_eq!(report.running[0].deadline_s, Some(0.4));
    insta::assert_snapshot!(without_times(&report.to_string()));
    release.add();
}

#[test]
fn a_long_wait_is_told_and_forgotten_when_it_is_over() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().to_owned();
    let seen = Arc::new(std::sync::Mutex::new(None));
    let kept = seen.clone();
    let generate = single("generate", generate_spec(), move |input, context| {
        // Half of the deadline passes before the run tells what it waits for.
        for _ in 0..1_500 {
            if let Ok(Some(report)) = StallReport::read(&dir) {
                *kept.lock().unwrap() = Some(report);
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        for prompt in input.split(1).iter().rev() {
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    });
    let mut pipe = pipeline(vec![generate]);
    pipe.run.stage_deadline_s = 4.0;
    let with_folder = RunOptions {
        run_dir: Some(temp.path().to_owned()),
        ..options()
    };
    let mut run = start_with(&pipe, with_folder);
    run.step().unwrap();
    let report = seen.lock().unwrap().take().expect("it was told");
    assert_eq!(report.error, None);
    assert_eq!(report.running[0].stage, "generate");
    let waiting: Vec<&str> = report
        .waiting
        .iter()
        .map(|edge| edge.stage.as_str())
        .collect();
    assert_eq!(waiting, ["reward", "advantages", "update"]);
    assert_eq!(StallReport::read(temp.path()).unwrap(), None);
}
