//! What replicas exchange: gradients of a round, partial sums of squares, new weights.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::{DType, Tensor, TensorData};
use verl_collective::{Collective, CollectiveError, Data};

use super::{Failure, Sharding, State};
use crate::model::{ModelError, StepReport};
use crate::optim::AdamW;
use crate::optim::accumulate::Collected;
use crate::optim::flat::FlatLayout;
use crate::optim::kernels::{sum_of_tasks, task_squares};
use crate::optim::pieces::Piece;
use crate::trained::Trained;
use crate::weights::{Loader, Weights};

/// A number that changes no bit of a number to which it is added: x + (−0) = x, also for x = −0. It stands for a gradient
/// that does not exist, and for a sum of no gradients.
const NOTHING: f32 = -0.0;

/// What a replica computed in an optimiser step.
pub(super) struct Update {
    /// The state of its slice.
    pub optimizer: AdamW,
    /// New weights in f32 of each replica's slice, only of parameters that have a gradient.
    pub weights: Vec<Arc<Data>>,
    pub report: StepReport,
}

impl Sharding {
    /// The numbers of which the replica has the sums of gradients.
    fn summed(self, layout: &FlatLayout, rank: usize) -> Range<usize> {
        match self {
            Sharding::Optimizer => 0..layout.len(),
            Sharding::Gradients => layout.slices()[rank].clone(),
        }
    }
}

impl<M: Module> State<M> {
    /// Stores the gradient of a micro-batch as one row of numbers; returns which parameters have one.
    pub fn flatten(&mut self, collected: Option<Collected>, layout: &FlatLayout) -> Vec<bool> {
        let Some(collected) = collected else {
            self.gradient = None;
            return Vec::new();
        };
        let gradients = collected.gradients;
        let present = gradients.iter().map(Option::is_some).collect();
        let mut flat = Vec::with_capacity(layout.len());
        for (position, gradient) in gradients.into_iter().enumerate() {
            match gradient {
                Some(gradient) => append(&mut flat, gradient),
                None => flat.resize(layout.place(position).end, NOTHING),
            }
        }
        self.gradient = Some(flat);
        present
    }

    /// Adds the gradients of all replicas that have one, in the order of replicas.
    pub fn add(&mut self, layout: &FlatLayout, sharding: Sharding) -> Result<(), CollectiveError> {
        let gradient = self.gradient.take();
        let summed = sharding.summed(layout, self.member.rank());
        self.sums.resize(summed.len(), NOTHING);
        match sharding {
            Sharding::Gradients => {
                let slices = layout.slices();
                self.member
                    .reduce_scatter_ordered(gradient, slices, &mut self.sums)
            }
            Sharding::Optimizer => {
                let all = self
                    .member
                    .all_gather(Data::F32(gradient.unwrap_or_default()))?;
                for gradient in all.iter().filter_map(|data| data.as_f32()) {
                    let pairs = self.sums.iter_mut().zip(gradient);
                    pairs.for_each(|(sum, value)| *sum += value);
                }
                Ok(())
            }
        }
    }

    /// The sum of the squares of all gradients, as [`check_finite`](crate::optim::accumulate::check_finite) computes it.
    fn squares(
        &mut self,
        sums: &[f32],
        layout: &FlatLayout,
        sharding: Sharding,
        present: &[bool],
    ) -> Result<f64, Failure> {
        let summed = sharding.summed(layout, self.member.rank());
        let mut tasks = Vec::new();
        for position in positions(present) {
            let piece = layout.piece(position, &summed);
            tasks.extend(task_squares(
                &sums[within(layout, position, &piece, &summed)],
            ));
        }
        if sharding == Sharding::Gradients {
            let all = self.member.all_gather(Data::F64(tasks))?;
            let all = all.iter().filter_map(|data| data.as_f64());
            tasks = all.flatten().copied().collect();
        }
        let training = self.trained.training.as_ref().ok_or(ModelError::Frozen)?;
        let mut rest = tasks.as_slice();
        let mut of_parameters = Vec::new();
        for (position, parameter) in training.parameters.iter().enumerate() {
            if !present[position] {
                continue;
            }
            let count = parameter.length.div_ceil(crate::optim::kernels::TASK);
            let (own, others) = rest.split_at(count.min(rest.len()));
            rest = others;
            let sum = f64::from(sum_of_tasks(own));
            if !sum.is_finite() {
                return Err(Failure::Model(ModelError::NonFinite {
                    what: format!("gradient of `{}`", parameter.name),
                    value: sum,
                }));
            }
            of_parameters.push(sum);
        }
        Ok(of_parameters.iter().sum())
    }

