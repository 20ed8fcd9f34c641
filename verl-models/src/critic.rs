//! A value model with its optimiser, as stages use it: a critic or a reward model.

use std::path::Path;

use burn::tensor::{DType, Device, Tensor};
use verl_kernels as kernels;

use crate::model::{ModelError, PackedValues, ScoreRow, TrainedModel, ValueInterface, ValueModel};
use crate::optim::{OptimizerConfig, OptimizerConfigError};
use crate::packing::{Layout, TrainingBatch};
use crate::rows::{self, Call, CallLimits};
use crate::trained::{Backward, Trained, trained_model};

/// A value model with an optimiser, or a frozen one without.
///
/// As in [`Policy`](crate::policy::Policy), the module inside never tracks gradients; a tracking module that shares its
/// buffers is created for each micro-batch.
///
/// ```
/// use burn::tensor::Device;
/// use verl_models::critic::Critic;
/// use verl_models::model::{ScoreRow, ValueModel};
/// use verl_models::value_head::{FreshHead, HeadInit, HeadKind, ValueDecoder};
///
/// let head = FreshHead {
///     kind: HeadKind::TokenClassification,
///     init: HeadInit::Zeros,
/// };
/// let dir = "tests/models/tiny-random-qwen3".as_ref();
/// let decoder = ValueDecoder::load(dir, &Device::flex(), Some(head))?;
/// let critic = Critic::new(decoder, None)?;
/// let row = ScoreRow {
///     prompt: &[1, 2],
///     response: &[3, 4, 5],
/// };
/// assert_eq!(critic.values(&[row])?, [[0.0, 0.0, 0.0]]);
/// assert_eq!(critic.scores(&[row])?, [0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Critic<M: ValueInterface> {
    pub(crate) trained: Trained<M>,
}

impl<M: ValueInterface> Critic<M> {
    /// Wraps a module; without optimiser settings it is frozen.
    ///
    /// # Errors
    /// An invalid setting of the optimiser.
    pub fn new(
        module: M,
        optimizer: Option<OptimizerConfig>,
    ) -> Result<Self, OptimizerConfigError> {
        let trained = Trained::new(module, M::parameter_group, optimizer)?;
        Ok(Critic { trained })
    }

    /// The module, without autodiff.
    ///
    /// # Panics
    /// Panics if an earlier optimiser step panicked.
    pub fn module(&self) -> &M {
        self.trained.module()
    }

    /// Writes the optimiser's state (moments, master weights, step counts) to a safetensors file.
    ///
    /// # Errors
    /// The model is frozen, or the file cannot be written.
    pub fn save_optimizer(&self, path: &Path) -> Result<(), ModelError> {
        self.trained.save_optimizer(path)
    }

    /// Reads the file that [`Critic::save_optimizer`] wrote; on an error nothing changes.
    ///
    /// # Errors
    /// The model is frozen, or the file cannot be read or belongs to another model.
    pub fn load_optimizer(&mut self, path: &Path) -> Result<(), ModelError> {
        self.trained.load_optimizer(path)
    }

