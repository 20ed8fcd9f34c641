//! Spans of steps: every call has one, in its lane, with its rows.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use verl_run::runner::RunOptions;
use verl_run::spans::{CallSpan, HOST, SpanKind, SpanOutcome, TimelineLine};
use verl_run::tap::{Tap, TapPoint};
use verl_words::batch::Batch;
use verl_words::stage::{RowRule, StageError, StageSpec};

use super::fakes::*;
use super::streaming::Count;
use crate::timeline_file::TIMELINE;
use crate::trainer::{Trainer, TrainerOptions};

/// Calls, rows that entered and rows that left, by stage.
#[derive(Default)]
struct Counts(Mutex<BTreeMap<String, (usize, usize, usize)>>);

impl Tap for Counts {
    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        let mut counts = self.0.lock().unwrap();
        let count = counts.entry(point.stage.to_owned()).or_default();
        count.0 += 1;
        count.1 += batch.num_rows();
    }
    fn output(&self, point: TapPoint<'_>, batch: &Batch) {
        let mut counts = self.0.lock().unwrap();
        counts.entry(point.stage.to_owned()).or_default().2 += batch.num_rows();
    }
}

/// Calls (as dispatched), rows that entered and rows that left, by stage.
fn counts(spans: &[CallSpan]) -> BTreeMap<String, (usize, usize, usize)> {
    let mut counts: BTreeMap<String, (usize, usize, usize)> = BTreeMap::new();
    for span in spans {
        let count = counts.entry(span.stage.clone()).or_default();
        count.0 += 1 + span.merged;
        count.1 += span.rows;
        count.2 += span.rows_emitted;
    }
    counts
}

/// Spans of one lane do not overlap, and none starts before the step.
#[track_caller]
fn check_lanes(spans: &[CallSpan]) {
    let mut lanes: BTreeMap<(&str, usize), f64> = BTreeMap::new();
    assert!(spans.is_sorted_by_key(|span| span.start_s));
    for span in spans {
        let end = lanes.entry((&span.place, span.lane)).or_insert(0.0);
        assert!(
            *end <= span.start_s && span.start_s <= span.end_s,
            "{span:?} in {spans:#?}"
        );
        *end = span.end_s;
    }
}

#[test]
fn every_call_of_a_step_has_a_span_with_its_rows() {
    for latency in [None, Some(1), Some(2)] {
        let (wait, again) = (jitter(latency), jitter(latency));
        let generate = single("generate", generate_spec(), move |input, context| {
            for prompt in input.split(1).iter().rev() {
                wait();
                let group = respond(prompt, context)?;
                context.emit(group)?;
            }
            Ok(())
        });
        // Each row is a call of its own.
        let spec = reward_spec().deadline(Duration::from_secs(20));
        let reward = stage("reward", spec, move |input, context| {
            again();
            score(input, context)
        });
        let tap = Arc::new(Counts::default());
        let options = RunOptions {
            tap: tap.clone(),
            ..options()
        };
        let mut run = start_with(&pipeline(vec![generate, reward]), options);
        for step in 1..=3 {
            tap.0.lock().unwrap().clear();
            let output = run.step().unwrap();
            let spans = &output.spans;
            assert_eq!(counts(spans), *tap.0.lock().unwrap(), "step {step}");
            check_lanes(spans);
            let step_s = output.metrics.get("perf/step_s").unwrap();
            assert!(spans.iter().all(|span| span.end_s <= step_s + 1e-6));
            assert!(spans.iter().all(|span| span.outcome == SpanOutcome::Done));
            let of = |stage: &'static str| spans.iter().filter(move |s| s.stage == stage);
            assert_eq!(
                of("reward").map(|span| span.calls).sum::<usize>(),
                6 * SAMPLES
            );
            assert!(of("reward").all(|span| span.place == HOST && span.lane < 3));
            assert!(of("generate").all(|span| span.place == "cpu" && span.calls == 1));
            // Calls of a device are numbered in the order in which they run.
            let calls: Vec<u64> = spans
                .iter()
                .filter(|s| s.place == "cpu")
                .map(|s| s.call)
                .collect();
            assert!(calls.is_sorted() && calls[0] > 0, "{calls:?}");
        }
    }
}

