//! The timeline of a step: which call ran where and when.
//!
//! Times are read on the threads that run the calls, so they do not include the time until the runner takes the result.
//! To the engine the timeline is output only: no decision and no result depends on it.

use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::channel::CallFailure;

/// Place of spans of the host pool; their lane is the number of the thread.
pub const HOST: &str = "host";

/// Place of spans of the thread that runs the steps: writing files, waiting for the recorder.
pub const RUN: &str = "run";

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
    pub(crate) fn merge(&mut self, next: &CallSpan) {
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

/// To the microsecond.
pub(crate) fn rounded(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// A call of two rows on the host pool, for tests.
#[cfg(test)]
pub(crate) fn host_span(stage: &str, lane: usize, start_s: f64, end_s: f64) -> CallSpan {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::host_span as span;
    use super::*;

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
}
