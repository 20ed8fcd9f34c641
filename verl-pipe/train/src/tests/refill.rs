use std::ops::Range;
use std::sync::{Arc, Mutex};

use verl_declare::pipe::{DataPipe, StageDecl};
use verl_run::runner::{Run, RunOptions};
use verl_run::tap::{Tap, TapPoint};
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::field::{Key, Scalar};
use verl_words::keys::{ADVANTAGES, GROUP_MEANS, PROMPTS, RESPONSES, REWARDS};
use verl_words::stage::{
    Cardinality, OnShort, Refill, RowRule, StageContext, StageError, StageSpec,
};

use super::fakes::*;
use super::streaming::{Count, Recorder};

const P: u64 = BATCH.prompts as u64;

/// Six rows per wave, highest first; every wave of a step draws the same rows of the data set.
pub(super) fn draw(context: &mut StageContext<'_>) -> Result<(), StageError> {
    let wave = context.wave;
    let ids = (0..P).map(|i| RowId::prompt(0, context.step * P - 1 - i)?.in_wave(wave));
    let ids = ids.collect::<Result<Vec<_>, _>>()?;
    let mut prompts = Batch::with_rows(&ids);
    let tokens = ids.iter().map(|id| vec![7, id.row() as u32]);
    prompts.put(&PROMPTS, RaggedColumn::from_rows(tokens))?;
    context.emit(prompts)
}

pub(super) fn source_spec() -> StageSpec {
    StageSpec::new()
        .rows(RowRule::Source)
        .draws_waves()
        .writes(PROMPTS)
}

fn source() -> StageDecl {
    stage("prompts", source_spec(), |_, context| draw(context))
}

/// Slices of four prompts, so that waves do not end at multiples of a slice.
fn rowwise() -> StageSpec {
    generate_spec().cardinality(Cardinality::Row).slice_rows(4)
}

fn generate() -> StageDecl {
    single("generate", rowwise(), |input, context| {
        for prompt in input.split(1).iter().rev() {
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    })
}

pub(super) fn refill(groups: usize, waves: usize) -> Refill {
    Refill {
        groups,
        waves,
        on_short: OnShort::Error,
    }
}

/// Keeps the groups for which `signal` holds.
pub(super) fn filter(
    refill: Refill,
    signal: impl Fn(u64, RowId) -> bool + Send + Sync + 'static,
) -> StageDecl {
    let spec = StageSpec::new()
        .reads(REWARDS)
        .writes(GROUP_MEANS)
        .rows(RowRule::Filter)
        .cardinality(Cardinality::Group)
        .refill(refill)
        .metrics(&[REWARD]);
    stage("filter", spec, move |input, context| {
        let rewards = input.get(&REWARDS)?;
        let mean = rewards.rows().flatten().sum::<f32>() / input.num_rows() as f32;
        context.record(&REWARD, f64::from(mean));
        if !signal(context.step, input.ids()[0]) {
            return Ok(());
        }
        let mut output = input.rows_only();
        output.put(&GROUP_MEANS, vec![mean; input.num_rows()])?;
        context.emit(output)
    })
}

fn advantages() -> StageDecl {
    let spec = StageSpec::new()
        .reads(REWARDS)
        .reads(GROUP_MEANS)
        .reads(RESPONSES)
        .writes(ADVANTAGES)
        .cardinality(Cardinality::Group);
    stage("advantages", spec, |input, context| {
        let (rewards, means) = (input.get(&REWARDS)?, input.get(&GROUP_MEANS)?);
        let lengths = input.get(&RESPONSES)?;
        let rows = (0..input.num_rows()).map(|row| {
            let reward = rewards.row(row).unwrap_or(0.0);
            vec![reward - means.values()[row]; lengths.row_len(row)]
        });
        let rows = RaggedColumn::from_rows(rows.collect::<Vec<_>>());
        let mut output = input.rows_only();
        output.put(&ADVANTAGES, rows)?;
        context.emit(output)
    })
}

pub(super) fn refilling(filter: StageDecl, others: Vec<StageDecl>) -> DataPipe {
    let mut stages = vec![source(), generate(), filter, advantages()];
    stages.extend(others);
    pipeline(stages)
}

/// Slice, rows and identities of a call.
type Call = (usize, Range<usize>, Vec<RowId>);

/// Calls by stage.
#[derive(Default)]
pub(super) struct Calls(Mutex<Vec<(String, Call)>>);

impl Tap for Calls {
    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        let call = (point.slice, point.rows.clone(), batch.ids());
        self.0.lock().unwrap().push((point.stage.to_owned(), call));
    }
}

impl Calls {
    fn of(&self, stage: &str) -> Vec<Call> {
        let calls = self.0.lock().unwrap();
        let own = calls.iter().filter(|(name, _)| name == stage);
        let mut own: Vec<Call> = own.map(|(_, call)| call.clone()).collect();
        own.sort_by_key(|(slice, ..)| *slice);
        own
    }

    fn rows(&self, stage: &str) -> Vec<Range<usize>> {
        self.of(stage).into_iter().map(|call| call.1).collect()
    }

