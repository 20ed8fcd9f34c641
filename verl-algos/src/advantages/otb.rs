//! Optimal token baseline: a baseline for each point in time, weighted by the accumulated variance of a response.

use std::ops::Range;

use super::{
    AdvantageEstimator, AdvantageInputs, Advantages, EstimatorInput, backward_scan, group_rows,
};
use crate::cut::CutUnit;
use crate::error::AlgoError;
use crate::ragged::Ragged;

/// Keeps the baseline finite if no response has any variance.
const EPSILON: f64 = 1e-8;

/// How tokens of a group's responses are matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenTime {
    /// The slot within the response, observations included.
    Slots,
    /// The number of action tokens before it.
    Actions,
}

/// A_t = G_t − B_t, B_t = Σ_i G W / (Σ_i W + 1e-8) over the rows i of the group that have an action token at time t.
///
/// G_t = Σ_{u ≥ t} r_u over action tokens. W_t = Σ_{u ≤ t} w_u with w = (1 − 2π + Σ_v π(v)²) ρ²: the squared length of
/// the token's score vector, ρ the rollout weight (1 if there is none). A lone row has baseline 0. Beyond the second
/// longest row the longest would be its own baseline; with `handle_zero_tail` its baseline there is 0.
///
/// # Shapes
/// Rewards, `old_log_probs` (ln π), `sum_pi_squared` (Σ_v π(v)²), rollout weights, advantages and returns: `[B, T~]`;
/// groups `[B]`.
/// # Errors
/// No `old_log_probs` or `sum_pi_squared`; numbers of action tokens that are not finite.
/// # Differences
/// Rows without action tokens do not count as members of their group; verl's flat form counts them, its multi-turn
/// form does not. With [`TokenTime::Slots`] the zero tail begins at the *slot* whose number is the second longest row's
/// count of action tokens, as in verl, so rows with observations should use [`TokenTime::Actions`].
/// # Source
/// verl `compute_optimal_token_baseline_advantage` and its multi-turn form; Greensmith et al. 2004 for the optimal
/// baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptimalTokenBaseline {
    /// How time is counted.
    pub time: TokenTime,
    /// Whether the longest row has baseline 0 beyond the others.
    pub handle_zero_tail: bool,
}

impl OptimalTokenBaseline {
    /// Time in slots: for single-turn responses.
    pub fn flat() -> OptimalTokenBaseline {
        OptimalTokenBaseline {
            time: TokenTime::Slots,
            handle_zero_tail: true,
        }
    }

    /// Time in action tokens: for responses with observations.
    pub fn multi_turn() -> OptimalTokenBaseline {
        OptimalTokenBaseline {
            time: TokenTime::Actions,
            handle_zero_tail: true,
        }
    }
}

impl AdvantageEstimator for OptimalTokenBaseline {
    fn name(&self) -> &'static str {
        match self.time {
            TokenTime::Slots => "otb",
            TokenTime::Actions => "tir_otb",
        }
    }

    fn cut_unit(&self) -> CutUnit {
        CutUnit::Group
    }

    fn inputs(&self) -> &'static [EstimatorInput] {
        &[
            EstimatorInput::Groups,
            EstimatorInput::TokenLevelRewards,
            EstimatorInput::OldLogProbs,
            EstimatorInput::SumPiSquared,
        ]
    }

    fn estimate(&self, inputs: &AdvantageInputs<'_>) -> Result<Advantages, AlgoError> {
        let rewards = inputs.rewards(self.name())?;
        let rows = inputs.actions.packed_rows();
        let returns = backward_scan(&rows, 0.0, |t, next| rewards[t] + next);
        let tokens = Tokens {
            time: self.times(inputs.actions),
            rows: row_ranges(&inputs.actions.counts()),
            variance: running_sums(&self.token_variances(inputs)?, &rows),
            returns,
        };
        let mut advantages = tokens.returns.clone();
        for mut members in group_rows(inputs.group_ids(self.name())?) {
            members.retain(|&row| !tokens.rows[row].is_empty());
            if members.len() > 1 {
                self.subtract_baseline(&tokens, &members, &mut advantages);
            }
        }
        Ok(Advantages {
            advantages: inputs.actions.scatter(&advantages)?,
            returns: Some(inputs.actions.scatter(&tokens.returns)?),
        })
    }
}

/// The action tokens of a batch, packed.
struct Tokens {
    time: Vec<usize>,
    returns: Vec<f64>,
    variance: Vec<f64>,
    rows: Vec<Range<usize>>,
}

impl OptimalTokenBaseline {
    /// w of each action token.
    fn token_variances(&self, inputs: &AdvantageInputs<'_>) -> Result<Vec<f64>, AlgoError> {
        let log_probs = inputs.packed(self.name(), "old_log_probs", inputs.old_log_probs)?;
        let squares = inputs.packed(self.name(), "sum_pi_squared", inputs.sum_pi_squared)?;
        let weights = match inputs.rollout_weights {
            Some(_) => inputs.packed(self.name(), "rollout_weights", inputs.rollout_weights)?,
            None => vec![1.0; log_probs.len()],
        };
        let each = log_probs.iter().zip(&squares).zip(&weights);
        Ok(each
            .map(|((l, s), rho)| (1.0 - 2.0 * libm::exp(*l) + s) * rho * rho)
            .collect())
    }

    /// Time of each action token.
    fn times(&self, actions: &Ragged<bool>) -> Vec<usize> {
        let of_row = |row: &[bool]| -> Vec<usize> {
            let slots = (0..row.len()).filter(|t| row[*t]);
            match self.time {
                TokenTime::Slots => slots.collect(),
                TokenTime::Actions => (0..slots.count()).collect(),
            }
        };
        actions.rows().flat_map(of_row).collect()
    }

