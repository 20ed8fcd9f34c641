//! Rewards before they become advantages.

use crate::error::{AlgoError, check_setting};

/// The soft penalty for a response of `length` tokens, which is added to its reward.
///
/// 0 up to L_max − buffer tokens, then linearly down to −factor at L_max:
/// −factor · max(0, L − (L_max − buffer)) / buffer. Beyond L_max it goes on falling, unless `capped`.
///
/// ```
/// use verl_algos::rewards::soft_overlong_penalty;
///
/// let penalty = |length, capped| soft_overlong_penalty(length, 4096, 512, 1.0, capped);
/// assert_eq!(penalty(3584, false)?, 0.0);
/// assert_eq!(penalty(3840, false)?, -0.5);
/// assert_eq!(penalty(5000, true)?, -1.0);
/// # Ok::<(), verl_algos::AlgoError>(())
/// ```
///
/// # Errors
/// A buffer of 0 tokens or longer than L_max; a factor that is negative or not finite.
///
/// # Source
/// Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13, where a longer response cannot be; verl does not cap, OpenRLHF
/// does.
pub fn soft_overlong_penalty(
    length: usize,
    max_length: usize,
    buffer: usize,
    factor: f64,
    capped: bool,
) -> Result<f64, AlgoError> {
    let (max, width) = (max_length as f64, buffer as f64);
    let rule = "it must lie between 1 and `max_length`";
    check_setting("buffer", width, width > 0.0 && width <= max, rule)?;
    let rule = "it must be a finite number from 0";
    let sound = factor >= 0.0 && factor.is_finite();
    check_setting("factor", factor, sound, rule)?;
    let mut exceeding = (length as f64 - (max - width)).max(0.0);
    if capped {
        exceeding = exceeding.min(width);
    }
    // Without this 0 would be -0 for short responses.
    Ok(0.0 - exceeding / width * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(capped: bool, expected: [f64; 5]) {
        let lengths = [0, 3584, 3840, 4096, 5000];
        let got = lengths.map(|n| soft_overlong_penalty(n, 4096, 512, 1.0, capped).unwrap());
        assert_eq!(got.map(f64::to_bits), expected.map(f64::to_bits));
    }

    #[test]
    fn by_hand() {
        check(false, [0.0, 0.0, -0.5, -1.0, -2.765625]);
        check(true, [0.0, 0.0, -0.5, -1.0, -1.0]);
        assert_eq!(soft_overlong_penalty(6, 8, 8, 2.0, false), Ok(-1.5));
    }

    #[test]
    fn refusals() {
        for buffer in [0, 4097] {
            assert!(soft_overlong_penalty(1, 4096, buffer, 1.0, false).is_err());
        }
        for factor in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(soft_overlong_penalty(1, 4096, 512, factor, false).is_err());
        }
    }
}
