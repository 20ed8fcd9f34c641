//! The optimiser's computations on a parameter: composed operations on every backend, and a single pass over memory on
//! the CPU.

use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, backend_extension};
use burn::tensor::{DType, Tensor, TensorData};
use rayon::prelude::*;

/// Elements of a task. Partial sums are formed per task and added in order, so results do not depend on threads, and not on
/// where a parameter is divided, if it is divided between tasks.
pub const TASK: usize = 1 << 14;

/// The scalars of one AdamW update of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWScalars {
    /// Factor on the gradient (clipping).
    pub gradient_scale: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Factor on the parameter: 1 − learning rate · weight decay.
    pub decay: f64,
    /// Learning rate / (1 − beta1^t).
    pub step_size: f64,
    /// √(1 − beta2^t).
    pub second_correction: f64,
    /// Added to the square root of the second moment.
    pub epsilon: f64,
}

/// One AdamW update in f32; returns parameter, first and second moment.
///
/// g ← scale · g; m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²;
/// p ← decay · p − step_size · m / (√v / second_correction + ε).
///
/// Buffers that are not shared are updated in place.
///
/// # Shapes
/// all tensors: `[n]`
/// # Source
/// Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with the schedule folded into the learning rate, as
/// PyTorch does.
pub fn adamw(
    parameter: Tensor<1>,
    first: Tensor<1>,
    second: Tensor<1>,
    gradient: Tensor<1>,
    scalars: AdamWScalars,
) -> (Tensor<1>, Tensor<1>, Tensor<1>) {
    let (parameter, first, second) = <Dispatch as OptimizerOps>::adamw(
        parameter.into_dispatch(),
        first.into_dispatch(),
        second.into_dispatch(),
        gradient.into_dispatch(),
        scalars,
    );
    (
        Tensor::from_dispatch(parameter),
        Tensor::from_dispatch(first),
        Tensor::from_dispatch(second),
    )
}

/// An AdamW update of one parameter; tensors as for [`adamw`].
#[derive(Debug)]
pub struct AdamWUpdate {
    /// The parameter in f32.
    pub parameter: Tensor<1>,
    /// First and second moment.
    pub moments: [Tensor<1>; 2],
    /// The gradient.
    pub gradient: Tensor<1>,
    /// Scalars; within a call only `decay`, `step_size` and `second_correction` may differ.
    pub scalars: AdamWScalars,
}

/// The result of an [`AdamWUpdate`].
#[derive(Debug)]
pub struct AdamWUpdated {
    /// The parameter in f32.
    pub parameter: Tensor<1>,
    /// First and second moment.
    pub moments: [Tensor<1>; 2],
    /// The parameter in the requested dtype.
    pub weight: Tensor<1>,
}

/// [`adamw`] for parameters whose weights are stored in `dtype`; on a GPU in bf16, many parameters per launch.
pub fn adamw_all(updates: Vec<AdamWUpdate>, dtype: DType) -> Vec<AdamWUpdated> {
    #[cfg(feature = "cuda")]
    if dtype == DType::BF16
        && let Some(first) = updates.first()
        && crate::device::DeviceKind::of(&first.gradient.device()).queues()
    {
        use crate::cuda::{tensor, update};
        let updates = updates.into_iter().map(|own| update::Update {
            tensors: {
                let [first, second] = own.moments;
                [own.parameter, first, second].map(tensor::primitive)
            },
            gradient: tensor::primitive(own.gradient),
            scalars: own.scalars,
        });
        let updated = update::adamw(updates.collect(), true).into_iter();
        return updated
            .map(|own| {
                let [parameter, first, second] = own.tensors.map(tensor::wrapped);
                let weight = own.weight.expect("the kernel writes the weight");
                AdamWUpdated {
                    parameter,
                    moments: [first, second],
                    weight: tensor::wrapped(weight),
                }
            })
            .collect();
    }
    let update = |own: AdamWUpdate| {
        let [first, second] = own.moments;
        let (parameter, first, second) =
            adamw(own.parameter, first, second, own.gradient, own.scalars);
        AdamWUpdated {
            weight: parameter.clone().cast(dtype),
            parameter,
            moments: [first, second],
        }
    };
    updates.into_iter().map(update).collect()
}

/// Sum of squares of each of one or more f32 tensors: `[tensors]`.
pub fn sums_of_squares(tensors: Vec<Tensor<1>>) -> Tensor<1> {
    #[cfg(feature = "cuda")]
    if crate::device::DeviceKind::of(&tensors[0].device()).queues() {
        use crate::cuda::{tensor, update};
        let tensors = tensors.into_iter().map(tensor::primitive).collect();
        return tensor::wrapped(update::sums_of_squares(tensors));
    }
    Tensor::cat(tensors.into_iter().map(sum_of_squares).collect(), 0)
}

