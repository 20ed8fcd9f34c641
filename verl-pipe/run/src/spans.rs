//! The timeline of a step: which call ran where and when. The runner adds each call to a [`SpanLog`] when it ends.
//!
//! Times are read on the threads that run the calls, so they do not include the time until the runner takes the result.
//! To the engine the timeline is output only: no decision and no result depends on it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::batch::Batch;

use crate::channel::{CallFailure, CallReport};
use crate::host_pool::Ran;
use crate::runner::{InFlight, Progress, Run};
use crate::step::CallId;

/// Place of spans of the host pool; their lane is the number of the thread.
pub const HOST: &str = "host";

/// Place of spans of the thread that runs the steps: writing files, waiting for the recorder.
pub const RUN: &str = "run";

/// Maximum number of spans of a lane before neighbouring ones are merged.
const CROWDED: usize = 64;

/// Spans of a crowded lane are merged across gaps of at most this fraction of the step.
const MERGED_GAP: f64 = 1e-3;

/// What a span is about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// A call of a stage in the step.
    #[default]
    Call,
    /// A call of a stage that runs between steps, such as an evaluation.
    Observe,
    /// Weights are transferred from one group to another.
    Sync,
    /// The state before a step is read, for the trace or the flight recorder.
    Snapshot,
    /// Files of the run folder are written.
    Record,
    /// The thread that runs the steps waits for the recorder of the trace.
    Wait,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpanOutcome {
    /// It succeeded.
    #[default]
    Done,
    /// It returned an error or panicked.
    Failed,
    /// It was abandoned: it exceeded its deadline, or did not end in time after the step had failed.
    Abandoned,
}

impl SpanOutcome {
    /// The outcome of a call that has ended.
    pub(crate) fn of(result: &Result<(), CallFailure>) -> SpanOutcome {
        match result {
            Ok(()) => SpanOutcome::Done,
            Err(_) => SpanOutcome::Failed,
        }
    }
}

/// A call of a stage as it ran, or other work of the run. Fields with the value 0, or with the first value of their
/// list, are omitted in files.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CallSpan {
    /// What the span is about.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kind: SpanKind,
    /// The stage; for other work what it is about, such as a model.
    pub stage: String,
    /// Name of the device group; `host` for the host pool, `run` for the thread that runs the steps.
    pub place: String,
    /// Worker of the group, or thread of the host pool, counted from 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lane: usize,
    /// Number of the call in the run, in the order in which calls are dispatched; 0 for other work.
    #[serde(default, skip_serializing_if = "is_default")]
    pub call: u64,
    /// Slice of the stage, in the order of rows.
    #[serde(default, skip_serializing_if = "is_default")]
    pub slice: usize,
    /// Wave that a call of a source draws.
    #[serde(default, skip_serializing_if = "is_default")]
    pub wave: u64,
    /// Rows that it processed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rows: usize,
    /// Rows that it emitted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rows_emitted: usize,
    /// Number of times that the stage was called: more than 1 if each row or group of the slice has its own deadline,
    /// or if spans were merged.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub calls: usize,
    /// Number of later spans of the same stage on the same thread that were merged into this one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merged: usize,
    /// Start, relative to the start of the step (seconds); negative before it.
    pub start_s: f64,
    /// End, relative to the start of the step (seconds).
    pub end_s: f64,
    /// Time that was spent in calls (seconds), if that is less than the whole span because spans were merged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_s: Option<f64>,
    /// Time between the dispatch of the call and its start (seconds): on the host pool, the wait for a thread.
    #[serde(default, skip_serializing_if = "is_default")]
    pub wait_s: f64,
    /// How it ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub outcome: SpanOutcome,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn one() -> usize {
    1
}

fn is_one(calls: &usize) -> bool {
    *calls == 1
}

/// A line of `timeline.jsonl`: a step as it ran.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TimelineLine {
    /// Step of the run.
    pub step: u64,
    /// When the step ended (seconds since 1970-01-01 UTC), as in `metrics.jsonl`.
    pub timestamp: f64,
    /// The step failed; `status.json` has the reason.
    #[serde(default, skip_serializing_if = "is_default")]
    pub failed: bool,
    /// Start of the step since the start of the run (seconds), by a clock that is never set back.
    pub start_s: f64,
    /// Time of the step (seconds), as `perf/step_s`.
    pub step_s: f64,
    /// Calls of the step, and other work since the step before, in the order of their start.
    pub spans: Vec<CallSpan>,
}

