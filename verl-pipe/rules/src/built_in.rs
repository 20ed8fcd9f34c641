//! The table of built-in rules. The code of each rule is in the file named after its input.

use std::fmt;
use verl_words::keys::{
    ADVANTAGES, FINISH_REASONS, OLD_LOG_PROBS, REF_LOG_PROBS, RESPONSES, REWARDS,
};
use verl_words::stage::MetricRole;

use self::LimitUnit::{Amount, Probability, Share};
use super::log_probs::{low_ess, negative_kl, probability_difference};
use super::metrics::{
    clip_share, entropy_collapse, grad_norm_spike, kl_blow_up, large_update, no_update,
    ratio_not_one, row_errors, weights_unchanged, zero_gradient, zero_learning_rate,
};
use super::rows::{
    advantage_variance, constant_reward, length_limit, looping_responses, non_finite,
    same_responses, zero_advantages,
};
use super::trends::{
    blind_critic, chosen_falls, entropy_explosion, kto_baseline, length_collapse, length_growth,
    reward_collapse, reward_jump,
};
use super::{Hit, MetricsView, Rule, RuleSeverity, StepView};

/// Roles of metrics that are a KL divergence per token.
pub(super) const KLS: &[MetricRole] = &[
    MetricRole::ReferenceKl,
    MetricRole::RolloutKl,
    MetricRole::UpdateKl,
];

/// What a rule needs in order to find anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleInputs {
    /// Any keys.
    Anything,
    /// One of these keys, by the writer's own name.
    Keys(&'static [&'static str]),
    /// A metric with one of these roles.
    Metrics(&'static [MetricRole]),
}

/// Unit of a rule's limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitUnit {
    /// A share of these things, between 0 and 1.
    Share(&'static str),
    /// A probability.
    Probability,
    /// Any other quantity, in this unit.
    Amount(&'static str),
}

impl LimitUnit {
    /// Whether it is a share or a probability, at most 1.
    pub fn is_share(self) -> bool {
        matches!(self, LimitUnit::Share(_) | LimitUnit::Probability)
    }
}

impl fmt::Display for LimitUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitUnit::Share(what) => write!(f, "share of {what}"),
            LimitUnit::Probability => f.write_str("probability"),
            LimitUnit::Amount(unit) => f.write_str(unit),
        }
    }
}