/// Sum of the squares of an f32 tensor, `[n]` -> `[1]`.
pub fn sum_of_squares(tensor: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(<Dispatch as OptimizerOps>::sum_of_squares(
        tensor.into_dispatch(),
    ))
}

/// Backend operations of the optimiser; the defaults are composed of a backend's primitive operations.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"))]
pub trait OptimizerOps: Backend {
    /// See [`adamw`].
    fn adamw(
        parameter: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        scalars: AdamWScalars,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        composed_adamw::<Self>(parameter, first, second, gradient, scalars)
    }

    /// See [`sum_of_squares`].
    fn sum_of_squares(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_sum(Self::float_mul(tensor.clone(), tensor))
    }
}

#[cfg(feature = "cuda")]
impl OptimizerOps for burn::backend::Cube {
    fn adamw(
        parameter: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        scalars: AdamWScalars,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let tensors = [parameter, first, second];
        use crate::cuda::update::{Update, adamw};
        let update = Update {
            tensors,
            gradient,
            scalars,
        };
        let [parameter, first, second] = adamw(vec![update], false).remove(0).tensors;
        (parameter, first, second)
    }

    fn sum_of_squares(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        crate::cuda::update::sums_of_squares(vec![tensor])
    }
}

impl OptimizerOps for Flex {
    fn adamw(
        parameter: FlexTensor,
        first: FlexTensor,
        second: FlexTensor,
        gradient: FlexTensor,
        scalars: AdamWScalars,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let mut tensors = [parameter, first, second].map(dense);
        let gradient = dense(gradient);
        let [parameter, first, second] = &mut tensors;
        let parameter = parameter.storage_mut::<f32>().par_chunks_mut(TASK);
        let first = first.storage_mut::<f32>().par_chunks_mut(TASK);
        let second = second.storage_mut::<f32>().par_chunks_mut(TASK);
        let gradient = gradient.storage::<f32>().par_chunks(TASK);
        let update = Update::from(scalars);
        parameter
            .zip(first)
            .zip(second)
            .zip(gradient)
            .for_each(|(((p, m), v), g)| update.apply(p, m, v, g));
        let [parameter, first, second] = tensors;
        (parameter, first, second)
    }

    fn sum_of_squares(tensor: FlexTensor) -> FlexTensor {
        let tensor = contiguous(tensor);
        let (start, end) = tensor
            .layout()
            .contiguous_offsets()
            .unwrap_or((0, tensor.layout().num_elements()));
        let partial = task_squares(&tensor.storage::<f32>()[start..end]);
        let sum = sum_of_tasks(&partial);
        FlexTensor::from_data(TensorData::new(vec![sum], [1]))
    }
}

/// Sums of the squares of each task of a parameter, or of a part of it that begins and ends between tasks.
pub fn task_squares(values: &[f32]) -> Vec<f64> {
    let tasks = values.par_chunks(TASK);
    tasks.map(sum_of_squares_of).collect()
}

/// The result of [`sum_of_squares`] on the CPU from the sums of all tasks of a parameter, in order.
pub fn sum_of_tasks(squares: &[f64]) -> f32 {
    squares.iter().sum::<f64>() as f32
}

/// [`AdamWScalars`] in f32.
struct Update {
    gradient_scale: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    decay: f32,
    step_size: f32,
    second_correction: f32,
    epsilon: f32,
}

impl From<AdamWScalars> for Update {
    fn from(scalars: AdamWScalars) -> Self {
        Update {
            gradient_scale: scalars.gradient_scale as f32,
            beta1: scalars.beta1 as f32,
            one_minus_beta1: (1.0 - scalars.beta1) as f32,
            beta2: scalars.beta2 as f32,
            one_minus_beta2: (1.0 - scalars.beta2) as f32,
            decay: scalars.decay as f32,
            step_size: scalars.step_size as f32,
            second_correction: scalars.second_correction as f32,
            epsilon: scalars.epsilon as f32,
        }
    }
}

impl Update {
    fn apply(&self, p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let g = g * self.gradient_scale;
            *m = *m * self.beta1 + g * self.one_minus_beta1;
            *v = *v * self.beta2 + g * g * self.one_minus_beta2;
            let root = v.sqrt() / self.second_correction + self.epsilon;
            *p = *p * self.decay - *m / root * self.step_size;
        }
    }
}

