//! Stages: what one reads and writes ([`StageSpec`]), how it runs ([`Stage`]), and what it is given
//! ([`StageContext`]).

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, BatchError};
use crate::data::{DataError, DataLoaderInterface};
use crate::field::Field;
use crate::resource::{
    ModelResource, ResourceError, Snapshot, StoredState, TokenTexts, WeightsVersion,
};
use crate::schedule::batching::BatchPlan;

/// How finely a stage's input may be cut. The executor streams as finely as this allows.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Cardinality {
    /// Any slice of rows; the result for a row does not depend on the others.
    #[default]
    Row,
    /// Whole prompt groups.
    Group,
    /// The whole batch of the step, all waves of it: a barrier.
    Batch,
}

/// What a stage does to the number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowRule {
    /// Makes rows from nothing: one a prompt of the step (of each wave of it, see [`Refill`]).
    Source,
    /// One row out for each row in, same identities.
    #[default]
    Same,
    /// Each row becomes `n` samples: `P → P·n`. All keys of the input are carried along.
    Expand(usize),
    /// Drops rows; identities of the others stay. All keys of the input are carried along.
    Filter,
    /// Reads rows and emits none.
    Sink,
}

/// How many groups a filter is to keep in a step, and how often its source is asked for more.
///
/// A source draws its prompts in *waves*. When the filter has seen all groups of a wave and kept fewer than `groups` so
/// far, the source draws the next wave, up to `waves` of them. Of what is kept only the first `groups` groups go on,
/// in the order in which they were drawn; the rest is surplus. Stages before the filter work on each wave as it comes;
/// stages after it see one list of rows.
///
/// The engine records, under the name of the stage, `…/waves` (waves drawn), `…/groups_kept` (groups that went on) and
/// `…/groups_surplus` (groups kept beyond those that were wanted).
///
/// ```
/// use verl_pipe::keys::{REWARDS, GROUP_MEANS};
/// use verl_pipe::stage::{Cardinality, OnShort, Refill, RowRule, StageSpec};
///
/// let spec = StageSpec::new()
///     .reads(REWARDS)
///     .writes(GROUP_MEANS)
///     .rows(RowRule::Filter)
///     .cardinality(Cardinality::Group)
///     .refill(Refill { groups: 32, waves: 3, on_short: OnShort::Error });
/// assert_eq!(spec.refill.map(|refill| refill.waves), Some(3));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refill {
    /// Groups that a step is to keep.
    pub groups: usize,
    /// Waves that a step may have; 1 asks for no more than a step draws anyway.
    pub waves: usize,
    /// What becomes of a step that kept fewer after its last wave.
    pub on_short: OnShort,
}

/// What becomes of a step for which too few groups were kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnShort {
    /// The run ends before anything is updated.
    #[default]
    Error,
    /// The step goes on with those there are; with none at all the run ends.
    Continue,
}

/// When a stage runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cadence {
    /// As part of every step.
    #[default]
    Step,
    /// Between steps, without rows: before the first step, after every `every` steps, and after the last.
    Observer {
        /// Steps between two runs; 0 means only before the first and after the last step.
        every: u64,
    },
}

/// What a stage does with a model.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reads weights.
    Read,
    /// Changes weights; runs after every stage that reads them in the same step.
    Update,
}

/// How metric values of one step become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reduce {
    /// Weighted mean.
    Mean,
    /// Sum.
    Sum,
    /// Smallest.
    Min,
    /// Largest.
    Max,
    /// The newest value.
    Last,
}

/// A metric that a stage records: documented once, here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Name with its group, for example `actor/loss`.
    pub name: &'static str,
    /// Unit; empty where there is none.
    pub unit: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// How the step's values are reduced.
    pub reduce: Reduce,
}

