//! The four terms of ILQL, one number per action each.

use burn::tensor::{Int, Tensor};

use super::batch::{IlqlMicroBatch, Steps};
use crate::error::AlgoError;
use crate::functions::exp;
use crate::log_probs::log_probs_from_logits;
use crate::losses::{Metric, MetricId, Share};
use crate::tensor::{at_least_f32, constant_like, indices_like};

/// Outputs of the heads for the actions that count.
pub(super) struct Live {
    /// `[K, V]` per head
    qs: Vec<Tensor<2>>,
    /// `[K, V]`
    logits: Tensor<2>,
    /// V_t, `[K]`
    values: Tensor<1>,
    /// r_t + γ sg(V_{t+1}) c_{t+1}, `[K]`
    returns: Tensor<1>,
    /// q̂_t, `[K]`
    target_q: Tensor<1>,
    /// `[K]`
    tokens: Tensor<1, Int>,
}

impl Live {
    pub(super) fn new(
        micro: &IlqlMicroBatch,
        steps: &Steps,
        gamma: f64,
    ) -> Result<Live, AlgoError> {
        let all = at_least_f32(micro.values.clone());
        let actions = indices_like(&steps.actions, &all);
        let next: Vec<usize> = steps.states.iter().map(|state| state + 1).collect();
        let next = all.clone().detach().select(0, indices_like(&next, &all));
        let ended = steps.next_alive.iter().map(|alive| f64::from(!alive));
        let ended = constant_like(ended.collect(), &all).greater_scalar(0.0);
        let rewards = constant_like(steps.rewards.clone(), &all);
        let every_action = steps.actions.len() == micro.logits.dims()[0];
        let rows = |tensor: &Tensor<2>| {
            let tensor = at_least_f32(tensor.clone());
            match every_action {
                true => tensor,
                false => tensor.select(0, actions.clone()),
            }
        };
        let target_qs = micro.target_qs.iter();
        let target_qs = target_qs.map(|q| at_least_f32(q.clone()).detach());
        let smallest = target_qs.reduce(Tensor::min_pair);
        let smallest = smallest.ok_or(AlgoError::Missing {
            algorithm: "ilql",
            argument: "target_qs",
        })?;
        Ok(Live {
            qs: micro.qs.iter().map(rows).collect(),
            logits: rows(&micro.logits),
            values: all.clone().select(0, indices_like(&steps.states, &all)),
            returns: rewards + next.mask_fill(ended, 0.0) * gamma,
            target_q: smallest.select(0, actions.clone()),
            tokens: indices_like(&steps.tokens, &all),
        })
    }

    pub(super) fn q_loss(&self) -> Tensor<1> {
        let each = self.qs.iter().map(|q| {
            let tokens = self.tokens.clone().unsqueeze_dim(1);
            let chosen: Tensor<1> = q.clone().gather(1, tokens).squeeze_dim(1);
            square(chosen - self.returns.clone())
        });
        self.sum(each)
    }

    pub(super) fn v_loss(&self, tau: f64) -> Tensor<1> {
        let advantages = self.target_q.clone() - self.values.clone();
        let below = advantages.clone().lower_scalar(0.0);
        let weights = advantages.zeros_like().detach() + tau;
        weights.mask_fill(below, 1.0 - tau) * square(advantages)
    }

    pub(super) fn cql_loss(&self) -> Result<Tensor<1>, AlgoError> {
        let each: Result<Vec<_>, _> = self.qs.iter().map(|q| self.cross_entropy(q)).collect();
        Ok(self.sum(each?.into_iter()))
    }

    pub(super) fn awac_loss(&self, beta: f64) -> Result<Tensor<1>, AlgoError> {
        let advantages = self.target_q.clone() - self.values.clone().detach();
        Ok(self.cross_entropy(&self.logits)? * exp(advantages * beta))
    }

    fn cross_entropy(&self, logits: &Tensor<2>) -> Result<Tensor<1>, AlgoError> {
        Ok(-log_probs_from_logits(
            logits.clone(),
            self.tokens.clone(),
            1.0,
        )?)
    }

    /// Sum over heads.
    fn sum(&self, heads: impl Iterator<Item = Tensor<1>>) -> Tensor<1> {
        let sum = heads.reduce(|a, b| a + b);
        sum.unwrap_or_else(|| self.values.zeros_like())
    }

    pub(super) fn means(&self) -> Vec<Metric> {
        let mean = |id, values: &Tensor<1>| Metric {
            id,
            number: values.clone().detach().sum(),
            share: Share::Mean {
                count: values.dims()[0],
            },
        };
        vec![
            mean(MetricId::VALUE, &self.values),
            mean(MetricId::TARGET_Q, &self.target_q),
        ]
    }
}

fn square(x: Tensor<1>) -> Tensor<1> {
    x.clone() * x
}
