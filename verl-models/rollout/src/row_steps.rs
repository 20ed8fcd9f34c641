//! How much of a rollout's steps was useful: rows that are free or have ended are computed with the others.

use std::cell::Cell;

/// Steps of rollouts, and their rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowSteps {
    /// Steps of rollouts.
    pub steps: usize,
    /// Rows of each step, added up.
    pub all: usize,
    /// Of these, rows that added a token to a response.
    pub live: usize,
}

impl RowSteps {
    /// Share of the rows' steps that yielded no token.
    pub fn idle_share(&self) -> f64 {
        match self.all {
            0 => 0.0,
            all => 1.0 - self.live as f64 / all as f64,
        }
    }
}

thread_local! {
    static COUNTED: Cell<RowSteps> = const {
        Cell::new(RowSteps {
            steps: 0,
            all: 0,
            live: 0,
        })
    };
}

/// Counts steps of `rows` rows.
pub(super) fn count(steps: usize, rows: usize) {
    COUNTED.with(|counted| {
        let mut now = counted.get();
        now.steps += steps;
        now.all += steps * rows;
        counted.set(now);
    });
}

/// Counts tokens that steps yielded.
pub(super) fn count_live(tokens: usize) {
    COUNTED.with(|counted| {
        let mut now = counted.get();
        now.live += tokens;
        counted.set(now);
    });
}

/// Returns and resets the counts of this thread's rollouts.
pub fn take() -> RowSteps {
    COUNTED.take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_until_they_are_taken() {
        assert_eq!(RowSteps::default().idle_share(), 0.0);
        take();
        count(3, 4);
        count(1, 2);
        count_live(7);
        let counted = take();
        let expected = RowSteps {
            steps: 4,
            all: 14,
            live: 7,
        };
        assert_eq!((counted, counted.idle_share()), (expected, 0.5));
        assert_eq!(take(), RowSteps::default());
    }
}