/// What a stage declares: keys read and written, row rule, cut, models.
///
/// ```
/// use verl_pipe::keys::{RESPONSES, REWARDS};
/// use verl_pipe::stage::{Cardinality, StageSpec};
///
/// let spec = StageSpec::new().reads(RESPONSES).writes(REWARDS);
/// assert_eq!(spec.cardinality, Cardinality::Row);
/// assert_eq!(spec.reads[0].name, "responses");
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StageSpec {
    /// Fields that the stage needs, with the shape and tag it needs them in.
    pub reads: Vec<Field>,
    /// Fields that it adds.
    pub writes: Vec<Field>,
    /// Fields that it reads where some stage writes them, and does without otherwise.
    pub reads_optional: Vec<Field>,
    /// Fields (by name) that it reads although they have fewer rows, one a group: they are repeated per sample.
    pub broadcast: Vec<String>,
    /// What it does to the number of rows.
    pub rows: RowRule,
    /// How finely its input may be cut.
    pub cardinality: Cardinality,
    /// When it runs.
    pub cadence: Cadence,
    /// Models by name, and what it does with them. With none, the stage runs on the host pool.
    pub models: Vec<(String, Access)>,
    /// Of models that must have a certain [role](ModelInfo::role): name and role.
    pub roles: Vec<(String, &'static str)>,
    /// Rows handed to one call; `None`: for `Row` stages with a model the plan's micro-batch, otherwise no limit.
    pub slice_rows: Option<usize>,
    /// Longest time one row may take on the host pool before it is given up.
    pub deadline: Option<Duration>,
    /// What becomes of a row whose call failed, panicked or passed its deadline on the host pool.
    pub on_row_error: OnRowError,
    /// Metrics that it records.
    pub metrics: Vec<Metric>,
    /// What it does that a pipeline usually does once, as a phrase: the plan warns where two stages say the same.
    pub once: Vec<&'static str>,
    /// What to do about a needed key (by name) that no stage writes, where more can be said than to write it.
    pub remedies: BTreeMap<String, String>,
    /// Settings that are possible and probably not meant: the plan warns.
    pub doubts: Vec<ConfigError>,
    /// Quantities that it and other stages are told each for itself, and that are one.
    pub agreements: Vec<Agreement>,
    /// For a filter of groups: how many it is to keep; its source draws further waves while they are too few.
    pub refill: Option<Refill>,
    /// For a source: it draws other rows in each wave of a step, as [`StageContext::wave`] tells.
    pub draws_waves: bool,
    /// JSON Schema of the samples that it hands to [`StageSink::sample`], for the documentation of `samples.jsonl`.
    pub sample: Option<serde_json::Value>,
}

/// A quantity that several stages are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreement {
    /// What it is, as a phrase.
    pub quantity: &'static str,
    /// The stage's setting.
    pub setting: &'static str,
    /// What it is set to.
    pub value: String,
}

/// What becomes of a row whose host-pool call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnRowError {
    /// Nullable keys are null for the row, and it is counted. Only possible where every written key is nullable.
    #[default]
    Null,
    /// The step ends with the error.
    Stop,
}

impl StageSpec {
    /// A stage that reads and writes nothing yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Adds a key that it needs.
    pub fn reads(mut self, field: impl Into<Field>) -> Self {
        self.reads.push(field.into());
        self
    }
    /// Adds a key that it reads where it exists.
    pub fn reads_optional(mut self, field: impl Into<Field>) -> Self {
        self.reads_optional.push(field.into());
        self
    }
    /// Adds a key of one row a group, repeated for each sample of the group.
    pub fn reads_broadcast(mut self, field: impl Into<Field>) -> Self {
        let field = field.into();
        self.broadcast.push(field.name.to_string());
        self.reads.push(field);
        self
    }
    /// Adds a key that it writes.
    pub fn writes(mut self, field: impl Into<Field>) -> Self {
        self.writes.push(field.into());
        self
    }
    /// Sets the row rule.
    pub fn rows(mut self, rule: RowRule) -> Self {
        self.rows = rule;
        self
    }
    /// Sets the cut.
    pub fn cardinality(mut self, cardinality: Cardinality) -> Self {
        self.cardinality = cardinality;
        self
    }
    /// Runs between steps instead of within them.
    pub fn observer(mut self, every: u64) -> Self {
        self.cadence = Cadence::Observer { every };
        self
    }
    /// Adds a model.
    pub fn uses(mut self, model: impl Into<String>, access: Access) -> Self {
        self.models.push((model.into(), access));
        self
    }
    /// Adds a model that must have this [role](ModelInfo::role), where the model tells its own.
    pub fn uses_as(mut self, role: &'static str, model: impl Into<String>, access: Access) -> Self {
        let model = model.into();
        self.roles.push((model.clone(), role));
        self.uses(model, access)
    }
    /// Sets the rows of one call.
    pub fn slice_rows(mut self, rows: usize) -> Self {
        self.slice_rows = Some(rows);
        self
    }
    /// Sets the deadline of a row.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }
    /// Sets what becomes of a row whose call failed.
    pub fn on_row_error(mut self, rule: OnRowError) -> Self {
        self.on_row_error = rule;
        self
    }
    /// Says that it does something that a pipeline usually does once, for example `a KL penalty to the reference`.
    pub fn once(mut self, what: &'static str) -> Self {
        self.once.push(what);
        self
    }
    /// Says what to do where no stage writes the key `name`.
    pub fn remedy(mut self, name: impl Into<String>, help: impl Into<String>) -> Self {
        self.remedies.insert(name.into(), help.into());
        self
    }
    /// Says that a setting is possible and probably not meant.
    pub fn doubts(mut self, setting: ConfigError) -> Self {
        self.doubts.push(setting);
        self
    }
    /// Says to what its setting `setting` sets a quantity that other stages are told too, for example `longest response
    /// in tokens`: the plan warns where two stages say different things.
    pub fn agrees(
        mut self,
        quantity: &'static str,
        setting: &'static str,
        value: impl ToString,
    ) -> Self {
        self.agreements.push(Agreement {
            quantity,
            setting,
            value: value.to_string(),
        });
        self
    }
    /// Sets how many groups a filter is to keep.
    pub fn refill(mut self, refill: Refill) -> Self {
        self.refill = Some(refill);
        self
    }
    /// Says that a source can draw further waves.
    pub fn draws_waves(mut self) -> Self {
        self.draws_waves = true;
        self
    }
    /// Says what the samples are that it hands to [`StageSink::sample`].
    pub fn samples_of<T: JsonSchema>(mut self) -> Self {
        let generator = schemars::SchemaGenerator::default();
        self.sample = Some(generator.into_root_schema_for::<T>().to_value());
        self
    }
    /// Adds metrics that it records.
    pub fn metrics(mut self, metrics: &[Metric]) -> Self {
        self.metrics.extend_from_slice(metrics);
        self
    }
}

