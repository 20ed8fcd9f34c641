//! Stages: what a stage reads and writes ([`StageSpec`]), how it runs ([`Stage`]), and the context of its calls
//! ([`StageContext`]).
//!
//! | module | content |
//! |---|---|
//! | this module | [`Stage`] |
//! | `rules` | the parts of a declaration: cut, rows, cadence, metrics |
//! | `spec` | [`StageSpec`], the complete declaration |
//! | `context` | [`StageContext`] and [`StageError`]: the context of a call and its errors |
//! | `preview` | [`RowPreview`]: a row as a source writes it, without a run |
//! | `work` | [`ModelWork`], its work with a model, and bounds on the length of rows |
//! | `config` | [`StageConfig`], [`ModelConfig`], [`DataConfig`]: what a pipeline file decodes into |

mod batch_plan;
mod config;
mod context;
mod preview;
mod rules;
mod spec;
mod work;

use std::any::Any;

use crate::batch::Batch;
use crate::resource::{ResourceError, Snapshot, StoredState, WeightsVersion};

pub use batch_plan::BatchPlan;
pub use config::{
    BuildContext, ConfigError, DataConfig, DeviceSupport, ModelConfig, ModelFactory, StageConfig,
    Training, config_json,
};
pub use context::{
    CancelToken, Models, StageContext, StageError, StageSink, StartContext, find_model,
};
pub use preview::{LongRows, NotePreview, PreviewContext, RowPreview, RowPreviews, TargetPreview};
pub use rules::{
    Access, Agreement, Cadence, Cardinality, Metric, MetricRole, MetricRoles, NO_SAMPLES,
    OnRowError, OnShort, Reduce, Refill, RowRule, STAGE, Shown, of_stage,
};
pub use spec::StageSpec;
pub use work::{LengthBound, LengthLimit, ModelWork, OptimizerPasses, WorkKind};

/// One stage of a pipeline.
///
/// A stage object is made from its configuration without loading anything; [`Stage::start`] may open files, and
/// models are loaded by the run.
pub trait Stage: Send + Any {
    /// What it reads and writes; the same at every call.
    fn spec(&self) -> StageSpec;

    /// Called once, on the thread that will run it, before the first step.
    ///
    /// # Errors
    /// When something it needs cannot be opened.
    fn start(&mut self, _context: &mut StartContext<'_>) -> Result<(), StageError> {
        Ok(())
    }

    /// Processes `input` (for a source: a batch without rows) and emits the keys it writes through
    /// [`StageContext::emit`]; a stage that keeps rows emits each row once, in any grouping and order.
    ///
    /// # Errors
    /// When the input is not as declared or the work fails.
    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError>;

    /// The rows that a source would write, without a run; `None` for a stage that reads no data set, or if the data set
    /// or the model is not in `context`, which is reported elsewhere.
    ///
    /// # Errors
    /// A tokenizer or template that cannot be used.
    fn preview(
        &self,
        _context: PreviewContext<'_>,
    ) -> Result<Option<Box<dyn RowPreviews>>, StageError> {
        Ok(None)
    }

    /// A copy for another thread of the host pool; `None` when the stage has state that cannot be shared. A stage
    /// without a model whose cardinality is `Row` and that can be copied runs rows in parallel.
    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        None
    }

    /// State that can be restored, for stages that have some.
    ///
    /// # Errors
    /// When the state cannot be read.
    fn snapshot(&mut self) -> Result<Option<Snapshot>, StageError> {
        Ok(None)
    }

    /// Restores a snapshot of this stage.
    ///
    /// # Errors
    /// When another kind of stage made the snapshot.
    fn restore(&mut self, _snapshot: &Snapshot) -> Result<(), StageError> {
        Ok(())
    }

    /// Converts a snapshot of this stage into a form for storage on disk; `None` if it does not support that.
    ///
    /// # Errors
    /// When another kind of stage made the snapshot.
    fn store(&mut self, _snapshot: &Snapshot) -> Result<Option<StoredState>, StageError> {
        Ok(None)
    }

    /// Converts `stored`, which [`Stage::store`] returned, back into the snapshot; `version` is its version.
    ///
    /// # Errors
    /// When it belongs to another stage, or this stage does not support storage.
    fn recall(
        &mut self,
        _version: &WeightsVersion,
        _stored: &StoredState,
    ) -> Result<Snapshot, StageError> {
        Err(ResourceError::NotStored.into())
    }
}
