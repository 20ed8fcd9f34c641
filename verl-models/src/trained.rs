//! A module with its optimiser: the common part of policies and critics.

mod stored;
mod synced;

use std::any::Any;
use std::path::Path;

use burn::module::{Module, ParamId};
use burn::tensor::{Device, Tensor};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use verl_decoder::parameters::visit_parameters;
use verl_kernels::device::DeviceKind;
use verl_reshard::Staging;
use verl_rollout::engine::{RolloutError, WeightTensor};

use crate::model::{ModelError, ParameterGroup, StepReport};
use crate::optim::accumulate::Collected;
use crate::optim::{
    AdamW, GradientAccumulator, OptimizerConfig, OptimizerConfigError, TrainableParameters,
};
use crate::weights::{self, Loader, Weights};

/// Why the module is always present.
const PRESENT: &str = "the module is absent only inside an optimiser step";

/// A module, without autodiff, and its optimiser unless it is frozen.
pub(crate) struct Trained<M: Module> {
    /// Only absent while an optimiser step maps it.
    pub(crate) module: Option<M>,
    pub(crate) training: Option<Training>,
    /// Weights that arrive; made when the first version is announced.
    staging: Option<Staging>,
}

/// The training state of a module.
pub(crate) struct Training {
    pub(crate) parameters: TrainableParameters,
    pub(crate) accumulator: GradientAccumulator,
    pub(crate) optimizer: AdamW,
}

/// The outcome of a backward pass.
#[derive(Debug)]
pub(crate) struct Backward {
    /// The loss.
    pub loss: f64,
    /// The gradients; `None` if nothing is trained.
    pub gradients: Option<Collected>,
}

impl Backward {
    /// The outcome if no token is trained on.
    pub const NOTHING: Backward = Backward {
        loss: 0.0,
        gradients: None,
    };
}

/// Implements [`TrainedModel`](crate::model::TrainedModel) for `$model` by its [`Trained`] module, which is the field
/// `$trained`.
macro_rules! trained_model {
    ($model:ty, $($trained:ident).+ $(, $module:ident: $interface:path)?) => {
        impl$(<$module: $interface>)? $crate::model::TrainedModel for $model {
            fn optimizer_step(
                &mut self,
            ) -> Result<$crate::model::StepReport, $crate::model::ModelError> {
                self.$($trained).+.optimizer_step()
            }

            fn optimizer_steps(&self) -> u64 {
                self.$($trained).+.optimizer_steps()
            }

            fn round_len(&self) -> usize {
                self.$($trained).+.round_len()
            }

            fn weights_hash(&self) -> String {
                self.$($trained).+.weights_hash()
            }

            fn snapshot(&self) -> Box<dyn std::any::Any + Send + Sync> {
                self.$($trained).+.snapshot()
            }

            fn restore(&mut self, snapshot: &(dyn std::any::Any + Send + Sync)) -> bool {
                self.$($trained).+.restore(snapshot)
            }

            fn store(
                &self,
                snapshot: &(dyn std::any::Any + Send + Sync),
            ) -> Result<Option<Vec<u8>>, $crate::model::ModelError> {
                self.$($trained).+.store(snapshot)
            }

            fn recall(
                &self,
                bytes: &[u8],
            ) -> Result<Option<Box<dyn std::any::Any + Send + Sync>>, $crate::model::ModelError> {
                self.$($trained).+.recall(bytes).map(Some)
            }

            fn weight_source(
                &self,
                version: verl_reshard::WeightsVersion,
                bucket_bytes: usize,
            ) -> Result<Option<Box<dyn verl_reshard::WeightSource>>, verl_reshard::SyncError> {
                let source = self.$($trained).+.weight_source(version, bucket_bytes);
                source.map(Some)
            }

            fn weight_sink(&mut self) -> Option<&mut dyn verl_reshard::WeightSink> {
                Some(&mut self.$($trained).+)
            }

            fn save(&self, dir: &std::path::Path) -> Result<(), $crate::model::ModelError> {
                self.$($trained).+.exported().save(dir)
            }

            fn vocab_size(&self) -> usize {
                self.$($trained).+.module().vocab_size()
            }

            fn max_tokens(&self) -> usize {
                self.$($trained).+.module().max_tokens()
            }
        }
    };
}
pub(crate) use trained_model;

/// Weights and optimiser at a point in time.
pub(crate) struct Snapshot {
    pub(crate) weights: Vec<(ParamId, Tensor<1>)>,
    pub(crate) optimizer: Option<AdamW>,
}