/// What a stage's call can end with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// Access to a batch failed.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Access to data failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A model refused.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// A model that is not there, or of another type than the stage expects.
    #[error("model `{name}` {reason}")]
    Model {
        /// Its name in the pipeline.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// One row is to blame.
    #[error("row {row} (sample {id}): {reason}")]
    Row {
        /// Position in the batch.
        row: usize,
        /// Identity of the row.
        id: String,
        /// What is wrong.
        reason: String,
    },
    /// The run was asked to end.
    #[error("the run was asked to end")]
    Cancelled,
    /// Anything else, as told by the library underneath.
    #[error("{0}")]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

impl StageError {
    /// Wraps an error of a library.
    pub fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        StageError::Failed(error.into())
    }
}

/// Asks a run to end; shared between threads.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks for the end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Where emitted batches and recorded metrics go; implemented by the executor, by tests and by replay.
pub trait StageSink {
    /// Takes rows that are ready. Blocks while the next stages are behind (back-pressure).
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

/// What a call of a stage is given.
pub struct StageContext<'a> {
    /// Name of the stage in the pipeline.
    pub stage: &'a str,
    /// Step of the run, counted from 1; 0 for an observer before the first step.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Seed of the run.
    pub seed: u64,
    /// For a source: which wave of the step it is to draw; 0 is the first, and for any other stage it is 0.
    pub wave: u64,
    /// Whether the run is to end.
    pub cancel: &'a CancelToken,
    /// Models of the device group; empty on the host pool.
    pub models: &'a mut Models,
    /// Where results go.
    pub sink: &'a mut dyn StageSink,
}

impl StageContext<'_> {
    /// Hands on rows that are ready.
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
    /// When the group holds no such model, or one of another type.
    pub fn model<T: ModelResource>(&mut self, name: &str) -> Result<&mut T, StageError> {
        find_model(self.models, name)
    }
}

/// The model `name` among `models`, as the type that a stage works with; for stages that emit while they hold it.
///
/// # Errors
/// When there is no such model, or it is of another type.
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
        .ok_or_else(|| fail(format!("is not on this device group; it holds: {known}")))?;
    model
        .as_any_mut()
        .downcast_mut()
        .ok_or_else(|| fail(format!("is not a {}", std::any::type_name::<T>())))
}

/// One stage of a pipeline.
///
/// A stage object is made from its configuration without loading anything; [`Stage::start`] may open files, and
/// models are loaded by the run.
pub trait Stage: Send + Any {
    /// What it reads and writes; the same answer at every call.
    fn spec(&self) -> StageSpec;

    /// Called once, on the thread that will run it, before the first step.
    ///
    /// # Errors
    /// When something it needs cannot be opened.
    fn start(&mut self, _context: &mut StartContext<'_>) -> Result<(), StageError> {
        Ok(())
    }

    /// Works on `input` (for a source: a batch without rows) and emits the keys it writes through
    /// [`StageContext::emit`]; a stage that keeps rows emits each row once, in any grouping and order.
    ///
    /// # Errors
    /// When the input is not as declared or the work fails.
    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError>;

