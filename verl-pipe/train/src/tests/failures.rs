use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use verl_run::error::RunError;
use verl_run::runner::RunOptions;
use verl_words::field::Key;
use verl_words::stage::{CancelToken, OnRowError, StageError};

use super::fakes::*;
use super::streaming::Count;

/// Whether the batch contains the second sample of data row 2.
fn is_victim(batch: &verl_words::batch::Batch) -> bool {
    batch
        .ids()
        .iter()
        .any(|id| id.row() == 2 && id.sample_index() == 1)
}

#[test]
fn a_hung_reward_loses_only_its_row() {
    let release = Arc::new(Count::default());
    let gate = release.clone();
    let spec = reward_spec().deadline(Duration::from_millis(80));
    let reward = stage("reward", spec, move |input, context| {
        assert_eq!(input.num_rows(), 1);
        if is_victim(&input) && context.step == 1 {
            let _ = gate.reaches(1);
        }
        score(input, context)
    });
    let mut run = start(vec![reward]);
    let metrics = run.step().unwrap().metrics;
    assert_eq!(metrics.get("reward/row_errors"), Some(1.0));
    assert_eq!(run.num_host_threads(), 3 + 1);
    assert_eq!(
        run.step().unwrap().metrics.get("reward/row_errors"),
        Some(0.0)
    );
    // The abandoned thread ends with its call, and its events are ignored.
    release.add();
    for _ in 0..200 {
        if run.num_host_threads() == 3 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(run.num_host_threads(), 3);
    assert_eq!(
        run.step().unwrap().metrics.get("reward/row_errors"),
        Some(0.0)
    );
}

#[test]
fn a_panic_and_an_error_lose_only_their_rows() {
    let reward = stage("reward", reward_spec(), move |input, context| {
        match context.step {
            1 if is_victim(&input) => panic!("a user's mistake"),
            2 if is_victim(&input) => return Err(StageError::failed("no answer")),
            _ => {}
        }
        score(input, context)
    });
    let mut run = start(vec![reward]);
    let first = run.step().unwrap().metrics;
    assert_eq!(first.get("reward/row_errors"), Some(1.0));
    let plain = start(vec![]).step().unwrap().metrics;
    assert_ne!(first.get("reward/mean"), plain.get("reward/mean"));
    // Data row 2 belongs to step 1 only.
    assert_eq!(
        run.step().unwrap().metrics.get("reward/row_errors"),
        Some(0.0)
    );
}

#[test]
fn if_null_is_not_allowed_the_step_fails_and_names_the_row() {
    const STRICT: Key<verl_words::field::Scalar<f32>> = Key::new("rewards", "[B]", "reward", "");
    let spec = verl_words::stage::StageSpec::new()
        .reads(verl_words::keys::RESPONSES)
        .writes(STRICT)
        .slice_rows(1);
    for spec in [
        spec,
        reward_spec().slice_rows(1).on_row_error(OnRowError::Stop),
    ] {
        let reward = stage("reward", spec, |input, context| {
            if is_victim(&input) {
                return Err(StageError::failed("no answer"));
            }
            score(input, context)
        });
        let mut run = start(vec![reward]);
        let before = weights(&mut run);
        let error = run.step().unwrap_err();
        assert!(
            matches!(&error, RunError::Stage { stage, .. } if stage == "reward"),
            "{error}"
        );
        assert!(
            error.to_string().contains("sample 0.2#1") && error.to_string().contains("no answer"),
            "{error}"
        );
        assert_eq!(weights(&mut run), before);
    }
}

#[test]
fn a_stage_with_a_model_that_panics_ends_the_step() {
    let generate = single("generate", generate_spec(), |_, _| panic!("out of memory"));
    let error = start(vec![generate]).step().unwrap_err();
    assert!(
        matches!(&error, RunError::Panic { stage, message, .. } if stage == "generate" && message.starts_with("out of memory (at ") && message.contains("failures.rs:"))
    );
}

#[test]
fn the_error_of_a_hung_worker_names_the_awaited_keys() {
    let release = Arc::new(Count::default());
    let gate = release.clone();
    let generate = single("generate", generate_spec(), move |_, _| gate.reaches(1));
    let mut pipe = pipeline(vec![generate]);
    pipe.run.stage_deadline_s = 0.2;
    let mut run = start_with(&pipe, options());
    let error = run.step().unwrap_err();
    assert!(
        matches!(&error, RunError::Deadline { stage, .. } if stage == "generate"),
        "{error}"
    );
    assert!(
        error.to_string().contains("awaited: responses, mask_kinds"),
        "{error}"
    );
    assert!(matches!(run.step().unwrap_err(), RunError::Lost { .. }));
    release.add();
}

#[test]
fn a_stage_that_cannot_be_copied_is_rebuilt_after_a_panic() {
    let made = Arc::new(AtomicUsize::new(0));
    let count = made.clone();
    struct Fragile(FnStage);
    impl verl_words::stage::Stage for Fragile {
        fn spec(&self) -> verl_words::stage::StageSpec {
            reward_spec().slice_rows(1)
        }
        fn run(
            &mut self,
            input: verl_words::batch::Batch,
            context: &mut verl_words::stage::StageContext<'_>,
        ) -> Result<(), StageError> {
            assert!(!is_victim(&input), "a user's mistake");
            self.0.run(input, context)
        }
    }
    let inner = reward();
    let reward = declare("reward", move |context| {
        count.fetch_add(1, Ordering::SeqCst);
        let inner = (inner.build)(context)?;
        let inner: Box<dyn std::any::Any> = inner;
        Ok(Box::new(Fragile(
            *inner.downcast::<FnStage>().expect("the closure stage"),
        )))
    });
    let mut run = start(vec![reward]);
    let before = made.load(Ordering::SeqCst);
    assert_eq!(
        run.step().unwrap().metrics.get("reward/row_errors"),
        Some(1.0)
    );
    assert_eq!(made.load(Ordering::SeqCst), before + 1);
}

#[test]
fn cancelling_ends_the_step_and_leaves_the_run_usable() {
    let cancel = CancelToken::default();
    let asked = cancel.clone();
    let generate = single("generate", generate_spec(), move |input, context| {
        if context.step == 2 && !asked.is_cancelled() {
            asked.cancel();
            while !context.cancel.is_cancelled() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return Err(StageError::Cancelled);
        }
        for prompt in &input.split(1) {
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    });
    let mut run = start_with(
        &pipeline(vec![generate]),
        RunOptions {
            cancel,
            ..options()
        },
    );
    run.step().unwrap();
    let before = weights(&mut run);
    assert!(matches!(
        run.step().unwrap_err(),
        RunError::Cancelled { step: 2 }
    ));
    assert_eq!(weights(&mut run), before);
    assert_eq!(run.steps_done(), 1);
}

#[test]
fn a_thousand_steps_leak_no_thread_and_no_object() {
    let alive = Arc::new(());
    let captured = alive.clone();
    let reward = stage("reward", reward_spec(), move |input, context| {
        let _ = &captured;
        score(input, context)
    });
    let mut run = start(vec![reward]);
    run.step().unwrap();
    // Copies of the stage are kept for concurrent jobs, at most as many as the pool accepts.
    let limit = Arc::strong_count(&alive) + 8;
    for _ in 0..999 {
        run.step().unwrap();
    }
    assert_eq!(run.steps_done(), 1000);
    assert_eq!(run.num_host_threads(), 3);
    assert!(Arc::strong_count(&alive) <= limit);
    drop(run);
    for _ in 0..200 {
        if Arc::strong_count(&alive) == 1 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(Arc::strong_count(&alive), 1);
}
