//! When groups were idle, what they waited for, and when two of them were busy at once.

use verl_run::spans::{CallSpan, HOST};

use super::intervals::{Interval, both, clip, gaps, total};
use super::lanes::{Lane, busy, label};

/// Gaps shorter than this share of the step are not listed.
const SHORTEST_GAP: f64 = 0.005;

/// Maximum number of gaps that are listed per group.
const MAX_GAPS: usize = 6;

/// Maximum number of calls that are listed per gap.
const MAX_MEANWHILE: usize = 3;

/// A time during which a group was idle.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Gap {
    pub time: Interval,
    /// What the group ran next; `None` at the end of the step.
    pub next: Option<String>,
    /// What ran elsewhere in the meantime, and for how long, longest first.
    pub meanwhile: Vec<(String, f64)>,
    /// Time during which nothing ran at all (seconds).
    pub nothing_s: f64,
}

/// A group in a step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct GroupTime {
    pub group: String,
    pub busy: Vec<Interval>,
    /// Its longest gaps, in the order of time.
    pub gaps: Vec<Gap>,
    /// Gaps that are not listed.
    pub others: usize,
}

/// The places in a step of `step_s` seconds whose spans these are: groups, with their gaps.
pub(super) fn group_times(spans: &[&CallSpan], step_s: f64) -> Vec<GroupTime> {
    let mut groups: Vec<Lane> = spans.iter().map(|span| Lane::of(span)).collect();
    groups.retain(Lane::is_group);
    groups.sort();
    groups.dedup_by(|a, b| a.place == b.place);
    let times = groups.into_iter().map(|group| {
        let group = group.place;
        let own = spans.iter().copied().filter(|span| span.place == group);
        let busy = busy(own);
        let mut idle = gaps(&busy, (0.0, step_s));
        let all = idle.len();
        idle.retain(|gap| gap.1 - gap.0 >= SHORTEST_GAP * step_s);
        idle.sort_by(|a, b| (b.1 - b.0).total_cmp(&(a.1 - a.0)));
        idle.truncate(MAX_GAPS);
        idle.sort_by(|a, b| a.0.total_cmp(&b.0));
        let listed: Vec<Gap> = idle.iter().map(|time| gap(*time, &group, spans)).collect();
        GroupTime {
            others: all - listed.len(),
            group,
            busy,
            gaps: listed,
        }
    });
    times.collect()
}

fn gap(time: Interval, group: &str, spans: &[&CallSpan]) -> Gap {
    let own = spans.iter().filter(|span| span.place == group);
    // Times are exact to the microsecond, so the next call starts where the gap ends.
    let later = own.filter(|span| span.start_s >= time.1);
    let next = later.min_by(|a, b| a.start_s.total_cmp(&b.start_s));
    let others = spans.iter().copied().filter(|span| span.place != group);
    let others: Vec<&CallSpan> = others.collect();
    let anything = clip(&busy(others.iter().copied()), time);
    let mut labels: Vec<(String, &str)> = Vec::new();
    for span in &others {
        let named = (label(span), span.place.as_str());
        if !labels.contains(&named) {
            labels.push(named);
        }
    }
    let meanwhile = labels.into_iter().filter_map(|(name, place)| {
        let same = others
            .iter()
            .copied()
            .filter(|span| span.place == place && label(span) == name);
        let seconds = total(&clip(&busy(same), time));
        (seconds > 0.0).then(|| (format!("{name} ({place})"), seconds))
    });
    let mut meanwhile: Vec<(String, f64)> = meanwhile.collect();
    meanwhile.sort_by(|a, b| b.1.total_cmp(&a.1));
    meanwhile.truncate(MAX_MEANWHILE);
    Gap {
        time,
        next: next.map(|span| label(span)),
        meanwhile,
        nothing_s: (time.1 - time.0 - total(&anything)).max(0.0),
    }
}

/// How long each two groups were busy at once, and each group and the host pool (seconds).
pub(super) fn overlaps(times: &[GroupTime], spans: &[&CallSpan]) -> Vec<(String, f64)> {
    let host = busy(spans.iter().copied().filter(|span| span.place == HOST));
    let mut found = Vec::new();
    for (at, one) in times.iter().enumerate() {
        for other in &times[at + 1..] {
            let names = format!("groups {} and {}", one.group, other.group);
            found.push((names, total(&both(&one.busy, &other.busy))));
        }
    }
    for one in times.iter().filter(|_| !host.is_empty()) {
        let names = format!("group {} and the host pool", one.group);
        found.push((names, total(&both(&one.busy, &host))));
    }
    found
}
