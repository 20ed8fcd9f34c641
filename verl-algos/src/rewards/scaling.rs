//! Scores divided by a deviation, and clipped.

use crate::error::{AlgoError, check_finite, check_given, check_setting};
use crate::masked;
use serde::{Deserialize, Serialize};

/// A deviation below this share of the mean is rounding error of equal scores.
const ROUNDING: f64 = 1e-12;

/// Mean and variance of all numbers so far, updated batch by batch.
///
/// Up to rounding, neither depends on how the numbers were divided into batches.
///
/// # Shapes
/// Numbers in batches of any length.
/// # Differences
/// trlX and TRL also combine the deviations of batches weighted by size; they start from a count of 1e-24, here from 0.
/// # Source
/// Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances"; trlX and TRL
/// `RunningMoments`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RunningMoments {
    /// Number of values.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Sum of their squared deviations from the mean.
    pub squared_deviations: f64,
}

impl RunningMoments {
    /// Adds more numbers.
    ///
    /// # Errors
    /// A number that is not finite; in that case nothing is added.
    pub fn update(&mut self, values: &[f64]) -> Result<(), AlgoError> {
        check_finite("values", values)?;
        if values.is_empty() {
            return Ok(());
        }
        let (old, new) = (self.count as f64, values.len() as f64);
        let total = old + new;
        let delta = masked::mean(values) - self.mean;
        self.squared_deviations +=
            masked::variance_biased(values) * new + delta * delta * old * new / total;
        self.mean += delta * new / total;
        self.count += values.len() as u64;
        Ok(())
    }

    /// Bessel's deviation (n − 1); `None` for fewer than two numbers.
    pub fn std(&self) -> Option<f64> {
        (self.count > 1).then(|| (self.squared_deviations / (self.count - 1) as f64).sqrt())
    }
}

/// The deviation by which scores are divided.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum RewardScale {
    /// No division.
    None,
    /// The deviation of the batch.
    Batch,
    /// The deviation of all scores up to and including the batch.
    Running,
    /// A known deviation, such as that of the first rollouts.
    Reference {
        /// Their mean.
        mean: f64,
        /// Their deviation.
        std: f64,
    },
}

/// (s − mean)/std, then clipped to ± a bound. The mean is only subtracted if `centre` is set.
///
/// Scores are not divided by a deviation of 0 (up to rounding), or of fewer than two scores. The state consists only of
/// the running moments, so that a checkpoint can store it.
///
/// # Shapes
/// Scores `[B]`; the result has the same shape.
/// # Differences
/// TRL and trlX add a machine epsilon to the deviation; here a constant score stays unchanged.
/// # Source
/// `scale_reward` and `cliprange_reward` of trlX; `use_score_scaling`, `use_score_norm` and `score_clip` of TRL's
/// first PPO. OpenRLHF clips at ±10.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RewardScaler {
    /// The deviation to divide by.
    pub scale: RewardScale,
    /// Whether the mean is subtracted.
    pub centre: bool,
    /// Bound of the result.
    pub clip: Option<f64>,
    /// Moments of the scores so far.
    pub moments: RunningMoments,
}

impl RewardScaler {
    /// A scaler that has not processed any score.
    pub fn new(scale: RewardScale, centre: bool, clip: Option<f64>) -> RewardScaler {
        RewardScaler {
            scale,
            centre,
            clip,
            moments: RunningMoments::default(),
        }
    }

