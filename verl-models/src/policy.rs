//! A model with its optimiser, as stages use it.

use std::any::Any;
use std::path::Path;

use burn::module::ParamId;
use burn::tensor::{Device, Tensor};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::model::{
    ModelError, ModelInterface, PackedScores, PolicyModel, ScoreRow, Scores, StepReport,
};
use crate::optim::{
    AdamW, GradientAccumulator, OptimizerConfig, OptimizerConfigError, TrainableParameters,
};
use crate::packing::{Packed, TrainingBatch};
use crate::rollout::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};
use crate::rows::{self, Call, CallLimits};
use crate::weights::{Loader, Weights};

/// Tokens whose logits are in memory at once while training.
const TRAIN_CHUNK: usize = 256;

/// Why a module is always there.
const PRESENT: &str = "the module is absent only inside an optimiser step";

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
        self.module.as_ref().expect(PRESENT)
    }

    /// Writes the optimiser's state (moments, master weights, step counts) to a safetensors file.
    ///
    /// # Errors
    /// A frozen model; a file that cannot be written.
    pub fn save_optimizer(&self, path: &Path) -> Result<(), ModelError> {
        let training = self.training.as_ref().ok_or(ModelError::Frozen)?;
        training.optimizer.save(&training.parameters, path)
    }

    /// Reads what [`Policy::save_optimizer`] wrote; on an error nothing changes.
    ///
    /// # Errors
    /// A frozen model; a file that cannot be read or is of another model.
    pub fn load_optimizer(&mut self, path: &Path) -> Result<(), ModelError> {
        let device = self.device();
        let training = self.training.as_mut().ok_or(ModelError::Frozen)?;
        let parameters = &training.parameters;
        training.optimizer.load(parameters, path, &device)
    }

    /// Where the weights are.
    fn device(&self) -> Device {
        let devices = self.module().devices();
        devices.into_iter().next().unwrap_or_else(Device::flex)
    }

    fn check(&self, rows: &[ScoreRow<'_>]) -> Result<(), ModelError> {
        rows::check(rows, self.vocab_size(), self.max_tokens())
    }
}

/// Scores the rows of one padded call, in the order of its rows.
fn score_call<M: ModelInterface>(
    module: &M,
    call: &Call,
    rows: &[ScoreRow<'_>],
    device: &Device,
    (temperature, entropies, limits): (f64, bool, CallLimits),
) -> Vec<Scores> {
    let mut packed = Packed::default();
    for (place, &row) in call.rows.iter().enumerate() {
        for token in 0..rows[row].response.len() {
            packed.push(place * call.width, place, &rows[row], token);
        }
    }
    let tokens = packed.rows.len();
    let chunk = limits.product_len(call, tokens);
    packed.pad(tokens.next_multiple_of(chunk));
    let picked = call.rows.iter().map(|&row| &rows[row]);
    let ids = rows::padded_ids(picked, call.height, call.width, device);
    let (log_probs, found) = packed.score(module, ids, device, temperature, entropies, chunk);
    let mut scores = vec![Scores::default(); call.rows.len()];
    for (&place, value) in packed.rows.iter().zip(log_probs.into_data().iter::<f32>()) {
        scores[place].log_probs.push(value);
    }
    if let Some(found) = found {
        for (&place, value) in packed.rows.iter().zip(found.into_data().iter::<f32>()) {
            scores[place].entropies.push(value);
        }
    }
    scores
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
        let device = self.device();
        let on_cpu = device == Device::flex();
        let limits = if on_cpu {
            CallLimits::CPU
        } else {
            CallLimits::GPU
        };
        let calls = rows::calls(rows, self.max_tokens(), limits);
        // Modules may be sent to another thread, but not shared with it: each call gets a handle of its own.
        let jobs: Vec<_> = calls
            .iter()
            .map(|call| (call, self.module().clone()))
            .collect();
        let run = |(call, module): (&Call, M)| {
            let settings = (temperature, entropies, limits);
            score_call(&module, call, rows, &device, settings)
        };
        // One call leaves cores idle, as only large products are split among threads. A GPU has a stream a thread and
        // a pool of memory a stream, so there calls stay on this thread.
        let scores: Vec<Vec<Scores>> = if on_cpu {
            jobs.into_par_iter().map(run).collect()
        } else {
            jobs.into_iter().map(run).collect()
        };
        let mut results = vec![Scores::default(); rows.len()];
        for (call, scores) in calls.iter().zip(scores) {
            for (&row, scores) in call.rows.iter().zip(scores) {
                results[row] = scores;
            }
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
        let module = self.module.as_ref().expect(PRESENT);
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
        let values = loss.shape().num_elements();
        if values != 1 {
            return Err(ModelError::LossShape { values });
        }
        let value = loss.clone().without_autodiff().into_scalar::<f64>();
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
        let module = self.module.take().expect(PRESENT);
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
            // Gradients of other weights are of no use.
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

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
