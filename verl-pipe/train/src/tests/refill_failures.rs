use std::sync::Arc;
use std::time::Duration;

use verl_declare::pipe::StageDecl;
use verl_run::error::RunError;
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::keys::{GROUP_MEANS, PROMPTS, REWARDS};
use verl_words::stage::{OnShort, Refill, RowRule, StageError, StageSpec};

use super::fakes::*;
use super::refill::{counts, draw, filter, refill, refilling, source_spec, watched};
use super::streaming::Count;

#[test]
fn too_few_groups_end_the_run_before_the_update() {
    let signal = |step, id: RowId| step == 1 || (id.wave() == 1 && id.row().is_multiple_of(5));
    let mut run = start_with(&refilling(filter(refill(4, 3), signal), vec![]), options());
    run.step().unwrap();
    let before = weights(&mut run);
    let error = run.step().unwrap_err();
    assert_eq!(error.code(), "R016");
    insta::assert_snapshot!("no_signal", error.to_string());
    assert!(matches!(
        error,
        RunError::NoSignal {
            step: 2,
            kept: 1,
            judged: 18,
            waves: 3,
            wanted: 4,
            ..
        }
    ));
    assert_eq!(weights(&mut run), before);
    assert_eq!(run.steps_done(), 1);
    // The run is still usable.
    assert!(run.step_at(1).is_ok());
}

#[test]
fn a_step_may_continue_with_fewer_groups_but_not_with_none() {
    let config = Refill {
        on_short: OnShort::Continue,
        ..refill(4, 2)
    };
    let signal = |step, id: RowId| step == 1 && id.row() == 3;
    let pipe = refilling(filter(config, signal), vec![]);
    let (mut run, calls) = watched(&pipe);
    assert_eq!(counts(&mut run), [2.0, 2.0, 0.0]);
    assert_eq!(calls.groups("update"), [(0, 3), (1, 3)]);
    let error = run.step().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("0 of 12 groups in 2 waves"), "{text}");
}

#[test]
fn a_single_wave_requires_nothing_of_the_source() {
    let plain = source();
    let pipe = |groups| {
        let filter = filter(refill(groups, 1), |_, id| id.row().is_multiple_of(2));
        refilling(filter, vec![plain.clone(), generate()])
    };
    let mut run = start_with(&pipe(2), options());
    assert_eq!(counts(&mut run), [1.0, 2.0, 1.0]);
    let error = start_with(&pipe(4), options()).step().unwrap_err();
    assert_eq!(error.code(), "R016");
}

#[test]
fn a_hung_reward_in_the_second_wave_loses_only_its_row() {
    let release = Arc::new(Count::default());
    let gate = release.clone();
    let spec = reward_spec().deadline(Duration::from_millis(80));
    let reward = stage("reward", spec, move |input, context| {
        let id = input.ids()[0];
        if (id.wave(), id.row(), id.sample_index()) == (1, 2, 1) {
            let _ = gate.reaches(1);
        }
        score(input, context)
    });
    let nulls = Arc::new(Count::default());
    let seen = nulls.clone();
    let spec = StageSpec::new()
        .reads(REWARDS)
        .reads(GROUP_MEANS)
        .rows(RowRule::Sink);
    let counts_nulls = stage("counts_nulls", spec, move |input, _| {
        for (id, reward) in input.ids().iter().zip(input.get(&REWARDS)?.rows()) {
            if reward.is_none() {
                assert_eq!((id.wave(), id.row(), id.sample_index()), (1, 2, 1));
                seen.add();
            }
        }
        Ok(())
    });
    let filter = filter(refill(3, 2), |_, id| id.row() % 3 == 2);
    let pipe = refilling(filter, vec![reward, counts_nulls]);
    let mut run = start_with(&pipe, options());
    let metrics = run.step().unwrap().metrics;
    assert_eq!(metrics.get("reward/row_errors"), Some(1.0));
    assert_eq!(metrics.get("filter/groups_kept"), Some(3.0));
    // Kept: rows 5 and 2 of wave 0, row 5 of wave 1; row 2 of wave 1 is surplus.
    assert_eq!(metrics.get("filter/groups_surplus"), Some(1.0));
    assert_eq!(nulls.get(), 0);
    release.add();
}

#[test]
fn a_null_of_the_second_wave_reaches_the_next_stages() {
    let reward = stage("reward", reward_spec(), |input, context| {
        let lost = |id: &RowId| id.wave() == 1 && id.sample_index() == 1;
        if input.ids().iter().any(lost) {
            return Err(StageError::failed("no answer"));
        }
        score(input, context)
    });
    let nulls = Arc::new(Count::default());
    let seen = nulls.clone();
    let spec = StageSpec::new()
        .reads(REWARDS)
        .reads(GROUP_MEANS)
        .rows(RowRule::Sink);
    let count = stage("count", spec, move |input, _| {
        let rewards = input.get(&REWARDS)?;
        (0..rewards.len())
            .filter(|row| rewards.row(*row).is_none())
            .for_each(|_| seen.add());
        Ok(())
    });
    let filter = filter(refill(3, 2), |_, id| id.row() % 3 == 2);
    let mut run = start_with(&refilling(filter, vec![reward, count]), options());
    let metrics = run.step().unwrap().metrics;
    // One response in each of the six groups of wave 1; one of the groups is passed on.
    assert_eq!(metrics.get("reward/row_errors"), Some(6.0));
    assert_eq!(nulls.get(), 1);
}

#[test]
fn a_source_that_repeats_rows_or_miscounts_a_wave_is_an_error() {
    let error_of = |source: StageDecl| {
        let filter = filter(refill(4, 3), |_, _| false);
        let mut run = start_with(&refilling(filter, vec![source]), options());
        run.step().unwrap_err().to_string()
    };
    let again = stage("prompts", source_spec(), |_, context| {
        context.wave = 0;
        draw(context)
    });
    let text = error_of(again);
    assert!(
        text.contains("`prompts` emitted sample 0.5#0 (row 6 of the data set) twice"),
        "{text}"
    );
    let more = stage("prompts", source_spec(), |_, context| {
        if context.wave == 1 {
            let mut extra = Batch::with_rows(&[RowId::prompt(0, 99)?.in_wave(1)?]);
            extra.put(&PROMPTS, RaggedColumn::from_rows([[1u32]]))?;
            context.emit(extra)?;
        }
        draw(context)
    });
    let text = error_of(more);
    assert!(text.contains("6 rows a wave"), "{text}");
    let fewer = stage("prompts", source_spec(), |_, context| match context.wave {
        0 => draw(context),
        _ => Ok(()),
    });
    let text = error_of(fewer);
    assert!(text.contains("6 of 6 rows missing"), "{text}");
}