impl<M: Module> Trained<M> {
    /// Wraps a module; without optimiser settings it is frozen. `group` returns how the optimiser treats the parameter
    /// with a name and rank.
    ///
    /// # Errors
    /// An invalid setting of the optimiser.
    pub(crate) fn new(
        module: M,
        group: impl Fn(&M, &str, usize) -> ParameterGroup,
        optimizer: Option<OptimizerConfig>,
    ) -> Result<Self, OptimizerConfigError> {
        let module = weights::dense(module.valid());
        let training = match optimizer {
            Some(config) => Some(Training {
                parameters: TrainableParameters::grouped(&module, &|name, rank| {
                    group(&module, name, rank)
                }),
                accumulator: GradientAccumulator::default(),
                optimizer: AdamW::new(config)?,
            }),
            None => None,
        };
        Ok(Trained {
            module: Some(module),
            training,
            staging: None,
        })
    }

    /// A frozen model that shares the buffers of `module`, which does not track gradients.
    pub(crate) fn frozen(module: M) -> Self {
        Trained {
            module: Some(module),
            training: None,
            staging: None,
        }
    }

    /// Micro-batches that are computed at the same time.
    pub(crate) fn round_len(&self) -> usize {
        1
    }

    /// # Panics
    /// Panics if an earlier optimiser step panicked.
    pub(crate) fn module(&self) -> &M {
        self.module.as_ref().expect(PRESENT)
    }

    /// The device of the weights.
    pub(crate) fn device(&self) -> Device {
        let devices = self.module().devices();
        devices.into_iter().next().unwrap_or_else(Device::flex)
    }

    /// # Errors
    /// The model is frozen, or the file cannot be written.
    pub(crate) fn save_optimizer(&self, path: &Path) -> Result<(), ModelError> {
        let training = self.training.as_ref().ok_or(ModelError::Frozen)?;
        training.optimizer.save(&training.parameters, path)
    }

    /// On an error nothing changes.
    ///
    /// # Errors
    /// The model is frozen, or the file cannot be read or belongs to another model.
    pub(crate) fn load_optimizer(&mut self, path: &Path) -> Result<(), ModelError> {
        let device = self.device();
        let training = self.training.as_mut().ok_or(ModelError::Frozen)?;
        let parameters = &training.parameters;
        training.optimizer.load(parameters, path, &device)
    }

    /// The result of `run` for each call, in order; calls run in parallel where that helps.
    pub(crate) fn run_calls<C: Sync, T: Send>(
        &self,
        calls: &[C],
        run: impl Fn(&M, &C) -> T + Send + Sync,
    ) -> Vec<T> {
        // Modules are `Send` but not `Sync`, so each call gets its own handle.
        let jobs: Vec<_> = calls
            .iter()
            .map(|call| (call, self.module().clone()))
            .collect();
        let run = |(call, module): (&C, M)| run(&module, call);
        // A single call leaves cores idle, because only large products are split among threads. A GPU has one stream
        // per thread and one memory pool per stream, so there calls stay on this thread.
        if DeviceKind::of(&self.device()).is_host() {
            jobs.into_par_iter().map(run).collect()
        } else {
            jobs.into_iter().map(run).collect()
        }
    }

    /// # Errors
    /// [`ModelError::Frozen`].
    pub(crate) fn check_trainable(&self) -> Result<(), ModelError> {
        match self.training {
            Some(_) => Ok(()),
            None => Err(ModelError::Frozen),
        }
    }

    /// Computes the loss of a forward pass with autodiff and adds its gradients to the f32 accumulators.
    ///
    /// # Errors
    /// As [`Trained::backward`]; the accumulators are then unchanged.
    pub(crate) fn accumulate(
        &mut self,
        loss: impl FnOnce(&M, &Device) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        let done = self.backward(loss)?;
        self.add(done)
    }

    /// Adds the gradients of a backward pass to the f32 accumulators; returns its loss.
    ///
    /// # Errors
    /// [`ModelError::Frozen`].
    pub(crate) fn add(&mut self, done: Backward) -> Result<f64, ModelError> {
        let training = self.training.as_mut().ok_or(ModelError::Frozen)?;
        if let Some(gradients) = done.gradients {
            training.accumulator.add_collected(gradients);
        }
        Ok(done.loss)
    }

