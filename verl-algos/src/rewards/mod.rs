//! Rewards before they become advantages: shaping, scaling, and which groups are worth training on.
//!
//! | module | what |
//! |---|---|
//! | [`eos`] | where a response ends, penalties for one that does not end, rows that are left out |
//! | [`group_filter`] | dynamic sampling: groups that teach nothing |
//! | [`overlong`] | soft penalty for long responses |
//! | [`pf_ppo`] | rows drawn anew by their scores |
//! | [`scaling`] | scores over a deviation, within bounds |
//!
//! Scores are one number a row, `None` where a row was not scored; no function makes a score of a `None`. The KL to the
//! reference is taken off by [`kl_in_reward`](crate::kl::kl_in_reward).

pub mod eos;
pub mod group_filter;
pub mod overlong;
pub mod pf_ppo;
pub mod scaling;

use crate::error::{AlgoError, check_given, check_len};
use crate::ragged::Ragged;

/// Puts each row's score on its last action token; 0 elsewhere.
///
/// A row that was not scored, or has no action token to hold the score, stays 0.
///
/// # Shapes
/// `scores`: `[B]`; `actions`, result: `[B, T~]`
/// # Errors
/// Another number of scores than rows; a score that is not finite.
/// # Differences
/// TRL's PPO puts the score behind the end of the response where there is padding, so that it lies outside the mask;
/// verl's component scores of an empty row land on the last slot.
/// # Source
/// Where verl and OpenRLHF put it.
pub fn scores_on_last_action(
    scores: &[Option<f64>],
    actions: &Ragged<bool>,
) -> Result<Ragged<f64>, AlgoError> {
    check_len("scores", "rows", scores.len(), actions.num_rows())?;
    check_given("scores", scores)?;
    let last: Vec<Option<usize>> = actions
        .rows()
        .map(|row| row.iter().rposition(|action| *action))
        .collect();
    Ok(actions.map(|b, t, _| match scores[b] {
        Some(score) if last[b] == Some(t) => score,
        _ => 0.0,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_lies_on_the_last_action() {
        let actions =
            Ragged::<bool>::from_rows([vec![true, true, false], vec![false], vec![], vec![true]]);
        let scores = [Some(2.0), Some(3.0), Some(4.0), None];
        let rewards = scores_on_last_action(&scores, &actions).unwrap();
        assert_eq!(rewards.values(), [0.0, 2.0, 0.0, 0.0, 0.0]);
        assert!(scores_on_last_action(&scores[1..], &actions).is_err());
        let scores = [Some(f64::NAN), None, None, None];
        assert!(scores_on_last_action(&scores, &actions).is_err());
    }
}
