//! A policy with replicas.

use burn::tensor::Tensor;
use verl_kernels::scoring::Extras;
use verl_rollout::engine::{EngineWeights, PreparedModel, RolloutError, WeightTensor};

use super::{ReplicaError, ReplicaSettings, Replicas};
use crate::model::{
    ListedTokens, ModelError, ModelInterface, PackedListed, PackedScores, PolicyModel, Round,
    RoundError, ScoreRow, Scores, SelectInRound, TopTokens,
};
use crate::optim::OptimizerConfig;
use crate::policy::{self, Policy, listed};
use crate::trained::{Trained, trained_model};

/// A language model with replicas; see the [module](crate::replicas).
///
/// ```
/// use burn::tensor::Device;
/// use verl_models::Decoder;
/// use verl_models::model::{Extras, PolicyModel, ScoreRow, TrainedModel};
/// use verl_models::replicas::{ReplicaSettings, ReplicatedPolicy};
///
/// let decoder = Decoder::load("tests/models/tiny-random-qwen3".as_ref(), &Device::flex())?;
/// let policy = ReplicatedPolicy::new(decoder, None, &ReplicaSettings::new(2))?;
/// assert_eq!(policy.round_len(), 2);
/// let rows = [[3, 4, 5], [6, 7, 8]].map(|response| response.to_vec());
/// let rows = rows.each_ref().map(|response| ScoreRow { prompt: &[1, 2], response });
/// assert_eq!(policy.score(&rows, 1.0, Extras::NONE)?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReplicatedPolicy<M: ModelInterface> {
    pub(super) replicas: Replicas<M>,
}

impl<M: ModelInterface> ReplicatedPolicy<M> {
    /// Replicas of a module on the CPU; without optimiser settings they are frozen.
    ///
    /// # Errors
    /// An invalid setting; threads that cannot be started.
    pub fn new(
        module: M,
        optimizer: Option<OptimizerConfig>,
        settings: &ReplicaSettings,
    ) -> Result<Self, ReplicaError> {
        let replicas = Replicas::new(module, M::parameter_group, optimizer, settings)?;
        Ok(ReplicatedPolicy { replicas })
    }

    /// The module of the first replica, without autodiff.
    pub fn module(&self) -> &M {
        self.replicas.module()
    }

    /// Reads rows on all replicas; each reads a piece with a policy that shares the weights.
    fn read<R: Send>(
        &self,
        rows: &[ScoreRow<'_>],
        read: impl Fn(&Policy<M>, &[ScoreRow<'_>]) -> Result<Vec<R>, ModelError> + Sync,
    ) -> Result<Vec<R>, ModelError> {
        policy::check(self.replicas.first(), rows)?;
        let sizes: Vec<usize> = rows.iter().map(ScoreRow::len).collect();
        self.replicas.read(&sizes, |module, piece| {
            let trained = Trained::frozen(module);
            read(&Policy { trained }, &rows[piece])
        })
    }
}

impl<M: ModelInterface> EngineWeights for ReplicatedPolicy<M> {
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        Ok(Box::new(self.replicas.prepare()?))
    }

    fn tensors(
        &self,
        each: &mut dyn FnMut(WeightTensor<'_>) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        self.replicas.first().tensors(each)
    }
}

impl<M: ModelInterface> PolicyModel for ReplicatedPolicy<M> {
    fn score(
        &self,
        rows: &[ScoreRow<'_>],
        temperature: f64,
        extras: Extras,
    ) -> Result<Vec<Scores>, ModelError> {
        self.read(rows, |policy, rows| policy.score(rows, temperature, extras))
    }

    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        entropies: bool,
        loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.replicas.accumulate(|trained| {
            policy::backward(trained, rows, select, temperature, entropies, loss)
        })
    }

    fn accumulate_round(
        &mut self,
        round: &Round<'_>,
        select: &SelectInRound<'_>,
        temperature: f64,
        entropies: bool,
        loss: &(dyn Fn(usize, PackedScores) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        self.replicas.round(round.len(), |micro, trained| {
            let select = |row, token| select(micro, row, token);
            let mut loss = |packed| loss(micro, packed);
            let rows = &round[micro];
            policy::backward(trained, rows, &select, temperature, entropies, &mut loss)
        })
    }

    fn top_tokens(
        &self,
        rows: &[ScoreRow<'_>],
        top_k: usize,
        temperature: f64,
    ) -> Result<Vec<TopTokens>, ModelError> {
        self.read(rows, |policy, rows| {
            policy.top_tokens(rows, top_k, temperature)
        })
    }

    fn accumulate_listed(
        &mut self,
        rows: &[ScoreRow<'_>],
        listed: &ListedTokens<'_>,
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        loss: &mut dyn FnMut(PackedListed) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.replicas.accumulate(|trained| {
            listed::backward(trained, rows, listed, select, temperature, loss)
        })
    }

    fn accumulate_listed_round(
        &mut self,
        round: &Round<'_>,
        listed: &[ListedTokens<'_>],
        select: &SelectInRound<'_>,
        temperature: f64,
        loss: &(dyn Fn(usize, PackedListed) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        self.replicas.round(round.len(), |micro, trained| {
            let select = |row, token| select(micro, row, token);
            let mut loss = |packed| loss(micro, packed);
            let (rows, listed) = (&round[micro], &listed[micro]);
            listed::backward(trained, rows, listed, &select, temperature, &mut loss)
        })
    }
}

trained_model!(ReplicatedPolicy<M>, replicas, M: ModelInterface);
