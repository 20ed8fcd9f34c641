//! The context of a running stage, and the errors of its calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::Metric;
use crate::batch::{Batch, BatchError, RowId};
use crate::data::{DataError, DataLoaderInterface};
use crate::resource::{ModelResource, ResourceError};

/// An error of a stage's call.
#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// Access to a batch failed.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Access to data failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A model returned an error.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// A model that is missing, or not of the type that the stage expects.
    #[error("model `{name}` {reason}")]
    Model {
        /// Its name in the pipeline.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// One row caused the error.
    #[error("{}: {reason}", .id.in_words())]
    Row {
        /// Position in the batch.
        row: usize,
        /// Identity of the row.
        id: RowId,
        /// What is wrong.
        reason: String,
    },
    /// The run was asked to end.
    #[error("the run was asked to end")]
    Cancelled,
    /// Any other error, as reported by the underlying library.
    #[error("{0}")]
    Failed(#[serde(with = "crate::error_text")] Box<dyn std::error::Error + Send + Sync>),
}

impl StageError {
    /// Wraps an error of a library.
    pub fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        StageError::Failed(error.into())
    }
}

/// Requests the end of a run; shared between threads.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Requests the end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
    /// Whether the end was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Where emitted batches and recorded metrics go; implemented by the executor, by tests and by replay.
pub trait StageSink {
    /// Takes rows that are ready. Blocks while the next stages lag (back-pressure).
    ///
    /// # Errors
    /// [`StageError::Cancelled`] when the run ends.
    fn emit(&mut self, batch: Batch) -> Result<(), StageError>;
    /// Takes a metric value with its weight in a mean.
    fn record(&mut self, metric: &Metric, value: f64, weight: f64);
    /// Takes a metric whose name is known only at run time (a data source, a layer), reduced by weighted mean.
    fn record_named(&mut self, name: &str, value: f64, weight: f64);
    /// Takes a few finished samples for `samples.jsonl`.
    fn sample(&mut self, sample: serde_json::Value);
}

/// Models on the worker that runs a stage.
pub type Models = BTreeMap<String, Box<dyn ModelResource>>;

/// The context of a call of a stage.
pub struct StageContext<'a> {
    /// Name of the stage in the pipeline.
    pub stage: &'a str,
    /// Step of the run, counted from 1; 0 for an observer before the first step.
    pub step: u64,
    /// Number of steps of the run.
    pub steps: u64,
    /// Seed of the run.
    pub seed: u64,
    /// For a source: the wave of the step to draw, counted from 0. For any other stage, 0.
    pub wave: u64,
    /// Whether the end of the run was requested.
    pub cancel: &'a CancelToken,
    /// Models of the device group; empty on the host pool.
    pub models: &'a mut Models,
    /// Where results go.
    pub sink: &'a mut dyn StageSink,
}

impl StageContext<'_> {
    /// Passes on rows that are ready.
    ///
    /// # Errors
    /// [`StageError::Cancelled`] when the run ends.
    pub fn emit(&mut self, batch: Batch) -> Result<(), StageError> {
        self.sink.emit(batch)
    }

    /// Records a metric; the value counts once in a mean.
    pub fn record(&mut self, metric: &Metric, value: f64) {
        self.sink.record(metric, value, 1.0);
    }

    /// Records a metric with a weight in the mean (a number of rows or tokens).
    pub fn record_weighted(&mut self, metric: &Metric, value: f64, weight: f64) {
        self.sink.record(metric, value, weight);
    }

    /// The model `name`, as the type that the stage works with.
    ///
    /// # Errors
    /// When the group has no such model, or the model has another type.
    pub fn model<T: ModelResource>(&mut self, name: &str) -> Result<&mut T, StageError> {
        find_model(self.models, name)
    }
}

/// The model `name` among `models`, as the type that a stage works with; for stages that emit while they borrow it.
///
/// # Errors
/// When there is no such model, or it has another type.
pub fn find_model<'a, T: ModelResource>(
    models: &'a mut Models,
    name: &str,
) -> Result<&'a mut T, StageError> {
    let fail = |reason: String| StageError::Model {
        name: name.to_owned(),
        reason,
    };
    let known = models.keys().cloned().collect::<Vec<_>>().join(", ");
    let model = models
        .get_mut(name)
        .ok_or_else(|| fail(format!("is not on this device group, which has: {known}")))?;
    model
        .as_any_mut()
        .downcast_mut()
        .ok_or_else(|| fail(format!("is not a {}", std::any::type_name::<T>())))
}

/// The context of [`Stage::start`](super::Stage::start).
pub struct StartContext<'a> {
    /// Opened data sets by name.
    pub data: &'a BTreeMap<String, Arc<dyn DataLoaderInterface>>,
    /// Models of the device group; empty on the host pool.
    pub models: &'a mut Models,
}

impl StartContext<'_> {
    /// The data set `name`.
    ///
    /// # Errors
    /// When the pipeline declares no such data set.
    pub fn data(&self, name: &str) -> Result<Arc<dyn DataLoaderInterface>, StageError> {
        self.data.get(name).cloned().ok_or_else(|| {
            let known = self.data.keys().cloned().collect::<Vec<_>>().join(", ");
            StageError::failed(format!(
                "there is no data set `{name}`; the pipeline declares: {known}"
            ))
        })
    }
}
