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

impl Heads {
    /// Width of all queries of a token, `H·Dh`.
    pub fn query_width(self) -> usize {
        self.query * self.dim
    }

    /// Width of all keys of a token, and of all values, `K·Dh`.
    pub fn key_width(self) -> usize {
        self.key_value * self.dim
    }

    /// Width of queries, keys and values of a token together, `(H + 2K)·Dh`.
    pub fn joined_width(self) -> usize {
        self.query_width() + 2 * self.key_width()
    }

    /// Query heads that share a key/value head, `H / K`.
    pub fn group(self) -> usize {
        self.query / self.key_value
    }
}
