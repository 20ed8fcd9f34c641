//! Loops of `step`: how they end, with and without `finish`.

use std::fs;
use std::path::Path;

use serde_json::json;
use verl_declare::pipe::DataPipe;
use verl_run::error::RunError;
use verl_words::stage::{CancelToken, OnRowError, StageError};

use super::fakes::*;
use super::trainer::{evaluated, lines, status, trainer};
use crate::folder::RunFolder;

fn weights_of(dir: &Path) -> String {
    fs::read_to_string(dir.join("model/actor/weights.txt")).unwrap_or_default()
}

fn quiet(dir: &Path, steps: u64) -> DataPipe {
    let mut pipe = evaluated(dir, steps);
    pipe.trace.stats = false;
    pipe
}

#[test]
fn p3_3_a_loop_of_steps_ends_with_finish_as_train_does() {
    let temp = tempfile::tempdir().unwrap();
    let (whole, looped) = (temp.path().join("whole"), temp.path().join("looped"));
    let (made, all) = trainer(&quiet(&whole, 5), CancelToken::default());
    made.unwrap().train().unwrap();

    let (made, page) = trainer(&quiet(&looped, 5), CancelToken::default());
    let mut trainer_ = made.unwrap();
    for _ in 0..5 {
        trainer_.step().unwrap();
    }
    let summary = trainer_.finish().unwrap();
    assert_eq!(summary.steps, 5);
    assert_eq!(weights_of(&looped), weights_of(&whole));
    let end = status(&looped);
    assert_eq!(
        (&end["status"], &end["step"], &end["saved"]),
        (&json!("finished"), &json!(5), &json!(["actor"]))
    );
    assert!(page.text().contains("5 steps in "), "{}", page.text());
    assert_eq!(page.text().lines().count(), all.text().lines().count());

    // Further calls have no effect, and no further step can run.
    let lines_before = page.text();
    assert_eq!(trainer_.finish().unwrap(), summary);
    assert_eq!(trainer_.train().unwrap(), summary);
    let error = trainer_.step().unwrap_err();
    assert!(matches!(error, RunError::Ended { step: 5 }), "{error}");
    assert_eq!(error.code(), "R021");
    drop(trainer_);
    assert_eq!(status(&looped), end);
    assert_eq!(page.text(), lines_before);
}

#[test]
fn a_loop_that_finishes_before_the_target_records_its_last_step() {
    let temp = tempfile::tempdir().unwrap();
    let (two, dir) = (temp.path().join("two"), temp.path().join("run"));
    let (made, _) = trainer(&quiet(&two, 2), CancelToken::default());
    made.unwrap().train().unwrap();

    let (made, page) = trainer(&quiet(&dir, 100), CancelToken::default());
    let mut trainer_ = made.unwrap();
    trainer_.step().unwrap();
    trainer_.step().unwrap();
    trainer_.finish().unwrap();
    assert_eq!(weights_of(&dir), weights_of(&two));
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["step"], &end["target"]),
        (&json!("stopped"), &json!(2), &json!(100))
    );
    assert_eq!(
        end["reason"],
        "the program ended the run after step 2 of 100"
    );
    assert!(
        page.text()
            .contains("ended after step 2 of 100\n2 steps in "),
        "{}",
        page.text()
    );
    // The run cannot be continued.
    let error = trainer_.train().unwrap_err();
    assert!(matches!(error, RunError::Ended { step: 2 }), "{error}");
    assert_eq!(status(&dir), end);
}

