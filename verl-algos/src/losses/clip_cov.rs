//! Clip-Cov: leaving out some of the tokens that make the entropy collapse.

use super::clipped_policy::{check_clip, clipped_surrogate};
use super::covariance::{check_share, covariances, selected_count};
use super::{LossInput, MetricId, PerToken, PreparedTokens, TokenLoss};
use crate::batch::{MiniBatch, require};
use crate::error::{AlgoError, check_setting};
use crate::functions::exp;
use crate::tensor::ones_where;

/// PPO's clip, and 0 on at most max(1, ⌊ratio·N⌋) of the unclipped tokens whose (A − Ā)(ℓ − ℓ̄) lies in (lb, ub). Times
/// the rollout weights.
///
/// The tokens are selected among all N of the mini-batch (of this rank) by [`MiniBatch::current_log_probs`]; if there
/// are more candidates than may be left out, those with the smallest [`MiniBatch::draws`] are. This loss needs both.
/// Reported: `pg_clipfrac`, the share that was left out; `ppo_kl`, mean of −d.
///
/// # Shapes
/// Log-probs, ℓ_old, A, weights and the result: `[M]`, one per token of the micro-batch.
/// # Differences
/// verl selects among the tokens of a micro-batch and draws from its own stateful generator. As in verl, there is
/// neither a clamp of d nor a dual clip.
/// # Source
/// Cui et al. 2025, arXiv:2505.22617.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipCovLoss {
    /// ε_low, in [0, 1].
    pub clip_low: f64,
    /// ε_high, at least 0.
    pub clip_high: f64,
    /// Share of tokens that are left out, in (0, 1].
    pub ratio: f64,
    /// Covariances of candidates lie above this.
    pub lower: f64,
    /// Covariances of candidates lie below this.
    pub upper: f64,
}

impl Default for ClipCovLoss {
    fn default() -> ClipCovLoss {
        ClipCovLoss {
            clip_low: 0.2,
            clip_high: 0.2,
            ratio: 0.0002,
            lower: 1.0,
            upper: 5.0,
        }
    }
}

impl ClipCovLoss {
    /// Tokens that may be left out, in the order of the mini-batch.
    fn candidates(&self, batch: &MiniBatch) -> Result<Vec<usize>, AlgoError> {
        let covariances = covariances(batch, self.name())?;
        let advantages = require(self.name(), "advantages", &batch.advantages)?;
        let old = require(self.name(), "old_log_probs", &batch.old_log_probs)?;
        let now = require(self.name(), "current_log_probs", &batch.current_log_probs)?;
        let is_clipped = |t: usize| {
            let ratio = libm::exp(now[t] - old[t]);
            let bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
            -advantages[t] * bounded > -advantages[t] * ratio
        };
        let inside = |t: &usize| covariances[*t] > self.lower && covariances[*t] < self.upper;
        let tokens = (0..covariances.len()).filter(inside);
        Ok(tokens.filter(|t| !is_clipped(*t)).collect())
    }
}

impl TokenLoss for ClipCovLoss {
    fn id(&self) -> MetricId {
        MetricId::new("clip_cov_loss")
    }

    fn inputs(&self) -> &'static [LossInput] {
        &[
            LossInput::Advantages,
            LossInput::OldLogProbs,
            LossInput::CurrentLogProbs,
            LossInput::Draws,
        ]
    }

    fn check(&self) -> Result<(), AlgoError> {
        check_clip(self.clip_low, self.clip_high)?;
        check_share("ratio", self.ratio)?;
        let rule = "it must be below `upper`";
        check_setting("lower", self.lower, self.lower < self.upper, rule)
    }

    /// 1 on the tokens that are left out.
    fn prepare(&self, batch: &MiniBatch) -> Result<Vec<f64>, AlgoError> {
        let draws = require(self.name(), "draws", &batch.draws)?;
        let mut candidates = self.candidates(batch)?;
        candidates.sort_by(|&a, &b| draws[a].total_cmp(&draws[b]));
        let mut marks = vec![0.0; batch.num_tokens()];
        let count = selected_count(self.ratio, batch.num_tokens());
        for token in candidates.into_iter().take(count) {
            marks[token] = 1.0;
        }
        Ok(marks)
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        let d = tokens.log_probs() - tokens.old_log_probs(self.name())?;
        let ratio = exp(d.clone());
        let bounded = ratio
            .clone()
            .clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let advantages = tokens.advantages(self.name())?;
        let clipped = clipped_surrogate(ratio, bounded, advantages);
        let left_out = tokens.marks(self.name())?.greater_scalar(0.0);
        let loss = clipped.loss.mask_fill(left_out.clone(), 0.0);
        Ok(PerToken {
            loss: tokens.times_rollout_weights(loss),
            metrics: vec![
                (MetricId::PG_CLIPFRAC, ones_where(left_out, &d)),
                (MetricId::PPO_KL, -d),
            ],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregation;
    use crate::losses::Objective;
    use crate::tensor::test::gradient;

    /// Means 0 and −2; covariances 1, 1.5, 0.5, 1.5, 0.5, 0; the last but one is clipped by its ratio.
    fn batch() -> MiniBatch {
        let mut batch = MiniBatch::new(vec![0, 0, 0, 1, 1, 1]);
        batch.advantages = Some(vec![1.0, 1.5, -0.5, -1.5, -0.5, 0.0]);
        let now = vec![-1.0, -1.0, -3.0, -3.0, -3.0, -1.0];
        let mut old = now.clone();
        old[4] += 1.0;
        batch.old_log_probs = Some(old);
        batch.current_log_probs = Some(now);
        batch.draws = Some(vec![0.9, 0.2, 0.5, 0.7, 0.0, 0.1]);
        batch
    }

    fn loss(ratio: f64) -> ClipCovLoss {
        ClipCovLoss {
            ratio,
            lower: 0.4,
            upper: 1.2,
            ..ClipCovLoss::default()
        }
    }

    #[track_caller]
    fn check(ratio: f64, left_out: &[usize]) {
        let marks = loss(ratio).prepare(&batch()).unwrap();
        let got: Vec<usize> = (0..marks.len()).filter(|t| marks[*t] == 1.0).collect();
        assert_eq!(got, left_out);
    }

    #[test]
    fn the_smallest_draws_of_the_candidates_are_left_out() {
        // Candidates are the first and the third.
        check(0.01, &[2]);
        check(0.34, &[0, 2]);
        check(1.0, &[0, 2]);
    }

    #[test]
    fn tokens_left_out_have_no_gradient() {
        let objective = Objective::new(Aggregation::TokenSum).with(1.0, loss(1.0));
        let batch = batch();
        let now = batch.current_log_probs.clone().unwrap();
        let prepared = objective.prepare(&batch).unwrap();
        let (_, grad) = gradient(&now, |l| prepared.loss(&batch.whole(l, None)).unwrap().loss);
        assert_eq!(grad, [0.0, -1.5, 0.0, 1.5, 0.0, 0.0]);
    }

    #[test]
    fn rejects_missing_inputs_and_settings_out_of_range() {
        let mut batch = batch();
        batch.draws = None;
        let error = loss(0.5).prepare(&batch).unwrap_err();
        assert!(error.to_string().contains("draws"), "{error}");
        let lower = 6.0;
        let plain = ClipCovLoss::default();
        assert!(ClipCovLoss { lower, ..plain }.check().is_err());
        assert!(
            ClipCovLoss {
                ratio: 0.0,
                ..plain
            }
            .check()
            .is_err()
        );
    }
}
