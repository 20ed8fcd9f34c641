//! Numbers for tests.

/// Pseudo-random numbers in [−0.5, 0.5), from a multiplicative hash.
pub(crate) fn numbers(count: usize, salt: u64) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let x = (i + 1 + salt * 1_000_003).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            (x >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        })
        .collect()
}
