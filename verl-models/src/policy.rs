//! A model with its optimiser, as stages use it.

use std::any::Any;
use std::collections::HashMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor};
use sha2::{Digest, Sha256};

use crate::model::{
    ModelError, ModelInterface, PackedScores, PolicyModel, ScoreRow, Scores, StepReport,
};
use crate::optim::{
    AdamW, GradientAccumulator, OptimizerConfig, OptimizerConfigError, TrainableParameters,
};
use crate::rollout::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};
use crate::rows::{self, Call};
use crate::scoring::linear_log_probs;

/// Tokens whose logits are in memory at once while training.
const TRAIN_CHUNK: usize = 256;

/// Tokens of a product with the head while scoring. All products have exactly as many rows, padding included, so that
/// a token's result does not depend on how many others there are.
const SCORE_CHUNK: usize = 64;

/// A model with an optimiser, or a frozen one without.
///
/// The module inside never tracks gradients; the one that does is made for each micro-batch and shares its buffers.
/// So rollouts and scores read the weights that training writes, without a copy, and an optimiser step writes in
/// place unless a snapshot holds the old weights.
pub struct Policy<M: ModelInterface> {
    /// Only absent while an optimiser step maps it.
    module: Option<M>,
    training: Option<Training>,
}

/// What a policy has beyond its weights when it is trained.
struct Training {
    parameters: TrainableParameters,
    accumulator: GradientAccumulator,
    optimizer: AdamW,
}

/// Weights and optimiser at one moment.
struct Snapshot {
    weights: Vec<(ParamId, Tensor<1>)>,
    optimizer: Option<AdamW>,
}

impl<M: ModelInterface> Policy<M> {
    /// Wraps a module; without optimiser settings it is frozen.
    ///
    /// # Errors
    /// A setting of the optimiser that makes no sense.
    pub fn new(
        module: M,
        optimizer: Option<OptimizerConfig>,
    ) -> Result<Self, OptimizerConfigError> {
        let module = module.valid();
        let training = match optimizer {
            Some(config) => Some(Training {
                parameters: TrainableParameters::new(&module),
                accumulator: GradientAccumulator::default(),
                optimizer: AdamW::new(config)?,
            }),
            None => None,
        };
        Ok(Policy {
            module: Some(module),
            training,
        })
    }

    /// The module, without autodiff.
    ///
    /// # Panics
    /// When an optimiser step panicked before.
    pub fn module(&self) -> &M {
        self.module
            .as_ref()
            .expect("the module is absent only inside an optimiser step")
    }

    /// Where the weights are.
    fn device(&self) -> Device {
        let devices = self.module().devices();
        devices.into_iter().next().unwrap_or_else(Device::flex)
    }

