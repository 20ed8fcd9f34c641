//! Trajectories in plain numbers, and micro-batches of them with the outputs of the heads.

use burn::tensor::Tensor;

use crate::aggregate::Counts;
use crate::error::{AlgoError, check_finite, check_len};
use crate::ragged::Ragged;

/// Trajectories of one optimiser step on this rank. Everything in it is a constant.
///
/// Observations are not included: an action's next state is the state of the row's next action, or the final state.
#[derive(Debug, Clone, PartialEq)]
pub struct IlqlBatch {
    /// Token of each action, `[B, T~]`.
    pub actions: Ragged<u32>,
    /// Reward of each action, `[B, T~]`. Rewards of states that are not alive are never read.
    pub rewards: Ragged<f64>,
    /// Whether each state is alive, `[B, (T + 1)~]`: the states of a row's actions, then its final state. An action
    /// counts if its state is alive; the next state's value counts if that state is.
    pub alive: Ragged<bool>,
    /// Sizes of the mini-batch over all ranks; `tokens` is K, the number of actions in states that are alive.
    pub counts: Counts,
}

impl IlqlBatch {
    /// Finished trajectories: the last action of each row carries the row's return, and the final state is not alive.
    /// The return of a row without actions is dropped.
    ///
    /// # Errors
    /// Different numbers of returns and rows.
    pub fn from_returns(actions: Ragged<u32>, returns: &[f64]) -> Result<IlqlBatch, AlgoError> {
        check_len("returns", "rows", returns.len(), actions.num_rows())?;
        let last = |b: usize, t: usize| t + 1 == actions.row(b).len();
        let rewards = actions.map(|b, t, _| if last(b, t) { returns[b] } else { 0.0 });
        let alive = actions.rows().map(|row| {
            let mut alive = vec![true; row.len()];
            alive.push(false);
            alive
        });
        Ok(IlqlBatch {
            rewards,
            alive: Ragged::from_rows(alive),
            actions,
            counts: Counts::LOCAL,
        })
    }

    /// Row of each action that counts, `[K]`.
    pub fn rows(&self) -> Vec<usize> {
        let rows = 0..self.actions.num_rows();
        rows.flat_map(|b| std::iter::repeat_n(b, self.num_counted(b)))
            .collect()
    }

    /// Actions of row `b` that count.
    fn num_counted(&self, b: usize) -> usize {
        let states = &self.alive.row(b)[..self.actions.row(b).len()];
        states.iter().filter(|alive| **alive).count()
    }

    /// Rejects rows of the wrong length, and counted rewards that are not finite.
    ///
    /// # Errors
    /// The first invalid argument.
    pub fn check(&self) -> Result<(), AlgoError> {
        self.rewards.check_like("rewards", &self.actions)?;
        let num_rows = self.actions.num_rows();
        check_len("alive", "rows", self.alive.num_rows(), num_rows)?;
        for row in 0..num_rows {
            let (got, expected) = (self.alive.row(row).len(), self.actions.row(row).len() + 1);
            if got != expected {
                return Err(AlgoError::RowLength {
                    argument: "alive",
                    row,
                    got,
                    expected,
                });
            }
        }
        let counted = self
            .rewards
            .map(|b, t, reward| if self.alive.row(b)[t] { reward } else { 0.0 });
        check_finite("rewards", counted.values())
    }

    /// The actions of `rows` that count, as positions in the tensors of a micro-batch.
    pub(super) fn steps(&self, rows: &[usize]) -> Steps {
        let mut steps = Steps::default();
        let (mut action, mut state) = (0, 0);
        for &row in rows {
            let (tokens, alive) = (self.actions.row(row), self.alive.row(row));
            for t in (0..tokens.len()).filter(|t| alive[*t]) {
                steps.actions.push(action + t);
                steps.states.push(state + t);
                steps.tokens.push(tokens[t] as usize);
                steps.rewards.push(self.rewards.row(row)[t]);
                steps.next_alive.push(alive[t + 1]);
            }
            action += tokens.len();
            state += alive.len();
        }
        steps
    }
}

/// Actions that count, `[K]` each.
#[derive(Debug, Default)]
pub(super) struct Steps {
    /// Position of each among the micro-batch's actions.
    pub actions: Vec<usize>,
    /// Position of its state among the micro-batch's states; the next state follows.
    pub states: Vec<usize>,
    pub tokens: Vec<usize>,
    pub rewards: Vec<f64>,
    pub next_alive: Vec<bool>,
}