    /// The optimiser step of this replica's slice; changes nothing but the sums of gradients, which it takes.
    pub fn update(
        &mut self,
        layout: &FlatLayout,
        sharding: Sharding,
        present: &[bool],
    ) -> Result<Update, Failure> {
        let sums = std::mem::take(&mut self.sums);
        let norm = self.squares(&sums, layout, sharding, present)?.sqrt();
        let rank = self.member.rank();
        let summed = sharding.summed(layout, rank);
        let slice = &layout.slices()[rank];
        let weights = by_position(&self.trained);
        let training = self.trained.training.as_ref().ok_or(ModelError::Frozen)?;
        let mut pieces = Vec::new();
        for position in positions(present) {
            let piece = layout.piece(position, slice);
            let Some((_, weight)) = weights.get(&position).filter(|_| !piece.is_empty()) else {
                continue;
            };
            let gradient = sums[within(layout, position, &piece, &summed)].to_vec();
            let gradient = TensorData::new(gradient, [piece.len()]);
            pieces.push(Piece {
                position,
                weight: weight.clone().slice([piece]),
                gradient: Tensor::from_data(gradient, (&weight.device(), DType::F32)),
            });
        }
        let mut optimizer = training.optimizer.clone();
        let (updated, report) = optimizer.step_pieces(&training.parameters, pieces, norm);
        let mut weights = Vec::new();
        for weight in updated {
            append(&mut weights, weight);
        }
        let weights = self.member.all_gather(Data::F32(weights))?;
        Ok(Update {
            optimizer,
            weights,
            report,
        })
    }
}

/// Appends the numbers of a flat f32 tensor.
fn append(numbers: &mut Vec<f32>, tensor: Tensor<1>) {
    let data = tensor.into_data();
    match data.as_slice::<f32>() {
        Ok(own) => numbers.extend_from_slice(own),
        Err(_) => numbers.extend(data.iter::<f32>()),
    }
}

/// Positions of the parameters that have a gradient.
fn positions(present: &[bool]) -> impl Iterator<Item = usize> {
    let each = present.iter().enumerate();
    each.filter(|(_, present)| **present)
        .map(|(position, _)| position)
}

/// Where a piece of a parameter is in the numbers at `summed`.
fn within(
    layout: &FlatLayout,
    position: usize,
    piece: &Range<usize>,
    summed: &Range<usize>,
) -> Range<usize> {
    if piece.is_empty() {
        return 0..0;
    }
    let start = layout.place(position).start + piece.start - summed.start;
    start..start + piece.len()
}

/// Ids and flat weights of the trained parameters, by position.
fn by_position<M: Module>(trained: &Trained<M>) -> HashMap<usize, (ParamId, Tensor<1>)> {
    let Some(training) = &trained.training else {
        return HashMap::new();
    };
    let all = Weights::of(trained.module()).by_id.into_iter();
    all.filter_map(|(id, weight)| Some((training.parameters.position(id)?, (id, weight))))
        .collect()
}

/// The module with new weights, which the replicas computed in f32: those of the parameters with a gradient, slice after
/// slice.
pub(super) fn with_weights<M: Module>(
    module: M,
    trained: &Trained<M>,
    layout: &FlatLayout,
    present: &[bool],
    slices: &[Arc<Data>],
) -> M {
    let old = by_position(trained);
    let mut numbers: Vec<&[f32]> = slices.iter().filter_map(|data| data.as_f32()).collect();
    let mut weights = HashMap::new();
    for position in positions(present) {
        let mut all = Vec::with_capacity(layout.place(position).len());
        for (rest, slice) in numbers.iter_mut().zip(layout.slices()) {
            let count = layout.piece(position, slice).len().min(rest.len());
            let (own, others) = rest.split_at(count);
            all.extend_from_slice(own);
            *rest = others;
        }
        if let Some((id, old)) = old.get(&position) {
            let data = TensorData::new(all, [layout.place(position).len()]);
            let weight = Tensor::<1>::from_data(data, (&old.device(), DType::F32));
            weights.insert(*id, weight.cast(old.dtype()));
        }
    }
    module.map(&mut Loader { weights })
}
