//! Converts between tensors and the slices of `cpu`.

use burn::backend::ops::IntTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, Shape};

use super::cpu::{Operands, Scored, Weight};
use super::{Extras, Inputs, Statistics, TokenWeights};
use crate::{dense, tensor, values};

/// Calls `with` on the operands; returns `None` if they are not f32.
fn operands<R>(inputs: &Inputs<Flex>, with: impl FnOnce(Operands<'_>) -> R) -> Option<R> {
    if inputs.hidden.dtype() != DType::F32 || inputs.head.dtype() != DType::F32 {
        return None;
    }
    let (hidden, head) = (dense(inputs.hidden.clone()), dense(inputs.head.clone()));
    let targets = dense_targets(inputs);
    Some(with(Operands {
        hidden: values(&hidden),
        head: values(&head),
        width: head.shape()[1],
        targets: &targets,
        temperature: inputs.temperature as f32,
        chunk: inputs.chunk,
    }))
}

fn dense_targets(inputs: &Inputs<Flex>) -> Vec<usize> {
    let data = burn::tensor::try_read_sync(Flex::int_into_data(inputs.targets.clone()));
    let data = data
        .expect("the CPU reads synchronously")
        .expect("an int tensor contains ints");
    data.iter::<i64>().map(|id| id as usize).collect()
}

pub(super) fn forward(inputs: &Inputs<Flex>, extras: Extras) -> Option<Statistics<Flex>> {
    let found = operands(inputs, |operands| operands.forward(extras))?;
    let column = |of: fn(&Scored) -> f32| {
        tensor(found.iter().map(of).collect(), Shape::new([found.len(), 1]))
    };
    Some(Statistics {
        log_probs: column(|found| found.log_prob),
        entropies: extras.entropies.then(|| column(|found| found.entropy)),
        sum_pi_squared: extras
            .sum_pi_squared
            .then(|| column(|found| found.sum_pi_squared)),
        largest: column(|found| found.largest),
        log_sum: column(|found| found.log_sum),
    })
}

pub(super) fn backward(
    inputs: &Inputs<Flex>,
    statistics: &Statistics<Flex>,
    weights: &TokenWeights<Flex>,
    wanted: [bool; 2],
) -> Option<[Option<FloatTensor<Flex>>; 2]> {
    let [largest, log_sum, target, constant] = [
        &statistics.largest,
        &statistics.log_sum,
        &weights.target,
        &weights.constant,
    ]
    .map(|column| dense(column.clone()));
    let factor = weights.log_prob_factor.clone().map(dense);
    let gradients = operands(inputs, |operands| {
        let (largest, log_sum) = (values(&largest), values(&log_sum));
        let found: Vec<Scored> = (largest.iter().zip(log_sum))
            .map(|(&largest, &log_sum)| Scored {
                largest,
                log_sum,
                ..Scored::default()
            })
            .collect();
        let factors = factor.as_ref().map(values);
        let weights: Vec<Weight> = (values(&target).iter().zip(values(&constant)))
            .enumerate()
            .map(|(token, (&target, &constant))| Weight {
                target,
                constant,
                log_prob_factor: factors.map_or(0.0, |factors| factors[token]),
            })
            .collect();
        operands.backward(&found, &weights, wanted)
    })?;
    let shapes = [inputs.hidden.shape(), inputs.head.shape()];
    let mut shapes = shapes.into_iter();
    Some(gradients.map(|gradient| {
        let shape = shapes.next().expect("a shape for each gradient");
        gradient.map(|gradient| tensor(gradient, shape))
    }))
}