/// When a rule runs, and its function.
#[derive(Clone, Copy)]
enum Check {
    Step(fn(&StepView<'_>, f64) -> Vec<Hit>),
    Metrics(fn(&MetricsView<'_>, f64) -> Vec<Hit>),
}

/// A built-in rule.
#[derive(Clone, Copy)]
pub struct BuiltIn {
    /// Its name in `[trace.rules]`.
    pub name: &'static str,
    /// Default severity.
    pub severity: RuleSeverity,
    /// Default limit at which it fires.
    pub limit: f64,
    /// Unit of the limit.
    pub unit: LimitUnit,
    /// When it fires: its limit, the minimum data, the steps that it covers.
    pub meaning: &'static str,
    /// Likely causes.
    pub causes: &'static str,
    /// What to do about it.
    pub advice: &'static str,
    /// Why the limit has this value.
    pub source: &'static str,
    /// What it needs in order to find anything.
    pub rule_inputs: RuleInputs,
    /// Rules whose findings imply this one's.
    pub follows_from: &'static [&'static str],
    check: Check,
}

impl Rule for BuiltIn {
    fn name(&self) -> &str {
        self.name
    }
    fn severity(&self) -> RuleSeverity {
        self.severity
    }
    fn limit(&self) -> f64 {
        self.limit
    }
    fn advice(&self) -> &str {
        self.advice
    }
    fn causes(&self) -> &str {
        self.causes
    }
    fn follows_from(&self) -> &[&str] {
        self.follows_from
    }
    fn before_update(&mut self, view: &StepView<'_>, limit: f64) -> Vec<Hit> {
        match self.check {
            Check::Step(check) => check(view, limit),
            Check::Metrics(_) => Vec::new(),
        }
    }
    fn after_step(&mut self, view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
        match self.check {
            Check::Metrics(check) => check(view, limit),
            Check::Step(_) => Vec::new(),
        }
    }
}

/// The built-in rules, in the order in which they run: causes before what follows from them.
pub const RULES: &[BuiltIn] = &[
    BuiltIn {
        name: "non_finite",
        severity: RuleSeverity::Stop,
        limit: 0.0,
        unit: Amount("values"),
        meaning: "more input values of an update than the limit are NaN or infinite; observation tokens do not count",
        causes: "a division by a standard deviation of 0, an overflow of bf16 or f16, a reward function that returns NaN",
        advice: "find the stage where the first such value appeared: `pipe debug first-bad`",
        source: "any such value makes the loss NaN",
        rule_inputs: RuleInputs::Anything,
        follows_from: &[],
        check: Check::Step(non_finite),
    },
    BuiltIn {
        name: "row_errors",
        severity: RuleSeverity::Warn,
        limit: 0.0,
        unit: Amount("rows"),
        meaning: "more rows than the limit failed in the step",
        causes: "a reward function that fails, panics or passes its deadline on some rows",
        advice: "read the error of the first row in the log; make the function total, or raise `deadline_s`",
        source: "none is expected",
        rule_inputs: RuleInputs::Anything,
        follows_from: &[],
        check: Check::Metrics(row_errors),
    },
    BuiltIn {
        name: "constant_reward",
        severity: RuleSeverity::Warn,
        limit: 0.95,
        unit: Share("groups"),
        meaning: "all rewards of the step are equal, or those within more than this share of its groups; needs at least 8 rewards or 4 groups",
        causes: "questions that are all too easy or too hard, a reward function that does not find the answer, temperature too low",
        advice: "compare response texts and answers of the samples; filter groups, or use data that is neither too easy nor too hard",
        source: "a group of equal rewards has advantages of 0 (DAPO, arXiv:2503.14476, section 3.2)",
        rule_inputs: RuleInputs::Keys(&[REWARDS.name()]),
        follows_from: &[],
        check: Check::Step(constant_reward),
    },
    BuiltIn {
        name: "zero_advantages",
        severity: RuleSeverity::Warn,
        limit: 1.0,
        unit: Share("advantages"),
        meaning: "at least this share of at least 32 advantages is exactly 0",
        causes: "a filter or a mask that leaves nothing, returns that equal their baseline",
        advice: "look at rewards and baselines of the samples",
        source: "the policy term of the loss has no gradient then",
        rule_inputs: RuleInputs::Keys(&[ADVANTAGES.name()]),
        follows_from: &["constant_reward"],
        check: Check::Step(zero_advantages),
    },
    BuiltIn {
        name: "advantage_variance",
        severity: RuleSeverity::Warn,
        limit: 100.0,
        unit: Amount("variance"),
        meaning: "the variance of the advantages is above the limit",
        causes: "rewards of very different size, a group whose standard deviation is almost 0",
        advice: "look at the rewards of the samples and at how the estimator scales; clip or scale rewards",
        source: "whitened advantages have a variance of 1; the limit leaves room for ten standard deviations",
        rule_inputs: RuleInputs::Keys(&[ADVANTAGES.name()]),
        follows_from: &[],
        check: Check::Step(advantage_variance),
    },
    BuiltIn {
        name: "negative_kl",
        severity: RuleSeverity::Warn,
        limit: 0.05,
        unit: Amount("nats"),
        meaning: "the mean of k1, which estimates a KL divergence, is below minus the limit and below 0 by more than 4 standard errors; needs at least 256 tokens in at least 16 rows",
        causes: "log-probs of other tokens, masks or temperatures on the two sides, responses that the counterpart did not sample, top-k or top-p",
        advice: "compare temperature, mask and token ids of the two log-probs",
        source: "a KL divergence is not negative, but its estimate from few tokens may be (Schulman 2020, joschu.net/blog/kl-approx.html)",
        rule_inputs: RuleInputs::Keys(&[OLD_LOG_PROBS.name(), REF_LOG_PROBS.name()]),
        follows_from: &[],
        check: Check::Step(negative_kl),
    },
    BuiltIn {
        name: "low_ess",
        severity: RuleSeverity::Warn,
        limit: 0.5,
        unit: Share("tokens"),
        meaning: "the effective sample size of the importance weights (trainer against rollout) is below this share of the tokens; needs at least 256 tokens",
        causes: "a rollout with older weights, another precision or other kernels in the rollout",
        advice: "look at `probability_diff` and at the samples' log-probs; use `correct_rollout`",
        source: "below one half the weights waste more tokens than they keep (Kish 1965)",
        rule_inputs: RuleInputs::Keys(&[OLD_LOG_PROBS.name()]),
        follows_from: &[],
        check: Check::Step(low_ess),
    },
    BuiltIn {
        name: "probability_difference",
        severity: RuleSeverity::Warn,
        limit: 0.01,
        unit: Probability,
        meaning: "probabilities of the sampled tokens differ between rollout and trainer by more than this on average, over at least 32 tokens",
        causes: "another temperature or older weights in the rollout, another precision, a mask that is shifted",
        advice: "compare temperature and weights version of rollout and trainer, then the samples token by token",
        source: "two correct forward passes in bf16 stay below 0.01 (verl, docs/advance/rollout_corr)",
        rule_inputs: RuleInputs::Keys(&[OLD_LOG_PROBS.name()]),
        follows_from: &[],
        check: Check::Step(probability_difference),
    },
    BuiltIn {
        name: "length_limit",
        severity: RuleSeverity::Warn,
        limit: 0.5,
        unit: Share("responses"),
        meaning: "more than this share of at least 8 responses reached the token limit",
        causes: "a limit that is too short for the task, end-of-sequence ids that the model does not emit, looping responses",
        advice: "look at the ends of the response texts; check the end-of-sequence ids, or shape overlong rewards",
        source: "half of the responses have no end that could be rewarded",
        rule_inputs: RuleInputs::Keys(&[FINISH_REASONS.name()]),
        follows_from: &[],
        check: Check::Step(length_limit),
    },
    BuiltIn {
        name: "same_responses",
        severity: RuleSeverity::Warn,
        limit: 0.9,
        unit: Share("responses"),
        meaning: "more than this share of at least 16 responses to at least 4 prompts have the same tokens",
        causes: "a policy that collapsed to one answer, a reward that any answer earns, prompts that do not reach the model",
        advice: "read the responses; go back to an earlier model, lower the learning rate, add a KL or entropy term",
        source: "different questions have different answers",
        rule_inputs: RuleInputs::Keys(&[RESPONSES.name()]),
        follows_from: &[],
        check: Check::Step(same_responses),
    },
    BuiltIn {
        name: "looping_responses",
        severity: RuleSeverity::Warn,
        limit: 0.25,
        unit: Share("responses"),
        meaning: "more than this share of at least 8 responses end in a loop: their last 32 tokens repeat with a period of at most 8",
        causes: "a temperature that is too low, a collapsed policy, a length bonus",
        advice: "read the ends of the response texts; raise the temperature, or penalise truncated responses",
        source: "degenerate repetition (Holtzman et al., arXiv:1904.09751)",
        rule_inputs: RuleInputs::Keys(&[RESPONSES.name()]),
        follows_from: &[],
        check: Check::Step(looping_responses),
    },
    BuiltIn {
        name: "no_update",
        severity: RuleSeverity::Warn,
        limit: 0.0,
        unit: Amount("optimiser steps"),
        meaning: "an update took at most this many optimiser steps in the step, because no token was left to train on",
        causes: "`mask_truncated` where all responses reach the token limit, a rollout correction that rejects every row, targets that are all masked",
        advice: "check why responses end, and what excludes them",
        source: "a step without an update teaches nothing",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::OptimizerSteps]),
        follows_from: &[],
        check: Check::Metrics(no_update),
    },
    BuiltIn {
        name: "zero_learning_rate",
        severity: RuleSeverity::Warn,
        limit: 2.0,
        unit: Amount("steps"),
        meaning: "the learning rate was 0 in this many steps in a row",
        causes: "a schedule whose `total_steps` is smaller than the run's optimiser steps",
        advice: "set `total_steps` to the optimiser steps of the run (`pipe plan`), or omit it",
        source: "the last step of a schedule may have a rate of 0; two in a row are a mistake",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::LearningRate]),
        follows_from: &[],
        check: Check::Metrics(zero_learning_rate),
    },
    BuiltIn {
        name: "zero_gradient",
        severity: RuleSeverity::Warn,
        limit: 3.0,
        unit: Amount("steps"),
        meaning: "the gradient norm was exactly 0 in this many steps in a row",
        causes: "advantages of 0, a loss that does not reach the weights, ratios that are all clipped",
        advice: "look at advantages and clip share; check that the update trains the model that the stages use",
        source: "rounding alone makes it positive if anything is learnt",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::GradientNorm]),
        follows_from: &["constant_reward", "zero_advantages", "no_update"],
        check: Check::Metrics(zero_gradient),
    },
    BuiltIn {
        name: "grad_norm_spike",
        severity: RuleSeverity::Warn,
        limit: 5.0,
        unit: Amount("times the median"),
        meaning: "a gradient norm is above 0.1 and above this multiple of its median over the previous 8 to 64 steps, of which at most one in 16 had at least half this norm",
        causes: "a batch of unusual responses or advantages, a learning rate that is too high, the first sign of a diverging run",
        advice: "look at advantages and log-probs of the step, longest and shortest responses first; clip gradients (`max_grad_norm`), lower the learning rate",
        source: "spikes precede a loss of quality (AdaGC, arXiv:2502.11034; ZClip, arXiv:2504.02507); healthy runs vary by a factor of two to three; below 0.1 a spike does not matter with the usual clip of 1",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::GradientNorm]),
        follows_from: &[],
        check: Check::Metrics(grad_norm_spike),
    },
    BuiltIn {
        name: "weights_unchanged",
        severity: RuleSeverity::Warn,
        limit: 1.0,
        unit: Amount("optimiser steps"),
        meaning: "a model's weights have the same hash after at least this many optimiser steps, although gradients were not zero",
        causes: "a learning rate that is too small for bf16, an optimiser that works on a copy",
        advice: "check the learning rate against the weights' type, and that the update trains the model that the stages use",
        source: "an optimiser step changes weights",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::GradientNorm]),
        follows_from: &["zero_learning_rate"],
        check: Check::Metrics(weights_unchanged),
    },
    BuiltIn {
        name: "ratio_not_one",
        severity: RuleSeverity::Warn,
        limit: 1e-4,
        unit: Amount("nats"),
        meaning: "old and current log-probs differ by more than this on the first mini-batch of a step, where both use the same weights; 100 times the limit on devices other than a CPU",
        causes: "another temperature, mask or dropout in the update than in `old_log_probs`",
        advice: "compare temperature, mask and token ids of `old_log_probs` and the update",
        source: "rounding of f32; the same kernels give the same bits",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::SameWeightsDifference]),
        follows_from: &[],
        check: Check::Metrics(ratio_not_one),
    },
    BuiltIn {
        name: "kl_blow_up",
        severity: RuleSeverity::Warn,
        limit: 1.0,
        unit: Amount("nats"),
        meaning: "a KL divergence per token is above the limit, or is NaN",
        causes: "a policy that moved too far from the reference: a learning rate that is too high, a KL coefficient that is too small, reward hacking",
        advice: "look at the samples whose log-probs moved most; lower the learning rate or raise the KL coefficient",
        source: "a response of 100 tokens is then 100 nats away, where rewards are overoptimised (Gao et al., arXiv:2210.10760)",
        rule_inputs: RuleInputs::Metrics(KLS),
        follows_from: &[],
        check: Check::Metrics(kl_blow_up),
    },
    BuiltIn {
        name: "large_update",
        severity: RuleSeverity::Warn,
        limit: 0.2,
        unit: Amount("nats"),
        meaning: "the mean of old minus current log-probs over the updates of a step is farther from 0 than the limit",
        causes: "a learning rate that is too high, too many mini-batches or epochs per step, a few huge advantages",
        advice: "lower the learning rate, use fewer optimiser steps per step, clip gradients",
        source: "Spinning Up ends the updates of a step at 0.015 nats",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::UpdateKl]),
        follows_from: &["kl_blow_up"],
        check: Check::Metrics(large_update),
    },
    BuiltIn {
        name: "clip_share",
        severity: RuleSeverity::Warn,
        limit: 0.4,
        unit: Share("tokens"),
        meaning: "the median share of clipped tokens over 5 steps is above the limit",
        causes: "a learning rate that is too high, too many optimiser steps per step, a rollout with older weights",
        advice: "lower the learning rate, use fewer mini-batches or epochs per step",
        source: "healthy runs clip up to 0.2, GSPO clips 0.15 by design (arXiv:2507.18071)",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::ClippedShare]),
        follows_from: &[],
        check: Check::Metrics(clip_share),
    },
    BuiltIn {
        name: "entropy_collapse",
        severity: RuleSeverity::Warn,
        limit: 0.01,
        unit: Amount("nats"),
        meaning: "the median entropy of the policy over 5 steps is below the limit, and below a tenth of its upper quartile in the first 16 steps",
        causes: "a policy that no longer explores: a learning rate that is too high, no entropy or KL term, an upper clip that is too small",
        advice: "check how similar the responses of a group are; lower the learning rate, raise `clip_high`, add an entropy or KL term",
        source: "without entropy there is no further gain (Cui et al., arXiv:2505.22617)",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::Entropy]),
        follows_from: &[],
        check: Check::Metrics(entropy_collapse),
    },
    BuiltIn {
        name: "entropy_explosion",
        severity: RuleSeverity::Warn,
        limit: 3.0,
        unit: Amount("times the first steps"),
        meaning: "the median entropy of the policy over 5 steps is above this multiple of its median in the first 16 steps, and more than 1 nat above it",
        causes: "an entropy bonus that is too large, a learning rate that is too high, a policy that breaks down",
        advice: "read the responses; lower the entropy coefficient or the learning rate",
        source: "text with 1 nat per token more than at the start is noise",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::Entropy]),
        follows_from: &[],
        check: Check::Metrics(entropy_explosion),
    },
    BuiltIn {
        name: "length_collapse",
        severity: RuleSeverity::Warn,
        limit: 0.25,
        unit: Amount("times the first steps"),
        meaning: "in 2 steps in a row the mean response length is below this multiple of its upper quartile in the first 16 steps, which is at least 4 tokens; also below 2 tokens if most of those responses were cut off",
        causes: "responses that end at once: a reward for short responses, a length penalty, a collapsed policy",
        advice: "read the responses with their rewards; go back to an earlier model, check reward and length penalty",
        source: "a fall to a quarter of the length is more than learnt brevity",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::ResponseLength]),
        follows_from: &[],
        check: Check::Metrics(length_collapse),
    },
    BuiltIn {
        name: "length_growth",
        severity: RuleSeverity::Warn,
        limit: 0.25,
        unit: Share("responses"),
        meaning: "more than this share of the responses reaches the token limit, at least 0.2 more than in the first 16 steps, while their mean length has grown by half",
        causes: "responses that grow until they are cut off: a loss that favours long ones, looping responses",
        advice: "read the longest responses; shape overlong rewards, or raise the token limit",
        source: "overlong responses are noise in the reward (DAPO, arXiv:2503.14476, section 3.4)",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::ResponseLength]),
        follows_from: &["length_limit"],
        check: Check::Metrics(length_growth),
    },
    BuiltIn {
        name: "reward_collapse",
        severity: RuleSeverity::Warn,
        limit: 6.0,
        unit: Amount("deviations"),
        meaning: "the median reward of 5 steps is lower than that of the previous 16 to 60 steps by more than this many of their deviations (1.48 times the median absolute deviation; at least 2 % of their median or of 0.5)",
        causes: "a policy that breaks down, a learning rate that is too high, harder data, a reward function that began to fail",
        advice: "compare response texts of a step before and after; go back to an earlier model, lower the learning rate",
        source: "six deviations of a median are not chance",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::Reward]),
        follows_from: &[],
        check: Check::Metrics(reward_collapse),
    },
    BuiltIn {
        name: "reward_jump",
        severity: RuleSeverity::Warn,
        limit: 8.0,
        unit: Amount("deviations"),
        meaning: "the median reward of 5 steps is higher than that of the previous 16 to 60 steps by more than this many of their deviations (as for `reward_collapse`)",
        causes: "a policy that exploits the reward, easier data, a format learnt at once",
        advice: "read the responses with the highest rewards: correct answers, or something that only looks like them?",
        source: "reward hacking shows as a jump (Pan et al., arXiv:2201.03544)",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::Reward]),
        follows_from: &[],
        check: Check::Metrics(reward_jump),
    },
    BuiltIn {
        name: "blind_critic",
        severity: RuleSeverity::Warn,
        limit: 0.0,
        unit: Amount("explained variance"),
        meaning: "the median explained variance of the values over 16 steps is below the limit, 48 steps into the run or later, and not 0.1 above that of the previous 16 steps",
        causes: "a critic that learns too slowly, values and returns of different rewards",
        advice: "raise the critic's learning rate, or train it first (`warmup_steps` of the update); look at values and returns of the samples",
        source: "below 0 a constant predicts better (Huang et al. 2022, the 37 implementation details)",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::ExplainedVariance]),
        follows_from: &[],
        check: Check::Metrics(blind_critic),
    },
    BuiltIn {
        name: "chosen_falls",
        severity: RuleSeverity::Warn,
        limit: 0.2,
        unit: Amount("times the first steps"),
        meaning: "the median log-prob of chosen and of rejected answers over 8 steps has fallen by more than this multiple of its size in the first 16 steps, and by 4 deviations",
        causes: "a loss that pushes both answers down, which moves probability to other answers; pairs that are almost identical",
        advice: "compare what the model writes with the chosen answers; lower the learning rate, add an SFT term, or filter similar pairs",
        source: "likelihood displacement (Razin et al., arXiv:2410.08847; Pal et al., arXiv:2402.13228)",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::ChosenLogProb]),
        follows_from: &[],
        check: Check::Metrics(chosen_falls),
    },
    BuiltIn {
        name: "kto_baseline",
        severity: RuleSeverity::Warn,
        limit: 50.0,
        unit: Amount("nats"),
        meaning: "z₀ of KTO is above the limit",
        causes: "a policy that moved too far from the reference",
        advice: "lower the learning rate or raise β",
        source: "at β = 0.1 and 50 nats σ is 0.99, so no gradient is left",
        rule_inputs: RuleInputs::Metrics(&[MetricRole::RewardBaseline]),
        follows_from: &[],
        check: Check::Metrics(kto_baseline),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_texts_are_complete() {
        let mut names = std::collections::BTreeSet::new();
        for rule in RULES {
            // A cause runs before the rules that follow from it.
            assert!(
                rule.follows_from.iter().all(|cause| names.contains(cause)),
                "{}",
                rule.name
            );
            assert!(names.insert(rule.name));
            for text in [rule.meaning, rule.causes, rule.advice, rule.source] {
                assert!(!text.is_empty() && !text.ends_with('.'), "{text}");
            }
            assert!(rule.limit.is_finite() && rule.limit >= 0.0);
            assert!(!rule.unit.is_share() || rule.limit <= 1.0);
        }
    }
}
