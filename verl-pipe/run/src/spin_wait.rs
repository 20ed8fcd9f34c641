//! Waiting for another thread: spin briefly, then block.
//!
//! Waking a sleeping thread costs more than most stages that use no model. So a thread that has just finished work
//! polls for more for a few microseconds and yields its core in between. While a model runs, whose threads use every
//! core, the thread blocks at once.

use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

/// How long a thread spins: a few times the cost of waking it.
const SPIN_TIME: Duration = Duration::from_micros(50);

/// Calls `poll` until it returns a value or [`SPIN_TIME`] has passed.
pub(super) fn spin<T>(mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let since = Instant::now();
    loop {
        let found = poll();
        if found.is_some() || since.elapsed() > SPIN_TIME {
            return found;
        }
        std::thread::yield_now();
    }
}

/// The next message; `None` when all senders are gone. `spins`: poll briefly before blocking.
pub(super) fn next<T>(inbox: &Receiver<T>, spins: bool) -> Option<T> {
    let polled = if spins {
        spin(|| inbox.try_recv().ok())
    } else {
        None
    };
    polled.or_else(|| inbox.recv().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_before_the_channel_closes() {
        let (to, from) = crossbeam_channel::unbounded();
        to.send(1).expect("an open channel");
        let sender = std::thread::spawn(move || {
            std::thread::sleep(4 * SPIN_TIME);
            to.send(2)
        });
        assert_eq!(next(&from, true), Some(1));
        assert_eq!(next(&from, false), Some(2));
        assert!(sender.join().expect("no panic").is_ok());
        assert_eq!(next(&from, true), None);
    }
}