    /// A copy for another thread of the host pool; `None` when the stage has state that cannot be shared. A stage
    /// without a model whose cardinality is `Row` and that can be copied runs rows side by side.
    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        None
    }

    /// State to go back to, for stages that have some.
    ///
    /// # Errors
    /// When the state cannot be read.
    fn snapshot(&mut self) -> Result<Option<Snapshot>, StageError> {
        Ok(None)
    }

    /// Back to a snapshot of this stage.
    ///
    /// # Errors
    /// When the snapshot is of another kind.
    fn restore(&mut self, _snapshot: &Snapshot) -> Result<(), StageError> {
        Ok(())
    }

    /// A snapshot of this stage in a form that can be kept on disk; `None` where it offers none.
    ///
    /// # Errors
    /// When the snapshot is of another kind.
    fn store(&mut self, _snapshot: &Snapshot) -> Result<Option<StoredState>, StageError> {
        Ok(None)
    }

    /// The snapshot that [`Stage::store`] made `stored` of; `version` is the one it had.
    ///
    /// # Errors
    /// When it is of another stage, or this one offers none.
    fn recall(
        &mut self,
        _version: &WeightsVersion,
        _stored: &StoredState,
    ) -> Result<Snapshot, StageError> {
        Err(ResourceError::NotStored.into())
    }
}

/// What [`Stage::start`] is given.
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

/// What a configuration is turned into a stage with.
#[derive(Debug, Clone, Default)]
pub struct BuildContext {
    /// The solved batch arithmetic of the pipeline.
    pub batch: BatchPlan,
    /// Seed of the run.
    pub seed: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Names of the declared models.
    pub models: Vec<String>,
    /// Names of the declared data sets.
    pub data: Vec<String>,
    /// Folder of the pipeline file, against which relative paths are read.
    pub base: std::path::PathBuf,
    /// What the declared models tell of themselves, by name, as far as they could be described.
    pub model_infos: BTreeMap<String, ModelInfo>,
}

impl BuildContext {
    /// Longest sequence of a model in tokens, where it is told.
    pub fn max_tokens(&self, model: &str) -> Option<usize> {
        let info = self.model_infos.get(model)?;
        (info.max_tokens > 0).then_some(info.max_tokens)
    }
}

/// Why a configuration cannot become a stage, model or data set: the setting, what is wrong, what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{setting}` {reason}")]
pub struct ConfigError {
    /// The setting, for example `temperature`.
    pub setting: String,
    /// What is wrong with its value.
    pub reason: String,
    /// What to do about it.
    pub help: String,
}

impl ConfigError {
    /// An error about `setting`.
    pub fn new(
        setting: impl Into<String>,
        reason: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        ConfigError {
            setting: setting.into(),
            reason: reason.into(),
            help: help.into(),
        }
    }
}

/// The configuration of a stage: a plain struct that becomes the stage. This is the whole seam of adding one.
///
/// Implementors derive `Deserialize` (with `deny_unknown_fields`), `Serialize` and `JsonSchema`; the registry, the
/// builder and the operator form take the same struct.
pub trait StageConfig:
    DeserializeOwned + Serialize + JsonSchema + Clone + Send + Sync + 'static
{
    /// Registered name, equal to the file's name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;

    /// Makes the stage; loads nothing.
    ///
    /// # Errors
    /// All settings that make no sense.
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>>;
}

/// The configuration of a model: a plain struct that becomes the resource.
pub trait ModelConfig:
    DeserializeOwned + Serialize + JsonSchema + Clone + Send + Sync + 'static
{
    /// Registered name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;

    /// What can be told without loading weights (reads `config.json` at most).
    ///
    /// # Errors
    /// Settings that make no sense, folders that are missing.
    fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>>;
    /// Whether a stage may update it.
    fn trainable(&self) -> bool;
    /// Whether it could be loaded onto `device`, when the pipeline is checked; a kind that does not tell takes any.
    ///
    /// # Errors
    /// A device that no machine has, or that this one lacks.
    fn check_device(&self, _device: &str) -> Result<(), DeviceRefusal> {
        Ok(())
    }
    /// How its token ids are written, without loading weights; `None` for a model without a tokenizer.
    fn token_texts(&self, _context: &BuildContext) -> Option<Arc<dyn TokenTexts>> {
        None
    }
    /// Loads it onto `device` (`cpu`, `cuda:0`).
    ///
    /// # Errors
    /// When the folder cannot be loaded.
    fn load(
        &self,
        name: &str,
        device: &str,
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError>;
}

/// The configuration of a data set.
pub trait DataConfig:
    DeserializeOwned + Serialize + JsonSchema + Clone + Send + Sync + 'static
{
    /// Registered name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;

    /// Looks at it without reading it, when the pipeline is checked: a file that is missing is told then.
    ///
    /// # Errors
    /// Settings that make no sense, files that are missing.
    fn check(&self, _context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        Ok(())
    }

    /// Opens it.
    ///
    /// # Errors
    /// When a file is missing, empty or malformed.
    fn open(&self, context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError>;
}

use crate::resource::{DeviceRefusal, ModelInfo};
