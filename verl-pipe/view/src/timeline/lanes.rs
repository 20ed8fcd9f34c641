//! Lanes of a timeline: a worker of a group, a thread of the host pool, the thread that runs the steps.

use verl_run::spans::{CallSpan, HOST, RUN, SpanKind, TimelineLine};

use super::intervals::{Interval, union};

/// A lane: groups by name come first, then the host pool, then the thread that runs the steps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    order: u8,
    pub place: String,
    pub number: usize,
}

impl Lane {
    pub(super) fn of(span: &CallSpan) -> Lane {
        Lane {
            order: match span.place.as_str() {
                HOST => 1,
                RUN => 2,
                _ => 0,
            },
            place: span.place.clone(),
            number: span.lane,
        }
    }

    /// Whether it is a worker of a device group.
    pub(super) fn is_group(&self) -> bool {
        self.order == 0
    }

    /// Its name among `all` lanes: the number is shown if its place has several, and always for the host pool.
    pub(super) fn name(&self, all: &[Lane]) -> String {
        let single = all.iter().filter(|lane| lane.place == self.place).count() == 1;
        match single && self.place != HOST {
            true => self.place.clone(),
            false => format!("{} {}", self.place, self.number),
        }
    }
}

/// The lanes of `spans` in order.
pub(super) fn lanes<'a>(spans: impl IntoIterator<Item = &'a CallSpan>) -> Vec<Lane> {
    let mut lanes: Vec<Lane> = spans.into_iter().map(Lane::of).collect();
    lanes.sort();
    lanes.dedup();
    lanes
}

/// What a span is about, in words.
pub(super) fn label(span: &CallSpan) -> String {
    let about = &span.stage;
    match span.kind {
        SpanKind::Call | SpanKind::Observe => about.clone(),
        SpanKind::Sync => format!("weights of {about}"),
        SpanKind::Snapshot => format!("read {about}"),
        SpanKind::Record => format!("write {about}"),
        SpanKind::Wait => format!("wait for {about}"),
    }
}

/// Whether a part of the span is in the step; otherwise it ran between two steps.
pub(super) fn is_in_step(span: &CallSpan, line: &TimelineLine) -> bool {
    span.kind == SpanKind::Call || (span.end_s > 0.0 && span.start_s < line.step_s)
}

/// When any of `spans` ran.
pub(super) fn busy<'a>(spans: impl IntoIterator<Item = &'a CallSpan>) -> Vec<Interval> {
    let spans = spans.into_iter();
    union(spans.map(|span| (span.start_s, span.end_s)).collect())
}
