//! How long nothing may come before a wait is told: a minute, or longer where such waits have been longer before.

use std::collections::HashMap;
use std::time::Duration;

/// How long nothing may come before the run tells what it waits for, until it has seen longer waits end well.
const NOTICE: Duration = Duration::from_secs(60);

/// A wait is told when it takes so many times as long as the longest of its kind that has ended.
const TIMES: u32 = 2;

/// When waits are told.
///
/// A wait is told after [`NOTICE`], or once it takes twice as long as the longest wait of its kind before, whichever is
/// later; so a stage whose calls always take three minutes is told once and not at every step. It is told after half of
/// its deadline at the latest. A deadline whose half is below [`NOTICE`] was set to be told sooner, and nothing changes
/// that.
#[derive(Debug)]
pub(crate) struct Notices {
    /// After which a wait of a kind that was never seen is told.
    floor: Duration,
    /// After which any is told.
    latest: Duration,
    /// Longest wait that has ended, by kind.
    longest: HashMap<String, Duration>,
}

impl Notices {
    /// For waits that may take as long as `deadline`.
    pub(crate) fn new(deadline: Duration) -> Notices {
        let latest = deadline / 2;
        Notices {
            floor: NOTICE.min(latest),
            latest,
            longest: HashMap::new(),
        }
    }

    /// After how long a wait of `kind` is told.
    pub(crate) fn after(&self, kind: &str) -> Duration {
        let longest = self.longest.get(kind).copied().unwrap_or_default();
        longest
            .saturating_mul(TIMES)
            .max(self.floor)
            .min(self.latest)
    }

    /// A wait of `kind` has ended well.
    pub(crate) fn ended(&mut self, kind: &str, waited: Duration) {
        // Short waits are forgotten: they change nothing, and there are many.
        if waited.saturating_mul(TIMES) > self.after(kind) {
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
    fn a_wait_is_told_after_a_minute_or_when_it_is_twice_as_long_as_any_before() {
        let mut notices = Notices::new(s(3600));
        assert_eq!(notices.after("update"), s(60));
        notices.ended("update", s(20));
        assert_eq!(notices.after("update"), s(60));
        notices.ended("update", s(180));
        assert_eq!(notices.after("update"), s(360));
        // A shorter one is no reason to tell sooner.
        notices.ended("update", s(90));
        assert_eq!(notices.after("update"), s(360));
        assert_eq!(notices.after("reward"), s(60));
        // Before the deadline, whatever was before.
        notices.ended("update", s(1500));
        assert_eq!(notices.after("update"), s(1800));
    }

    #[test]
    fn a_short_deadline_is_told_after_its_half_whatever_was_before() {
        let mut notices = Notices::new(s(100));
        assert_eq!(notices.after("update"), s(50));
        notices.ended("update", s(90));
        assert_eq!(notices.after("update"), s(50));
    }
}
