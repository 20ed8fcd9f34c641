//! Weights and rejection together, and the resulting mini-batch.

use super::bypass::BypassLoss;
use super::diagnostics::mismatch;
use super::log_ratios::{LogProbPair, LogRatios};
use super::rejection::{RejectionRule, masked_fractions};
use super::stats::{Mismatch, RejectionStats, WeightStats};
use super::weights::RolloutWeights;
use crate::aggregate::Counts;
use crate::batch::MiniBatch;
use crate::cut::CutUnit;
use crate::error::AlgoError;
use crate::ragged::Ragged;

/// The number of policies.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Mode {
    /// Three: π_roll sampled, π_old is the training engine's at the start of the update, π is trained.
    #[default]
    Decoupled,
    /// Two: π_roll takes the place of π_old, and no log-probs are computed before the update.
    Bypass(BypassLoss),
}

/// How a batch is corrected; without weights and rules it is only measured.
///
/// # Shapes
/// As [`LogProbPair`]: `[B, T~]`.
/// # Differences
/// As [`RolloutCorrection::correct`].
/// # Source
/// verl `rollout_corr_helper`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RolloutCorrection {
    /// The number of policies.
    pub mode: Mode,
    /// Importance weights, if any.
    pub weights: Option<RolloutWeights>,
    /// Rules for what is not trained on; a token is kept if all rules keep it.
    pub rejection: Vec<RejectionRule>,
}

/// The result of a correction. None of it has a gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct Correction {
    /// Importance weights, `[B, T~]`; 0 at observations. A rejected token has one too.
    pub weights: Option<Ragged<f64>>,
    /// The action tokens that are kept, `[B, T~]`.
    pub actions: Ragged<bool>,
    /// Statistics of the weights.
    pub weight_stats: Option<WeightStats>,
    /// Statistics of each rule, in the order of the rules.
    pub rejection_stats: Vec<(RejectionRule, RejectionStats)>,
    /// Share of action tokens that were rejected.
    pub masked_fraction: f64,
    /// Share of rows that lost a token.
    pub seq_masked_fraction: f64,
    /// How far the sampler was off, before any rejection.
    pub mismatch: Mismatch,
}

impl Correction {
    /// All numbers by the names that verl uses for them.
    pub fn metrics(&self) -> Vec<(String, f64)> {
        let mut metrics = Vec::new();
        let mut add = |prefix: &str, named: Vec<(&'static str, f64)>| {
            let named = named.into_iter();
            metrics.extend(named.map(|(name, value)| (format!("{prefix}{name}"), value)));
        };
        if let Some(stats) = &self.weight_stats {
            add("rollout_is_", stats.named());
        }
        for (rule, stats) in &self.rejection_stats {
            add(&format!("rollout_rs_{}_", rule.name()), stats.named());
        }
        if !self.rejection_stats.is_empty() {
            let total = vec![
                ("masked_fraction", self.masked_fraction),
                ("seq_masked_fraction", self.seq_masked_fraction),
            ];
            add("rollout_rs_", total);
        }
        add("", self.mismatch.named());
        metrics
    }
}

impl RolloutCorrection {
    /// Rejects settings out of range.
    ///
    /// # Errors
    /// The first invalid bound.
    pub fn check(&self) -> Result<(), AlgoError> {
        self.weights.map_or(Ok(()), |weights| weights.check())?;
        self.rejection.iter().try_for_each(RejectionRule::check)
    }

    /// The unit that it must receive in one piece: the batch if weights are normalised, else a row.
    pub fn cut_unit(&self) -> CutUnit {
        match self.weights {
            Some(weights) if weights.normalize => CutUnit::MiniBatch,
            _ => CutUnit::Row,
        }
    }

    /// Weights, and the mask without rejected tokens.
    ///
    /// # Errors
    /// Settings out of range; rows whose lengths differ from those of the mask; a log-prob of an action token that is
    /// not finite, unless the sampler is known not to have scored it; no action token that it scored.
    /// # Differences
    /// verl counts rows without action tokens in its row statistics, and NaN at observations becomes NaN in its
    /// weights. A token that was not scored is NaN there, and ratio 1 in TRL, as here.
    pub fn correct(&self, pair: &LogProbPair<'_>) -> Result<Correction, AlgoError> {
        self.check()?;
        let ratios = LogRatios::new(pair)?;
        let weighed = self.weights.map(|weights| weights.weigh(&ratios));
        let mut keep = vec![true; ratios.values.len()];
        let mut rejection_stats = Vec::with_capacity(self.rejection.len());
        for rule in &self.rejection {
            let (kept, stats) = rule.apply(&ratios);
            keep.iter_mut().zip(kept).for_each(|(all, own)| *all &= own);
            rejection_stats.push((*rule, stats));
        }
        let (masked_fraction, seq_masked_fraction) = masked_fractions(&ratios, &keep);
        let mut next = keep.iter();
        let actions = pair
            .actions
            .map(|_, _, action| action && next.next().is_some_and(|kept| *kept));
        let weights = weighed
            .as_ref()
            .map(|(weights, _)| pair.actions.scatter(weights));
        Ok(Correction {
            weights: weights.transpose()?,
            actions,
            weight_stats: weighed.map(|(_, stats)| stats),
            rejection_stats,
            masked_fraction,
            seq_masked_fraction,
            mismatch: mismatch(&ratios),
        })
    }