    /// Values at the positions that `wanted` returns for each row; `length` is how many tokens of a row the model must
    /// read.
    fn read(
        &self,
        rows: &[ScoreRow<'_>],
        length: impl Fn(&ScoreRow<'_>) -> Option<usize>,
        wanted: impl Fn(&ScoreRow<'_>) -> std::ops::Range<usize> + Send + Sync,
    ) -> Vec<Vec<f32>> {
        let device = self.trained.device();
        let limits = CallLimits::of(&device);
        let calls = rows::calls_of(rows.iter().map(length), self.max_tokens(), limits);
        let values = self
            .trained
            .run_calls(&calls, |module, call| grid(module, call, rows, &device));
        let mut results = vec![Vec::new(); rows.len()];
        for (call, values) in calls.iter().zip(values) {
            for (&row, values) in call.rows.iter().zip(values.chunks(call.width)) {
                results[row] = values[wanted(&rows[row])].to_vec();
            }
        }
        results
    }
}

/// Values of all positions of a padded call, row by row.
fn grid<M: ValueInterface>(
    module: &M,
    call: &Call,
    rows: &[ScoreRow<'_>],
    device: &Device,
) -> Vec<f32> {
    let picked = call.rows.iter().map(|&row| &rows[row]);
    let ids = rows::padded_ids(picked, call.height, call.width, device);
    module.values(ids).into_data().iter::<f32>().collect()
}

/// Position of the state in which response token `token` is chosen.
fn state(row: &ScoreRow<'_>, token: usize) -> usize {
    row.prompt.len() + token - 1
}

/// Casts half precision to f32, in which all losses are computed.
fn at_least_f32(values: Tensor<2>) -> Tensor<2> {
    match values.dtype() {
        DType::F32 | DType::F64 => values,
        _ => values.cast(DType::F32),
    }
}

/// The backward pass of [`ValueModel::accumulate`].
///
/// # Errors
/// As [`ValueModel::accumulate`].
pub(crate) fn backward<M: ValueInterface>(
    trained: &Trained<M>,
    rows: &[ScoreRow<'_>],
    select: &dyn Fn(usize, usize) -> bool,
    loss: &mut dyn FnMut(PackedValues) -> Tensor<1>,
) -> Result<Backward, ModelError> {
    check(trained, rows)?;
    trained.check_trainable()?;
    let Some(batch) = TrainingBatch::new(rows, select, Layout::Padded) else {
        return Ok(Backward::NOTHING);
    };
    trained.backward(|module, device| {
        let height = batch.rows.len();
        let picked = batch.rows.iter().map(|&row| &rows[row]);
        let ids = rows::padded_ids(picked, height, batch.width, device);
        let values = at_least_f32(module.values(ids)).reshape([height * batch.width]);
        loss(PackedValues {
            values: values.select(0, batch.packed.states(device)),
            rows: batch.packed.rows,
        })
    })
}

/// The backward pass of [`ValueModel::accumulate_scores`].
///
/// # Errors
/// As [`ValueModel::accumulate_scores`].
pub(crate) fn backward_scores<M: ValueInterface>(
    trained: &Trained<M>,
    rows: &[ScoreRow<'_>],
    loss: &mut dyn FnMut(Tensor<1>) -> Tensor<1>,
) -> Result<Backward, ModelError> {
    check(trained, rows)?;
    trained.check_trainable()?;
    let last = rows.iter().map(|row| state(row, row.response.len()));
    let last: Vec<usize> = last.collect();
    let Some(width) = last.iter().max().map(|last| last + 1) else {
        return Ok(Backward::NOTHING);
    };
    trained.backward(|module, device| {
        let ids = rows::padded_ids(rows.iter(), rows.len(), width, device);
        let values = at_least_f32(module.values(ids)).reshape([rows.len() * width]);
        let places = last.iter().enumerate();
        let places = places.map(|(row, last)| (row * width + last) as i32);
        loss(values.select(0, kernels::indices(places.collect(), device)))
    })
}

/// Refuses rows that the model cannot read.
pub(crate) fn check<M: ValueInterface>(
    trained: &Trained<M>,
    rows: &[ScoreRow<'_>],
) -> Result<(), ModelError> {
    let module = trained.module();
    rows::check(rows, module.vocab_size(), module.max_tokens())
}

impl<M: ValueInterface> ValueModel for Critic<M> {
    fn values(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<Vec<f32>>, ModelError> {
        check(&self.trained, rows)?;
        let tokens = |row: &ScoreRow<'_>| row.response.len();
        let length = |row: &ScoreRow<'_>| (tokens(row) > 0).then(|| state(row, tokens(row)));
        Ok(self.read(rows, length, |row| state(row, 0)..state(row, tokens(row))))
    }

    fn scores(&self, rows: &[ScoreRow<'_>]) -> Result<Vec<f32>, ModelError> {
        check(&self.trained, rows)?;
        let last = |row: &ScoreRow<'_>| state(row, row.response.len());
        let scores = self.read(
            rows,
            |row| Some(last(row) + 1),
            |row| last(row)..last(row) + 1,
        );
        Ok(scores.concat())
    }

    fn accumulate(
        &mut self,
        rows: &[ScoreRow<'_>],
        select: &dyn Fn(usize, usize) -> bool,
        loss: &mut dyn FnMut(PackedValues) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        let done = backward(&self.trained, rows, select, loss)?;
        self.trained.add(done)
    }

    fn accumulate_scores(
        &mut self,
        rows: &[ScoreRow<'_>],
        loss: &mut dyn FnMut(Tensor<1>) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        let done = backward_scores(&self.trained, rows, loss)?;
        self.trained.add(done)
    }
}

trained_model!(Critic<M>, trained, M: ValueInterface);

#[cfg(test)]
#[path = "critic_tests.rs"]
mod tests;
