//! Training of an ILQL model, as stages use it.

use burn::tensor::{Device, Tensor};
use std::any::Any;
use verl_decoder::blocks::linear::linear;
use verl_kernels as kernels;
use verl_rollout::engine::{EngineWeights, PreparedModel, RolloutError, WeightTensor};

use super::IlqlDecoder;
use crate::model::{
    Extras, ListedTokens, ModelError, ModelInterface, PackedListed, PackedScores, PolicyModel,
    ScoreRow, Scores, TopTokens, TrainedModel,
};
use crate::optim::{OptimizerConfig, OptimizerConfigError};
use crate::policy::Policy;
use crate::rows;
use crate::trained::trained_model;

/// Outputs of the heads for a micro-batch, packed row by row. The selected response tokens are the actions. Each row
/// has one more state than actions: that of its last token.
///
/// Dims: `M` actions, `R` rows, `V` vocabulary.
pub struct PackedIlql {
    /// Rows with an action, in the order of the tensors, `[R]`.
    pub rows: Vec<usize>,
    /// Q of every token in the state of each action, one tensor per head, `[M, V]`; differentiable.
    pub qs: Vec<Tensor<2>>,
    /// Q̂ of each action, one tensor per head, `[M]`; without gradient.
    pub target_qs: Vec<Tensor<1>>,
    /// V of each state, `[M + R]`; differentiable.
    pub values: Tensor<1>,
    /// Logits of the policy in the state of each action, `[M, V]`; differentiable.
    pub logits: Tensor<2>,
}

/// A policy with ILQL's heads and an optimiser; object-safe.
pub trait IlqlModel: PolicyModel {
    /// Runs `rows` forward, computes `loss` on the heads' outputs where `select(row, token)` is true, runs backward,
    /// and adds the gradients to the f32 accumulators. Returns the loss; 0 if no token is selected.
    ///
    /// # Errors
    /// As [`PolicyModel::accumulate`].
    fn accumulate_ilql(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        loss: &mut dyn FnMut(PackedIlql) -> Tensor<1>,
    ) -> Result<f64, ModelError>;

    /// Q̂ ← α Q + (1 − α) Q̂.
    ///
    /// # Errors
    /// The model is frozen.
    fn sync_targets(&mut self, alpha: f64) -> Result<(), ModelError>;
}

/// An [`IlqlDecoder`] with an optimiser, or a frozen one without.
pub struct IlqlPolicy {
    policy: Policy<IlqlDecoder>,
}

impl IlqlPolicy {
    /// Wraps a module; without optimiser settings it is frozen.
    ///
    /// # Errors
    /// An invalid setting of the optimiser.
    pub fn new(
        module: IlqlDecoder,
        optimizer: Option<OptimizerConfig>,
    ) -> Result<Self, OptimizerConfigError> {
        let policy = Policy::new(module, optimizer)?;
        Ok(IlqlPolicy { policy })
    }

