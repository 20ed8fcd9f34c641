//! Snapshots as bytes in the safetensors format, so that they can be stored on disk.
//!
//! Weights are `name#weight`, flat and in the module's type; the optimiser's tensors and step counts are those of
//! [`AdamW::save`].

use std::any::Any;
use std::collections::HashMap;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::tensor::{SafeTensors, TensorView};

use super::{Snapshot, Trained};
use crate::model::ModelError;
use crate::weights::Weights;

/// Name of the bytes in messages.
const NAME: &str = "a stored snapshot";

impl<M: Module> Trained<M> {
    /// A snapshot of this module as bytes; `None` if it belongs to another kind of module.
    ///
    /// # Errors
    /// Weights of a type that safetensors does not support.
    pub(crate) fn store(
        &self,
        snapshot: &(dyn Any + Send + Sync),
    ) -> Result<Option<Vec<u8>>, ModelError> {
        let Some(snapshot) = snapshot.downcast_ref::<Snapshot>() else {
            return Ok(None);
        };
        let names = Weights::of(self.module()).named;
        let weights = names.iter().zip(&snapshot.weights);
        let mut tensors: Vec<(String, TensorData)> = weights
            .map(|((name, _), (_, weight))| (weight_name(name), weight.clone().into_data()))
            .collect();
        let mut counts = HashMap::new();
        if let (Some(optimizer), Some(training)) = (&snapshot.optimizer, &self.training) {
            let (more, steps) = optimizer.content(&training.parameters);
            tensors.extend(more);
            counts = steps;
        }
        let views = tensors.iter().map(|(name, data)| {
            let shape = vec![data.num_elements()];
            let view = TensorView::new(stored_type(data.dtype())?, shape, data.as_bytes());
            view.map(|view| (name.as_str(), view)).map_err(write_error)
        });
        let views = views.collect::<Result<Vec<_>, _>>()?;
        let bytes = safetensors::serialize(views, Some(counts)).map_err(write_error)?;
        Ok(Some(bytes))
    }

    /// The snapshot whose bytes [`Trained::store`] returned.
    ///
    /// # Errors
    /// The bytes are not such a snapshot, or belong to another module.
    pub(crate) fn recall(&self, bytes: &[u8]) -> Result<Box<dyn Any + Send + Sync>, ModelError> {
        let stored =
            SafeTensors::deserialize(bytes).map_err(|e| snapshot_error("read", &e.to_string()))?;
        let device = self.device();
        let own = Weights::of(self.module());
        let mut weights = Vec::with_capacity(own.by_id.len());
        for ((name, _), (id, weight)) in own.named.iter().zip(&own.by_id) {
            let other = |what: &str| {
                snapshot_error("read", &format!("it belongs to another model: {what}"))
            };
            let missing = || other(&format!("no `{name}` of this size"));
            let view = stored.tensor(&weight_name(name)).map_err(|_| missing())?;
            if view.shape() != [weight.dims()[0]] {
                return Err(missing());
            }
            let dtype = weight.dtype();
            if view.dtype() != stored_type(dtype)? {
                let stored = view.dtype();
                return Err(other(&format!(
                    "its weights are {stored}, but this model has {dtype:?}; load the model in the type that it had then"
                )));
            }
            let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape(), dtype);
            weights.push((*id, Tensor::from_data(data, (&device, dtype))));
        }
        let optimizer = match &self.training {
            Some(training) => {
                let mut optimizer = training.optimizer.clone();
                optimizer.read(&training.parameters, bytes, Path::new(NAME), &device)?;
                Some(optimizer)
            }
            None => None,
        };
        Ok(Box::new(Snapshot { weights, optimizer }))
    }
}

fn weight_name(name: &str) -> String {
    format!("{name}#weight")
}

pub(super) fn stored_type(dtype: DType) -> Result<safetensors::Dtype, ModelError> {
    match dtype {
        DType::F32 => Ok(safetensors::Dtype::F32),
        DType::BF16 => Ok(safetensors::Dtype::BF16),
        DType::F16 => Ok(safetensors::Dtype::F16),
        DType::F64 => Ok(safetensors::Dtype::F64),
        other => Err(snapshot_error(
            "write",
            &format!("weights of type {other:?} cannot be stored"),
        )),
    }
}

fn write_error(error: safetensors::SafeTensorError) -> ModelError {
    snapshot_error("write", &error.to_string())
}

fn snapshot_error(action: &'static str, reason: &str) -> ModelError {
    ModelError::File {
        action,
        path: NAME.to_owned(),
        reason: reason.to_owned(),
    }
}
