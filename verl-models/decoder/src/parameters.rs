//! A module's parameters by name.
//!
//! Names are field paths joined by dots. For the decoders of this crate they match the checkpoint's names, such as
//! `model.layers.0.self_attn.q_proj.weight`.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::tensor::{SafeTensors, TensorView};
use verl_kernels::random;
use verl_text::files;

use crate::blocks::norm::to_dtype;
use crate::error::ModelError;

/// Name and shape of every parameter in the order of the module's fields; nothing is read from a device.
pub fn named_parameters<M: Module>(module: &M) -> Vec<(String, Vec<usize>)> {
    let mut names = Vec::new();
    visit_parameters(module, |name, shape, _| {
        names.push((name.to_string(), shape.to_vec()))
    });
    names
}

/// Calls `see(name, shape, read)` for every parameter; `read()` copies its values to the host.
pub fn visit_parameters<M: Module>(
    module: &M,
    see: impl FnMut(&str, &[usize], &dyn Fn() -> TensorData),
) {
    module.visit(&mut Visitor {
        path: Path::default(),
        see,
    });
}

/// Replaces the module's parameters: `value(name, shape)` returns each new value, or `None` to keep the old one.
///
/// Values are converted to `dtype` and put on the parameter's device. Parameters that were never used are not allocated
/// first.
pub fn fill_parameters<M: Module>(
    module: M,
    dtype: DType,
    value: impl FnMut(&str, &[usize]) -> Option<TensorData>,
) -> M {
    module.map(&mut Filler {
        path: Path::default(),
        dtype,
        value,
    })
}

/// The module with fresh matrices drawn from `scale` · N(0, 1), depending only on the seed and each parameter's name.
/// Vectors are unchanged.
pub fn randomized<M: Module>(module: M, seed: u64, scale: f32) -> M {
    fill_parameters(module, DType::F32, |name, shape| {
        (shape.len() >= 2).then(|| {
            let draws = random::normals(seed, name, shape.iter().product());
            let values: Vec<f32> = draws.into_iter().map(|draw| draw * scale).collect();
            TensorData::new(values, shape.to_vec())
        })
    })
}

/// The module with its parameters in `dtype`.
pub fn cast<M: Module>(module: M, dtype: DType) -> M {
    struct Caster(DType);

    impl ModuleMapper for Caster {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|weight| to_dtype(weight, self.0))
        }
    }

    module.map(&mut Caster(dtype))
}