    /// Computes the loss of a forward pass with autodiff, and its gradients in f32.
    ///
    /// # Errors
    /// The model is frozen, the loss is not a single number, or the loss or a gradient is not finite.
    pub(crate) fn backward(
        &self,
        loss: impl FnOnce(&M, &Device) -> Tensor<1>,
    ) -> Result<Backward, ModelError> {
        let device = self.device().autodiff();
        let training = self.training.as_ref().ok_or(ModelError::Frozen)?;
        let parameters = &training.parameters;
        let module = parameters.differentiable(self.module());
        let loss = loss(&module, &device);
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
        let gradients = loss
            .is_tracked()
            .then(|| Collected::of(parameters, &module, loss.backward()));
        Ok(Backward {
            loss: value,
            gradients: gradients.transpose()?,
        })
    }

    /// # Errors
    /// A gradient is not finite (the weights are then unchanged), or the model is frozen.
    pub(crate) fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        let training = self.training.as_mut().ok_or(ModelError::Frozen)?;
        let module = self.module.take().expect(PRESENT);
        let gradients = training.accumulator.take_accumulated();
        let (module, report) =
            training
                .optimizer
                .step_accumulated(module, &training.parameters, gradients);
        self.module = Some(module);
        report
    }

    /// The module to save: with the optimiser's f32 weights instead of those that the module stores in a narrower type.
    ///
    /// A folder in f32 then contains the trained weights, and one in bf16 the module's own weights, which are the
    /// rounded ones.
    pub(crate) fn exported(&self) -> M {
        let optimizer = self.training.as_ref().map(|training| &training.optimizer);
        self.exported_with(optimizer)
    }

    /// [`Trained::exported`] with the weights of this optimiser.
    pub(crate) fn exported_with(&self, optimizer: Option<&AdamW>) -> M {
        let module = self.module().clone();
        let (Some(training), Some(optimizer)) = (&self.training, optimizer) else {
            return module;
        };
        let weights = optimizer.masters_by_id(&training.parameters);
        match weights.is_empty() {
            true => module,
            false => module.map(&mut Loader { weights }),
        }
    }

    pub(crate) fn optimizer_steps(&self) -> u64 {
        self.training
            .as_ref()
            .map_or(0, |training| training.optimizer.steps())
    }

    /// Hash of the weights' bytes, in hexadecimal.
    pub(crate) fn weights_hash(&self) -> String {
        let mut weights = Weights::of(self.module()).named;
        weights.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut hash = Sha256::new();
        for (_, tensor) in weights {
            hash.update(tensor.into_data().as_bytes());
        }
        let digest = hash.finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Passes every weight to `each`, in the order of the module.
    ///
    /// # Errors
    /// A weight of a type that safetensors does not support; an error of `each`, after which no weight is read.
    pub(crate) fn tensors(
        &self,
        each: &mut dyn FnMut(WeightTensor<'_>) -> Result<(), RolloutError>,
    ) -> Result<(), RolloutError> {
        let mut result = Ok(());
        visit_parameters(self.module(), |name, shape, read| {
            if result.is_err() {
                return;
            }
            let data = read();
            let dtype = stored::stored_type(data.dtype());
            let dtype = dtype.map_err(|error| RolloutError::Device {
                reason: error.to_string(),
            });
            result = dtype.and_then(|dtype| {
                each(WeightTensor {
                    name,
                    dtype: &dtype.to_string(),
                    shape,
                    bytes: data.as_bytes(),
                })
            });
        });
        result
    }

    pub(crate) fn snapshot(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(Snapshot {
            weights: Weights::of(self.module()).by_id,
            optimizer: self
                .training
                .as_ref()
                .map(|training| training.optimizer.clone()),
        })
    }

    /// Restores a snapshot of the same module; returns `false` if it belongs to another one.
    pub(crate) fn restore(&mut self, snapshot: &(dyn Any + Send + Sync)) -> bool {
        let Some(snapshot) = snapshot.downcast_ref::<Snapshot>() else {
            return false;
        };
        let own = Weights::of(self.module()).by_id;
        let same = own.len() == snapshot.weights.len()
            && own
                .iter()
                .zip(&snapshot.weights)
                .all(|(own, saved)| own.0 == saved.0 && own.1.shape() == saved.1.shape())
            && self.training.is_some() == snapshot.optimizer.is_some();
        drop(own);
        let Some(module) = self.module.take_if(|_| same) else {
            return false;
        };
        let weights = snapshot.weights.iter().cloned().collect();
        self.module = Some(module.map(&mut Loader { weights }));
        if let (Some(training), Some(optimizer)) = (&mut self.training, &snapshot.optimizer) {
            training.optimizer = optimizer.clone();
            // Gradients of other weights are useless.
            training.accumulator = GradientAccumulator::default();
        }
        true
    }
}