    /// Wave and data row of each group that a stage saw, in order.
    pub(super) fn groups(&self, stage: &str) -> Vec<(u64, u64)> {
        let mut groups: Vec<(u64, u64)> = Vec::new();
        for id in self.of(stage).into_iter().flat_map(|call| call.2) {
            let group = (id.wave(), id.row());
            if groups.last() != Some(&group) {
                groups.push(group);
            }
        }
        groups
    }
}

pub(super) fn watched(pipe: &DataPipe) -> (Run, Arc<Calls>) {
    let calls = Arc::new(Calls::default());
    let options = RunOptions {
        tap: calls.clone(),
        ..options()
    };
    (start_with(pipe, options), calls)
}

/// Waves, groups passed on, and surplus groups of the next step.
#[track_caller]
pub(super) fn counts(run: &mut Run) -> [f64; 3] {
    let metrics = run.step().unwrap().metrics;
    ["waves", "groups_kept", "groups_surplus"]
        .map(|name| metrics.get(&format!("filter/{name}")).unwrap())
}

#[test]
fn a_step_with_enough_groups_draws_no_further_wave() {
    let pipe = refilling(filter(refill(4, 5), |_, _| true), vec![]);
    let (mut run, calls) = watched(&pipe);
    assert_eq!(counts(&mut run), [1.0, 4.0, 2.0]);
    // The first four in declared order, although the last were generated first.
    assert_eq!(calls.groups("update"), [(0, 5), (0, 4), (0, 3), (0, 2)]);
    assert_eq!(calls.groups("filter").len(), 6);
}

#[test]
fn waves_are_drawn_until_enough_groups_are_kept() {
    // Wave 0 keeps row 5, wave 1 rows 5 and 0, wave 2 rows 4, 3 and 1.
    let signal =
        |_, id: RowId| matches!((id.wave(), id.row()), (0, 5) | (1, 5 | 0) | (2, 4 | 3 | 1));
    let pipe = refilling(filter(refill(5, 9), signal), vec![]);
    let (mut run, calls) = watched(&pipe);
    assert_eq!(counts(&mut run), [3.0, 5.0, 1.0]);
    assert_eq!(
        calls.groups("update"),
        [(0, 5), (1, 5), (1, 0), (2, 4), (2, 3)]
    );
    // No slice crosses the end of a wave: 6 prompts, 18 samples.
    assert_eq!(
        calls.rows("generate"),
        [0..4, 4..6, 6..10, 10..12, 12..16, 16..18]
    );
    let rewards: Vec<Range<usize>> = (0..3)
        .flat_map(|wave| [0..8, 8..16, 16..18].map(|r| r.start + 18 * wave..r.end + 18 * wave))
        .collect();
    assert_eq!(calls.rows("reward"), rewards);
    let groups: Vec<Range<usize>> = (0..18).map(|group| 3 * group..3 * group + 3).collect();
    assert_eq!(calls.rows("filter"), groups);
    assert_eq!(calls.rows("advantages"), groups[..5]);
    let [update] = calls.rows("update").try_into().unwrap();
    assert_eq!(update, 0..15);
}

#[test]
fn a_larger_wave_limit_changes_nothing_if_not_needed() {
    let signal = |step: u64, id: RowId| (id.row() + id.wave() + step).is_multiple_of(3);
    let outcome = |waves| {
        let pipe = refilling(filter(refill(4, waves), signal), vec![]);
        let mut run = start_with(&pipe, options());
        let steps: Vec<[f64; 3]> = (0..4).map(|_| counts(&mut run)).collect();
        (steps, weights(&mut run))
    };
    let needed = outcome(2);
    assert!(needed.0.iter().all(|counts| counts[0] == 2.0));
    assert_eq!(outcome(7), needed);
}

fn timed(latency: Option<u64>, threads: usize) -> (String, Vec<(String, f64)>, Rows) {
    let wait = jitter(latency);
    let [generate, reward] = scattered(rowwise(), latency, &wait);
    // All groups of a wave are kept, or half, or a third.
    let before_group = wait.clone();
    let filter = filter(refill(4, 4), move |step, id| {
        before_group();
        (id.row() * 7 + id.wave() * 5 + step * step).is_multiple_of(step % 3 + 1)
    });
    let seen = Key::<Scalar<u64>>::new("seen", "[B]", "", "rows of the slice");
    let bonus = StageSpec::new()
        .reads(GROUP_MEANS)
        .reads(PROMPTS)
        .writes(seen)
        .slice_rows(4);
    let bonus = stage("bonus", bonus, move |mut input, context| {
        wait();
        input.put(&seen, vec![input.num_rows() as u64; input.num_rows()])?;
        context.emit(input)
    });
    let recorder = Arc::new(Recorder::default());
    let options = RunOptions {
        host_threads: threads,
        tap: recorder.clone(),
        ..RunOptions::default()
    };
    let pipe = refilling(filter, vec![generate, reward, bonus]);
    let mut run = start_with(&pipe, options);
    let mut metrics = Vec::new();
    for _ in 0..6 {
        let values = run.step().unwrap().metrics.values;
        metrics.extend(
            values
                .into_iter()
                .filter(|(name, _)| !name.starts_with("perf/")),
        );
    }
    (weights(&mut run), metrics, recorder.rows())
}

