//! All weights of a module as flat tensors, for hashes and snapshots.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use verl_kernels::device::DeviceKind;

/// Flat views of all float parameters, in the order of the module; a parameter used twice is listed once.
#[derive(Default)]
pub(crate) struct Weights {
    path: Vec<String>,
    pub(crate) by_id: Vec<(ParamId, Tensor<1>)>,
    pub(crate) named: Vec<(String, Tensor<1>)>,
}

impl Weights {
    pub(crate) fn of<M: Module>(module: &M) -> Self {
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

/// The module with every matrix on a GPU made contiguous: burn pads its rows, and kernels would copy it each time.
pub(crate) fn dense<M: Module>(module: M) -> M {
    let cpu = module
        .devices()
        .iter()
        .all(|device| DeviceKind::of(device).is_host());
    if cpu {
        module
    } else {
        module.map(&mut Unpadder)
    }
}

struct Unpadder;

impl ModuleMapper for Unpadder {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|weight| {
            let shape = weight.shape();
            let flat: Tensor<1> = weight.reshape([shape.num_elements()]);
            flat.reshape(shape)
        })
    }
}

/// Replaces parameters by flat weights.
pub(crate) struct Loader {
    pub(crate) weights: HashMap<ParamId, Tensor<1>>,
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
