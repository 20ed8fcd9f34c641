//! `timeline.jsonl`: each step as it ran, within a size limit.
//!
//! Besides the calls of the step, a line contains what the thread of the trainer did since the step before: reading
//! states, writing files, waiting for the recorder.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, mem};

use verl_rules::Anomaly;
use verl_rules::config::bytes_of;
use verl_run::error::RunError;
use verl_run::metrics::{StepMetrics, now};
use verl_run::records::STEP_S;
use verl_run::space::Room;
use verl_run::spans::{CallSpan, SpanKind, TimelineLine, seconds_since};
use verl_run::tap::{Tap, TapPoint};
use verl_words::batch::Batch;

use crate::lines::Lines;

/// Name of the file in a run folder.
pub const TIMELINE: &str = "timeline.jsonl";

/// Work of the trainer's thread that takes less time is left out.
const SHORTEST: Duration = Duration::from_micros(20);

/// Waits for the recorder that are at most this far apart count as one.
const ONE_WAIT: Duration = Duration::from_millis(1);

/// Writes the timeline of a run.
#[derive(Debug)]
pub(crate) struct TimelineFile {
    path: PathBuf,
    /// Size limit (bytes).
    budget: u64,
    room: Room,
    /// Created with the first line; `None` once a line could not be written.
    lines: Option<Lines>,
    ended: bool,
    /// Start of the run.
    began: Instant,
    /// Spans since the last step, relative to the start of the run.
    between: Vec<CallSpan>,
    waits: Arc<Waits>,
}

impl TimelineFile {
    /// The timeline of the run in folder `dir`, of at most `megabytes`; with 0 nothing is written.
    pub(crate) fn new(dir: &Path, megabytes: u64, room: Room) -> TimelineFile {
        TimelineFile {
            path: dir.join(TIMELINE),
            budget: bytes_of(megabytes),
            room,
            lines: None,
            ended: megabytes == 0,
            began: Instant::now(),
            between: Vec::new(),
            waits: Arc::default(),
        }
    }

    /// `tap`, so that the timeline shows how long the run waits for it.
    pub(crate) fn timed(&self, tap: Arc<dyn Tap>) -> Arc<dyn Tap> {
        match self.ended {
            true => tap,
            false => Arc::new(TimedTap {
                tap,
                waits: self.waits.clone(),
            }),
        }
    }

    /// Adds work of the trainer's thread that began at `since` and ends now.
    pub(crate) fn note(&mut self, kind: SpanKind, about: &str, since: Instant) {
        if !self.ended && since.elapsed() >= SHORTEST {
            let time = (since, Instant::now());
            let span = CallSpan::of_run(kind, about, time, self.began);
            self.between.push(span);
        }
    }

    /// Adds the calls of observers, whose times are relative to `since`.
    pub(crate) fn observed(&mut self, spans: Vec<CallSpan>, since: Instant) {
        if !self.ended {
            let offset = seconds_since(self.began, since);
            self.between.extend(spans.into_iter().map(|mut span| {
                span.shift(offset);
                span
            }));
        }
    }

    /// Ends a step that began at `since`: writes its line, unless the file is so full that the step is left out. A line
    /// that cannot be written ends the timeline with a warning; the run continues.
    pub(crate) fn step(&mut self, metrics: &StepMetrics, spans: Vec<CallSpan>, since: Instant) {
        let line = TimelineLine {
            step: metrics.step,
            timestamp: metrics.timestamp,
            step_s: metrics.get(STEP_S.name).unwrap_or_default(),
            spans,
            ..TimelineLine::default()
        };
        self.add(line, since);
    }

    /// Ends a step that began at `since` and failed at `ended`. It is never left out.
    pub(crate) fn failed(&mut self, step: u64, spans: &[CallSpan], since: Instant, ended: Instant) {
        let line = TimelineLine {
            step,
            timestamp: now(),
            failed: true,
            step_s: seconds_since(since, ended),
            spans: spans.to_vec(),
            ..TimelineLine::default()
        };
        self.add(line, since);
    }