/// Some rows of a mini-batch, with the outputs of the heads for them.
///
/// Actions are packed, row after row: `M` of them. States are packed too, and each row has one more: its final state,
/// where the hidden state is that of the row's last token. A row without actions has only its final state.
///
/// Dims: `M` actions, `R` rows, `V` vocabulary.
#[derive(Debug, Clone)]
pub struct IlqlMicroBatch {
    /// Rows of the mini-batch, in the order of the tensors, `[R]`.
    pub rows: Vec<usize>,
    /// Q of every token in the state of each action, one tensor per head, `[M, V]`; differentiable.
    pub qs: Vec<Tensor<2>>,
    /// Q̂ of each action taken, one tensor per target head, `[M]`; without gradient.
    pub target_qs: Vec<Tensor<1>>,
    /// V of each state, `[M + R]`; differentiable.
    pub values: Tensor<1>,
    /// Logits of the policy in the state of each action, `[M, V]`; differentiable.
    pub logits: Tensor<2>,
}

impl IlqlMicroBatch {
    /// Rejects rows outside the mini-batch, tensors of the wrong shape, and actions outside the vocabulary.
    pub(super) fn check(&self, batch: &IlqlBatch) -> Result<(), AlgoError> {
        let rows = batch.actions.num_rows();
        if let Some(&row) = self.rows.iter().find(|row| **row >= rows) {
            return Err(AlgoError::RowOutOfRange { row, rows });
        }
        let tokens = self.rows.iter().flat_map(|b| batch.actions.row(*b));
        let tokens: Vec<u32> = tokens.copied().collect();
        let [logits, vocab] = self.logits.dims();
        check_len("logits", "actions", logits, tokens.len())?;
        check_len(
            "values",
            "states",
            self.values.dims()[0],
            tokens.len() + self.rows.len(),
        )?;
        let missing = |argument| AlgoError::Missing {
            algorithm: "ilql",
            argument,
        };
        self.qs.first().ok_or(missing("qs"))?;
        self.target_qs.first().ok_or(missing("target_qs"))?;
        for q in &self.qs {
            check_len("qs", "actions", q.dims()[0], tokens.len())?;
            check_len("qs", "tokens of the vocabulary", q.dims()[1], vocab)?;
        }
        for q in &self.target_qs {
            check_len("target_qs", "actions", q.dims()[0], tokens.len())?;
        }
        match tokens.iter().position(|id| *id as usize >= vocab) {
            Some(position) => Err(AlgoError::TokenId {
                argument: "actions",
                position,
                id: tokens[position],
                vocab,
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_action_carries_the_return() {
        let actions = Ragged::<u32>::from_rows([vec![5u32, 6], vec![], vec![7]]);
        let batch = IlqlBatch::from_returns(actions, &[2.0, 9.0, -1.0]).unwrap();
        assert_eq!(batch.rewards.values(), [0.0, 2.0, -1.0]);
        assert_eq!(batch.alive.row(0), [true, true, false]);
        assert_eq!(batch.alive.row(1), [false]);
        assert_eq!(batch.rows(), [0, 0, 2]);
        batch.check().unwrap();
        assert!(IlqlBatch::from_returns(batch.actions, &[1.0]).is_err());
    }

    #[test]
    fn steps_skip_states_that_are_not_alive() {
        let batch = IlqlBatch {
            actions: Ragged::from_rows([vec![5u32, 6, 7], vec![8]]),
            rewards: Ragged::from_rows([vec![0.5, f64::NAN, 1.5], vec![2.0]]),
            alive: Ragged::from_rows([vec![true, false, true, false], vec![true, true]]),
            counts: Counts::LOCAL,
        };
        batch.check().unwrap();
        let steps = batch.steps(&[1, 0]);
        assert_eq!(steps.tokens, [8, 5, 7]);
        assert_eq!(steps.rewards, [2.0, 0.5, 1.5]);
        assert_eq!(steps.actions, [0, 1, 3]);
        assert_eq!(steps.states, [0, 2, 4]);
        assert_eq!(steps.next_alive, [true, false, false]);
    }

    #[test]
    fn rejects_rows_of_the_wrong_shape() {
        let actions = Ragged::<u32>::from_rows([[5u32, 6]]);
        let valid = IlqlBatch::from_returns(actions, &[1.0]).unwrap();
        let mut batch = valid.clone();
        batch.alive = Ragged::from_rows([[true, true]]);
        let error = batch.check().unwrap_err();
        assert_eq!(
            error.to_string(),
            "row 0 of `alive` has 2 tokens, expected 3"
        );
        let mut batch = valid.clone();
        batch.rewards = Ragged::from_rows([[0.0]]);
        assert!(batch.check().is_err());
        let mut batch = valid;
        batch.rewards = Ragged::from_rows([[0.0, f64::NAN]]);
        let error = batch.check().unwrap_err();
        assert_eq!(error.to_string(), "`rewards` is NaN at position 1");
    }
}
