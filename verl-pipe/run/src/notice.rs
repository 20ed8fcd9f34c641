//! When a silent wait is reported: after a minute, or later if earlier waits of the same kind took longer.

use std::collections::HashMap;
use std::time::Duration;

/// How long the run waits silently before it reports the wait, until longer waits of the same kind have succeeded.
const NOTICE: Duration = Duration::from_secs(60);

/// A wait is reported when it takes this many times as long as the longest completed wait of its kind.
const FACTOR: u32 = 2;

/// When waits are reported.
///
/// A wait is reported after [`NOTICE`], or once it takes twice as long as the longest earlier wait of its kind,
/// whichever is later; so a stage whose calls always take three minutes is reported once, not at every step. It is
/// reported after half of its deadline at the latest. If half of the deadline is below [`NOTICE`], every wait is
/// reported after that time, regardless of earlier waits.
#[derive(Debug)]
pub(crate) struct WaitThresholds {
    /// Threshold of a kind of wait that was never seen.
    floor: Duration,
    /// Upper limit of all thresholds.
    latest: Duration,
    /// Longest completed wait, by kind.
    longest: HashMap<String, Duration>,
}

impl WaitThresholds {
    /// Thresholds for waits with the given `deadline`.
    pub(crate) fn new(deadline: Duration) -> WaitThresholds {
        let latest = deadline / 2;
        WaitThresholds {
            floor: NOTICE.min(latest),
            latest,
            longest: HashMap::new(),
        }
    }

    /// How long a wait of `kind` takes before it is reported.
    pub(crate) fn of(&self, kind: &str) -> Duration {
        let longest = self.longest.get(kind).copied().unwrap_or_default();
        longest
            .saturating_mul(FACTOR)
            .max(self.floor)
            .min(self.latest)
    }

    /// Records a wait of `kind` that succeeded.
    pub(crate) fn record(&mut self, kind: &str, waited: Duration) {
        // Short waits are not stored: they do not change the threshold, and there are many.
        if waited.saturating_mul(FACTOR) > self.of(kind) {
            self.longest.insert(kind.to_owned(), waited);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_wait_is_reported_after_a_minute_or_twice_the_longest_earlier_wait() {
        let mut thresholds = WaitThresholds::new(s(3600));
        assert_eq!(thresholds.of("update"), s(60));
        thresholds.record("update", s(20));
        assert_eq!(thresholds.of("update"), s(60));
        thresholds.record("update", s(180));
        assert_eq!(thresholds.of("update"), s(360));
        // A shorter wait does not lower the threshold.
        thresholds.record("update", s(90));
        assert_eq!(thresholds.of("update"), s(360));
        assert_eq!(thresholds.of("reward"), s(60));
        // Never later than half of the deadline.
        thresholds.record("update", s(1500));
        assert_eq!(thresholds.of("update"), s(1800));
    }

    #[test]
    fn with_a_short_deadline_a_wait_is_always_reported_after_half_of_it() {
        let mut thresholds = WaitThresholds::new(s(100));
        assert_eq!(thresholds.of("update"), s(50));
        thresholds.record("update", s(90));
        assert_eq!(thresholds.of("update"), s(50));
    }
}
