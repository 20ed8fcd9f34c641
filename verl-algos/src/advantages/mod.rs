//! Advantages: how much better a response, or a token of it, was than expected.
//!
//! Plain scans over ragged rows in f64. An estimator takes [`AdvantageInputs`], uses what it needs, refuses when that
//! is missing, and returns [`Advantages`]. A new one is a file here and a line in [`ESTIMATORS`].

use std::collections::HashMap;

use crate::cut::CutUnit;
use crate::error::{AlgoError, check_finite, check_len};
use crate::ragged::Ragged;

mod grpo;

pub use grpo::{Grpo, grpo_advantages};

/// What estimators read. Only the mask of action tokens is always there.
#[derive(Debug, Clone)]
pub struct AdvantageInputs<'a> {
    /// Which response tokens are actions, `[B, T~]`. Observations are stepped over, and get advantage 0.
    pub actions: &'a Ragged<bool>,
    /// Prompt of each row, `[B]`: any numbers, in any order.
    pub groups: Option<&'a [u64]>,
    /// Outcome score of each row, `[B]`; `None` where the row was not scored. Otherwise the sum of the row's
    /// `token_level_rewards`.
    pub scores: Option<&'a [Option<f64>]>,
    /// Reward of each token, `[B, T~]`. What lies on observations is dropped.
    pub token_level_rewards: Option<&'a Ragged<f64>>,
    /// The critic's value of each token, `[B, T~]`.
    pub values: Option<&'a Ragged<f64>>,
    /// Score of a reference response (such as the greedy one) to each row's prompt, `[B]`.
    pub reward_baselines: Option<&'a [f64]>,
}

impl<'a> AdvantageInputs<'a> {
    /// Inputs with nothing but the mask; set the fields that the estimator needs.
    pub fn new(actions: &'a Ragged<bool>) -> AdvantageInputs<'a> {
        AdvantageInputs {
            actions,
            groups: None,
            scores: None,
            token_level_rewards: None,
            values: None,
            reward_baselines: None,
        }
    }

    /// Number of rows, `B`.
    pub fn num_rows(&self) -> usize {
        self.actions.num_rows()
    }

    /// The outcome score of each row: declared, or the sum of its rewards on action tokens. `None` where not scored.
    ///
    /// # Errors
    /// Neither scores nor rewards; another number of rows; a score that is not finite.
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
        let given: Vec<f64> = scores.iter().map(|s| s.unwrap_or(0.0)).collect();
        check_finite("scores", &given)?;
        Ok(scores)
    }

    /// The groups, as lists of rows in the order in which they first appear.
    ///
    /// # Errors
    /// No groups, or another number of rows.
    pub fn group_rows(&self, algorithm: &'static str) -> Result<Vec<Vec<usize>>, AlgoError> {
        let groups = self.groups.ok_or(AlgoError::Missing {
            algorithm,
            argument: "groups",
        })?;
        check_len("groups", "rows", groups.len(), self.num_rows())?;
        Ok(group_rows(groups))
    }
}

/// What an estimator returns; 0 at observations.
#[derive(Debug, Clone, PartialEq)]
pub struct Advantages {
    /// `[B, T~]`
    pub advantages: Ragged<f64>,
    /// `[B, T~]`: what a critic should learn, where the estimator defines it.
    pub returns: Option<Ragged<f64>>,
}

/// An estimator with its settings.
pub trait AdvantageEstimator: std::fmt::Debug + Send + Sync {
    /// Its name in pipelines.
    fn name(&self) -> &'static str;

    /// What it must see whole.
    fn cut_unit(&self) -> CutUnit;

    /// Advantages of a batch that holds whole cut units.
    ///
    /// # Errors
    /// Inputs that are missing, of the wrong shape or not finite; settings out of range.
    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError>;
}

/// All estimators with their default settings, by name.
pub const ESTIMATORS: &[(&str, fn() -> Box<dyn AdvantageEstimator>)] = &[
    ("grpo", || Box::new(Grpo::default())),
    ("dr_grpo", || Box::new(Grpo::without_std())),
];

/// Sum of a row's rewards over its action tokens: what lies on observations is dropped.
///
/// # Shapes
/// `rewards`, `actions`: `[B, T~]`; result: `[B]`
/// # Errors
/// Rows of different lengths.
/// # Differences
/// verl's outcome estimators add what lies on masked slots too, while its GAE drops it.
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

/// Whether all are the same number: then there is no signal, whatever the rounding of their mean.
pub(crate) fn all_equal(scores: &[f64]) -> bool {
    scores.windows(2).all(|pair| pair[0] == pair[1])
}