    fn subtract_baseline(&self, tokens: &Tokens, members: &[usize], advantages: &mut [f64]) {
        let all = || members.iter().flat_map(|&row| tokens.rows[row].clone());
        let end = all().map(|t| tokens.time[t] + 1).max().unwrap_or(0);
        let mut sums = vec![(0.0, 0.0); end];
        for t in all() {
            let (weighted, weight) = &mut sums[tokens.time[t]];
            *weighted += tokens.returns[t] * tokens.variance[t];
            *weight += tokens.variance[t];
        }
        let tail = longest(tokens, members).filter(|_| self.handle_zero_tail);
        for &row in members {
            let from = match tail {
                Some((longest, from)) if longest == row => from,
                _ => usize::MAX,
            };
            for t in tokens.rows[row].clone() {
                let (weighted, weight) = sums[tokens.time[t]];
                if tokens.time[t] < from {
                    advantages[t] -= weighted / (weight + EPSILON);
                }
            }
        }
    }
}

/// The longest row, if it is unique, and the length of the second longest.
fn longest(tokens: &Tokens, members: &[usize]) -> Option<(usize, usize)> {
    let mut order = members.to_vec();
    order.sort_by_key(|&row| std::cmp::Reverse(tokens.rows[row].len()));
    match order[..] {
        [first, second, ..] if tokens.rows[first].len() > tokens.rows[second].len() => {
            Some((first, tokens.rows[second].len()))
        }
        _ => None,
    }
}

/// Running sum within each row.
fn running_sums(values: &[f64], rows: &[usize]) -> Vec<f64> {
    let mut sums = values.to_vec();
    for t in 1..sums.len() {
        if rows[t] == rows[t - 1] {
            sums[t] += sums[t - 1];
        }
    }
    sums
}

/// Range of the packed tokens of each row.
fn row_ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |&length: &usize| {
        end += length;
        end - length..end
    };
    lengths.iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advantages::test::check;

    /// π = ½ and Σπ² = ½ make w = ½ everywhere, so W counts the action tokens.
    #[track_caller]
    fn check_advantages(
        estimator: OptimalTokenBaseline,
        rewards: &Ragged<f64>,
        groups: &[u64],
        weights: Option<&Ragged<f64>>,
        expected: &[f64],
    ) {
        // NaN marks observations.
        let actions = rewards.map(|_, _, r| !r.is_nan());
        let at_actions = |value: f64| rewards.map(|_, _, r| if r.is_nan() { r } else { value });
        let (old, squares) = (at_actions(0.5f64.ln()), at_actions(0.5));
        let mut inputs = AdvantageInputs::new(&actions);
        inputs.token_level_rewards = Some(rewards);
        inputs.groups = Some(groups);
        inputs.old_log_probs = Some(&old);
        assert!(estimator.estimate(&inputs).is_err(), "without Σπ²");
        inputs.sum_pi_squared = Some(&squares);
        inputs.rollout_weights = weights;
        let got = estimator.estimate(&inputs).unwrap();
        check(got.advantages.values(), expected);
    }

    #[test]
    fn by_hand() {
        let rewards = Ragged::<f64>::from_rows([vec![1.0, 2.0, 3.0], vec![0.0, 4.0], vec![5.0]]);
        let groups = [1, 1, 2];
        // G = 6 5 3 | 4 4 | 5 with W = ½ 1 1½ | ½ 1: B = 5, 4½, then the first row's own.
        let mut otb = OptimalTokenBaseline::flat();
        let expected = [1.0, 0.5, 3.0, -1.0, -0.5, 5.0];
        check_advantages(otb, &rewards, &groups, None, &expected);
        otb.handle_zero_tail = false;
        let expected = [1.0, 0.5, 0.0, -1.0, -0.5, 5.0];
        check_advantages(otb, &rewards, &groups, None, &expected);
        // Weights 2 in the first row: W = 2 4 6 | ½ 1, B = 5.6, 4.8.
        let weights = Ragged::<f64>::from_rows([vec![2.0; 3], vec![1.0; 2], vec![1.0]]);
        let expected = [0.4, 0.2, 0.0, -1.6, -0.8, 5.0];
        check_advantages(otb, &rewards, &groups, Some(&weights), &expected);
    }

    #[test]
    fn time_is_counted_in_slots_or_in_actions() {
        let rewards = Ragged::<f64>::from_rows([vec![0.0, f64::NAN, 2.0], vec![0.0, 4.0, 0.0]]);
        // By slots: G = 2 - 2 | 4 4 0, W = ½ - 1 | ½ 1 1½; B = 3, 4, 0.8. The tail begins at slot 2.
        let expected = [-1.0, 0.0, 1.2, 1.0, 0.0, 0.0];
        check_advantages(
            OptimalTokenBaseline::flat(),
            &rewards,
            &[1, 1],
            None,
            &expected,
        );
        // By actions: B = 3, 3.
        let expected = [-1.0, 0.0, -1.0, 1.0, 1.0, 0.0];
        let tir = OptimalTokenBaseline::multi_turn();
        check_advantages(tir, &rewards, &[1, 1], None, &expected);
    }

    #[test]
    fn rows_without_actions_do_not_count_as_members() {
        let rewards = Ragged::<f64>::from_rows([vec![1.0, 1.0], vec![f64::NAN]]);
        for estimator in [
            OptimalTokenBaseline::flat(),
            OptimalTokenBaseline::multi_turn(),
        ] {
            check_advantages(estimator, &rewards, &[1, 1], None, &[2.0, 1.0, 0.0]);
        }
    }
}
