//! A value model with replicas.

use burn::tensor::Tensor;

use super::{ReplicaError, ReplicaSettings, Replicas};
use crate::critic::{self, Critic};
use crate::model::{
    ModelError, PackedValues, Round, RoundError, ScoreRow, SelectInRound, ValueInterface,
    ValueModel,
};
use crate::optim::OptimizerConfig;
use crate::trained::{Trained, trained_model};

/// A critic or reward model with replicas; see the [module](crate::replicas).
pub struct ReplicatedCritic<M: ValueInterface> {
    pub(super) replicas: Replicas<M>,
}

impl<M: ValueInterface> ReplicatedCritic<M> {
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
        Ok(ReplicatedCritic { replicas })
    }

    /// The module of the first replica, without autodiff.
    pub fn module(&self) -> &M {
        self.replicas.module()
    }

    /// Reads rows on all replicas; each reads a piece with a critic that shares the weights.
    fn read<R: Send>(
        &self,
        rows: &[ScoreRow<'_>],
        read: impl Fn(&Critic<M>, &[ScoreRow<'_>]) -> Result<Vec<R>, ModelError> + Sync,
    ) -> Result<Vec<R>, ModelError> {
        critic::check(self.replicas.first(), rows)?;
        let sizes: Vec<usize> = rows.iter().map(ScoreRow::len).collect();
        self.replicas.read(&sizes, |module, piece| {
            let trained = Trained::frozen(module);
            read(&Critic { trained }, &rows[piece])
        })
    }
}

impl<M: ValueInterface> ValueModel for ReplicatedCritic<M> {
    fn values(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<Vec<f32>>, ModelError> {
        self.read(rows, |critic, rows| critic.values(rows))
    }

    fn scores(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<f32>, ModelError> {
        self.read(rows, |critic, rows| critic.scores(rows))
    }

    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        loss: &mut dyn FnMut(PackedValues) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        let accumulate = |trained: &Trained<M>| critic::backward(trained, rows, select, loss);
        self.replicas.accumulate(accumulate)
    }

    fn accumulate_scores(
        &mut self,
        rows: &[ScoreRow<'_>],
        loss: &mut dyn FnMut(Tensor<1>) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        let accumulate = |trained: &Trained<M>| critic::backward_scores(trained, rows, loss);
        self.replicas.accumulate(accumulate)
    }

    fn accumulate_round(
        &mut self,
        round: &Round<'_>,
        select: &SelectInRound<'_>,
        loss: &(dyn Fn(usize, PackedValues) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        self.replicas.round(round.len(), |micro, trained| {
            let select = |row, token| select(micro, row, token);
            let mut loss = |packed| loss(micro, packed);
            critic::backward(trained, &round[micro], &select, &mut loss)
        })
    }

    fn accumulate_scores_round(
        &mut self,
        round: &Round<'_>,
        loss: &(dyn Fn(usize, Tensor<1>) -> Tensor<1> + Sync),
    ) -> Result<Vec<f64>, RoundError> {
        self.replicas.round(round.len(), |micro, trained| {
            let mut loss = |scores| loss(micro, scores);
            critic::backward_scores(trained, &round[micro], &mut loss)
        })
    }
}

trained_model!(ReplicatedCritic<M>, replicas, M: ValueInterface);
