//! AdamW on pieces of parameters, whose states are divided among replicas.

use std::ops::Range;

use burn::tensor::{DType, Tensor};

use super::AdamW;
use super::accumulate::TrainableParameters;
use super::adamw::{ParameterState, Updater};
use super::kernels;
use crate::model::StepReport;

/// A piece of a parameter that took part in a loss.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Position of the parameter.
    pub position: usize,
    /// Its weights in the module's type.
    pub weight: Tensor<1>,
    /// Its gradient.
    pub gradient: Tensor<1>,
}

impl AdamW {
    /// An optimiser step on `pieces`, which are the same parts of parameters in every step; returns their new weights in f32.
    /// `norm` is the global norm of the gradient. The bits are those of a step on the entire parameters.
    pub(crate) fn step_pieces(
        &mut self,
        parameters: &TrainableParameters,
        pieces: Vec<Piece>,
        norm: f64,
    ) -> (Vec<Tensor<1>>, StepReport) {
        let (mut updater, report) = Updater::new(self, parameters, Vec::new(), norm);
        let weights = pieces.into_iter().map(|piece| updater.update_piece(piece));
        let weights = weights.collect();
        self.steps += 1;
        (weights, report)
    }

    /// The state of the pieces that `piece` returns for each parameter.
    pub(crate) fn cut(&self, piece: impl Fn(usize) -> Range<usize>) -> AdamW {
        let states = self.states.iter().enumerate().map(|(position, state)| {
            let piece = piece(position);
            let state = state.as_ref().filter(|_| !piece.is_empty())?;
            // A copy, so that the state of the entire parameter does not stay in memory.
            let cut = |tensor: &Tensor<1>| {
                let own = tensor.clone().slice([piece.clone()]).into_data();
                Tensor::<1>::from_data(own, &tensor.device())
            };
            Some(ParameterState {
                first: cut(&state.first),
                second: cut(&state.second),
                master: state.master.as_ref().map(cut),
                steps: state.steps,
            })
        });
        AdamW {
            config: self.config.clone(),
            states: states.collect(),
            steps: self.steps,
        }
    }

    /// The state of entire parameters from those of their pieces, in order; `None` without pieces.
    pub(crate) fn joined(pieces: &[&AdamW]) -> Option<AdamW> {
        let first = pieces.first()?;
        let parameters = pieces.iter().map(|piece| piece.states.len()).max()?;
        let states = (0..parameters).map(|position| {
            let own = |piece: &&AdamW| piece.states.get(position)?.clone();
            let own: Vec<ParameterState> = pieces.iter().filter_map(own).collect();
            let steps = own.first()?.steps;
            let join = |of: fn(&ParameterState) -> Option<&Tensor<1>>| {
                let parts: Vec<Tensor<1>> = own.iter().filter_map(of).cloned().collect();
                (!parts.is_empty()).then(|| Tensor::cat(parts, 0))
            };
            Some(ParameterState {
                first: join(|state| Some(&state.first))?,
                second: join(|state| Some(&state.second))?,
                master: join(|state| state.master.as_ref()),
                steps,
            })
        });
        Some(AdamW {
            config: first.config.clone(),
            states: states.collect(),
            steps: first.steps,
        })
    }
}

impl Updater<'_> {
    fn update_piece(&mut self, piece: Piece) -> Tensor<1> {
        let position = piece.position;
        let narrow = piece.weight.dtype() != DType::F32;
        let (steps, update) = self.prepare(position, piece.weight, piece.gradient);
        let [first, second] = update.moments;
        let (weight, first, second) = kernels::adamw(
            update.parameter,
            first,
            second,
            update.gradient,
            update.scalars,
        );
        self.keep(
            position,
            ParameterState {
                first,
                second,
                master: narrow.then(|| weight.clone()),
                steps,
            },
        );
        weight
    }
}
