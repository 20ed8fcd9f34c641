//! Moments and master weights on disk, as safetensors.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{DType, Device, Tensor, TensorData};
use safetensors::tensor::{SafeTensors, TensorView};
use verl_text::files;

use super::accumulate::TrainableParameters;
use super::adamw::{AdamW, ParameterState};
use crate::model::ModelError;

/// Metadata key of the optimiser's step count; for a parameter's step count it follows the parameter's name.
const STEPS: &str = "steps";

/// Separates a parameter's name from the part of its state.
const SEPARATOR: &str = "#";

impl AdamW {
    /// Writes moments, master weights and step counts to a safetensors file.
    ///
    /// Tensors are named after the parameter: `name#first`, `name#second` and, for weights that are not f32,
    /// `name#master`; all are flat and f32.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, parameters: &TrainableParameters, path: &Path) -> Result<(), ModelError> {
        let (tensors, metadata) = self.content(parameters);
        let failed = |error: safetensors::SafeTensorError| file("write", path, &error);
        let views = tensors.iter().map(|(name, data)| {
            let shape = vec![data.num_elements()];
            let view = TensorView::new(safetensors::Dtype::F32, shape, data.as_bytes());
            view.map(|view| (name.as_str(), view))
        });
        let views = views.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        files::write_safetensors(views, metadata, path).map_err(failed)
    }

    /// Moments and master weights by their names on disk, and step counts.
    pub(crate) fn content(
        &self,
        parameters: &TrainableParameters,
    ) -> (Vec<(String, TensorData)>, HashMap<String, String>) {
        let mut tensors: Vec<(String, TensorData)> = Vec::new();
        let mut metadata = HashMap::from([(STEPS.to_owned(), self.steps().to_string())]);
        for (parameter, state) in parameters.iter().zip(&self.states) {
            let Some(state) = state else { continue };
            let name = &parameter.name;
            let mut keep = |part: &str, tensor: &Tensor<1>| {
                let key = format!("{name}{SEPARATOR}{part}");
                tensors.push((key, tensor.clone().into_data()));
            };
            keep("first", &state.first);
            keep("second", &state.second);
            if let Some(master) = &state.master {
                keep("master", master);
            }
            metadata.insert(format!("{name}{SEPARATOR}{STEPS}"), state.steps.to_string());
        }
        (tensors, metadata)
    }

    /// Reads the file that [`AdamW::save`] wrote for the same parameters; on an error the state is unchanged.
    ///
    /// # Errors
    /// The file cannot be read or belongs to other parameters.
    pub fn load(
        &mut self,
        parameters: &TrainableParameters,
        path: &Path,
        device: &Device,
    ) -> Result<(), ModelError> {
        let bytes = std::fs::read(path).map_err(|error| file("read", path, &error))?;
        self.read(parameters, &bytes, path, device)
    }

    /// As [`AdamW::load`], from bytes; `path` is used in messages. Tensors with other names are ignored.
    pub(crate) fn read(
        &mut self,
        parameters: &TrainableParameters,
        bytes: &[u8],
        path: &Path,
        device: &Device,
    ) -> Result<(), ModelError> {
        let failed = |error: safetensors::SafeTensorError| file("read", path, &error);
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(failed)?;
        let stored = SafeTensors::deserialize(bytes).map_err(failed)?;
        let none = HashMap::new();
        let counts = header.metadata().as_ref().unwrap_or(&none);
        let count = |key: &str| counts.get(key).and_then(|text| text.parse::<u64>().ok());
        let flat = |key: String| {
            let view = stored.tensor(&key).ok()?;
            if view.dtype() != safetensors::Dtype::F32 {
                return None;
            }
            let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape(), DType::F32);
            Some(Tensor::<1>::from_data(data, device))
        };
        let steps = count(STEPS).ok_or_else(|| {
            file(
                "read",
                path,
                &"it is not an optimiser state (no step count)",
            )
        })?;
        let mut states = Vec::new();
        for parameter in parameters.iter() {
            let part = |part: &str| format!("{}{SEPARATOR}{part}", parameter.name);
            let state = match (
                flat(part("first")),
                flat(part("second")),
                count(&part(STEPS)),
            ) {
                (Some(first), Some(second), Some(steps)) => Some(ParameterState {
                    first,
                    second,
                    master: flat(part("master")),
                    steps,
                }),
                (None, None, None) => None,
                _ => {
                    let reason = format!("the state of `{}` is incomplete", parameter.name);
                    return Err(file("read", path, &reason));
                }
            };
            let lengths = state.iter().flat_map(|state| {
                let moments = [&state.first, &state.second].into_iter();
                moments.chain(&state.master).map(|tensor| tensor.dims()[0])
            });
            if lengths.into_iter().any(|length| length != parameter.length) {
                let reason = format!("the state of `{}` has a different size", parameter.name);
                return Err(file("read", path, &reason));
            }
            states.push(state);
        }
        if counts.len() != 1 + states.iter().flatten().count() {
            return Err(file(
                "read",
                path,
                &"it contains parameters that the model lacks",
            ));
        }
        self.states = states;
        self.steps = steps;
        Ok(())
    }
}

fn file(action: &'static str, path: &Path, reason: &dyn std::fmt::Display) -> ModelError {
    ModelError::File {
        action,
        path: path.display().to_string(),
        reason: reason.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::OptimizerConfig;
    use crate::toy::Toy;

    fn optimizer() -> AdamW {
        AdamW::new(OptimizerConfig::default()).expect("valid settings")
    }

    fn step(optimizer: &mut AdamW, toy: Toy) -> Toy {
        let parameters = TrainableParameters::new(&toy);
        let gradient = Tensor::from_data([0.5, -1.0, 2.0], &Device::flex());
        let (toy, report) = optimizer.step(toy, &parameters, vec![Some(gradient)]);
        report.expect("a finite gradient");
        toy
    }

    fn bytes(toy: &Toy) -> Vec<u8> {
        toy.embedding.val().into_data().as_bytes().to_vec()
    }

    #[test]
    fn a_loaded_state_steps_to_the_same_bits() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("optimizer.safetensors");
        for dtype in [DType::F32, DType::BF16] {
            let mut saved = optimizer();
            let toy = step(&mut saved, Toy::new(3, 1, 8).cast(dtype));
            let toy = step(&mut saved, toy);
            let parameters = TrainableParameters::new(&toy);
            saved.save(&parameters, &path).expect("a writable folder");
            let mut loaded = optimizer();
            loaded
                .load(&parameters, &path, &Device::flex())
                .expect("a state of the same model");
            assert_eq!(loaded.steps(), 2);
            let expected = step(&mut saved, toy.clone());
            assert_eq!(bytes(&step(&mut loaded, toy)), bytes(&expected));
        }
    }

    #[test]
    fn the_state_of_another_model_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("optimizer.safetensors");
        let mut saved = optimizer();
        let toy = step(&mut saved, Toy::new(3, 1, 8));
        saved
            .save(&TrainableParameters::new(&toy), &path)
            .expect("a writable folder");
        let refused = |toy: Toy| {
            let mut other = optimizer();
            let error = other.load(&TrainableParameters::new(&toy), &path, &Device::flex());
            assert_eq!(other.steps(), 0);
            error.expect_err("another model").to_string()
        };
        let wider = refused(Toy::new(4, 1, 8));
        assert!(
            wider.ends_with("the state of `embedding` has a different size"),
            "{wider}"
        );
        let frozen = refused(Toy::new(3, 1, 8).freezing("embedding"));
        assert!(
            frozen.ends_with("it contains parameters that the model lacks"),
            "{frozen}"
        );
    }
}