#[test]
fn a_dropped_trainer_warns_and_saves_its_models() {
    let temp = tempfile::tempdir().unwrap();
    let (two, dir) = (temp.path().join("two"), temp.path().join("run"));
    let (made, _) = trainer(&quiet(&two, 2), CancelToken::default());
    made.unwrap().train().unwrap();

    let (made, page) = trainer(&quiet(&dir, 5), CancelToken::default());
    let mut trainer_ = made.unwrap();
    trainer_.step().unwrap();
    trainer_.step().unwrap();
    drop(trainer_);
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["step"], &end["saved"]),
        (&json!("stopped"), &json!(2), &json!(["actor"]))
    );
    assert_eq!(
        end["reason"],
        "the trainer was dropped after step 2 of 5 without `finish`"
    );
    assert_eq!(weights_of(&dir), weights_of(&two));
    let text = page.text();
    assert!(
        text.contains("warning: the trainer was dropped after step 2 of 5"),
        "{text}"
    );
    let warnings = lines(&dir, "warnings.jsonl");
    assert_eq!(end["warnings"], warnings.len());

    // At the target, dropping the trainer is fine.
    let dir = temp.path().join("reached");
    let (made, _) = trainer(&quiet(&dir, 1), CancelToken::default());
    made.unwrap().step().unwrap();
    assert_eq!(status(&dir)["status"], "finished");
    assert_eq!(status(&dir).get("reason"), None);
    assert!(!weights_of(&dir).is_empty());

    // Before the first step there is nothing to keep, and the next run replaces the folder.
    let dir = temp.path().join("unused");
    let (made, page) = trainer(&quiet(&dir, 5), CancelToken::default());
    drop(made.unwrap());
    assert_eq!(
        (&status(&dir)["status"], &status(&dir)["step"]),
        (&json!("stopped"), &json!(0))
    );
    assert!(!dir.join("model").exists());
    assert_eq!(page.text(), "");
    let (made, page) = trainer(&quiet(&dir, 1), CancelToken::default());
    made.unwrap().train().unwrap();
    assert!(
        page.text()
            .contains("first step; that run ended with: the trainer was dropped"),
        "{}",
        page.text()
    );
}

#[test]
fn a_loop_that_ends_with_a_failed_step_saves_its_models() {
    let temp = tempfile::tempdir().unwrap();
    let two = temp.path().join("two");
    let (made, _) = trainer(&quiet(&two, 2), CancelToken::default());
    made.unwrap().train().unwrap();
    for finishes in [true, false] {
        let dir = temp.path().join(format!("finishes-{finishes}"));
        let mut pipe = quiet(&dir, 5);
        let spec = reward_spec().on_row_error(OnRowError::Stop);
        pipe.stages[2] = stage("reward", spec, |input, context| match context.step {
            3 => Err(StageError::failed("row 401 has no answer")),
            _ => score(input, context),
        });
        let (made, page) = trainer(&pipe, CancelToken::default());
        let mut trainer_ = made.unwrap();
        let ended = (0..5).try_for_each(|_| trainer_.step().map(drop));
        assert!(
            matches!(ended, Err(RunError::Stage { step: 3, .. })),
            "{ended:?}"
        );
        assert_eq!(status(&dir)["status"], "running");
        if finishes {
            assert_eq!(trainer_.finish().unwrap().steps, 2);
        }
        drop(trainer_);
        let end = status(&dir);
        assert_eq!(
            (&end["status"], &end["step"], &end["saved"]),
            (&json!("failed"), &json!(2), &json!(["actor"]))
        );
        assert!(
            end["reason"]
                .as_str()
                .unwrap()
                .contains("row 401 has no answer")
        );
        assert_eq!(weights_of(&dir), weights_of(&two));
        assert!(
            page.text().contains("saved as of step 2: `actor`\n"),
            "{}",
            page.text()
        );
    }
}

#[test]
fn a_step_that_succeeds_on_retry_counts_as_completed() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let tries = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let spec = reward_spec().on_row_error(OnRowError::Stop);
    let mut pipe = quiet(&dir, 2);
    pipe.stages[2] = stage("reward", spec, move |input, context| {
        let first = tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0;
        match first {
            true => Err(StageError::failed("the service restarts")),
            false => score(input, context),
        }
    });
    let (made, _) = trainer(&pipe, CancelToken::default());
    let mut trainer_ = made.unwrap();
    assert!(trainer_.step().is_err());
    trainer_.step().unwrap();
    trainer_.step().unwrap();
    trainer_.finish().unwrap();
    assert_eq!(status(&dir)["status"], "finished");
    assert_eq!(status(&dir).get("reason"), None);
}

#[test]
fn p3_13_a_run_that_failed_in_step_1_does_not_block_its_folder() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let mut broken = quiet(&dir, 2);
    broken.stages[2] = stage("reward", reward_spec(), |_, _| panic!("a user's mistake"));
    let (made, _) = trainer(&broken, CancelToken::default());
    assert!(made.unwrap().train().is_err());
    assert_eq!(status(&dir)["status"], "failed");

    // Fixed, and run again in the same folder.
    let (made, page) = trainer(&quiet(&dir, 2), CancelToken::default());
    made.unwrap().train().unwrap();
    assert_eq!(status(&dir)["status"], "finished");
    let text = page.text();
    assert!(
        text.contains("which contained a run that ended before completing its first step; that run ended with: step 1, stage `reward`: all 18 rows failed"),
        "{text}"
    );
    assert!(!dir.join("row_errors.jsonl").exists());
    // A folder with results is never replaced.
    assert!(matches!(
        RunFolder::create(&dir, 2),
        Err(RunError::FolderExists { .. })
    ));
}

