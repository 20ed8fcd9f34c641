//! Accumulates gradients of micro-batches in f32, whatever the dtype of the weights.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Gradients, Tensor};

use super::clip::sums_of_squares;
use crate::model::{ModelError, ModelInterface, ParameterGroup};

/// A parameter that the optimiser updates.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainableParameter {
    /// Path of its field in the module, joined by dots.
    pub name: String,
    /// How the optimiser treats it.
    pub group: ParameterGroup,
    /// Whether the module uses it in several places.
    pub shared: bool,
    /// Number of elements.
    pub length: usize,
}

/// The parameters of a module that are trained, in the order of the module.
///
/// A parameter that the module uses several times (a tied one) is listed once; its gradients are summed. Parameters
/// with a learning-rate scale of 0 are not listed.
#[derive(Debug, Clone, Default)]
pub struct TrainableParameters {
    parameters: Vec<TrainableParameter>,
    positions: HashMap<ParamId, usize>,
    frozen: bool,
}

impl TrainableParameters {
    /// Lists the trained parameters of a language model.
    pub fn new<M: ModelInterface>(module: &M) -> Self {
        TrainableParameters::grouped(module, &|name, rank| module.parameter_group(name, rank))
    }

    /// Lists the trained parameters of any module; `group` returns how the parameter with a name and rank is treated.
    pub fn grouped<M: Module>(module: &M, group: &dyn Fn(&str, usize) -> ParameterGroup) -> Self {
        let mut lister = Lister {
            group,
            path: Vec::new(),
            found: TrainableParameters {
                parameters: Vec::new(),
                positions: HashMap::new(),
                frozen: false,
            },
        };
        module.visit(&mut lister);
        lister.found
    }

    /// Number of parameters (tensors).
    pub fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Whether nothing is trained.
    pub fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    /// The parameters in the order of the module.
    pub fn iter(&self) -> impl Iterator<Item = &TrainableParameter> {
        self.parameters.iter()
    }

    /// Whether the module uses the parameter at this position in several places.
    pub fn is_shared(&self, position: usize) -> bool {
        self.parameters[position].shared
    }

    /// The parameters' ids with their positions in the order of the module.
    pub(crate) fn ids(&self) -> impl Iterator<Item = (ParamId, usize)> {
        self.positions.iter().map(|(id, position)| (*id, *position))
    }

    /// Position of a parameter in the order of the module.
    pub fn position(&self, id: ParamId) -> Option<usize> {
        self.positions.get(&id).copied()
    }

    /// The module with autodiff enabled for the listed parameters; buffers are shared with `module`.
    pub fn differentiable<M: Module>(&self, module: &M) -> M {
        let module = module.clone().train();
        if self.frozen {
            module.map(&mut Freezer { trained: self })
        } else {
            module
        }
    }
}

struct Lister<'a> {
    group: &'a dyn Fn(&str, usize) -> ParameterGroup,
    path: Vec<String>,
    found: TrainableParameters,
}

impl ModuleVisitor for Lister<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = self.path.join(".");
        let group = (self.group)(&name, D);
        if group.learning_rate_scale == 0.0 {
            self.found.frozen = true;
        } else if let Some(position) = self.found.position(param.id) {
            self.found.parameters[position].shared = true;
        } else {
            let position = self.found.parameters.len();
            self.found.positions.insert(param.id, position);
            self.found.parameters.push(TrainableParameter {
                name,
                group,
                shared: false,
                length: param.shape().num_elements(),
            });
        }
    }
}

struct Freezer<'a> {
    trained: &'a TrainableParameters,
}

impl ModuleMapper for Freezer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.trained.position(param.id) {
            Some(_) => param,
            None => param.set_require_grad(false),
        }
    }
}

/// Finite gradients of one backward pass in f32.
#[derive(Debug)]
pub(crate) struct Collected {
    /// By position in [`TrainableParameters`], flat.
    pub gradients: Vec<Option<Tensor<1>>>,
    /// The sum of their squares.
    squares: f64,
}

