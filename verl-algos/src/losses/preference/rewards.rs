//! Metrics of implicit rewards.

use burn::tensor::Tensor;

use crate::losses::Sides;

/// The policy's implicit rewards of both sides, their margin, the share of pairs whose chosen reward is larger (a tie
/// does not count), and the log-probs of the responses.
pub(super) fn reported(rewards: &Sides, log_probs: &Sides) -> Vec<(&'static str, Tensor<1>)> {
    let mut reported = of_rewards(rewards);
    reported.push(("log_probs_chosen", log_probs.chosen.clone()));
    reported.push(("log_probs_rejected", log_probs.rejected.clone()));
    reported
}

/// The same without log-probs.
pub(super) fn of_rewards(rewards: &Sides) -> Vec<(&'static str, Tensor<1>)> {
    let rewards = rewards.map(Tensor::detach);
    let margins = rewards.margin();
    let right = margins.clone().greater_scalar(0.0);
    vec![
        (
            "reward_accuracies",
            margins.zeros_like().mask_fill(right, 1.0),
        ),
        ("reward_margins", margins),
        ("rewards_chosen", rewards.chosen),
        ("rewards_rejected", rewards.rejected),
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
            .map(|(name, values)| (name, read(values)))
            .collect();
        let expected = [
            ("reward_accuracies", vec![1.0, 0.0, 0.0]),
            ("reward_margins", vec![1.0, 0.0, -2.0]),
            ("rewards_chosen", vec![1.0, 0.5, -1.0]),
            ("rewards_rejected", vec![0.0, 0.5, 1.0]),
        ];
        assert_eq!(got, expected);
    }
}
