//! Soft penalty for long responses.

use crate::error::{AlgoError, check_given, check_len, check_setting};

/// 0 up to L_max − buffer tokens, then linearly down to −factor at L_max.
///
/// −factor · (L − (L_max − buffer)) / buffer if that is negative. Beyond L_max it keeps falling, unless `capped`.
///
/// # Shapes
/// Lengths and scores `[B]`; result `[B]`.
/// # Differences
/// verl's keeps falling beyond L_max; OpenRLHF's stops at −factor, as here with `capped`.
/// # Source
/// Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13; verl's DAPO reward manager does not cap, OpenRLHF does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OverlongPenalty {
    /// L_max, tokens.
    pub max_length: usize,
    /// Number of tokens below L_max that are already penalised.
    pub buffer: usize,
    /// Penalty at L_max, at least 0.
    pub factor: f64,
    /// Whether the penalty stays at −factor beyond L_max.
    pub capped: bool,
}

impl OverlongPenalty {
    /// The number to add to the score of a response of `length` tokens.
    ///
    /// # Errors
    /// A buffer of 0, or longer than L_max; a factor that is negative or not finite.
    pub fn penalty(&self, length: usize) -> Result<f64, AlgoError> {
        let (max, buffer) = (self.max_length as f64, self.buffer as f64);
        let valid = buffer > 0.0 && buffer <= max;
        let rule = "it must lie between 1 and `max_length`";
        check_setting("overlong_buffer", buffer, valid, rule)?;
        let valid = self.factor >= 0.0 && self.factor.is_finite();
        let rule = "it must be a finite number of at least 0";
        check_setting("overlong_factor", self.factor, valid, rule)?;
        let mut exceeding = (length as f64 - (max - buffer)).max(0.0);
        if self.capped {
            exceeding = exceeding.min(buffer);
        }
        // Without this, short responses would get -0 instead of 0.
        Ok(0.0 - exceeding / buffer * self.factor)
    }

    /// Scores with the penalty of each response's length, `[B]`.
    ///
    /// # Errors
    /// Those of [`OverlongPenalty::penalty`]; different numbers of lengths and scores.
    pub fn penalise(
        &self,
        scores: &[Option<f64>],
        lengths: &[usize],
    ) -> Result<Vec<Option<f64>>, AlgoError> {
        check_len("lengths", "rows", lengths.len(), scores.len())?;
        check_given("scores", scores)?;
        let each = scores.iter().zip(lengths);
        each.map(|(score, &length)| {
            let penalty = self.penalty(length)?;
            Ok(score.map(|score| score + penalty))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: OverlongPenalty = OverlongPenalty {
        max_length: 4096,
        buffer: 512,
        factor: 1.0,
        capped: false,
    };

    #[test]
    fn by_hand() {
        let lengths = [0, 3584, 3840, 4096, 5000];
        let capped = OverlongPenalty {
            capped: true,
            ..PLAIN
        };
        let of = |penalty: OverlongPenalty| lengths.map(|n| penalty.penalty(n).unwrap());
        assert_eq!(of(PLAIN), [0.0, 0.0, -0.5, -1.0, -2.765625]);
        assert_eq!(of(capped), [0.0, 0.0, -0.5, -1.0, -1.0]);
        let scores = PLAIN.penalise(&[Some(1.0), None], &[3840, 3840]).unwrap();
        assert_eq!(scores, [Some(0.5), None]);
    }

    #[test]
    fn rejects_invalid_inputs() {
        for buffer in [0, 4097] {
            assert!(OverlongPenalty { buffer, ..PLAIN }.penalty(1).is_err());
        }
        for factor in [-1.0, f64::NAN] {
            assert!(OverlongPenalty { factor, ..PLAIN }.penalty(1).is_err());
        }
        assert!(PLAIN.penalise(&[Some(1.0)], &[]).is_err());
    }
}
