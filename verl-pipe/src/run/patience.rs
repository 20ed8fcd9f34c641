//! Waiting for another thread: awake for a moment, asleep after it.
//!
//! Waking a sleeping thread costs more than most stages that use no model. So who has just worked looks for more for
//! a few microseconds, and leaves its core to anybody who wants it meanwhile.

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

/// How long a thread stays awake: a few times what waking it costs.
const PATIENCE: Duration = Duration::from_micros(50);

/// What `poll` finds within [`PATIENCE`].
pub(super) fn soon<T>(mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let since = Instant::now();
    loop {
        let found = poll();
        if found.is_some() || since.elapsed() > PATIENCE {
            return found;
        }
        std::thread::yield_now();
    }
}

/// The next message; `None` when nobody is left to send one.
pub(super) fn next<T>(inbox: &Receiver<T>) -> Option<T> {
    soon(|| inbox.try_recv().ok()).or_else(|| inbox.recv().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_before_the_end() {
        let (to, from) = crossbeam_channel::unbounded();
        to.send(1).expect("an open channel");
        let sender = std::thread::spawn(move || {
            std::thread::sleep(4 * PATIENCE);
            to.send(2)
        });
        assert_eq!(next(&from), Some(1));
        assert_eq!(next(&from), Some(2));
        assert!(sender.join().expect("no panic").is_ok());
        assert_eq!(next(&from), None);
    }
}