    fn add(&mut self, mut line: TimelineLine, since: Instant) {
        if self.ended {
            return;
        }
        let start_s = seconds_since(self.began, since);
        let waits = self.waits.take();
        line.spans
            .extend(waits.into_iter().map(|wait| wait.span(since)));
        line.spans.extend(self.between.drain(..).map(|mut span| {
            span.shift(-start_s);
            span
        }));
        line.spans.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        line.start_s = start_s;
        if let Err(error) = self.write(&line) {
            self.ended = true;
            tracing::warn!(
                "`{}` ends before step {}: {error}",
                self.path.display(),
                line.step
            );
        }
    }

    fn write(&mut self, line: &TimelineLine) -> io::Result<()> {
        let used = self.lines.as_ref().map_or(0, Lines::len);
        if !line.failed && !line.step.is_multiple_of(stride(self.budget, used)) {
            return Ok(());
        }
        let text = serde_json::to_string(line)?;
        let size = text.len() as u64 + 1;
        if used + size > self.budget {
            return Ok(());
        }
        self.room.ensure_free_beside_lines(size)?;
        let lines = match &mut self.lines {
            Some(lines) => lines,
            none => none.insert(Lines::create(self.path.clone())?),
        };
        lines.add_text(text)
    }
}

/// Of how many steps one is written: all until half of the budget is used, then every 4th until half of the rest is
/// used, then every 16th, and so on. With room for n lines, the last is that of about step n²/2.
fn stride(budget: u64, used: u64) -> u64 {
    let left = budget.saturating_sub(used).max(1);
    1 << (2 * (budget / left).max(1).ilog2()).min(62)
}

/// Times during which the run waited for a tap.
#[derive(Debug, Default)]
struct Waits(Mutex<Vec<TapWait>>);

#[derive(Debug)]
struct TapWait {
    from: Instant,
    to: Instant,
    busy: Duration,
    calls: usize,
}

impl Waits {
    fn add(&self, from: Instant) {
        let to = Instant::now();
        let busy = to - from;
        if busy < SHORTEST {
            return;
        }
        // Nothing that can panic runs under the lock.
        let mut waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match waits.last_mut() {
            Some(last) if from.saturating_duration_since(last.to) <= ONE_WAIT => {
                last.to = to;
                last.busy += busy;
                last.calls += 1;
            }
            _ => waits.push(TapWait {
                from,
                to,
                busy,
                calls: 1,
            }),
        }
    }