type Rows = Vec<(String, bool, u64, String)>;

#[test]
fn latencies_and_thread_counts_change_no_bit_of_a_refilled_step() {
    let calm = timed(None, 2);
    let waves: Vec<f64> = calm
        .1
        .iter()
        .filter(|(name, _)| name == "filter/waves")
        .map(|(_, waves)| *waves)
        .collect();
    assert!(
        waves.contains(&1.0) && waves.iter().any(|waves| *waves > 1.0),
        "{waves:?}"
    );
    for latency in 1..4 {
        assert_eq!(timed(Some(latency), 2 + latency as usize), calm);
    }
}

#[test]
fn kept_rows_are_passed_on_before_the_last_wave_is_drawn() {
    let passed = Arc::new(Count::default());
    let seen = passed.clone();
    let source = stage("prompts", source_spec(), move |_, context| {
        // Two groups of wave 0 are kept; the stage after the filter processes them before wave 1 is drawn.
        if context.wave == 1 {
            seen.reaches(2 * SAMPLES)?;
        }
        draw(context)
    });
    let spec = StageSpec::new()
        .reads(GROUP_MEANS)
        .reads(RESPONSES)
        .rows(RowRule::Sink)
        .slice_rows(1);
    let passes = stage("passes", spec, move |_, _| {
        passed.add();
        Ok(())
    });
    let filter = filter(refill(3, 2), |_, id| id.row() % 3 == 1);
    let mut run = start_with(&refilling(filter, vec![source, passes]), options());
    assert_eq!(counts(&mut run), [2.0, 3.0, 1.0]);
}

#[test]
fn stages_that_need_the_entire_batch_wait_for_the_last_wave() {
    let spec = StageSpec::new()
        .reads(REWARDS)
        .rows(RowRule::Sink)
        .cardinality(Cardinality::Batch);
    let all = stage("all", spec, |input, _| {
        assert_eq!(input.num_rows(), 2 * BATCH.prompts * SAMPLES);
        assert!(input.ids().iter().any(|id| id.wave() == 1));
        Ok(())
    });
    let filter = filter(refill(3, 4), |_, id| id.row() % 3 == 1);
    let pipe = refilling(filter, vec![all]);
    let (mut run, calls) = watched(&pipe);
    run.step().unwrap();
    assert_eq!((calls.of("all").len(), calls.of("update").len()), (1, 1));
}

#[test]
fn an_earlier_filter_may_drop_an_entire_wave() {
    let lucky = Key::<Scalar<u64>>::new("lucky", "[B]", "", "1");
    let spec = StageSpec::new()
        .reads(PROMPTS)
        .writes(lucky)
        .rows(RowRule::Filter)
        .cardinality(Cardinality::Group);
    // Drops waves 0 and 2, and half of the others.
    let sieve = stage("sieve", spec, move |input, context| {
        let id = input.ids()[0];
        if id.wave().is_multiple_of(2) || id.row().is_multiple_of(2) {
            return Ok(());
        }
        let mut output = input.rows_only();
        output.put(&lucky, vec![1u64; input.num_rows()])?;
        context.emit(output)
    });
    let generate = single("generate", rowwise().reads(lucky), |input, context| {
        for prompt in &input.split(1) {
            let group = respond(prompt, context)?;
            context.emit(group)?;
        }
        Ok(())
    });
    let filter = filter(refill(5, 6), |_, _| true);
    let pipe = refilling(filter, vec![sieve, generate]);
    let (mut run, calls) = watched(&pipe);
    assert_eq!(counts(&mut run), [4.0, 5.0, 1.0]);
    assert_eq!(
        calls.groups("update"),
        [(1, 5), (1, 3), (1, 1), (3, 5), (3, 3)]
    );
}

#[test]
fn a_restored_step_with_waves_repeats_bit_by_bit() {
    let recorder = Arc::new(Recorder::default());
    let filter = filter(refill(4, 3), |step, id| {
        (id.row() + id.wave() + step).is_multiple_of(3)
    });
    let options = RunOptions {
        tap: recorder.clone(),
        ..options()
    };
    let mut run = start_with(&refilling(filter, vec![]), options);
    run.step().unwrap();
    let snapshot = run.snapshot().unwrap();
    let repeat = |run: &mut Run| {
        recorder.0.lock().unwrap().clear();
        let mut metrics = run.step().unwrap().metrics;
        metrics.values.retain(|name, _| !name.starts_with("perf/"));
        (metrics.values, recorder.rows(), weights(run))
    };
    let first = repeat(&mut run);
    assert_eq!(first.0["filter/waves"], 2.0);
    let second = repeat(&mut run);
    run.restore(&snapshot).unwrap();
    assert_eq!(repeat(&mut run), first);
    assert_eq!(repeat(&mut run), second);
}
