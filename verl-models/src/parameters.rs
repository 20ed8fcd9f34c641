//! A module's parameters by name.
//!
//! Names are paths of fields joined by dots. For the decoders of this crate they are the checkpoint's names, such as
//! `model.layers.0.self_attn.q_proj.weight`.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};

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

/// The module with values in place of its parameters: `value(name, shape)` gives each, or `None` to leave it.
///
/// Values are converted to `dtype` and put on the parameter's device. Parameters that were never used take no memory
/// before.
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
    fn names_follow_the_fields() {
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
}