#[test]
fn warnings_of_the_plan_are_printed_once() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let mut pipe = quiet(&dir, 1);
    let unread = verl_words::stage::StageSpec::new()
        .reads(verl_words::keys::RESPONSES)
        .writes(verl_words::keys::SHAPED_REWARDS);
    pipe.stages
        .push(stage("audit", unread, |mut input, context| {
            let zeros = vec![Some(0.0f32); input.num_rows()];
            input.put(&verl_words::keys::SHAPED_REWARDS, zeros)?;
            context.emit(input)
        }));
    let (made, page) = trainer(&pipe, CancelToken::default());
    made.unwrap().train().unwrap();
    let text = page.text();
    assert_eq!(text.matches("warning[P013]").count(), 1, "{text}");
    assert!(text.starts_with("warning[P013]: "), "{text}");
    let warnings = lines(&dir, "warnings.jsonl");
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(warnings[0]["message"].as_str().unwrap().contains("P013"));
}

#[test]
fn a_panic_of_the_program_saves_the_models_and_the_reason() {
    let temp = tempfile::tempdir().unwrap();
    let (two, dir) = (temp.path().join("two"), temp.path().join("run"));
    let (made, _) = trainer(&quiet(&two, 2), CancelToken::default());
    made.unwrap().train().unwrap();
    let (made, _) = trainer(&quiet(&dir, 5), CancelToken::default());
    let mut trainer_ = made.unwrap();
    trainer_.on_step(|metrics| assert!(metrics.step < 2, "a plot has no axis"));
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        trainer_.train().map(drop)
    }));
    assert!(ended.is_err());
    let end = status(&dir);
    assert_eq!(
        (&end["status"], &end["step"], &end["saved"]),
        (&json!("stopped"), &json!(2), &json!(["actor"]))
    );
    let reason = end["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("the program panicked after step 2 of 5: a plot has no axis (at "),
        "{reason}"
    );
    assert_eq!(weights_of(&dir), weights_of(&two));
}

#[test]
fn a_stage_that_panics_when_it_starts_is_an_error_and_leaves_no_folder() {
    struct Rash;
    impl verl_words::stage::Stage for Rash {
        fn spec(&self) -> verl_words::stage::StageSpec {
            reward_spec()
        }
        fn start(&mut self, _: &mut verl_words::stage::StartContext<'_>) -> Result<(), StageError> {
            panic!("no key of the service")
        }
        fn run(
            &mut self,
            _: verl_words::batch::Batch,
            _: &mut verl_words::stage::StageContext<'_>,
        ) -> Result<(), StageError> {
            Ok(())
        }
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let mut pipe = quiet(&dir, 1);
    pipe.stages[2] = declare("reward", |_| Ok(Box::new(Rash)));
    let (made, _) = trainer(&pipe, CancelToken::default());
    let error = made.err().expect("a panic").to_string();
    assert!(
        error.starts_with("stage `reward` cannot start: it panicked: no key of the service (at "),
        "{error}"
    );
    assert!(!dir.exists());
}

#[test]
fn a_rule_that_panics_is_reported_and_the_run_continues() {
    struct Broken;
    impl verl_rules::Rule for Broken {
        fn name(&self) -> &str {
            "broken"
        }
        fn severity(&self) -> verl_rules::RuleSeverity {
            verl_rules::RuleSeverity::Warn
        }
        fn limit(&self) -> f64 {
            0.0
        }
        fn advice(&self) -> &str {
            "fix it"
        }
        fn after_step(&mut self, _: &verl_rules::MetricsView<'_>, _: f64) -> Vec<verl_rules::Hit> {
            panic!("a rule without a unit")
        }
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("run");
    let pipe = evaluated(&dir, 3).rule(|| Broken);
    let (made, page) = trainer(&pipe, CancelToken::default());
    made.unwrap().train().unwrap();
    assert_eq!(status(&dir)["status"], "finished");
    let text = page.text();
    assert_eq!(
        text.matches("its thread panicked: a rule without a unit (at ")
            .count(),
        1,
        "{text}"
    );
    let warnings = lines(&dir, "warnings.jsonl");
    assert_eq!(warnings.last().unwrap()["level"], "error");
}
