//! AdamW with f32 master state.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::accumulate::{Accumulated, TrainableParameters, check_finite};
use super::clip::clip_factor;
use super::kernels::{self, AdamWScalars, AdamWUpdate};
use super::schedule::Schedule;
use crate::model::{ModelError, ParameterGroup, StepReport};

/// Settings of AdamW.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Peak learning rate, a step size in units of the weights; positive or 0. The default suits reinforcement learning
    /// of a pretrained model; supervised training needs more, for example 1e-5.
    pub learning_rate: f64,
    /// Decay rates of the first and second moment, each in 0..1 (1 excluded).
    pub betas: [f64; 2],
    /// Added to the square root of the second moment; positive.
    pub eps: f64,
    /// Decoupled weight decay, a share of the weight per step and unit of learning rate; positive or 0.
    pub weight_decay: f64,
    /// Largest global norm of the gradient; longer gradients are scaled down to it. Without it, gradients are not
    /// scaled.
    pub max_grad_norm: Option<f64>,
    /// How the learning rate changes over the optimiser steps.
    pub schedule: Schedule,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        OptimizerConfig {
            learning_rate: 1e-6,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.01,
            max_grad_norm: Some(1.0),
            schedule: Schedule::default(),
        }
    }
}

/// An invalid setting of the optimiser.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("optimiser setting `{setting}` is {value}, but must be {expected}")]
pub struct OptimizerConfigError {
    /// Its name.
    pub setting: &'static str,
    /// Its value; `absent` if it has none.
    pub value: String,
    /// What is allowed.
    pub expected: &'static str,
}

impl OptimizerConfig {
    /// Checks the range of every setting.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    pub fn validate(&self) -> Result<(), OptimizerConfigError> {
        let positive_or_zero = |x: f64| x.is_finite() && x >= 0.0;
        let below_one = |x: f64| (0.0..1.0).contains(&x);
        let range = |setting, value: f64, allowed: bool, expected| {
            if allowed {
                return Ok(());
            }
            Err(OptimizerConfigError {
                setting,
                value: value.to_string(),
                expected,
            })
        };
        let [beta1, beta2] = self.betas;
        let rate = self.learning_rate;
        range("learning_rate", rate, positive_or_zero(rate), ">= 0")?;
        range("betas[0]", beta1, below_one(beta1), ">= 0 and < 1")?;
        range("betas[1]", beta2, below_one(beta2), ">= 0 and < 1")?;
        let eps = self.eps;
        range("eps", eps, eps.is_finite() && eps > 0.0, "> 0")?;
        let decay = self.weight_decay;
        range("weight_decay", decay, positive_or_zero(decay), ">= 0")?;
        if let Some(norm) = self.max_grad_norm {
            range("max_grad_norm", norm, norm > 0.0, "> 0")?;
        }
        let share = self.schedule.final_share();
        let allowed = (0.0..=1.0).contains(&share);
        range("schedule.final_share", share, allowed, ">= 0 and <= 1")
    }

    /// The same settings for a run of `steps` optimiser steps, if known: the schedule decays over them unless it sets
    /// its own number of steps.
    #[must_use]
    pub fn for_run(mut self, steps: Option<u64>) -> Self {
        if let Some(steps) = steps {
            self.schedule = self.schedule.for_run(steps);
        }
        self
    }
}

/// State of one parameter; flat f32 tensors.
#[derive(Debug, Clone)]
pub(super) struct ParameterState {
    pub(super) first: Tensor<1>,
    pub(super) second: Tensor<1>,
    /// The weight in f32, if the module stores it in another dtype.
    pub(super) master: Option<Tensor<1>>,
    /// Steps this parameter took part in.
    pub(super) steps: u64,
}

/// AdamW: moments and, for weights of another dtype, a master copy, in f32.
///
/// Weight decay is decoupled and applies to parameters whose [`ParameterGroup`] decays. A parameter that took part in
/// no loss since the last step is not changed, not even by weight decay, and its bias correction does not advance.
///
/// # Source
/// Loshchilov and Hutter 2019, arXiv:1711.05101; agrees with PyTorch's `AdamW`.
#[derive(Debug, Clone)]
pub struct AdamW {
    pub(super) config: OptimizerConfig,
    pub(super) states: Vec<Option<ParameterState>>,
    pub(super) steps: u64,
}

