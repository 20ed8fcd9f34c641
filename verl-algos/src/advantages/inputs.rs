//! Inputs of estimators, and their common loops.

use std::collections::HashMap;

use super::Advantages;
use crate::error::{AlgoError, check_finite, check_given, check_len};
use crate::ragged::Ragged;

/// Inputs of estimators. Only the mask of action tokens is always present.
#[derive(Debug, Clone)]
pub struct AdvantageInputs<'a> {
    /// Which response tokens are actions, `[B, T~]`. Observations are skipped, and get advantage 0.
    pub actions: &'a Ragged<bool>,
    /// Prompt of each row, `[B]`: any numbers, in any order.
    pub groups: Option<&'a [u64]>,
    /// Outcome score of each row, `[B]`; `None` if the row was not scored. If absent, the sum of the row's
    /// `token_level_rewards` is used.
    pub scores: Option<&'a [Option<f64>]>,
    /// Reward of each token, `[B, T~]`. Rewards at observations are dropped.
    pub token_level_rewards: Option<&'a Ragged<f64>>,
    /// The critic's value of each token, `[B, T~]`.
    pub values: Option<&'a Ragged<f64>>,
    /// Score of a reference response (such as the greedy one) to each row's prompt, `[B]`.
    pub reward_baselines: Option<&'a [f64]>,
    /// Scores of several reward functions, `[K, B]`; `None` if a function did not score a row.
    pub reward_components: Option<&'a [Vec<Option<f64>>]>,
    /// Log-probs at the start of the update, `[B, T~]`, nats.
    pub old_log_probs: Option<&'a Ragged<f64>>,
    /// Log-probs of the reference policy, `[B, T~]`, nats.
    pub ref_log_probs: Option<&'a Ragged<f64>>,
    /// Σ_v π(v)² over the vocabulary at each token, `[B, T~]`.
    pub sum_pi_squared: Option<&'a Ragged<f64>>,
    /// Importance weights against the sampler, `[B, T~]`.
    pub rollout_weights: Option<&'a Ragged<f64>>,
}

