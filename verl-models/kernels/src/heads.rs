//! The heads of an attention.

/// Heads of an attention block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads, `H`.
    pub query: usize,
    /// Key/value heads, `K`; a divisor of `H`.
    pub key_value: usize,
    /// Width of a head, `Dh`.
    pub dim: usize,
}