impl AdamW {
    /// An optimiser without state.
    ///
    /// # Errors
    /// A setting out of range; a decaying schedule whose number of steps is not set.
    pub fn new(config: OptimizerConfig) -> Result<Self, OptimizerConfigError> {
        config.validate()?;
        if config.schedule.lacks_total_steps() {
            return Err(OptimizerConfigError {
                setting: "schedule.total_steps",
                value: "absent".to_owned(),
                expected: "set if the run's number of optimiser steps is unknown",
            });
        }
        Ok(AdamW {
            config,
            states: Vec::new(),
            steps: 0,
        })
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The f32 weights of parameters that the module stores in another dtype; empty if there are none.
    pub(crate) fn masters(&self, parameters: &TrainableParameters) -> Vec<(String, Tensor<1>)> {
        let states = parameters.iter().zip(&self.states);
        states
            .filter_map(|(parameter, state)| {
                Some((parameter.name.clone(), state.as_ref()?.master.clone()?))
            })
            .collect()
    }

    /// [`AdamW::masters`] by parameter id.
    pub(crate) fn masters_by_id(
        &self,
        parameters: &TrainableParameters,
    ) -> HashMap<ParamId, Tensor<1>> {
        let master = |position: usize| self.states.get(position)?.as_ref()?.master.clone();
        let ids = parameters.ids();
        ids.filter_map(|(id, position)| Some((id, master(position)?)))
            .collect()
    }

    /// Sets the f32 weights of parameters that have them to new weights, of which the state has the piece that `piece` returns
    /// for a parameter with this position and number of elements.
    pub(crate) fn replace_masters(
        &mut self,
        parameters: &TrainableParameters,
        weights: &HashMap<ParamId, Tensor<1>>,
        piece: impl Fn(usize, usize) -> Range<usize>,
    ) {
        for (id, position) in parameters.ids() {
            let state = self.states.get_mut(position).and_then(Option::as_mut);
            let master = state.and_then(|state| state.master.as_mut());
            if let (Some(master), Some(weight)) = (master, weights.get(&id)) {
                let piece = piece(position, weight.dims()[0]);
                *master = weight.clone().slice([piece]).cast(DType::F32);
            }
        }
    }

    /// Clips the gradients to the largest norm and updates the weights.
    ///
    /// `gradients` are by position in `parameters`; a missing or `None` entry means that a parameter has no gradient.
    ///
    /// # Errors
    /// [`ModelError::NonFinite`] names a gradient that is not finite; the module is then returned unchanged.
    pub fn step<M: Module>(
        &mut self,
        module: M,
        parameters: &TrainableParameters,
        gradients: Vec<Option<Tensor<1>>>,
    ) -> (M, Result<StepReport, ModelError>) {
        let gradients = Accumulated {
            gradients,
            squares: None,
        };
        self.step_accumulated(module, parameters, gradients)
    }

    /// [`AdamW::step`] with accumulated gradients.
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub(crate) fn step_accumulated<M: Module>(
        &mut self,
        module: M,
        parameters: &TrainableParameters,
        accumulated: Accumulated,
    ) -> (M, Result<StepReport, ModelError>) {
        let Accumulated {
            mut gradients,
            squares,
        } = accumulated;
        gradients.resize(parameters.len(), None);
        let squares = squares.map_or_else(|| check_finite(parameters, &gradients), Ok);
        let norm = match squares {
            Ok(sum) => sum.sqrt(),
            Err(error) => return (module, Err(error)),
        };
        let (mut updater, report) = Updater::new(self, parameters, gradients, norm);
        updater.update_narrow(&module);
        let module = module.map(&mut updater);
        self.steps += 1;
        (module, Ok(report))
    }
}

/// An optimiser step in progress.
pub(super) struct Updater<'a> {
    config: &'a OptimizerConfig,
    parameters: &'a TrainableParameters,
    groups: Vec<ParameterGroup>,
    states: &'a mut Vec<Option<ParameterState>>,
    /// Results, for parameters that the module uses several times.
    updated: Vec<Option<Tensor<1>>>,
    gradients: Vec<Option<Tensor<1>>>,
    factor: f64,
    learning_rate: f64,
}

impl ModuleMapper for Updater<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(position) = self.parameters.position(param.id) else {
            return param;
        };
        let gradient = self.gradients[position].take();
        let twin = self.updated[position].clone();
        if gradient.is_none() && twin.is_none() {
            return param;
        }
        param.map(|weight| {
            let shape = weight.shape();
            let length = shape.num_elements();
            let flat = match (gradient, twin) {
                (Some(gradient), _) => self.update(position, weight.reshape([length]), gradient),
                (None, Some(twin)) => twin,
                (None, None) => weight.reshape([length]),
            };
            flat.reshape(shape)
        })
    }
}

/// Flat weights that are not f32, by position.
struct NarrowWeights<'a> {
    parameters: &'a TrainableParameters,
    found: BTreeMap<usize, Tensor<1>>,
}

impl ModuleVisitor for NarrowWeights<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(position) = self.parameters.position(param.id) else {
            return;
        };
        let weight = param.base();
        if weight.dtype() != DType::F32 {
            let length = weight.shape().num_elements();
            self.found.insert(position, weight.reshape([length]));
        }
    }
}

