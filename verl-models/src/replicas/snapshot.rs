//! Snapshots of replicas. They can be restored by another number of replicas, and as bytes they are those of a single model.

use std::any::Any;

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;

use super::Replicas;
use crate::model::ModelError;
use crate::optim::AdamW;
use crate::trained::Snapshot;
use crate::weights::Weights;

/// Weights, and the optimiser's state of each slice; shares buffers with the replicas.
struct Slices {
    weights: Vec<(ParamId, Tensor<1>)>,
    optimizers: Vec<AdamW>,
}

impl Slices {
    /// The snapshot of a single model.
    fn joined(&self) -> Snapshot {
        let pieces: Vec<&AdamW> = self.optimizers.iter().collect();
        Snapshot {
            weights: self.weights.clone(),
            optimizer: AdamW::joined(&pieces),
        }
    }
}

impl<M: Module> Replicas<M> {
    /// The optimiser's state of entire parameters; `None` if the model is frozen.
    fn optimizer(&self) -> Option<AdamW> {
        let pieces: Vec<&AdamW> = self.optimizers().collect();
        AdamW::joined(&pieces)
    }

    fn optimizers(&self) -> impl Iterator<Item = &AdamW> {
        let replicas = self.replicas.iter();
        replicas.filter_map(|replica| Some(&replica.state.trained.training.as_ref()?.optimizer))
    }

    /// See [`Trained::exported`](crate::trained::Trained::exported).
    pub fn exported(&self) -> M {
        self.first().exported_with(self.optimizer().as_ref())
    }

    pub fn snapshot(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(Slices {
            weights: Weights::of(self.module()).by_id,
            optimizers: self.optimizers().cloned().collect(),
        })
    }

    /// Restores a snapshot of the same module, of any number of replicas or of a single model; returns `false` if it belongs
    /// to another module.
    pub fn restore(&mut self, snapshot: &(dyn Any + Send + Sync)) -> bool {
        let joined;
        let (snapshot, slices) = match snapshot.downcast_ref::<Slices>() {
            Some(slices) => {
                joined = Snapshot {
                    weights: slices.weights.clone(),
                    optimizer: slices.optimizers.first().cloned(),
                };
                (&joined, Some(slices))
            }
            None => match snapshot.downcast_ref::<Snapshot>() {
                Some(snapshot) => (snapshot, None),
                None => return false,
            },
        };
        let count = self.replicas.len();
        let same_slices = slices.filter(|slices| slices.optimizers.len() == count);
        let whole = match (same_slices, slices) {
            (None, Some(slices)) => slices.joined().optimizer,
            (None, None) => snapshot.optimizer.clone(),
            (Some(_), _) => None,
        };
        if !self.replicas[0].state.trained.restore(snapshot) {
            return false;
        }
        let module = self.module().clone();
        for (rank, replica) in self.replicas.iter_mut().enumerate() {
            let trained = &mut replica.state.trained;
            trained.module = Some(module.clone());
            let Some(training) = &mut trained.training else {
                continue;
            };
            let slice = &self.layout.slices()[rank];
            let own = match (same_slices, &whole) {
                (Some(slices), _) => slices.optimizers.get(rank).cloned(),
                (None, Some(whole)) => {
                    Some(whole.cut(|position| self.layout.piece(position, slice)))
                }
                (None, None) => None,
            };
            if let Some(own) = own {
                training.optimizer = own;
            }
        }
        // Gradients of other weights are useless.
        self.forget();
        true
    }

    pub fn store(&self, snapshot: &(dyn Any + Send + Sync)) -> Result<Option<Vec<u8>>, ModelError> {
        match snapshot.downcast_ref::<Slices>() {
            Some(slices) => self.first().store(&slices.joined()),
            None => self.first().store(snapshot),
        }
    }

    pub fn recall(&self, bytes: &[u8]) -> Result<Box<dyn Any + Send + Sync>, ModelError> {
        self.first().recall(bytes)
    }
}