    /// The mini-batch of the kept tokens, for the policy loss of the mode, and the correction that it came from.
    ///
    /// Decoupled: ℓ_old are the pair's `train_log_probs`, the weights multiply the loss. Bypass: ℓ_old is ℓ_roll, so
    /// the pair's `train_log_probs` must be those of the *current* policy: computed without gradient for the entire
    /// mini-batch, before the first micro-batch of the optimiser step. Then no weight depends on the division of the
    /// mini-batch. A token that the sampler did not score has ratio 1.
    ///
    /// Tokens are those of [`Correction::actions`], packed. Rejected ones leave the denominators as well, unless
    /// `counts` declares them: declare the number of kept tokens, over all ranks.
    ///
    /// # Shapes
    /// `advantages`: `[B, T~]`
    /// # Errors
    /// Those of [`RolloutCorrection::correct`]; advantages of another shape.
    pub fn mini_batch(
        &self,
        pair: &LogProbPair<'_>,
        advantages: &Ragged<f64>,
        counts: Counts,
    ) -> Result<(MiniBatch, Correction), AlgoError> {
        let correction = self.correct(pair)?;
        let left = &correction.actions;
        let train = pair.train_log_probs.select("train_log_probs", left)?;
        let rollout = pair.rollout_log_probs.select("rollout_log_probs", left)?;
        let weights = match &correction.weights {
            Some(weights) => Some(weights.select("weights", left)?),
            None => None,
        };
        let (old_log_probs, rollout_weights) = match self.mode {
            Mode::Decoupled => (train, weights),
            Mode::Bypass(loss) => {
                let each = rollout.iter().zip(&train);
                let old = each.map(|(rollout, train)| rollout.unwrap_or(*train));
                (old.collect(), weights.filter(|_| loss.uses_weights()))
            }
        };
        let batch = MiniBatch {
            rows: left.packed_rows(),
            counts,
            old_log_probs: Some(old_log_probs),
            advantages: Some(advantages.select("advantages", left)?),
            rollout_weights,
            ..MiniBatch::default()
        };
        Ok((batch, correction))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::ClippedPolicyLoss;
    use crate::rollout_correction::{RejectionRuleName, WeightBound, WeightLevel};

    /// Tokens with ratio 1, 4 | an observation and a token that was not scored | 2.
    fn run(mode: Mode) -> (MiniBatch, Correction) {
        let actions = Ragged::<bool>::from_rows([vec![true, true], vec![false, true], vec![true]]);
        let train = Ragged::<f64>::from_rows([vec![-1.0, -1.0], vec![f64::NAN, -3.0], vec![-1.0]]);
        let rollout = Ragged::<Option<f64>>::from_rows([
            vec![Some(-1.0), Some(-1.0 - 4f64.ln())],
            vec![Some(f64::NAN), None],
            vec![Some(-1.0 - 2f64.ln())],
        ]);
        let pair = LogProbPair {
            actions: &actions,
            train_log_probs: &train,
            rollout_log_probs: &rollout,
        };
        let correction = RolloutCorrection {
            mode,
            weights: Some(RolloutWeights {
                level: WeightLevel::Token,
                bound: WeightBound::Truncate(1.5),
                normalize: false,
            }),
            rejection: vec![RejectionRule::named(RejectionRuleName::TokenK1, "3").unwrap()],
        };
        let advantages = actions.map(|b, _, action| if action { b as f64 } else { f64::NAN });
        correction
            .mini_batch(&pair, &advantages, Counts::LOCAL)
            .unwrap()
    }

    #[test]
    fn a_decoupled_batch_by_hand() {
        let (batch, correction) = run(Mode::Decoupled);
        assert_eq!(
            correction.actions.values(),
            [true, false, false, true, true]
        );
        let weights = correction.weights.unwrap();
        assert_eq!(weights.values(), [1.0, 1.5, 0.0, 1.0, 1.5]);
        assert_eq!(correction.masked_fraction, 0.25);
        assert_eq!(batch.rows, [0, 1, 2]);
        assert_eq!(batch.old_log_probs.unwrap(), [-1.0, -3.0, -1.0]);
        assert_eq!(batch.advantages.unwrap(), [0.0, 1.0, 2.0]);
        assert_eq!(batch.rollout_weights.unwrap(), [1.0, 1.0, 1.5]);
    }

    #[test]
    fn the_sampler_replaces_the_old_policy_in_bypass_mode() {
        let old = [-1.0, -3.0, -1.0 - 2f64.ln()];
        let (batch, _) = run(Mode::Bypass(BypassLoss::Reinforce));
        assert_eq!(batch.old_log_probs.unwrap(), old);
        assert_eq!(batch.rollout_weights.unwrap(), [1.0, 1.0, 1.5]);
        let clip = BypassLoss::PpoClip(ClippedPolicyLoss::default());
        let (batch, _) = run(Mode::Bypass(clip));
        assert_eq!(batch.old_log_probs.unwrap(), old);
        assert_eq!(batch.rollout_weights, None);
    }

    #[test]
    fn metrics_have_names() {
        let (_, correction) = run(Mode::Decoupled);
        let metrics = correction.metrics();
        let value = |name: &str| metrics.iter().find(|(n, _)| n == name).unwrap().1;
        assert_eq!(value("rollout_is_max"), 1.5);
        assert_eq!(value("rollout_rs_token_k1_masked_fraction"), 0.25);
        assert_eq!(value("rollout_rs_seq_masked_fraction"), 1.0 / 3.0);
        assert!((value("kl") + 8f64.ln() / 3.0).abs() < 1e-12);
    }

    #[test]
    fn only_normalised_weights_need_the_whole_batch() {
        let mut correction = RolloutCorrection::default();
        assert_eq!(correction.cut_unit(), CutUnit::Row);
        correction.weights = Some(RolloutWeights {
            level: WeightLevel::Token,
            bound: WeightBound::Truncate(2.0),
            normalize: true,
        });
        assert_eq!(correction.cut_unit(), CutUnit::MiniBatch);
        correction.weights.as_mut().unwrap().bound = WeightBound::Truncate(-2.0);
        assert!(correction.check().is_err());
    }
}
