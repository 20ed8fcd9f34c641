//! Counter-based randomness (Philox 4×32-10): each draw is a function of its key, never of scheduling.

/// What draws are for; separate purposes never share random words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Purpose {
    /// Training rollouts.
    Rollout = 1,
    /// Evaluation rollouts.
    Evaluation = 2,
    /// Baseline rollouts.
    Baseline = 3,
    /// Order of data.
    Shuffle = 4,
    /// Initial weights.
    Init = 5,
    /// Generated data sets.
    Data = 6,
}

/// What the draws of one response are a function of, apart from position and token id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DrawKey {
    /// Seed of the run.
    pub seed: u64,
    /// What for.
    pub purpose: Purpose,
    /// Step of the run.
    pub step: u64,
    /// Identity of the row: epoch, data-set row and sample index.
    pub row: u64,
    /// Refill attempt.
    pub attempt: u32,
}