impl<'a> Updater<'a> {
    /// A step with these gradients, by position, whose global norm is `norm`.
    pub(super) fn new(
        optimizer: &'a mut AdamW,
        parameters: &'a TrainableParameters,
        gradients: Vec<Option<Tensor<1>>>,
        norm: f64,
    ) -> (Self, StepReport) {
        let config = &optimizer.config;
        let factor = clip_factor(norm, config.max_grad_norm);
        let learning_rate = config.learning_rate * config.schedule.factor(optimizer.steps);
        optimizer.states.resize(parameters.len(), None);
        let updater = Updater {
            config,
            parameters,
            groups: parameters.iter().map(|p| p.group).collect(),
            states: &mut optimizer.states,
            updated: vec![None; parameters.len()],
            gradients,
            factor,
            learning_rate,
        };
        let report = StepReport {
            grad_norm: norm,
            learning_rate,
            clipped: factor < 1.0,
        };
        (updater, report)
    }

    /// Sets the state of a parameter.
    pub(super) fn keep(&mut self, position: usize, state: ParameterState) {
        self.states[position] = Some(state);
    }

    /// Updates parameters whose weights are not f32 and stores the results in `updated`. Batching them takes fewer
    /// launches, and their weights are rewritten anyway.
    fn update_narrow<M: Module>(&mut self, module: &M) {
        let mut weights = NarrowWeights {
            parameters: self.parameters,
            found: BTreeMap::new(),
        };
        module.visit(&mut weights);
        let mut waiting = Vec::new();
        for (position, weight) in weights.found {
            if let Some(gradient) = self.gradients[position].take() {
                let dtype = weight.dtype();
                let (steps, update) = self.prepare(position, weight, gradient);
                waiting.push((dtype, (position, steps), update));
            }
        }
        while let Some(&(dtype, ..)) = waiting.first() {
            let (now, later): (Vec<_>, _) = waiting.into_iter().partition(|own| own.0 == dtype);
            waiting = later;
            let (places, updates): (Vec<_>, Vec<_>) =
                now.into_iter().map(|(_, place, own)| (place, own)).unzip();
            let updated = kernels::adamw_all(updates, dtype);
            for ((position, steps), updated) in places.into_iter().zip(updated) {
                let [first, second] = updated.moments;
                self.states[position] = Some(ParameterState {
                    first,
                    second,
                    master: Some(updated.parameter),
                    steps,
                });
                self.updated[position] = Some(updated.weight);
            }
        }
    }

    /// The parameter's step count including this step, and its update.
    pub(super) fn prepare(
        &mut self,
        position: usize,
        weight: Tensor<1>,
        gradient: Tensor<1>,
    ) -> (u64, AdamWUpdate) {
        let (first, second, master, steps) = match self.states[position].take() {
            Some(state) => (state.first, state.second, state.master, state.steps + 1),
            None => (gradient.zeros_like(), gradient.zeros_like(), None, 1),
        };
        let update = AdamWUpdate {
            parameter: master.unwrap_or_else(|| weight.cast(DType::F32)),
            moments: [first, second],
            gradient,
            scalars: self.scalars(position, steps),
        };
        (steps, update)
    }

    /// The new weight, for f32 weights.
    fn update(&mut self, position: usize, weight: Tensor<1>, gradient: Tensor<1>) -> Tensor<1> {
        let (steps, update) = self.prepare(position, weight, gradient);
        let [first, second] = update.moments;
        let scalars = update.scalars;
        let (updated, first, second) =
            kernels::adamw(update.parameter, first, second, update.gradient, scalars);
        self.states[position] = Some(ParameterState {
            first,
            second,
            master: None,
            steps,
        });
        if self.parameters.is_shared(position) {
            self.updated[position] = Some(updated.clone());
        }
        updated
    }

    fn scalars(&self, position: usize, steps: u64) -> AdamWScalars {
        let group = self.groups[position];
        let learning_rate = self.learning_rate * group.learning_rate_scale;
        let [beta1, beta2] = self.config.betas;
        let correction = |beta: f64| 1.0 - libm::pow(beta, steps as f64);
        let weight_decay = if group.decays {
            self.config.weight_decay
        } else {
            0.0
        };
        AdamWScalars {
            gradient_scale: self.factor,
            beta1,
            beta2,
            decay: 1.0 - learning_rate * weight_decay,
            step_size: learning_rate / correction(beta1),
            second_correction: correction(beta2).sqrt(),
            epsilon: self.config.eps,
        }
    }
}

#[cfg(test)]
#[path = "adamw_tests.rs"]
mod tests;