    /// The policy, if it is one with ILQL's heads.
    pub fn of<'a>(policy: &'a mut (dyn PolicyModel + 'static)) -> Option<&'a mut IlqlPolicy> {
        let policy: &mut dyn Any = policy;
        policy.downcast_mut()
    }

    /// The module, without autodiff.
    ///
    /// # Panics
    /// Panics if an earlier optimiser step panicked.
    pub fn module(&self) -> &IlqlDecoder {
        self.policy.module()
    }
}

/// The states of a micro-batch in a padded call.
#[derive(Debug, Default, PartialEq)]
struct States {
    /// Rows with an action.
    rows: Vec<usize>,
    /// Tokens of each padded row.
    width: usize,
    /// Index of each state in the flattened call: for each row, its action states, then its last token.
    positions: Vec<i32>,
    /// Indices of the states that belong to actions.
    actions: Vec<i32>,
    /// Token of each action.
    tokens: Vec<i32>,
}

impl States {
    fn new(rows: &[ScoreRow<'_>], select: &dyn Fn(usize, usize) -> bool) -> Self {
        let chosen = |row: usize| -> Vec<usize> {
            let tokens = 0..rows[row].response.len();
            tokens.filter(|token| select(row, *token)).collect()
        };
        let picked: Vec<(usize, Vec<usize>)> = (0..rows.len())
            .map(|row| (row, chosen(row)))
            .filter(|(_, chosen)| !chosen.is_empty())
            .collect();
        let length = |row: usize| rows[row].prompt.len() + rows[row].response.len();
        let width = picked.iter().map(|(row, _)| length(*row)).max();
        let mut states = States {
            width: width.unwrap_or(0),
            ..States::default()
        };
        for (place, (row, chosen)) in picked.into_iter().enumerate() {
            let start = place * states.width;
            for token in chosen {
                let state = start + rows[row].prompt.len() + token - 1;
                states.actions.push(states.positions.len() as i32);
                states.positions.push(state as i32);
                states.tokens.push(rows[row].response[token] as i32);
            }
            states.positions.push((start + length(row) - 1) as i32);
            states.rows.push(row);
        }
        states
    }

    /// Computes the outputs of the heads.
    fn read(self, module: &IlqlDecoder, rows: &[ScoreRow<'_>], device: &Device) -> PackedIlql {
        let picked = self.rows.iter().map(|&row| &rows[row]);
        let ids = rows::padded_ids(picked, self.rows.len(), self.width, device);
        let hidden = module.hidden(ids);
        let [b, s, d] = hidden.dims();
        let hidden = hidden.reshape([b * s, d]);
        let states = hidden.select(0, kernels::indices(self.positions, device)); // [M + R, D]
        let actions = states
            .clone()
            .select(0, kernels::indices(self.actions, device)); // [M, D]
        let tokens = kernels::indices(self.tokens, device).unsqueeze_dim::<2>(1);
        let targets = module.heads.target_qs(actions.clone().detach());
        let targets = targets.into_iter();
        PackedIlql {
            rows: self.rows,
            qs: module.heads.qs(actions.clone()),
            target_qs: targets
                .map(|q| q.gather(1, tokens.clone()).squeeze_dim(1).detach())
                .collect(),
            values: module.heads.values(states),
            logits: linear(actions, module.head()),
        }
    }
}

impl IlqlModel for IlqlPolicy {
    fn accumulate_ilql(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        loss: &mut dyn FnMut(PackedIlql) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        rows::check(rows, self.vocab_size(), self.max_tokens())?;
        let trained = &mut self.policy.trained;
        trained.check_trainable()?;
        let states = States::new(rows, select);
        if states.rows.is_empty() {
            return Ok(0.0);
        }
        trained.accumulate(|module, device| loss(states.read(module, rows, device)))
    }

    fn sync_targets(&mut self, alpha: f64) -> Result<(), ModelError> {
        let trained = &mut self.policy.trained;
        trained.check_trainable()?;
        trained.module = trained.module.take().map(|module| IlqlDecoder {
            heads: module.heads.synced(alpha),
            ..module
        });
        Ok(())
    }
}

/// Delegates to the inner policy.
impl EngineWeights for IlqlPolicy {
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        self.policy.prepare()
    }

    fn tensors(
        &self,
        each: &mut dyn FnMut(WeightTensor<'_>) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        self.policy.tensors(each)
    }
}

/// Delegates to the inner policy.
impl PolicyModel for IlqlPolicy {
    fn score(
        &self,
        rows: &[ScoreRow<'_>],
        temperature: f64,
        extras: Extras,
    ) -> Result<Vec<Scores>, ModelError> {
        self.policy.score(rows, temperature, extras)
    }

    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        entropies: bool,
        loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.policy
            .accumulate(rows, select, temperature, entropies, loss)
    }

    fn top_tokens(
        &self,
        rows: &[ScoreRow<'_>],
        top_k: usize,
        temperature: f64,
    ) -> Result<Vec<TopTokens>, ModelError> {
        self.policy.top_tokens(rows, top_k, temperature)
    }

    fn accumulate_listed(
        &mut self,
        rows: &[ScoreRow<'_>],
        listed: &ListedTokens<'_>,
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        loss: &mut dyn FnMut(PackedListed) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.policy
            .accumulate_listed(rows, listed, select, temperature, loss)
    }
}

trained_model!(IlqlPolicy, policy.trained);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_belong_to_the_actions_and_the_last_token() {
        let row = |prompt, response| ScoreRow { prompt, response };
        let rows = [
            row(&[1, 2][..], &[3, 4, 5][..]),
            row(&[6], &[7]),
            row(&[8], &[9, 10]),
        ];
        // The second token of row 0 is an observation, row 1 has no action.
        let select = |row: usize, token: usize| (row, token) != (0, 1) && row != 1;
        let states = States::new(&rows, &select);
        let expected = States {
            rows: vec![0, 2],
            width: 5,
            positions: vec![1, 3, 4, 5, 6, 7],
            actions: vec![0, 1, 3, 4],
            tokens: vec![3, 5, 9, 10],
        };
        assert_eq!(states, expected);
        assert_eq!(States::new(&rows, &|_, _| false), States::default());
    }
}