fn composed_adamw<B: Backend>(
    parameter: FloatTensor<B>,
    first: FloatTensor<B>,
    second: FloatTensor<B>,
    gradient: FloatTensor<B>,
    scalars: AdamWScalars,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let scaled = |tensor, factor: f64| B::float_mul_scalar(tensor, factor.into());
    let gradient = match scalars.gradient_scale {
        1.0 => gradient,
        scale => scaled(gradient, scale),
    };
    let square = B::float_mul(gradient.clone(), gradient.clone());
    let first = B::float_add(
        scaled(first, scalars.beta1),
        scaled(gradient, 1.0 - scalars.beta1),
    );
    let second = B::float_add(
        scaled(second, scalars.beta2),
        scaled(square, 1.0 - scalars.beta2),
    );
    let root = B::float_add_scalar(
        B::float_div_scalar(
            B::float_sqrt(second.clone()),
            scalars.second_correction.into(),
        ),
        scalars.epsilon.into(),
    );
    let step = scaled(B::float_div(first.clone(), root), scalars.step_size);
    let parameter = B::float_sub(scaled(parameter, scalars.decay), step);
    (parameter, first, second)
}

/// Eight running sums, so that the loop vectorises; squares in f64 cannot overflow.
fn sum_of_squares_of(values: &[f32]) -> f64 {
    let mut sums = [0.0_f64; 8];
    let (eights, rest) = values.as_chunks::<8>();
    for eight in eights {
        for (sum, x) in sums.iter_mut().zip(eight) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
    let rest: f64 = rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    sums.iter().sum::<f64>() + rest
}

/// A tensor that owns exactly its elements, in order; copies only if necessary.
fn dense(tensor: FlexTensor) -> FlexTensor {
    FlexTensor::from_data(tensor.into_data())
}

fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// More than one task, and not a multiple of the vector width.
    const LENGTH: usize = TASK + 77;

    fn wave(salt: f32) -> Vec<f32> {
        (0..LENGTH).map(|i| (i as f32 * salt).sin()).collect()
    }

    fn flex(values: Vec<f32>) -> FlexTensor {
        FlexTensor::from_data(TensorData::new(values, [LENGTH]))
    }

    #[test]
    fn one_pass_agrees_with_composed_operations() {
        let scalars = AdamWScalars {
            gradient_scale: 0.3,
            beta1: 0.9,
            beta2: 0.95,
            decay: 0.99,
            step_size: 0.01,
            second_correction: 0.6,
            epsilon: 1e-8,
        };
        let inputs = || {
            let second = wave(0.3).iter().map(|x| x * x).collect();
            [wave(0.1), wave(0.2), second, wave(0.7)].map(flex)
        };
        let [p, m, v, g] = inputs();
        let got = <Flex as OptimizerOps>::adamw(p, m, v, g, scalars);
        let [p, m, v, g] = inputs();
        let expected = composed_adamw::<Flex>(p, m, v, g, scalars);
        for (got, expected) in [
            (got.0, expected.0),
            (got.1, expected.1),
            (got.2, expected.2),
        ] {
            let pairs = got.storage::<f32>().iter().zip(expected.storage::<f32>());
            for (got, expected) in pairs {
                // A fused multiply-add may round once where two operations round twice.
                assert!((got - expected).abs() <= 2e-6 * expected.abs().max(1e-3));
            }
        }
    }

    #[test]
    fn a_shared_buffer_is_not_written_to() {
        let device = Device::flex();
        let parameter = Tensor::<1>::ones([3], &device);
        let kept = parameter.clone();
        let zeros = || Tensor::<1>::zeros([3], &device);
        let scalars = AdamWScalars {
            gradient_scale: 1.0,
            beta1: 0.0,
            beta2: 0.0,
            decay: 1.0,
            step_size: 0.5,
            second_correction: 1.0,
            epsilon: 0.0,
        };
        let gradient = Tensor::from_data([2.0, -2.0, 4.0], &device);
        let (parameter, ..) = adamw(parameter, zeros(), zeros(), gradient, scalars);
        let values = |tensor: Tensor<1>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        assert_eq!(values(parameter), [0.5, 1.5, 0.5]);
        assert_eq!(values(kept), [1.0, 1.0, 1.0]);
    }

    #[test]
    fn squares_of_a_view_and_of_many_tasks() {
        let whole = Tensor::<1>::from_data(wave(0.1).as_slice(), &Device::flex());
        let expected: f64 = wave(0.1)[5..].iter().map(|x| f64::from(*x).powi(2)).sum();
        let got: f64 = sum_of_squares(whole.slice(5..LENGTH))
            .into_scalar::<f32>()
            .into();
        assert!((got - expected).abs() < 1e-6 * expected);
    }
}
