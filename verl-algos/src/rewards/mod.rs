//! Rewards before they become advantages: shaping, scaling, and the choice of groups worth training on.
//!
//! | module | what |
//! |---|---|
//! | [`eos`] | where a response ends, penalties for one that does not end, rows that are dropped |
//! | [`group_filter`] | dynamic sampling: groups without a training signal |
//! | [`overlong`] | soft penalty for long responses |
//! | [`pf_ppo`] | rows resampled by their scores |
//! | [`scaling`] | scores over a deviation, within bounds |
//!
//! There is one score per row, `None` if a row was not scored; no function turns a `None` into a score. The KL to the
//! reference is subtracted by [`kl_in_reward`](crate::kl::kl_in_reward).

pub mod eos;
pub mod group_filter;
pub mod overlong;
pub mod pf_ppo;
pub mod scaling;

use crate::error::{AlgoError, check_given, check_len};
use crate::ragged::Ragged;

/// Puts each row's score on its last action token; 0 elsewhere.
///
/// A row that was not scored, or has no action token, is 0 everywhere.
///
/// # Shapes
/// `scores`: `[B]`; `actions`, result: `[B, T~]`
/// # Errors
/// Different numbers of scores and rows; a score that is not finite.
/// # Differences
/// TRL's PPO puts the score after the end of the response if there is padding, so that it lies outside the mask; verl's
/// component scores of an empty row are put on the last slot.
/// # Source
/// As in verl and OpenRLHF.
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