/// Writes all parameters by name to a safetensors file, in f32. For most models this is a sufficient implementation of
/// `ModelInterface::save`.
///
/// # Errors
/// [`ModelError::File`] if the file cannot be written.
pub fn save_parameters<M: Module>(module: &M, path: &std::path::Path) -> Result<(), ModelError> {
    let mut tensors: Vec<(String, TensorData)> = Vec::new();
    visit_parameters(module, |name, _, read| {
        tensors.push((name.to_owned(), read().convert_dtype(DType::F32)));
    });
    let failed = |error: safetensors::SafeTensorError| file_error("write", path, &error);
    let views = tensors.iter().map(|(name, data)| {
        let view = TensorView::new(
            safetensors::Dtype::F32,
            data.shape().to_vec(),
            data.as_bytes(),
        );
        view.map(|view| (name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    files::write_safetensors(views, metadata, path).map_err(failed)
}

/// Loads the values that [`save_parameters`] wrote.
///
/// # Errors
/// [`ModelError::File`] if the file cannot be read, lacks a parameter, or has one with another shape or dtype; the
/// message lists all of them.
pub fn load_parameters<M: Module>(module: M, path: &std::path::Path) -> Result<M, ModelError> {
    let bytes = std::fs::read(path).map_err(|error| file_error("read", path, &error))?;
    let stored =
        SafeTensors::deserialize(&bytes).map_err(|error| file_error("read", path, &error))?;
    let mut problems = Vec::new();
    let loaded = fill_parameters(module, DType::F32, |name, shape| {
        match stored.tensor(name) {
            Ok(view) if view.shape() == shape && view.dtype() == safetensors::Dtype::F32 => Some(
                TensorData::from_bytes_vec(view.data().to_vec(), shape.to_vec(), DType::F32),
            ),
            Ok(view) => {
                problems.push(format!(
                    "`{name}` is {:?} {:?}, but the model has F32 {shape:?}",
                    view.dtype(),
                    view.shape()
                ));
                None
            }
            Err(_) => {
                problems.push(format!("`{name}` is missing"));
                None
            }
        }
    });
    if problems.is_empty() {
        Ok(loaded)
    } else {
        Err(file_error("read", path, &problems.join("; ")))
    }
}

fn file_error(
    action: &'static str,
    path: &std::path::Path,
    reason: &dyn std::fmt::Display,
) -> ModelError {
    ModelError::File {
        action,
        path: path.display().to_string(),
        reason: reason.to_string(),
    }
}

#[derive(Default)]
struct Path(Vec<String>);

impl Path {
    fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }

    fn exit(&mut self) {
        self.0.pop();
    }

    fn name(&self) -> String {
        self.0.join(".")
    }
}

struct Visitor<F> {
    path: Path,
    see: F,
}

impl<F: FnMut(&str, &[usize], &dyn Fn() -> TensorData)> ModuleVisitor for Visitor<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.lazy_shape();
        (self.see)(&self.path.name(), shape.as_slice(), &|| {
            param.val().into_data()
        });
    }
}

struct Filler<F> {
    path: Path,
    dtype: DType,
    value: F,
}

impl<F: FnMut(&str, &[usize]) -> Option<TensorData>> ModuleMapper for Filler<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape();
        match (self.value)(&self.path.name(), shape.as_slice()) {
            Some(data) => {
                let device = param.lazy_device();
                Param::from_tensor(Tensor::from_data(data, (&device, self.dtype)))
            }
            None => param,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::linear::Linear;
    use burn::tensor::Device;

    #[derive(Module, Debug)]
    struct Pair {
        first: Linear,
        rest: Vec<Linear>,
    }

    fn pair() -> Pair {
        let device = Device::flex();
        Pair {
            first: Linear::lazy(2, 3, true, &device),
            rest: vec![Linear::lazy(1, 2, false, &device)],
        }
    }

    #[test]
    fn names_match_the_fields() {
        let named = named_parameters(&pair());
        assert_eq!(
            named,
            [
                ("first.weight".to_string(), vec![2, 3]),
                ("first.bias".to_string(), vec![2]),
                ("rest.0.weight".to_string(), vec![1, 2]),
            ]
        );
    }

    #[test]
    fn filled_values_can_be_read_back_and_others_stay() {
        let filled = fill_parameters(pair(), DType::F32, |name, shape| {
            (name == "first.bias").then(|| TensorData::full(shape.to_vec(), 7.0f32))
        });
        let mut sums = Vec::new();
        visit_parameters(&filled, |name, _, read| {
            let sum: f32 = read().as_slice::<f32>().unwrap().iter().sum();
            sums.push((name.to_string(), sum));
        });
        assert_eq!(sums[0], ("first.weight".to_string(), 0.0));
        assert_eq!(sums[1], ("first.bias".to_string(), 14.0));
    }

    #[test]
    fn filled_parameters_are_trainable_after_train() {
        let filled = fill_parameters(pair(), DType::F32, |_, shape| {
            Some(TensorData::full(shape.to_vec(), 1.0f32))
        });
        assert!(filled.train().first.weight.val().is_require_grad());
    }

    #[test]
    fn saved_parameters_can_be_loaded_and_problems_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pair.safetensors");
        let values = |pair: &Pair| {
            let mut all = Vec::new();
            visit_parameters(pair, |_, _, read| {
                all.extend_from_slice(read().as_slice::<f32>().unwrap());
            });
            all
        };
        let saved = randomized(pair(), 3, 0.5);
        save_parameters(&saved, &path).unwrap();
        let loaded = load_parameters(pair(), &path).unwrap();
        assert_eq!(values(&loaded), values(&saved));
        assert_ne!(values(&randomized(pair(), 4, 0.5)), values(&saved));

        let device = Device::flex();
        let other = Pair {
            first: Linear::lazy(2, 4, true, &device),
            rest: vec![],
        };
        save_parameters(&other, &path).unwrap();
        let error = load_parameters(pair(), &path).unwrap_err().to_string();
        assert!(
            error.contains("`first.weight` is F32 [2, 4], but the model has F32 [2, 3]"),
            "{error}"
        );
        assert!(error.contains("`rest.0.weight` is missing"), "{error}");
        assert!(load_parameters(pair(), &folder.path().join("none")).is_err());
    }
}