#[test]
fn calls_that_failed_or_hang_are_marked() {
    let release = Arc::new(Count::default());
    let gate = release.clone();
    let spec = reward_spec().deadline(Duration::from_millis(80));
    let reward = stage("reward", spec, move |input, context| {
        match input.ids()[0] {
            id if id.row() == 2 && id.sample_index() == 1 => drop(gate.reaches(1)),
            id if id.row() == 4 => return Err(StageError::failed("no answer")),
            _ => {}
        }
        score(input, context)
    });
    let output = start(vec![reward]).step().unwrap();
    release.add();
    check_lanes(&output.spans);
    let reward = || output.spans.iter().filter(|span| span.stage == "reward");
    let ended = |outcome| reward().filter(|span| span.outcome == outcome).count();
    assert_eq!(
        (ended(SpanOutcome::Abandoned), ended(SpanOutcome::Failed)),
        (1, SAMPLES)
    );
    // Rows after the failed one are in a later call; the nulls of lost rows are not emitted by the stage.
    let (calls, rows, emitted) = counts(&output.spans)["reward"];
    assert!(calls > SAMPLES && rows == 6 * SAMPLES && emitted == rows - SAMPLES - 1);
    let hung = reward()
        .find(|span| span.outcome == SpanOutcome::Abandoned)
        .unwrap();
    assert!(hung.end_s - hung.start_s >= 0.08);
}

/// A trainer of the pipeline, in a new folder.
fn trainer(others: Vec<verl_declare::pipe::StageDecl>) -> (tempfile::TempDir, Trainer) {
    use verl_plan::Plannable;
    let temp = tempfile::tempdir().unwrap();
    let mut pipe = pipeline(others);
    pipe.run.dir = temp.path().join("run");
    pipe.run.steps = 3;
    let plan = pipe.plan().unwrap();
    let trainer = Trainer::with_options(plan, TrainerOptions::default()).unwrap();
    (temp, trainer)
}

fn lines(temp: &tempfile::TempDir) -> Vec<TimelineLine> {
    let text = fs::read_to_string(temp.path().join("run").join(TIMELINE)).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_run_writes_its_steps_and_what_it_does_between_them() {
    let watcher = stage("watcher", StageSpec::new().observer(2), |_, _| {
        std::thread::sleep(Duration::from_millis(2));
        Ok(())
    });
    let (temp, mut trainer) = trainer(vec![watcher]);
    trainer.train().unwrap();
    let lines = lines(&temp);
    assert_eq!(
        lines.iter().map(|line| line.step).collect::<Vec<_>>(),
        [1, 2, 3]
    );
    for line in &lines {
        let calls = line.spans.iter().filter(|span| span.kind == SpanKind::Call);
        let calls: Vec<CallSpan> = calls.cloned().collect();
        check_lanes(&calls);
        assert_eq!(counts(&calls)["update"], (1, 18, 0), "{line:#?}");
        assert!(!line.failed && line.step_s > 0.0);
    }
    // The observer runs before the first step, after the second and after the last.
    let observed = |line: &TimelineLine| {
        let spans = line
            .spans
            .iter()
            .filter(|span| span.kind == SpanKind::Observe);
        spans
            .map(|span| (span.start_s < 0.0, span.end_s >= line.step_s))
            .collect::<Vec<_>>()
    };
    let all: Vec<_> = lines.iter().map(observed).collect();
    assert_eq!(
        all,
        [
            vec![(true, false)],
            vec![(false, true)],
            vec![(false, true)]
        ]
    );
    // Steps follow each other.
    assert!(
        lines
            .windows(2)
            .all(|two| two[0].start_s + two[0].step_s <= two[1].start_s)
    );
}

#[test]
fn a_failed_step_is_on_the_timeline() {
    let broken = single("update", update_spec(), |_, context| match context.step {
        2 => Err(StageError::failed("no gradient")),
        _ => Ok(()),
    });
    let (temp, mut trainer) = trainer(vec![broken]);
    assert!(trainer.train().is_err());
    let lines = lines(&temp);
    assert_eq!(
        lines
            .iter()
            .map(|line| (line.step, line.failed))
            .collect::<Vec<_>>(),
        [(1, false), (2, true)]
    );
    let failed = &lines[1];
    let mut spans = failed.spans.iter();
    let last = spans.rfind(|span| span.kind == SpanKind::Call).unwrap();
    assert_eq!(
        (last.stage.as_str(), last.outcome),
        ("update", SpanOutcome::Failed)
    );
    assert!(failed.step_s >= last.end_s);
    assert_eq!(counts(&failed.spans)["generate"], (1, 6, 18));
}

fn update_spec() -> StageSpec {
    StageSpec::new()
        .reads(verl_words::keys::ADVANTAGES)
        .rows(RowRule::Sink)
        .cardinality(verl_words::stage::Cardinality::Batch)
        .uses("actor", verl_words::stage::Access::Update)
}