impl Collected {
    /// The gradients of a backward pass over `module`.
    ///
    /// # Errors
    /// [`ModelError::NonFinite`] names the first parameter whose gradient is not finite.
    pub fn of<M: Module>(
        parameters: &TrainableParameters,
        module: &M,
        gradients: Gradients,
    ) -> Result<Self, ModelError> {
        let mut collector = Collector {
            parameters,
            gradients,
            collected: vec![None; parameters.len()],
        };
        module.visit(&mut collector);
        let gradients = collector.collected;
        let squares = check_finite(parameters, &gradients)?;
        Ok(Collected { gradients, squares })
    }
}

/// Sums of gradients in f32, one flat tensor per parameter.
#[derive(Debug, Clone, Default)]
pub struct GradientAccumulator {
    sums: Vec<Option<Tensor<1>>>,
    /// The sum of the squares of the sums, if known: after a single backward pass.
    squares: Option<f64>,
}

/// The content of a [`GradientAccumulator`].
#[derive(Debug)]
pub(crate) struct Accumulated {
    /// The sums, by position in [`TrainableParameters`].
    pub gradients: Vec<Option<Tensor<1>>>,
    /// The sum of their squares, if known; it is finite.
    pub squares: Option<f64>,
}

impl GradientAccumulator {
    /// Adds the gradients of one backward pass over `module`.
    ///
    /// # Errors
    /// [`ModelError::NonFinite`] names the first parameter, in the order of the module, whose gradient is not finite;
    /// then nothing is added.
    pub fn add<M: Module>(
        &mut self,
        parameters: &TrainableParameters,
        module: &M,
        gradients: Gradients,
    ) -> Result<(), ModelError> {
        self.add_collected(Collected::of(parameters, module, gradients)?);
        Ok(())
    }

    /// Adds the gradients of one backward pass.
    pub(crate) fn add_collected(&mut self, collected: Collected) {
        let Collected { gradients, squares } = collected;
        self.squares = self.is_empty().then_some(squares);
        self.sums.resize(gradients.len(), None);
        for (sum, gradient) in self.sums.iter_mut().zip(gradients) {
            if let Some(gradient) = gradient {
                *sum = Some(match sum.take() {
                    Some(sum) => sum.add(gradient),
                    None => gradient,
                });
            }
        }
    }

    /// Whether nothing was added since the last [`GradientAccumulator::take`].
    pub fn is_empty(&self) -> bool {
        self.sums.iter().all(Option::is_none)
    }

    /// The sums, by position in [`TrainableParameters`]; `None` for a parameter that took part in no loss.
    pub fn sums(&self) -> &[Option<Tensor<1>>] {
        &self.sums
    }

    /// Takes the sums and resets the accumulator.
    pub fn take(&mut self) -> Vec<Option<Tensor<1>>> {
        self.take_accumulated().gradients
    }

    /// [`GradientAccumulator::take`], with the sum of squares if it is known.
    pub(crate) fn take_accumulated(&mut self) -> Accumulated {
        Accumulated {
            gradients: std::mem::take(&mut self.sums),
            squares: self.squares.take(),
        }
    }
}

struct Collector<'a> {
    parameters: &'a TrainableParameters,
    gradients: Gradients,
    collected: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for Collector<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(position) = self.parameters.position(param.id) else {
            return;
        };
        let Some(gradient) = param.base().grad_remove(&mut self.gradients) else {
            return;
        };
        let length = gradient.shape().num_elements();
        let gradient: Tensor<1> = gradient.cast(DType::F32).reshape([length]);
        let collected = &mut self.collected[position];
        *collected = Some(match collected.take() {
            Some(sum) => sum.add(gradient),
            None => gradient,
        });
    }
}

/// Sum of squares of all gradients.
///
/// # Errors
/// [`ModelError::NonFinite`] names the first parameter whose gradient is not finite.
pub fn check_finite(
    parameters: &TrainableParameters,
    gradients: &[Option<Tensor<1>>],
) -> Result<f64, ModelError> {
    let named = parameters
        .iter()
        .zip(gradients)
        .filter(|(_, gradient)| gradient.is_some());
    let sums = sums_of_squares(gradients.iter().flatten());
    for ((parameter, _), sum) in named.zip(&sums) {
        if !sum.is_finite() {
            return Err(ModelError::NonFinite {
                what: format!("gradient of `{}`", parameter.name),
                value: *sum,
            });
        }
    }
    Ok(sums.iter().sum())
}