impl CallSpan {
    /// A span of work other than calls on the thread that runs the steps, relative to `zero`.
    pub fn of_run(kind: SpanKind, about: &str, time: (Instant, Instant), zero: Instant) -> Self {
        CallSpan {
            kind,
            stage: about.to_owned(),
            place: RUN.to_owned(),
            calls: 1,
            start_s: seconds_since(zero, time.0),
            end_s: seconds_since(zero, time.1),
            ..CallSpan::default()
        }
    }

    /// Time spent in calls (seconds).
    pub fn busy_s(&self) -> f64 {
        self.busy_s.unwrap_or(self.end_s - self.start_s)
    }

    /// Moves the span by `seconds`: to another start of time.
    pub fn shift(&mut self, seconds: f64) {
        self.start_s = rounded(self.start_s + seconds);
        self.end_s = rounded(self.end_s + seconds);
    }

    /// Merges a later span of the same lane.
    fn merge(&mut self, next: &CallSpan) {
        self.busy_s = Some(rounded(self.busy_s() + next.busy_s()));
        self.end_s = next.end_s;
        self.rows += next.rows;
        self.rows_emitted += next.rows_emitted;
        self.calls += next.calls;
        self.merged += 1 + next.merged;
        self.wait_s = self.wait_s.max(next.wait_s);
    }
}