    fn take(&self) -> Vec<TapWait> {
        mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl TapWait {
    fn span(&self, zero: Instant) -> CallSpan {
        let time = (self.from, self.to);
        CallSpan {
            calls: self.calls,
            merged: self.calls - 1,
            busy_s: (self.calls > 1).then_some(self.busy.as_micros() as f64 / 1e6),
            ..CallSpan::of_run(SpanKind::Wait, "recorder", time, zero)
        }
    }
}

/// Measures how long the run waits for a tap.
struct TimedTap {
    tap: Arc<dyn Tap>,
    waits: Arc<Waits>,
}

impl TimedTap {
    fn timed<T>(&self, call: impl FnOnce(&dyn Tap) -> T) -> T {
        let from = Instant::now();
        let result = call(self.tap.as_ref());
        self.waits.add(from);
        result
    }
}

impl Tap for TimedTap {
    fn step_begin(&self, step: u64) {
        self.timed(|tap| tap.step_begin(step));
    }
    fn input(&self, point: TapPoint<'_>, batch: &Batch) {
        self.timed(|tap| tap.input(point, batch));
    }
    fn output(&self, point: TapPoint<'_>, batch: &Batch) {
        self.timed(|tap| tap.output(point, batch));
    }
    fn refused(&self, point: TapPoint<'_>, batch: &Batch, reason: &str) {
        self.timed(|tap| tap.refused(point, batch, reason));
    }
    fn gate(&self, point: TapPoint<'_>, batch: &Batch) -> Result<(), Box<Anomaly>> {
        self.timed(|tap| tap.gate(point, batch))
    }
    fn step_end(&self, step: u64) {
        self.timed(|tap| tap.step_end(step));
    }
    fn step_failed(&self, step: u64, error: &RunError) {
        self.timed(|tap| tap.step_failed(step, error));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn call(start_s: f64, end_s: f64) -> CallSpan {
        CallSpan {
            stage: "generate".to_owned(),
            place: "cpu".to_owned(),
            calls: 1,
            start_s,
            end_s,
            ..CallSpan::default()
        }
    }

    fn metrics(step: u64) -> StepMetrics {
        let values = [(STEP_S.name.to_owned(), 0.5)];
        StepMetrics {
            step,
            values: values.into(),
            ..StepMetrics::default()
        }
    }

    fn written(dir: &Path) -> Vec<TimelineLine> {
        let text = fs::read_to_string(dir.join(TIMELINE)).unwrap_or_default();
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).expect("a line"))
            .collect()
    }

    #[test]
    fn a_step_comes_with_the_work_around_it() {
        let temp = tempfile::tempdir().expect("a folder");
        let mut file = TimelineFile::new(temp.path(), 1, Room::of(temp.path(), None));
        let before = file.began;
        // Observers before the first step, then a state that is read.
        file.observed(vec![call(0.0, 0.25)], before);
        let long_ago = before.checked_sub(Duration::from_secs(1)).expect("a time");
        file.note(SpanKind::Snapshot, "state", long_ago);
        file.note(SpanKind::Snapshot, "too short", Instant::now());
        let since = before + Duration::from_millis(750);
        file.step(&metrics(1), vec![call(0.0, 0.5)], since);
        file.step(&metrics(2), Vec::new(), since + Duration::from_secs(1));
        let lines = written(temp.path());
        assert_eq!(
            (lines[0].step, lines[0].start_s, lines[0].step_s),
            (1, 0.75, 0.5)
        );
        let spans = &lines[0].spans;
        let shown: Vec<_> = spans
            .iter()
            .map(|span| (span.stage.as_str(), span.start_s))
            .collect();
        assert_eq!(
            shown,
            [("state", -1.75), ("generate", -0.75), ("generate", 0.0)]
        );
        assert_eq!(spans[1].end_s, -0.5);
        // Each span is in one line only.
        assert!(lines[1].spans.is_empty() && lines[1].start_s == 1.75);
    }

    #[test]
    fn a_long_run_keeps_steps_up_to_its_end_within_the_budget() {
        let temp = tempfile::tempdir().expect("a folder");
        let mut file = TimelineFile::new(temp.path(), 1, Room::of(temp.path(), None));
        file.budget = 40_000;
        for step in 1..=3000 {
            file.step(&metrics(step), vec![call(0.0, 0.5)], file.began);
        }
        let size = fs::metadata(temp.path().join(TIMELINE))
            .expect("a file")
            .len();
        assert!(size <= 40_000, "{size}");
        let steps: Vec<u64> = written(temp.path()).iter().map(|line| line.step).collect();
        assert_eq!(steps[..100], (1..=100).collect::<Vec<u64>>());
        assert!(steps.last().is_some_and(|last| *last > 2500), "{steps:?}");
        let strides: Vec<u64> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(
            strides.is_sorted() && strides.contains(&4) && strides.contains(&16),
            "{strides:?}"
        );
        assert_eq!(
            (stride(100, 0), stride(100, 49), stride(100, 50)),
            (1, 1, 4)
        );
        assert_eq!(
            (stride(100, 75), stride(100, 100), stride(0, 0)),
            (16, 4096, 1)
        );
    }

    #[test]
    fn a_full_disk_ends_the_timeline_and_not_the_run() {
        let temp = tempfile::tempdir().expect("a folder");
        let gone = temp.path().join("gone");
        let mut file = TimelineFile::new(&gone, 1, Room::of(temp.path(), None));
        file.step(&metrics(1), Vec::new(), file.began);
        assert!(file.ended);
        let mut off = TimelineFile::new(temp.path(), 0, Room::of(temp.path(), None));
        off.note(SpanKind::Record, "metrics", off.began);
        off.step(&metrics(1), Vec::new(), off.began);
        assert!(written(temp.path()).is_empty() && off.between.is_empty());
    }

    #[test]
    fn waits_close_to_each_other_count_as_one() {
        let waits = Waits::default();
        let from = Instant::now()
            .checked_sub(Duration::from_secs(2))
            .expect("a time");
        waits.add(from);
        // It began while the first one lasted.
        waits.add(from + Duration::from_secs(1));
        waits.add(Instant::now());
        let taken = waits.take();
        assert_eq!((taken.len(), taken[0].calls), (1, 2));
        let span = taken[0].span(from);
        assert!(span.start_s == 0.0 && span.end_s >= 2.0 && span.busy_s() >= 3.0);
        assert_eq!((span.place.as_str(), span.merged), ("run", 1));
        assert!(waits.take().is_empty());
    }
}
