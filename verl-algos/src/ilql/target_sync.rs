//! Target heads that follow the trained ones slowly.

use burn::tensor::Tensor;

use crate::error::{AlgoError, check_len, check_setting};

/// Polyak averaging every few optimiser steps: Q̂ ← α Q + (1 − α) Q̂.
///
/// # Shapes
/// Weights of any shape, the same on both sides.
/// # Differences
/// None known compared with trlX.
/// # Source
/// Polyak and Juditsky 1992; trlX `sync_target_q_heads`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TargetSync {
    /// α, in [0, 1]; 1 copies.
    pub alpha: f64,
    /// Optimiser steps between two synchronisations, at least 1.
    pub every: u64,
}

impl Default for TargetSync {
    /// α = 0.001 every 5 steps, as in trlX.
    fn default() -> TargetSync {
        TargetSync {
            alpha: 0.001,
            every: 5,
        }
    }
}

impl TargetSync {
    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid setting.
    pub fn check(&self) -> Result<(), AlgoError> {
        let valid = (0.0..=1.0).contains(&self.alpha);
        check_setting("alpha", self.alpha, valid, "it must lie in [0, 1]")?;
        let every = self.every as f64;
        check_setting("every", every, self.every > 0, "it must be at least 1 step")
    }

    /// Whether a synchronisation is due after `steps` optimiser steps.
    ///
    /// # Errors
    /// Settings out of range.
    pub fn is_due(&self, steps: u64) -> Result<bool, AlgoError> {
        self.check()?;
        Ok(steps > 0 && steps.is_multiple_of(self.every))
    }

    /// The targets after one synchronisation.
    ///
    /// # Errors
    /// Settings out of range; different numbers of weights and targets.
    pub fn values(&self, targets: &[f64], weights: &[f64]) -> Result<Vec<f64>, AlgoError> {
        self.check()?;
        check_len("targets", "weights", targets.len(), weights.len())?;
        let each = targets.iter().zip(weights);
        Ok(each
            .map(|(target, weight)| self.alpha * weight + (1.0 - self.alpha) * target)
            .collect())
    }

    /// The targets after one synchronisation, without gradient and in the dtype of `targets`.
    ///
    /// # Errors
    /// Settings out of range; weights whose shape differs from that of the targets.
    pub fn tensor<const D: usize>(
        &self,
        targets: Tensor<D>,
        weights: Tensor<D>,
    ) -> Result<Tensor<D>, AlgoError> {
        self.check()?;
        for (got, expected) in targets.dims().into_iter().zip(weights.dims()) {
            check_len("targets", "weights", got, expected)?;
        }
        let weights = weights.detach().cast(targets.dtype());
        Ok(weights * self.alpha + targets.detach() * (1.0 - self.alpha))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, read};

    const QUARTER: TargetSync = TargetSync {
        alpha: 0.25,
        every: 3,
    };

    #[test]
    fn by_hand() {
        let (targets, weights) = ([4.0, -8.0], [0.0, 8.0]);
        let expected = [3.0, -4.0];
        assert_eq!(QUARTER.values(&targets, &weights).unwrap(), expected);
        let (targets, weights) = (constant(&targets), constant(&weights));
        assert_eq!(read(QUARTER.tensor(targets, weights).unwrap()), expected);
    }

    #[test]
    fn is_due_every_few_steps() {
        let due = (0..8).filter(|steps| QUARTER.is_due(*steps).unwrap());
        assert_eq!(due.collect::<Vec<_>>(), [3, 6]);
    }

    #[test]
    fn rejects_invalid_inputs() {
        for alpha in [-0.1, 1.1, f64::NAN] {
            assert!(TargetSync { alpha, ..QUARTER }.check().is_err());
        }
        assert!(
            TargetSync {
                every: 0,
                ..QUARTER
            }
            .is_due(1)
            .is_err()
        );
        assert!(QUARTER.values(&[1.0], &[]).is_err());
        let (a, b) = (constant(&[1.0]), constant(&[1.0, 2.0]));
        assert!(QUARTER.tensor(a, b).is_err());
    }
}
