//! [`SpanLog`]: the runner adds each call to it when the call ends.

use std::collections::HashMap;
use std::time::Instant;

use verl_plan::schedule::placement::{Place, Schedule};
use verl_words::batch::Batch;

use crate::channel::CallReport;
use crate::host_pool::Ran;
use crate::runner::{InFlight, Progress, Run};
use crate::spans::{CallSpan, HOST, SpanKind, SpanOutcome, rounded, seconds_since};
use crate::start::seconds;
use crate::step::CallId;

/// Maximum number of spans of a lane before neighbouring ones are merged.
const CROWDED: usize = 256;

/// Spans of a crowded lane are merged across gaps of at most this fraction of the step.
const MERGED_GAP: f64 = 1e-4;

/// The calls of a step that have ended.
#[derive(Debug)]
pub(crate) struct SpanLog {
    zero: Instant,
    spans: Vec<PlacedSpan>,
    /// Rows that running calls have emitted so far; only few calls run at a time.
    emitted: Vec<(CallId, usize)>,
}

/// A span whose stage and place are not yet names.
#[derive(Debug)]
struct PlacedSpan {
    /// The stage of a call; other work has its name in the span.
    stage: Option<usize>,
    place: Place,
    span: CallSpan,
}

impl SpanLog {
    /// An empty log; times are relative to `zero`, the start of the step.
    pub(crate) fn new(zero: Instant) -> SpanLog {
        SpanLog {
            zero,
            spans: Vec::new(),
            emitted: Vec::new(),
        }
    }

    /// Counts rows that call `id` emitted while it runs.
    pub(crate) fn emitted(&mut self, id: CallId, rows: usize) {
        match self.emitted.iter_mut().find(|known| known.0 == id) {
            Some(known) => known.1 += rows,
            None => self.emitted.push((id, rows)),
        }
    }

    /// Adds a call at `place` that has ended. `known` contains what the runner knows of it: its number, lane, wave,
    /// rows and outcome.
    pub(crate) fn call(
        &mut self,
        id: CallId,
        place: Place,
        known: CallSpan,
        dispatched: Instant,
        report: &CallReport,
    ) {
        let seconds = seconds(report.seconds);
        let began = report.began.unwrap_or_else(|| {
            // A worker in another process has another clock; there the call ended just now.
            let since = Instant::now().checked_sub(seconds);
            since.map_or(dispatched, |since| since.max(dispatched))
        });
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
        let counted = self.emitted.iter().position(|known| known.0 == id);
        let streamed = counted.map_or(0, |at| self.emitted.swap_remove(at).1);
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
        let stage = Some(id.0);
        self.spans.push(PlacedSpan { stage, place, span });
    }

    /// Adds other work at a lane of a place, with its start and end: an observer, a model whose weights are transferred.
    pub(crate) fn work(
        &mut self,
        kind: SpanKind,
        about: &str,
        (place, lane): (Place, usize),
        time: (Instant, Instant),
    ) {
        let span = CallSpan {
            lane,
            ..CallSpan::of_run(kind, about, time, self.zero)
        };
        let stage = None;
        self.spans.push(PlacedSpan { stage, place, span });
    }

    /// Takes the spans in the order of their start, with names. Those of crowded lanes are merged.
    pub(crate) fn finish(&mut self, schedule: &Schedule) -> Vec<CallSpan> {
        let named = self.spans.drain(..).map(|placed| CallSpan {
            stage: match placed.stage {
                Some(stage) => schedule.plan().stages()[stage].name().to_owned(),
                None => placed.span.stage,
            },
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
    use crate::spans::host_span as span;

    #[test]
    fn only_neighbours_of_one_stage_on_a_crowded_lane_are_merged() {
        let mut spans = Vec::new();
        for at in 0..300 {
            let start = f64::from(at) * 0.01;
            spans.push(span("a", 0, start, start + 0.0098));
            if at == 50 {
                spans.push(span("b", 0, start + 0.0098, start + 0.0099));
            }
            if at % 30 == 0 {
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
        let apart = (0..300).map(|at| f64::from(at) * 0.01);
        let apart = apart.map(|at| span("a", 0, at, at + 0.005));
        assert_eq!(merge_crowded(apart.collect()).len(), 300);
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
