//! The smallest piece of a batch that an algorithm must see whole.

/// What must not be cut apart when a batch is streamed or split into micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CutUnit {
    /// A row: a prompt with one response.
    Row,
    /// A preference pair.
    Pair,
    /// All responses of a prompt.
    Group,
    /// The whole mini-batch.
    MiniBatch,
}
