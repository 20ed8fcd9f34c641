//! The smallest part of a batch that an algorithm must receive in one piece.

/// The unit that must not be divided when a batch is streamed or split into micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CutUnit {
    /// A row: a prompt with one response.
    Row,
    /// A preference pair.
    Pair,
    /// All responses of a prompt.
    Group,
    /// The entire mini-batch.
    MiniBatch,
}