    /// Records a batch of scores, and scales it.
    ///
    /// # Shapes
    /// `scores`, result: `[B]`
    /// # Errors
    /// Scores that are not finite; a bound or reference deviation that is not positive. A rejected batch changes
    /// nothing.
    pub fn scale(&mut self, scores: &[Option<f64>]) -> Result<Vec<Option<f64>>, AlgoError> {
        check_given("scores", scores)?;
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let rule = "it must be positive";
        if let Some(clip) = self.clip {
            check_setting("cliprange_reward", clip, positive(clip), rule)?;
        }
        if let RewardScale::Reference { mean, std } = self.scale {
            check_finite("reference mean", &[mean])?;
            check_setting("reference std", std, positive(std), rule)?;
        }
        let given: Vec<f64> = scores.iter().flatten().copied().collect();
        let mut of_batch = RunningMoments::default();
        of_batch.update(&given)?;
        self.moments.update(&given)?;
        let (mean, std) = match self.scale {
            RewardScale::None | RewardScale::Batch => (of_batch.mean, of_batch.std()),
            RewardScale::Running => (self.moments.mean, self.moments.std()),
            RewardScale::Reference { mean, std } => (mean, Some(std)),
        };
        let offset = if self.centre { mean } else { 0.0 };
        let divisor = match (self.scale, std) {
            (RewardScale::None, _) | (_, None) => 1.0,
            (_, Some(std)) if std <= ROUNDING * mean.abs() => 1.0,
            (_, Some(std)) => std,
        };
        let bound = self.clip.unwrap_or(f64::INFINITY);
        let one = |score: f64| ((score - offset) / divisor).clamp(-bound, bound);
        Ok(scores.iter().map(|score| score.map(one)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(scaler: &mut RewardScaler, scores: &[f64], expected: &[f64]) {
        let scores: Vec<Option<f64>> = scores.iter().copied().map(Some).collect();
        let got: Vec<f64> = scaler
            .scale(&scores)
            .unwrap()
            .into_iter()
            .flatten()
            .collect();
        assert_eq!(got.len(), expected.len());
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{got:?}");
        }
    }

    #[test]
    fn by_the_deviation_of_the_batch() {
        let mut scaler = RewardScaler::new(RewardScale::Batch, false, None);
        check(&mut scaler, &[1.0, 3.0, 5.0], &[0.5, 1.5, 2.5]);
        scaler.centre = true;
        check(&mut scaler, &[1.0, 3.0, 5.0], &[-1.0, 0.0, 1.0]);
        scaler.clip = Some(0.75);
        check(&mut scaler, &[1.0, 3.0, 5.0], &[-0.75, 0.0, 0.75]);
    }

    #[test]
    fn by_the_deviation_of_all_scores_so_far() {
        let mut scaler = RewardScaler::new(RewardScale::Running, false, None);
        // The deviation of one score is undefined.
        check(&mut scaler, &[1.0], &[1.0]);
        check(&mut scaler, &[3.0, 5.0], &[1.5, 2.5]);
        assert_eq!((scaler.moments.count, scaler.moments.mean), (3, 3.0));
        assert_eq!(scaler.moments.std(), Some(2.0));
    }

    #[test]
    fn by_a_known_deviation() {
        let reference = RewardScale::Reference {
            mean: 1.0,
            std: 4.0,
        };
        let mut scaler = RewardScaler::new(reference, true, Some(10.0));
        check(&mut scaler, &[3.0, 100.0], &[0.5, 10.0]);
        let mut clip = RewardScaler::new(RewardScale::None, false, Some(10.0));
        check(&mut clip, &[3.0, -100.0], &[3.0, -10.0]);
    }

    #[test]
    fn equal_scores_and_rows_without_a_score_stay() {
        let mut scaler = RewardScaler::new(RewardScale::Batch, false, None);
        let scores = [Some(0.1), None, Some(0.1), Some(0.1)];
        assert_eq!(scaler.scale(&scores).unwrap(), scores);
        assert_eq!(scaler.scale(&[None]).unwrap(), [None]);
        assert_eq!(scaler.moments.count, 3);
    }

    #[test]
    fn a_rejected_batch_changes_nothing() {
        let mut scaler = RewardScaler::new(RewardScale::Running, false, Some(1.0));
        assert!(scaler.scale(&[Some(1.0), Some(f64::NAN)]).is_err());
        assert_eq!(scaler.moments, RunningMoments::default());
        scaler.clip = Some(0.0);
        assert!(scaler.scale(&[Some(1.0)]).is_err());
        let reference = RewardScale::Reference {
            mean: 0.0,
            std: 0.0,
        };
        let mut scaler = RewardScaler::new(reference, false, None);
        assert!(scaler.scale(&[Some(1.0)]).is_err());
        assert_eq!(scaler.moments, RunningMoments::default());
    }
}
