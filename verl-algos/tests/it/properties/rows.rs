//! Rows with all inputs of estimators and rollout corrections.

use proptest::prelude::*;
use verl_algos::Ragged;
use verl_algos::advantages::{AdvantageEstimator, AdvantageInputs, Advantages};

/// A token with all inputs of an estimator.
#[derive(Debug, Clone, Copy)]
pub struct TokenInputs {
    pub action: bool,
    pub reward: f64,
    pub value: f64,
    pub old_log_prob: f64,
    pub ref_log_prob: f64,
    pub sum_pi_squared: f64,
    pub rollout_weight: f64,
}

impl TokenInputs {
    /// An observation whose numbers are all `junk`.
    pub fn observation(junk: f64) -> TokenInputs {
        TokenInputs {
            action: false,
            reward: junk,
            value: junk,
            old_log_prob: junk,
            ref_log_prob: junk,
            sum_pi_squared: junk,
            rollout_weight: junk,
        }
    }
}

/// A response with all inputs of an estimator.
#[derive(Debug, Clone)]
pub struct Row {
    pub tokens: Vec<TokenInputs>,
    pub group: u64,
    pub baseline: f64,
    pub components: [Option<f64>; 2],
}

impl Row {
    /// Position of the first action token.
    pub fn first(&self) -> usize {
        self.tokens.iter().position(|t| t.action).unwrap()
    }
}

/// A batch of rows.
#[derive(Debug, Clone)]
pub struct Rows(pub Vec<Row>);

impl Rows {
    pub fn column<T: Copy>(&self, f: impl Fn(&TokenInputs) -> T) -> Ragged<T> {
        let row = |row: &Row| row.tokens.iter().map(&f).collect::<Vec<T>>();
        Ragged::from_rows(self.0.iter().map(row))
    }

    pub fn estimate(&self, estimator: &dyn AdvantageEstimator) -> Advantages {
        let actions = self.column(|t| t.action);
        let rewards = self.column(|t| t.reward);
        let values = self.column(|t| t.value);
        let old_log_probs = self.column(|t| t.old_log_prob);
        let ref_log_probs = self.column(|t| t.ref_log_prob);
        let sum_pi_squared = self.column(|t| t.sum_pi_squared);
        let rollout_weights = self.column(|t| t.rollout_weight);
        let groups: Vec<u64> = self.0.iter().map(|row| row.group).collect();
        let baselines: Vec<f64> = self.0.iter().map(|row| row.baseline).collect();
        let component = |k: usize| self.0.iter().map(|row| row.components[k]).collect();
        let components: [Vec<Option<f64>>; 2] = std::array::from_fn(component);
        let inputs = AdvantageInputs {
            groups: Some(&groups),
            token_level_rewards: Some(&rewards),
            values: Some(&values),
            reward_baselines: Some(&baselines),
            reward_components: Some(&components),
            old_log_probs: Some(&old_log_probs),
            ref_log_probs: Some(&ref_log_probs),
            sum_pi_squared: Some(&sum_pi_squared),
            rollout_weights: Some(&rollout_weights),
            ..AdvantageInputs::new(&actions)
        };
        estimator.estimate(&inputs).unwrap()
    }

    pub fn reordered(&self, order: &[usize]) -> Rows {
        Rows(order.iter().map(|&b| self.0[b].clone()).collect())
    }

    /// The same rows without their observations.
    pub fn actions_only(&self) -> Rows {
        let mut out = self.clone();
        for row in &mut out.0 {
            row.tokens.retain(|token| token.action);
        }
        out
    }
}

/// Numbers with few digits, so that equal ones occur.
pub fn number() -> impl Strategy<Value = f64> {
    (-20i32..=20).prop_map(|n| f64::from(n) / 10.0)
}

/// Σπ² is at least that of the sampled token and a single other one.
pub fn token() -> impl Strategy<Value = TokenInputs> {
    let log_prob = || -3.0..-0.01f64;
    let numbers = (number(), number(), log_prob(), log_prob());
    (any::<bool>(), numbers, 0.0..1.0f64, 0.1..2.0f64).prop_map(
        |(action, (reward, value, old_log_prob, ref_log_prob), others, rollout_weight)| {
            let rest = 1.0 - old_log_prob.exp();
            TokenInputs {
                action,
                reward,
                value,
                old_log_prob,
                ref_log_prob,
                sum_pi_squared: (2.0 * old_log_prob).exp() + rest * rest * others,
                rollout_weight,
            }
        },
    )
}

/// Rows of two to four groups of two to four rows each, in any order; each row has an action token.
pub fn rows() -> impl Strategy<Value = Rows> {
    let tokens = prop::collection::vec(token(), 1..6).prop_map(|mut tokens| {
        tokens[0].action = true;
        tokens
    });
    let component = || prop::option::weighted(0.9, number());
    let row = (tokens, number(), component(), component());
    let row = row.prop_map(|(tokens, baseline, first, second)| Row {
        tokens,
        group: 0,
        baseline,
        components: [first, second],
    });
    let row = row.boxed();
    let groups = prop::collection::vec(2usize..5, 2..5);
    groups
        .prop_flat_map(move |sizes| {
            let total = sizes.iter().sum::<usize>();
            let ids = sizes.iter().enumerate();
            let ids: Vec<u64> = ids
                .flat_map(|(g, &n)| std::iter::repeat_n(7 * g as u64 + 3, n))
                .collect();
            let rows = prop::collection::vec(row.clone(), total);
            (Just(ids).prop_shuffle(), rows)
        })
        .prop_map(|(groups, mut rows)| {
            let each = rows.iter_mut().zip(groups);
            each.for_each(|(row, group)| row.group = group);
            Rows(rows)
        })
}