/// Seconds from `zero` to `at`, to the microsecond.
pub fn seconds_since(zero: Instant, at: Instant) -> f64 {
    let before = zero.saturating_duration_since(at).as_secs_f64();
    rounded(at.saturating_duration_since(zero).as_secs_f64() - before)
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// The calls of a step that have ended.
#[derive(Debug)]
pub(crate) struct SpanLog {
    zero: Instant,
    spans: Vec<PlacedSpan>,
    /// Rows that running calls have emitted so far.
    emitted: HashMap<CallId, usize>,
}

/// A span whose stage and place are not yet names.
#[derive(Debug)]
struct PlacedSpan {
    stage: usize,
    place: Place,
    span: CallSpan,
}

impl SpanLog {
    /// An empty log; times are relative to `zero`, the start of the step.
    pub(crate) fn new(zero: Instant) -> SpanLog {
        SpanLog {
            zero,
            spans: Vec::new(),
            emitted: HashMap::new(),
        }
    }

    /// Counts rows that call `id` emitted while it runs.
    pub(crate) fn emitted(&mut self, id: CallId, rows: usize) {
        *self.emitted.entry(id).or_default() += rows;
    }

    /// Adds a call at `place` that has ended. `known` contains what the runner knows of it: its number,
    /// lane, wave, rows and outcome.
    pub(crate) fn call(
        &mut self,
        id: CallId,
        place: Place,
        known: CallSpan,
        dispatched: Instant,
        report: &CallReport,
    ) {
        let seconds = Duration::try_from_secs_f64(report.seconds).unwrap_or_default();
        // A worker in another process has another clock; there the call ended just now.
        let since = report.began.or_else(|| Instant::now().checked_sub(seconds));
        let began = since.unwrap_or(dispatched).max(dispatched);
        let time = (dispatched, began, began + seconds);
        self.push(id, place, known, time);
    }

    /// Adds a job that has ended on the host pool, or that was abandoned. `known` contains what the runner knows of
    /// it: its wave, rows, emitted rows that were not streamed, and outcome. A job that no thread has started is left
    /// out.
    pub(crate) fn host_job(
        &mut self,
        id: CallId,
        known: CallSpan,
        dispatched: Instant,
        ran: Option<Ran>,
    ) {
        let Some(ran) = ran else { return };
        let ended = match known.outcome {
            SpanOutcome::Abandoned => Instant::now(),
            SpanOutcome::Done | SpanOutcome::Failed => ran.ended,
        };
        let known = CallSpan {
            call: ran.call,
            lane: ran.thread,
            ..known
        };
        self.push(id, Place::Host, known, (dispatched, ran.began, ended));
    }

    /// Adds a span with its times of dispatch, start and end.
    fn push(
        &mut self,
        id: CallId,
        place: Place,
        known: CallSpan,
        time: (Instant, Instant, Instant),
    ) {
        let (dispatched, began, ended) = time;
        let streamed = self.emitted.remove(&id).unwrap_or(0);
        let wait = began.saturating_duration_since(dispatched);
        let span = CallSpan {
            slice: id.1,
            rows_emitted: known.rows_emitted + streamed,
            calls: known.calls.max(1),
            start_s: seconds_since(self.zero, began),
            end_s: seconds_since(self.zero, ended),
            wait_s: rounded(wait.as_secs_f64()),
            ..known
        };
        let stage = id.0;
        self.spans.push(PlacedSpan { stage, place, span });
    }

    /// Takes the spans in the order of their start, with names. Those of crowded lanes are merged.
    pub(crate) fn finish(&mut self, schedule: &Schedule) -> Vec<CallSpan> {
        let named = self.spans.drain(..).map(|placed| CallSpan {
            stage: schedule.plan().stages()[placed.stage].name().to_owned(),
            place: match placed.place {
                Place::Host => HOST.to_owned(),
                Place::Group(group) => schedule.groups()[group].name.clone(),
            },
            ..placed.span
        });
        let mut spans: Vec<CallSpan> = named.collect();
        spans.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        merge_crowded(spans)
    }
}

impl Run {
    /// Calls of the last step, in the order of their start, if it failed; the output of a step that did not fail
    /// contains them.
    pub fn failed_spans(&self) -> &[CallSpan] {
        &self.failed_spans
    }

    /// Adds a call of a device worker that has ended to the timeline of the step.
    pub(super) fn note_device_call(
        &self,
        progress: &mut Progress,
        call: u64,
        flight: &InFlight,
        report: &CallReport,
        outcome: SpanOutcome,
    ) {
        let known = CallSpan {
            call,
            wave: progress.state.wave(flight.id),
            rows: flight.input.num_rows(),
            outcome,
            ..CallSpan::default()
        };
        let place = self.schedule.places()[flight.id.0];
        let log = &mut progress.spans;
        log.call(flight.id, place, known, flight.since, report);
    }

    /// Adds a call of a device worker that is abandoned.
    pub(super) fn note_abandoned_call(
        &self,
        progress: &mut Progress,
        call: u64,
        flight: &InFlight,
    ) {
        let report = CallReport {
            seconds: flight.since.elapsed().as_secs_f64(),
            ..CallReport::default()
        };
        self.note_device_call(progress, call, flight, &report, SpanOutcome::Abandoned);
    }

    /// Adds a job of the host pool that has ended, or is `abandoned`. Its cell still contains the results.
    pub(super) fn note_host_job(
        &self,
        progress: &mut Progress,
        flight: &InFlight,
        abandoned: bool,
    ) {
        let Some(host) = &flight.host else { return };
        let cell = host.cell.lock();
        let outcome = match (&cell.failure, abandoned) {
            (_, true) => SpanOutcome::Abandoned,
            (Some(_), false) => SpanOutcome::Failed,
            (None, false) => SpanOutcome::Done,
        };
        let tried = cell.finished.len() + usize::from(outcome != SpanOutcome::Done);
        let units = host.units.iter().take(tried);
        let emitted = cell.finished.iter().flat_map(|result| &result.batches);
        let known = CallSpan {
            wave: progress.state.wave(flight.id),
            rows: units.map(Batch::num_rows).sum(),
            rows_emitted: emitted.map(Batch::num_rows).sum(),
            calls: tried,
            outcome,
            ..CallSpan::default()
        };
        let log = &mut progress.spans;
        log.host_job(flight.id, known, flight.since, cell.ran);
    }
}

/// Merges neighbouring spans of one stage, with hardly a gap between them, on lanes with too many spans. `spans` are
/// in the order of their start.
fn merge_crowded(spans: Vec<CallSpan>) -> Vec<CallSpan> {
    if spans.len() <= CROWDED {
        return spans;
    }
    let mut sizes: HashMap<(String, usize), usize> = HashMap::new();
    for span in &spans {
        *sizes.entry((span.place.clone(), span.lane)).or_default() += 1;
    }
    let end = spans.iter().map(|span| span.end_s).fold(0.0, f64::max);
    let mut merged: Vec<CallSpan> = Vec::new();
    // The last span of each crowded lane.
    let mut last: HashMap<(String, usize), usize> = HashMap::new();
    for span in spans {
        let lane = (span.place.clone(), span.lane);
        if sizes[&lane] <= CROWDED {
            merged.push(span);
            continue;
        }
        let before = last.get(&lane).map(|at| &mut merged[*at]);
        let before = before.filter(|before| {
            let alike = (&before.stage, before.kind, before.outcome);
            alike == (&span.stage, span.kind, span.outcome)
                && span.start_s - before.end_s <= MERGED_GAP * end
        });
        match before {
            Some(before) => before.merge(&span),
            None => {
                last.insert(lane, merged.len());
                merged.push(span);
            }
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(stage: &str, lane: usize, start_s: f64, end_s: f64) -> CallSpan {
        CallSpan {
            stage: stage.to_owned(),
            place: HOST.to_owned(),
            lane,
            rows: 2,
            rows_emitted: 1,
            calls: 1,
            start_s,
            end_s,
            ..CallSpan::default()
        }
    }

    #[test]
    fn only_neighbours_of_one_stage_on_a_crowded_lane_are_merged() {
        let mut spans = Vec::new();
        for at in 0..100 {
            let start = f64::from(at) * 0.01;
            spans.push(span("a", 0, start, start + 0.0098));
            if at == 50 {
                spans.push(span("b", 0, start + 0.0098, start + 0.0099));
            }
            if at % 10 == 0 {
                spans.push(span("a", 1, start, start + 0.01));
            }
        }
        let before: (usize, usize) = (spans.len(), spans.iter().map(|span| span.rows).sum());
        let merged = merge_crowded(spans);
        let of = |lane| merged.iter().filter(move |span| span.lane == lane);
        let stages: Vec<&str> = of(0).map(|span| span.stage.as_str()).collect();
        assert_eq!(stages, ["a", "b", "a"]);
        assert_eq!(of(1).count(), 10);
        let calls: usize = merged.iter().map(|span| span.calls).sum();
        let all: usize = merged.iter().map(|span| 1 + span.merged).sum();
        let rows: usize = merged.iter().map(|span| span.rows).sum();
        assert_eq!((calls, all, rows), (before.0, before.0, before.1));
        // The gaps between merged calls are not busy.
        let first = of(0).next().expect("the first one");
        assert_eq!((first.start_s, first.end_s), (0.0, 0.5098));
        assert_eq!(first.busy_s(), rounded(51.0 * 0.0098));
        // Gaps that are long compared with the step stay.
        let apart = (0..100).map(|at| f64::from(at) * 0.01);
        let apart = apart.map(|at| span("a", 0, at, at + 0.005));
        assert_eq!(merge_crowded(apart.collect()).len(), 100);
    }

    #[test]
    fn files_omit_what_is_usual_and_read_the_same() {
        let usual = span("a", 0, 0.25, 0.5);
        let text = serde_json::to_string(&usual).expect("JSON");
        assert_eq!(
            text,
            r#"{"stage":"a","place":"host","rows":2,"rows_emitted":1,"start_s":0.25,"end_s":0.5}"#
        );
        let unusual = CallSpan {
            kind: SpanKind::Observe,
            calls: 3,
            merged: 2,
            busy_s: Some(0.125),
            outcome: SpanOutcome::Abandoned,
            ..span("b", 2, -0.5, 0.5)
        };
        for span in [usual, unusual] {
            let text = serde_json::to_string(&span).expect("JSON");
            assert_eq!(
                serde_json::from_str::<CallSpan>(&text).expect("a span"),
                span
            );
        }
    }

    #[test]
    fn times_are_relative_and_may_be_negative() {
        let zero = Instant::now() + Duration::from_secs(1);
        let work = |from: u64, to: u64| {
            let at = |ms| zero - Duration::from_millis(500) + Duration::from_millis(ms);
            let span = CallSpan::of_run(SpanKind::Record, "metrics", (at(from), at(to)), zero);
            (span.start_s, span.end_s)
        };
        assert_eq!(work(0, 250), (-0.5, -0.25));
        assert_eq!(work(250, 1000), (-0.25, 0.5));
        let mut moved = CallSpan::of_run(SpanKind::Record, "metrics", (zero, zero), zero);
        moved.shift(0.75);
        assert_eq!(
            (moved.start_s, moved.end_s, moved.busy_s()),
            (0.75, 0.75, 0.0)
        );
    }

    #[test]
    fn emitted_rows_belong_to_their_call_and_unknown_clocks_end_now() {
        let zero = Instant::now();
        let mut log = SpanLog::new(zero);
        log.emitted((3, 0), 4);
        log.emitted((3, 0), 2);
        log.emitted((3, 1), 1);
        let report = CallReport {
            seconds: 0.0,
            ..CallReport::default()
        };
        let known = || CallSpan {
            rows: 6,
            ..CallSpan::default()
        };
        log.call((3, 0), Place::Group(1), known(), zero, &report);
        log.call((3, 1), Place::Group(0), known(), zero, &report);
        // No thread has started it.
        log.host_job((0, 0), known(), zero, None);
        let rows: Vec<_> = log
            .spans
            .iter()
            .map(|placed| placed.span.rows_emitted)
            .collect();
        assert_eq!(rows, [6, 1]);
        let first = &log.spans[0];
        assert_eq!(first.place, Place::Group(1));
        assert!(first.span.start_s >= 0.0 && first.span.start_s == first.span.wait_s);
        assert_eq!(first.span.start_s, first.span.end_s);
    }
}
