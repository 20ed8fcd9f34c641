//! Identities of the numbers that losses report.

use std::fmt;

/// Identity of a number that a loss reports: the value of a term of an [`Objective`](super::Objective), or a measure of
/// its tokens or rows.
///
/// Whoever needs the number asks for it by a constant of this type, so the compiler knows that it exists; the name under
/// which it is reported follows from the identity. A loss whose numbers nobody else asks for, such as a custom one,
/// makes its own:
///
/// ```
/// use verl_algos::losses::MetricId;
///
/// const PULL: MetricId = MetricId::new("spo_pull");
/// assert_eq!(PULL.name(), "spo_pull");
/// assert_ne!(PULL, MetricId::PPO_KL);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MetricId(&'static str);

impl MetricId {
    /// The identity of what is reported as `name`.
    pub const fn new(name: &'static str) -> MetricId {
        MetricId(name)
    }

    /// The name under which it is reported.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for MetricId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Constants of [`MetricId`] with the names under which they are reported.
macro_rules! metric_ids {
    ($(#[doc = $meaning:literal] $ident:ident = $name:literal;)+) => {
        impl MetricId {
            $(#[doc = $meaning] pub const $ident: MetricId = MetricId::new($name);)+
        }

        #[cfg(test)]
        const SHARED: &[MetricId] = &[$(MetricId::$ident),+];
    };
}

metric_ids! {
    /// Term: the KL to the reference, aggregated.
    KL_LOSS = "kl_loss";
    /// Term: the entropy, aggregated.
    ENTROPY_LOSS = "entropy_loss";
    /// Term: the mean entropy of the tokens with the largest entropies.
    TOP_ENTROPY_LOSS = "top_entropy_loss";
    /// Term: the negative log-likelihood of the tokens, aggregated.
    SFT_LOSS = "sft_loss";
    /// Term: the negative log-likelihood of chosen responses.
    CHOSEN_NLL = "chosen_nll";
    /// Mean over tokens of the estimated KL to the reference.
    REF_KL = "ref_kl";
    /// Mean over tokens of the old minus the current log-prob.
    PPO_KL = "ppo_kl";
    /// Mean entropy of the policy over tokens.
    ENTROPY = "entropy";
    /// Share of tokens whose ratio is clipped.
    PG_CLIPFRAC = "pg_clipfrac";
    /// Share of tokens where the dual clip, or the bound on the other side, applies.
    PG_CLIPFRAC_LOWER = "pg_clipfrac_lower";
    /// Share of tokens with a clipped value.
    VF_CLIPFRAC = "vf_clipfrac";
    /// Share of the tokens or rows that the lower bound clips.
    CLIP_RATIO_LOW_MEAN = "clip_ratio_low_mean";
    /// Share of the tokens or rows that the upper bound clips.
    CLIP_RATIO_HIGH_MEAN = "clip_ratio_high_mean";
    /// Share of the tokens or rows that either bound clips.
    CLIP_RATIO_REGION_MEAN = "clip_ratio_region_mean";
    /// The smallest of the rows' shares of tokens that the lower bound clips.
    CLIP_RATIO_LOW_MIN = "clip_ratio_low_min";
    /// The largest of the rows' shares of tokens that the upper bound clips.
    CLIP_RATIO_HIGH_MAX = "clip_ratio_high_max";
    /// Mean implicit reward of chosen or desirable responses.
    REWARDS_CHOSEN = "rewards_chosen";
    /// Mean implicit reward of rejected or undesirable responses.
    REWARDS_REJECTED = "rewards_rejected";
    /// Mean over pairs of the chosen minus the rejected reward.
    REWARD_MARGINS = "reward_margins";
    /// Share of pairs whose chosen response has the larger reward.
    REWARD_ACCURACIES = "reward_accuracies";
    /// Mean log-prob of chosen or desirable responses.
    LOG_PROBS_CHOSEN = "log_probs_chosen";
    /// Mean log-prob of rejected or undesirable responses.
    LOG_PROBS_REJECTED = "log_probs_rejected";
    /// z₀ of KTO.
    KTO_KL = "kto_kl";
    /// Mean log odds ratio of the chosen to the rejected response.
    LOG_ODDS = "log_odds";
    /// Mean divergence of the student from its teacher over tokens.
    DISTILLATION_DIVERGENCE = "distillation_divergence";
    /// Mean mass that the teacher gives to its listed tokens.
    TEACHER_MASS = "teacher_mass";
    /// Mean mass that the student gives to the teacher's listed tokens.
    STUDENT_MASS = "student_mass";
    /// Term of implicit Q-learning: the squared error of Q.
    Q_LOSS = "q_loss";
    /// Term of implicit Q-learning: the expectile loss of V.
    V_LOSS = "v_loss";
    /// Term of implicit Q-learning: the conservative loss.
    CQL_LOSS = "cql_loss";
    /// Term of implicit Q-learning: the weighted imitation of actions.
    AWAC_LOSS = "awac_loss";
    /// Mean V of implicit Q-learning over actions.
    VALUE = "value";
    /// Mean of the target heads' Q over actions.
    TARGET_Q = "target_q";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let names = std::collections::BTreeSet::from_iter(SHARED.iter().map(|id| id.name()));
        assert_eq!(names.len(), SHARED.len());
    }
}
