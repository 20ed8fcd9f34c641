//! Metrics of implicit rewards.

use burn::tensor::Tensor;

use crate::losses::{MetricId, Sides};

/// The policy's implicit rewards of both sides, their margin, the share of pairs whose chosen reward is larger (a tie
/// does not count), and the log-probs of the responses.
pub(super) fn reported(rewards: &Sides, log_probs: &Sides) -> Vec<(MetricId, Tensor<1>)> {
    let mut reported = of_rewards(rewards);
    reported.push((MetricId::LOG_PROBS_CHOSEN, log_probs.chosen.clone()));
    reported.push((MetricId::LOG_PROBS_REJECTED, log_probs.rejected.clone()));
    reported
}

/// The same without log-probs.
pub(super) fn of_rewards(rewards: &Sides) -> Vec<(MetricId, Tensor<1>)> {
    let rewards = rewards.map(Tensor::detach);
    let margins = rewards.margin();
    let right = margins.clone().greater_scalar(0.0);
    vec![
        (
            MetricId::REWARD_ACCURACIES,
            margins.zeros_like().mask_fill(right, 1.0),
        ),
        (MetricId::REWARD_MARGINS, margins),
        (MetricId::REWARDS_CHOSEN, rewards.chosen),
        (MetricId::REWARDS_REJECTED, rewards.rejected),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, read};

    #[test]
    fn a_tie_does_not_count_as_correct() {
        let rewards = Sides {
            chosen: constant(&[1.0, 0.5, -1.0]),
            rejected: constant(&[0.0, 0.5, 1.0]),
        };
        let got: Vec<_> = of_rewards(&rewards)
            .into_iter()
            .map(|(id, values)| (id, read(values)))
            .collect();
        let expected = [
            (MetricId::REWARD_ACCURACIES, vec![1.0, 0.0, 0.0]),
            (MetricId::REWARD_MARGINS, vec![1.0, 0.0, -2.0]),
            (MetricId::REWARDS_CHOSEN, vec![1.0, 0.5, -1.0]),
            (MetricId::REWARDS_REJECTED, vec![0.0, 0.5, 1.0]),
        ];
        assert_eq!(got, expected);
    }
}