impl<'a> AdvantageInputs<'a> {
    /// Inputs with only the mask; set the fields that the estimator needs.
    pub fn new(actions: &'a Ragged<bool>) -> AdvantageInputs<'a> {
        AdvantageInputs {
            actions,
            groups: None,
            scores: None,
            token_level_rewards: None,
            values: None,
            reward_baselines: None,
            reward_components: None,
            old_log_probs: None,
            ref_log_probs: None,
            sum_pi_squared: None,
            rollout_weights: None,
        }
    }

    /// Number of rows, `B`.
    pub fn num_rows(&self) -> usize {
        self.actions.num_rows()
    }

    /// The outcome score of each row: declared, or the sum of its rewards on action tokens. `None` if not scored.
    ///
    /// # Errors
    /// Neither scores nor rewards; a wrong number of rows; a score that is not finite.
    pub fn outcome_scores(&self, algorithm: &'static str) -> Result<Vec<Option<f64>>, AlgoError> {
        let scores: Vec<Option<f64>> = if let Some(scores) = self.scores {
            check_len("scores", "rows", scores.len(), self.num_rows())?;
            scores.to_vec()
        } else {
            let rewards = self.token_level_rewards.ok_or(AlgoError::Missing {
                algorithm,
                argument: "scores",
            })?;
            outcome_scores(rewards, self.actions)?
                .into_iter()
                .map(Some)
                .collect()
        };
        check_given("scores", &scores)?;
        Ok(scores)
    }

    /// Rewards of the action tokens, packed `[N]`.
    ///
    /// # Errors
    /// No rewards, rows of the wrong length, a reward of an action token that is not finite.
    pub fn rewards(&self, algorithm: &'static str) -> Result<Vec<f64>, AlgoError> {
        self.packed(algorithm, "token_level_rewards", self.token_level_rewards)
    }

    /// A column of the action tokens, packed `[N]`.
    ///
    /// # Errors
    /// No column, rows of the wrong length, a number of an action token that is not finite.
    pub fn packed(
        &self,
        algorithm: &'static str,
        argument: &'static str,
        column: Option<&Ragged<f64>>,
    ) -> Result<Vec<f64>, AlgoError> {
        let column = column.ok_or(AlgoError::Missing {
            algorithm,
            argument,
        })?;
        let values = column.select(argument, self.actions)?;
        check_finite(argument, &values)?;
        Ok(values)
    }

    /// The prompt of each row.
    ///
    /// # Errors
    /// No groups, or a wrong number of rows.
    pub fn group_ids(&self, algorithm: &'static str) -> Result<&'a [u64], AlgoError> {
        let groups = self.groups.ok_or(AlgoError::Missing {
            algorithm,
            argument: "groups",
        })?;
        check_len("groups", "rows", groups.len(), self.num_rows())?;
        Ok(groups)
    }

    /// The scores by each reward function, `[K, B]`.
    ///
    /// # Errors
    /// No components, a component with a wrong number of rows, a score that is not finite.
    pub fn components(&self, algorithm: &'static str) -> Result<&'a [Vec<Option<f64>>], AlgoError> {
        let components = match self.reward_components {
            None | Some([]) => {
                return Err(AlgoError::Missing {
                    algorithm,
                    argument: "reward_components",
                });
            }
            Some(components) => components,
        };
        for component in components {
            check_len(
                "reward_components",
                "rows",
                component.len(),
                self.num_rows(),
            )?;
            check_given("reward_components", component)?;
        }
        Ok(components)
    }

    /// Puts one advantage per row on each of its action tokens.
    ///
    /// # Errors
    /// A wrong number of rows.
    pub fn of_rows(&self, rows: &[f64]) -> Result<Advantages, AlgoError> {
        Ok(Advantages {
            advantages: self.actions.broadcast(rows)?,
            returns: None,
        })
    }
}

/// Outcome scores by group.
#[derive(Debug, Clone)]
pub struct GroupScores {
    /// Score of each row, `[B]`; `None` if it was not scored.
    pub scores: Vec<Option<f64>>,
    groups: Vec<Vec<usize>>,
}

impl GroupScores {
    /// The scores of the inputs, by group.
    ///
    /// # Errors
    /// No scores or rewards, no groups, wrong numbers of rows, scores that are not finite.
    pub fn new(
        inputs: &AdvantageInputs<'_>,
        algorithm: &'static str,
    ) -> Result<GroupScores, AlgoError> {
        let scores = inputs.outcome_scores(algorithm)?;
        let groups = inputs.groups.ok_or(AlgoError::Missing {
            algorithm,
            argument: "groups",
        })?;
        GroupScores::from_parts(scores, groups)
    }

    /// Scores and their groups.
    ///
    /// # Errors
    /// Different numbers of groups and scores; a score that is not finite.
    pub fn from_parts(scores: Vec<Option<f64>>, groups: &[u64]) -> Result<GroupScores, AlgoError> {
        check_len("groups", "rows", groups.len(), scores.len())?;
        check_given("scores", &scores)?;
        Ok(GroupScores {
            scores,
            groups: group_rows(groups),
        })
    }

    /// Advantage of each row; `f(rows, scores)` returns those of the scored rows of a group; rows without a score get
    /// 0.
    ///
    /// A group of several equal scores carries no signal and gets exactly 0, regardless of rounding in its mean.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map_groups(
        &self,
        f: impl Fn(&[usize], &[f64]) -> Result<Vec<f64>, AlgoError>,
    ) -> Result<Vec<f64>, AlgoError> {
        let mut advantages = vec![0.0; self.scores.len()];
        for members in &self.groups {
            let scored = members.iter();
            let scored = scored.filter_map(|&row| Some((row, self.scores[row]?)));
            let (rows, scores): (Vec<usize>, Vec<f64>) = scored.unzip();
            let equal = scores.windows(2).all(|pair| pair[0] == pair[1]);
            if scores.is_empty() || (equal && scores.len() > 1) {
                continue;
            }
            for (row, advantage) in rows.iter().zip(f(&rows, &scores)?) {
                advantages[*row] = advantage;
            }
        }
        Ok(advantages)
    }
}

/// The weight of each of `count` reward components: the declared ones, else 1.
///
/// # Errors
/// Different numbers of weights and components; a weight that is not finite.
pub(super) fn component_weights(
    weights: Option<&[f64]>,
    count: usize,
) -> Result<Vec<f64>, AlgoError> {
    let Some(weights) = weights else {
        return Ok(vec![1.0; count]);
    };
    check_len("weights", "reward components", weights.len(), count)?;
    check_finite("weights", weights)?;
    Ok(weights.to_vec())
}

/// Scans the packed tokens of each row from last to first: `step(token, state of the next token)`; the state after the
/// last token of a row is `end`.
///
/// # Shapes
/// `rows`, result: `[N]`, packed action tokens.
pub fn backward_scan<S: Copy>(rows: &[usize], end: S, step: impl Fn(usize, S) -> S) -> Vec<S> {
    let mut states = vec![end; rows.len()];
    for t in (0..rows.len()).rev() {
        let next = match rows.get(t + 1) {
            Some(row) if *row == rows[t] => states[t + 1],
            _ => end,
        };
        states[t] = step(t, next);
    }
    states
}

/// Sum of a row's rewards over its action tokens; rewards at observations are dropped.
///
/// # Shapes
/// `rewards`, `actions`: `[B, T~]`; result: `[B]`
/// # Errors
/// Rows of different lengths.
/// # Differences
/// verl's outcome estimators also add rewards at masked slots, while its GAE drops them.
/// # Source
/// verl sums token rewards in each outcome estimator.
pub fn outcome_scores(
    rewards: &Ragged<f64>,
    actions: &Ragged<bool>,
) -> Result<Vec<f64>, AlgoError> {
    rewards.check_like("token_level_rewards", actions)?;
    let rows = rewards.rows().zip(actions.rows());
    Ok(rows
        .map(|(row, mask)| {
            row.iter()
                .zip(mask)
                .filter(|(_, m)| **m)
                .map(|(r, _)| r)
                .sum()
        })
        .collect())
}

/// The rows of each group, groups in the order of their first row.
///
/// # Shapes
/// `groups`: `[B]`; result: each row once.
pub fn group_rows(groups: &[u64]) -> Vec<Vec<usize>> {
    let mut index = HashMap::new();
    let mut members: Vec<Vec<usize>> = Vec::new();
    for (row, group) in groups.iter().enumerate() {
        let at = *index.entry(group).or_insert_with(|| {
            members.push(Vec::new());
            members.len() - 1
        });
        members[at].push(row);
    }
    members
}