    fn check(&self, rows: &[ScoreRow<'_>]) -> Result<(), ModelError> {
        rows::check(rows, self.vocab_size(), self.max_tokens())
    }

    /// Scores the rows of one padded call into `results`.
    fn score_call(
        &self,
        call: &Call,
        rows: &[ScoreRow<'_>],
        temperature: f64,
        entropies: bool,
        results: &mut [Scores],
    ) {
        let device = self.device();
        let mut packed = Packed::default();
        for (place, &row) in call.rows.iter().enumerate() {
            for token in 0..rows[row].response.len() {
                packed.push(place * call.width, row, &rows[row], token);
            }
        }
        let tokens = packed.rows.len();
        packed.pad(tokens.next_multiple_of(SCORE_CHUNK));
        let picked = call.rows.iter().map(|&row| &rows[row]);
        let ids = rows::padded_ids(picked, call.height, call.width, &device);
        let (log_probs, found) = packed.score(
            self.module(),
            ids,
            &device,
            temperature,
            entropies,
            SCORE_CHUNK,
        );
        let log_probs = log_probs.into_data();
        for (&row, value) in packed.rows.iter().zip(log_probs.iter::<f32>()) {
            results[row].log_probs.push(value);
        }
        if let Some(found) = found {
            for (&row, value) in packed.rows.iter().zip(found.into_data().iter::<f32>()) {
                results[row].entropies.push(value);
            }
        }
    }
}

/// Response tokens of a call, one after the other.
#[derive(Default)]
struct Packed {
    /// Index of the hidden state that predicts each token, in the flattened call.
    positions: Vec<i32>,
    targets: Vec<i32>,
    rows: Vec<usize>,
}

impl Packed {
    /// Adds response token `token` of row `row`, which starts at `start` in the flattened call.
    fn push(&mut self, start: usize, row: usize, tokens: &ScoreRow<'_>, token: usize) {
        let predictor = start + tokens.prompt.len() + token - 1;
        self.positions.push(predictor as i32);
        self.targets.push(tokens.response[token] as i32);
        self.rows.push(row);
    }

    /// Fills up with tokens of no row.
    fn pad(&mut self, length: usize) {
        self.positions.resize(length, 0);
        self.targets.resize(length, 0);
    }

    /// Forward pass of the padded `ids`, then log-probs and entropies of the packed tokens only.
    fn score<M: ModelInterface>(
        &self,
        module: &M,
        ids: Tensor<2, burn::tensor::Int>,
        device: &Device,
        temperature: f64,
        entropies: bool,
        chunk: usize,
    ) -> (Tensor<1>, Option<Tensor<1>>) {
        let hidden = module.hidden(ids); // [B, S, D]
        let [b, s, d] = hidden.dims();
        let positions = rows::indices(self.positions.clone(), device);
        let hidden = hidden.reshape([b * s, d]).select(0, positions); // [N, D]
        let targets = rows::indices(self.targets.clone(), device);
        // Greedy rollouts report log-probs of temperature 1.
        let temperature = if temperature == 0.0 { 1.0 } else { temperature };
        linear_log_probs(
            hidden,
            module.head(),
            targets,
            temperature,
            entropies,
            chunk,
        )
    }
}

impl<M: ModelInterface> PolicyModel for Policy<M> {
    fn generate(
        &self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut dyn FnMut(usize, RolloutOutput) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        self.module().generate(requests, settings, on_done)
    }

    fn score(
        &self,
        rows: &[ScoreRow<'_>],
        temperature: f64,
        entropies: bool,
    ) -> Result<Vec<Scores>, ModelError> {
        self.check(rows)?;
        let mut results = vec![Scores::default(); rows.len()];
        for call in rows::calls(rows, self.max_tokens()) {
            self.score_call(&call, rows, temperature, entropies, &mut results);
        }
        Ok(results)
    }

    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        temperature: f64,
        entropies: bool,
        loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        self.check(rows)?;
        let device = self.device().autodiff();
        let Some(training) = &mut self.training else {
            return Err(ModelError::Frozen);
        };
        let Some(batch) = TrainingBatch::new(rows, select) else {
            return Ok(0.0);
        };
        let module = self.module.as_ref().ok_or(ModelError::Frozen)?;
        let module = training.parameters.differentiable(module);
        let picked = batch.rows.iter().map(|&row| &rows[row]);
        let ids = rows::padded_ids(picked, batch.rows.len(), batch.width, &device);
        let (log_probs, entropies) =
            batch
                .packed
                .score(&module, ids, &device, temperature, entropies, TRAIN_CHUNK);
        let loss = loss(PackedScores {
            log_probs,
            entropies,
            rows: batch.packed.rows,
        });
        let value = loss.clone().inner().into_scalar::<f64>();
        if !value.is_finite() {
            return Err(ModelError::NonFinite {
                what: "loss".to_owned(),
                value,
            });
        }
        if loss.is_tracked() {
            let gradients = loss.backward();
            let Training {
                parameters,
                accumulator,
                ..
            } = training;
            accumulator.add(parameters, &module, gradients)?;
        }
        Ok(value)
    }

    fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        let training = self.training.as_mut().ok_or(ModelError::Frozen)?;
        let module = self.module.take().ok_or(ModelError::Frozen)?;
        let gradients = training.accumulator.take();
        let (module, report) = training
            .optimizer
            .step(module, &training.parameters, gradients);
        self.module = Some(module);
        report
    }

    fn optimizer_steps(&self) -> u64 {
        self.training
            .as_ref()
            .map_or(0, |training| training.optimizer.steps())
    }

    fn weights_hash(&self) -> String {
        let mut weights = Weights::of(self.module()).named;
        weights.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut hash = Sha256::new();
        for (_, tensor) in weights {
            hash.update(tensor.into_data().as_bytes());
        }
        let digest = hash.finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn snapshot(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(Snapshot {
            weights: Weights::of(self.module()).by_id,
            optimizer: self
                .training
                .as_ref()
                .map(|training| training.optimizer.clone()),
        })
    }

    fn restore(&mut self, snapshot: &(dyn Any + Send + Sync)) -> bool {
        let Some(snapshot) = snapshot.downcast_ref::<Snapshot>() else {
            return false;
        };
        let own = Weights::of(self.module()).by_id;
        let same = own.len() == snapshot.weights.len()
            && own
                .iter()
                .zip(&snapshot.weights)
                .all(|(own, kept)| own.0 == kept.0 && own.1.shape() == kept.1.shape())
            && self.training.is_some() == snapshot.optimizer.is_some();
        drop(own);
        let Some(module) = self.module.take_if(|_| same) else {
            return false;
        };
        let weights = snapshot.weights.iter().cloned().collect();
        self.module = Some(module.map(&mut Loader { weights }));
        if let (Some(training), Some(optimizer)) = (&mut self.training, &snapshot.optimizer) {
            training.optimizer = optimizer.clone();
            training.accumulator = GradientAccumulator::default();
        }
        true
    }

    fn save(&self, dir: &Path) -> Result<(), ModelError> {
        self.module().save(dir)
    }

    fn vocab_size(&self) -> usize {
        self.module().vocab_size()
    }

    fn max_tokens(&self) -> usize {
        self.module().max_tokens()
    }
}

/// What a micro-batch runs through the model: rows with a selected token, up to the last one that is needed.
struct TrainingBatch {
    rows: Vec<usize>,
    width: usize,
    packed: Packed,
}

impl TrainingBatch {
    /// None where no token is selected.
    fn new(rows: &[ScoreRow<'_>], select: &dyn Fn(usize, usize) -> bool) -> Option<Self> {
        let selected: Vec<(usize, Vec<usize>)> = rows
            .iter()
            .enumerate()
            .map(|(row, tokens)| {
                let chosen = (0..tokens.response.len()).filter(|&token| select(row, token));
                (row, chosen.collect())
            })
            .filter(|(_, chosen): &(usize, Vec<usize>)| !chosen.is_empty())
            .collect();
        let lengths = selected
            .iter()
            .filter_map(|(row, chosen)| Some(rows::input_len(&rows[*row], chosen.last()? + 1)));
        let width = lengths.max()?;
        let mut packed = Packed::default();
        for (place, (row, chosen)) in selected.iter().enumerate() {
            for &token in chosen {
                packed.push(place * width, *row, &rows[*row], token);
            }
        }
        Some(TrainingBatch {
            rows: selected.into_iter().map(|(row, _)| row).collect(),
            width,
            packed,
        })
    }
}

/// Flat views of all float parameters, in the order of the module; a parameter held twice is listed once.
#[derive(Default)]
struct Weights {
    path: Vec<String>,
    by_id: Vec<(ParamId, Tensor<1>)>,
    named: Vec<(String, Tensor<1>)>,
}

impl Weights {
    fn of<M: Module>(module: &M) -> Self {
        let mut weights = Weights::default();
        module.visit(&mut weights);
        weights
    }
}

impl ModuleVisitor for Weights {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.by_id.iter().any(|(id, _)| *id == param.id) {
            return;
        }
        let weight = param.base();
        let length = weight.shape().num_elements();
        let weight: Tensor<1> = weight.reshape([length]);
        self.named.push((self.path.join("."), weight.clone()));
        self.by_id.push((param.id, weight));
    }
}

/// Puts flat weights back.
struct Loader {
    weights: HashMap<ParamId, Tensor<1>>,
}

impl ModuleMapper for Loader {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.weights.get(&param.id) {
            Some(weight) => {
                let weight = weight.clone();
                param.map(|old| weight.reshape(old.shape()))
            }
            None => param,
        }
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
