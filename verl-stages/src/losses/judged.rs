//! Shared by preference losses: their metrics, and the rows that they need.

use verl_algos::losses::{MetricId, Objective};
use verl_words::stage::{BuildContext, ConfigError, Metric, Shown};

use super::Loss;
use crate::settings::metrics;

metrics! {
    PREFERENCE_LOSS: "preference/loss", "", "loss of a pair or of a labelled answer, before additional terms";
    CHOSEN_NLL: "preference/chosen_nll", "nats", "negative log-likelihood of the chosen answers, a mean over tokens, before its coefficient";
    REWARDS_CHOSEN: "preference/rewards_chosen", "nats", "mean implicit reward of chosen or desirable answers: β times their log-ratio to the reference, or without a reference β times their log-prob";
    REWARDS_REJECTED: "preference/rewards_rejected", "nats", "mean implicit reward of rejected or undesirable answers";
    REWARD_MARGINS: "preference/reward_margins", "nats", "mean over pairs of the chosen minus the rejected answer's implicit reward";
    REWARD_ACCURACIES: "preference/reward_accuracies", "share", "share of pairs whose chosen answer has the larger implicit reward; a tie does not count";
    LOG_PROBS_CHOSEN: "preference/log_probs_chosen", "nats", "mean log-prob of chosen or desirable answers, as the loss uses it: a sum or a mean over tokens", ChosenLogProb;
    LOG_PROBS_REJECTED: "preference/log_probs_rejected", "nats", "mean log-prob of rejected or undesirable answers, as the loss uses it", RejectedLogProb;
    KL: "preference/kl", "nats", "z₀ of KTO: the estimated KL of the policy to the reference, on answers to other prompts", RewardBaseline;
    LOG_ODDS: "preference/log_odds", "nats", "mean log odds ratio of the chosen to the rejected answer";
}

/// What preference losses report, and the metrics as which it is recorded.
const REPORTED: [(MetricId, Metric); 9] = [
    (MetricId::CHOSEN_NLL, CHOSEN_NLL),
    (MetricId::REWARDS_CHOSEN, REWARDS_CHOSEN),
    (MetricId::REWARDS_REJECTED, REWARDS_REJECTED),
    (MetricId::REWARD_MARGINS, REWARD_MARGINS),
    (MetricId::REWARD_ACCURACIES, REWARD_ACCURACIES),
    (MetricId::LOG_PROBS_CHOSEN, LOG_PROBS_CHOSEN),
    (MetricId::LOG_PROBS_REJECTED, LOG_PROBS_REJECTED),
    (MetricId::KTO_KL, KL),
    (MetricId::LOG_ODDS, LOG_ODDS),
];

/// The metrics that the console shows, if the loss reports them.
pub(super) const SHOWN: [Shown; 5] = [
    Shown::of(&REWARD_ACCURACIES, "acc", Shown::OUTCOME).narrow(),
    Shown::of(&REWARD_MARGINS, "margin", Shown::OUTCOME + 1),
    Shown::of(&REWARDS_CHOSEN, "chosen", Shown::RESPONSES),
    Shown::of(&REWARDS_REJECTED, "rejected", Shown::RESPONSES + 1),
    Shown::of(&KL, "z₀", Shown::DISTANCE),
];

/// A preference loss whose own term is `own`; the terms of a mixture are reported by their names.
pub(super) fn judged(objective: Objective, own: Option<MetricId>) -> Loss {
    let own = own.map(|id| (id, PREFERENCE_LOSS));
    Loss {
        metrics: own.into_iter().chain(REPORTED).collect(),
        ..Loss::new(objective)
    }
}

/// A preference loss on pairs: rows 2i and 2i + 1 are the chosen and the rejected answer.
pub(super) fn of_pairs(objective: Objective, own: Option<MetricId>) -> Loss {
    Loss {
        of_pairs: true,
        ..judged(objective, own)
    }
}

/// Refuses a batch for the pair loss `kind` unless it has two rows per prompt: otherwise the rows of a mini-batch are
/// not pairs.
pub(super) fn pair_fault(kind: &str, context: &BuildContext) -> Option<ConfigError> {
    let samples = context.batch.samples;
    (samples != 2).then(|| {
        ConfigError::new(
            "kind",
            format!("is `{kind}`, a loss on pairs, but batch.samples is {samples}: the rows of a mini-batch would not be pairs"),
            "set `samples = 2` in [batch], and add a stage `pairs` after `preferences`",
        )
    })
}
