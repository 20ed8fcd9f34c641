//! Weights that travel: a module's parameters as a source, and a module that switches to those that arrive.
//!
//! Only the parameters travel, in the module's own element types, not the optimiser's state.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{Module, ParamId};
use burn::tensor::Tensor;
use verl_reshard::{
    Bucket, BucketSource, Staging, SyncError, WeightSink, WeightSource, WeightsManifest,
    WeightsVersion,
};

use super::Trained;
use crate::optim::GradientAccumulator;
use crate::reshard;
use crate::weights::{Loader, Weights};

/// Weights that have arrived, by parameter.
pub(crate) struct NewWeights(HashMap<ParamId, Tensor<1>>);

impl<M: Module> Trained<M> {
    /// The weights of this moment. They share the module's buffers, which an optimiser step replaces without changing them.
    ///
    /// # Errors
    /// Weights of a type that cannot be sent; buckets smaller than a weight.
    pub(crate) fn weight_source(
        &self,
        version: WeightsVersion,
        bucket_bytes: usize,
    ) -> Result<Box<dyn WeightSource>, SyncError> {
        let specs = reshard::tensor_specs(self.module())?;
        let weights = Weights::of(self.module()).named.into_iter();
        let tensors: Vec<Tensor<1>> = weights.map(|(_, tensor)| tensor).collect();
        let read = move |tensor: usize, cells: Range<usize>, bytes: &mut Vec<u8>| {
            let cells = tensors[tensor].clone().slice(cells);
            bytes.extend_from_slice(cells.into_data().as_bytes());
            Ok(())
        };
        let source = BucketSource::new(version, specs, bucket_bytes, read)?;
        Ok(Box::new(source))
    }

    /// Complete weights that have arrived, for [`Trained::switch`].
    ///
    /// # Errors
    /// Weights are missing.
    pub(crate) fn arrived(&mut self) -> Result<(WeightsVersion, NewWeights), SyncError> {
        let staging = self.staging.as_mut().ok_or(SyncError::NotBegun)?;
        let staged = staging.finish()?;
        let device = self.device();
        let own = Weights::of(self.module()).by_id;
        let weights = own.iter().zip(&staged.tensors);
        let weights = weights
            .map(|((id, old), bytes)| (*id, reshard::flat(bytes, old.dtype(), &device)))
            .collect();
        Ok((staged.version, NewWeights(weights)))
    }

    /// Switches to complete weights, whose buffers it shares. An optimiser keeps its moments; its f32 copies of narrower
    /// weights become the new weights, and gradients of the old ones are dropped.
    ///
    /// The optimiser's state is that of the piece which `piece` returns for a parameter with this position and size.
    pub(crate) fn switch(
        &mut self,
        weights: &NewWeights,
        piece: impl Fn(usize, usize) -> Range<usize>,
    ) {
        let weights = weights.0.clone();
        if let Some(training) = &mut self.training {
            let parameters = &training.parameters;
            training
                .optimizer
                .replace_masters(parameters, &weights, piece);
            training.accumulator = GradientAccumulator::default();
        }
        let module = self.module.take();
        self.module = module.map(|module| module.map(&mut Loader { weights }));
    }
}

impl<M: Module> WeightSink for Trained<M> {
    fn begin(&mut self, manifest: &WeightsManifest) -> Result<(), SyncError> {
        if self.staging.is_none() {
            self.staging = Some(Staging::new(reshard::tensor_specs(self.module())?));
        }
        let staging = self.staging.as_mut().ok_or(SyncError::NotBegun)?;
        staging.begin(manifest)
    }

    fn accept(&mut self, bucket: &Bucket) -> Result<(), SyncError> {
        let staging = self.staging.as_mut().ok_or(SyncError::NotBegun)?;
        staging.accept(bucket)
    }

    fn finish(&mut self) -> Result<WeightsVersion, SyncError> {
        let (version, weights) = self.arrived()?;
        self.switch(&weights, |_, size| 0..size);
        Ok(version)
    }
}
