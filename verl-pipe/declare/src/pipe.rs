//! [`DataPipe`]: a declared pipeline. It only records declarations; `Plannable::plan` checks them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_rules::config::TraceConfig;
use verl_rules::{Rule, RuleDecl};
use verl_words::data::{DataError, DataLoaderInterface, OpenedData};
use verl_words::resource::{CpuKernels, ModelInfo};
use verl_words::stage::{
    BuildContext, ConfigError, DataConfig, ModelConfig, Stage, StageConfig, config_json,
};

use crate::chain::Chain;
pub use crate::chain::{IntoStage, stage_fn, stage_with};
use crate::sizes::{BatchConfig, DevicesConfig, GroupConfig};
pub use verl_words::stage::ModelFactory;

/// Settings of a run (`[run]`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Run folder. It must not exist, unless it contains a run that failed before it completed its first step.
    pub dir: PathBuf,
    /// Seed of every random draw.
    pub seed: u64,
    /// Steps to run (steps).
    pub steps: u64,
    /// Steps between two console lines (steps).
    pub console_every: u64,
    /// Samples per step written to `samples.jsonl` (samples): rows of the step with prompt, response, answer, reward
    /// and advantage, as far as the pipeline has these keys.
    pub samples_per_step: usize,
    /// Time limit for one call of a stage that uses a model (seconds).
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub stage_deadline_s: f64,
    /// Largest share of a step's rows that may fail in a stage (share); if more fail, the run ends. If all of them
    /// fail, the run always ends.
    #[schemars(range(min = 0, max = 1))]
    pub max_failed_share: f64,
    /// How often a worker process that is lost is started again in one step before the run ends (times). Only for groups
    /// with `worker = "process"`.
    pub worker_retries: u32,
    /// Steps between two snapshots of a worker process (steps): after a loss, at most so many steps of updates are repeated.
    /// A snapshot copies weights and optimiser state. Only for groups with `worker = "process"`.
    #[schemars(range(min = 1))]
    pub worker_snapshot_steps: u64,
    /// How long a worker process may be silent before it is considered lost (seconds); it sends heartbeats, also during a
    /// call. Only for groups with `worker = "process"`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub worker_deadline_s: f64,
    /// Models to save at the end; by default all that were updated.
    pub save: Option<Vec<String>>,
}

impl Default for RunConfig {
    fn default() -> Self {
        RunConfig {
            dir: PathBuf::from("runs/run"),
            seed: 17,
            steps: 100,
            console_every: 1,
            samples_per_step: 2,
            stage_deadline_s: 3600.0,
            max_failed_share: 1.0,
            worker_retries: 2,
            worker_snapshot_steps: 10,
            worker_deadline_s: 10.0,
            save: None,
        }
    }
}

/// Builds a stage from its configuration; created by the typed front ends, called by the plan and the workers.
pub type StageBuilder =
    Arc<dyn Fn(&BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> + Send + Sync>;
/// Opens a data set.
pub type DataBuilder =
    Arc<dyn Fn(&BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> + Send + Sync>;

/// Opens the part of a data set that a check reads.
pub type DataStartBuilder =
    Arc<dyn Fn(&BuildContext) -> Result<OpenedData, DataError> + Send + Sync>;

/// Checks a data set without reading it.
pub type DataCheck = Arc<dyn Fn(&BuildContext) -> Result<(), Vec<ConfigError>> + Send + Sync>;

/// A declared stage.
#[derive(Clone)]
pub struct StageDecl {
    /// Name in the pipeline, unique.
    pub name: String,
    /// Registered kind, or `custom` for a stage that was given as an object.
    pub kind: String,
    /// Its configuration, for the resolved config and the plan.
    pub config: serde_json::Value,
    /// Renamed keys: the stage's own name → the pipeline's.
    pub rename: BTreeMap<String, String>,
    /// Explicitly stated reads; must agree with the stage.
    pub stated_reads: Option<Vec<String>>,
    /// Explicitly stated writes; must agree with the stage.
    pub stated_writes: Option<Vec<String>>,
    /// Whether it is recorded in full at every step.
    pub debug: bool,
    /// The device group on which it runs; by default that of its model.
    pub group: Option<String>,
    /// Builds the stage.
    pub build: StageBuilder,
}

impl fmt::Debug for StageDecl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StageDecl")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// A declared model.
#[derive(Clone)]
pub struct ModelDecl {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// Its configuration.
    pub config: serde_json::Value,
    /// Its device group; by default that of `[devices]`.
    pub group: Option<String>,
    /// Describes and loads it.
    pub factory: Arc<dyn ModelFactory>,
    /// Why its settings cannot be written as JSON; empty if they can.
    pub unwritable: Vec<ConfigError>,
}

/// A declared data set.
#[derive(Clone)]
pub struct DataDecl {
    /// Name in the pipeline.
    pub name: String,
    /// Registered kind.
    pub kind: String,
    /// Its configuration.
    pub config: serde_json::Value,
    /// Checks it before it is opened; see [`DataConfig::check`].
    pub check: DataCheck,
    /// Opens it.
    pub open: DataBuilder,
    /// Opens the part of it that a check reads; see [`DataConfig::open_start`].
    pub open_start: DataStartBuilder,
}

/// A declared pipeline; see the crate documentation.
#[derive(Clone)]
pub struct DataPipe {
    /// Name of the pipeline.
    pub name: String,
    /// Run settings.
    pub run: RunConfig,
    /// Batch sizes.
    pub batch: BatchConfig,
    /// Devices.
    pub devices: DevicesConfig,
    /// Named device groups by declaration order; without any, the group of `devices` is the only one.
    pub groups: Vec<(String, GroupConfig)>,
    /// What is recorded.
    pub trace: TraceConfig,
    /// Data sets by declaration order.
    pub data: Vec<DataDecl>,
    /// Models by declaration order.
    pub models: Vec<ModelDecl>,
    /// Stages by declaration order.
    pub stages: Vec<StageDecl>,
    /// Anomaly rules in addition to the built-in ones.
    pub rules: Vec<RuleDecl>,
    /// Folder against which relative paths are resolved.
    pub base: PathBuf,
    /// Statements about a stage that were made before any stage was added; the plan reports them as errors.
    pub misplaced: Vec<String>,
}

impl DataPipe {
    /// An empty pipeline.
    pub fn new(name: impl Into<String>) -> Self {
        DataPipe {
            name: name.into(),
            run: RunConfig::default(),
            batch: BatchConfig::default(),
            devices: DevicesConfig::default(),
            groups: Vec::new(),
            trace: TraceConfig::default(),
            data: Vec::new(),
            models: Vec::new(),
            stages: Vec::new(),
            rules: Vec::new(),
            base: PathBuf::new(),
            misplaced: Vec::new(),
        }
    }

    /// Sets the run settings.
    pub fn run(mut self, run: RunConfig) -> Self {
        self.run = run;
        self
    }

    /// Adds a custom anomaly rule, which `[trace.rules]` may tune by its name. Each run makes a new instance of it.
    pub fn rule<R: Rule + 'static>(mut self, make: impl Fn() -> R + Send + Sync + 'static) -> Self {
        self.rules.push(RuleDecl::new(make));
        self
    }

    /// Sets the batch sizes.
    pub fn batch(mut self, batch: BatchConfig) -> Self {
        self.batch = batch;
        self
    }

    /// Sets the devices.
    pub fn devices(mut self, devices: DevicesConfig) -> Self {
        self.devices = devices;
        self
    }

    /// Declares a named device group.
    pub fn group(mut self, name: impl Into<String>, config: GroupConfig) -> Self {
        self.groups.push((name.into(), config));
        self
    }

    /// Sets what is recorded.
    pub fn trace(mut self, trace: TraceConfig) -> Self {
        self.trace = trace;
        self
    }

    /// Whether any step of any stage is to be recorded in full, because of the trace settings, the flags that change
    /// them, or a stage's own `debug`.
    pub fn records_in_full(&self) -> bool {
        self.trace.captures() || self.stages.iter().any(|stage| stage.debug)
    }

    /// Declares a data set.
    pub fn data<C: DataConfig>(mut self, name: impl Into<String>, config: C) -> Self {
        self.data.push(DataDecl::new(name, config));
        self
    }

    /// Declares a model.
    pub fn model<C: ModelConfig>(mut self, name: impl Into<String>, config: C) -> Self {
        self.models.push(ModelDecl::new(name, config));
        self
    }

    /// Puts the model declared last into a device group.
    ///
    /// ```
    /// # use verl_pipe::pipe::DataPipe;
    /// # use verl_pipe::sizes::GroupConfig;
    /// let cpu = || GroupConfig::new("cpu");
    /// let pipe = DataPipe::new("two groups").group("train", cpu()).group("score", cpu());
    /// assert_eq!(pipe.groups[1].0, "score");
    /// assert_eq!(pipe.model_in("score").misplaced, ["model_in"]); // no model was declared before it
    /// ```
    pub fn model_in(mut self, group: impl Into<String>) -> Self {
        match self.models.last_mut() {
            Some(model) => model.group = Some(group.into()),
            None => self.misplaced.push("model_in".to_owned()),
        }
        self
    }

    /// Declares a custom model, given as the object that loads it.
    pub fn model_object(mut self, name: impl Into<String>, factory: Arc<dyn ModelFactory>) -> Self {
        self.models.push(ModelDecl {
            name: name.into(),
            kind: CUSTOM.to_owned(),
            config: serde_json::Value::Null,
            group: None,
            factory,
            unwritable: Vec::new(),
        });
        self
    }

    /// Declares a custom data set, given as an object.
    pub fn data_object(
        mut self,
        name: impl Into<String>,
        data: Arc<dyn DataLoaderInterface>,
    ) -> Self {
        let start = OpenedData::complete(data.clone());
        self.data.push(DataDecl {
            name: name.into(),
            kind: CUSTOM.to_owned(),
            config: serde_json::Value::Null,
            check: Arc::new(|_| Ok(())),
            open: Arc::new(move |_| Ok(data.clone())),
            open_start: Arc::new(move |_| Ok(start.clone())),
        });
        self
    }

    /// Adds a stage under a name: a [`StageConfig`], or a custom stage from [`stage_fn`] or [`stage_with`].
    ///
    /// ```
    /// use verl_pipe::keys::{REWARDS, RESPONSES};
    /// use verl_pipe::pipe::{DataPipe, stage_fn};
    /// use verl_pipe::plan::Plannable;
    /// use verl_pipe::stage::{RowRule, StageSpec};
    ///
    /// let source = StageSpec::new().rows(RowRule::Source).writes(RESPONSES);
    /// let length = StageSpec::new().reads(RESPONSES).writes(REWARDS);
    /// let pipe = DataPipe::new("lengths")
    ///     .add_stage("source", stage_fn(source, |batch, ctx| ctx.emit(batch)))
    ///     .writes(["responses"])
    ///     .add_stage("length", stage_fn(length, |mut batch, ctx| {
    ///         let rewards: Vec<f32> = batch.get(&RESPONSES)?.rows().map(|row| -(row.len() as f32)).collect();
    ///         batch.put(&REWARDS, rewards)?;
    ///         ctx.emit(batch)
    ///     }))
    ///     .reads(["responses"])
    ///     .writes(["length_rewards"])
    ///     .writing("rewards", "length_rewards");
    ///
    /// let plan = pipe.plan().unwrap();
    /// assert_eq!(plan.fields()["length_rewards"].shape, "[B]");
    /// assert_eq!(plan.warnings()[0].code, "P013"); // nothing reads it
    /// ```
    pub fn add_stage(mut self, name: impl Into<String>, stage: impl IntoStage) -> Self {
        self.stages.push(StageDecl {
            name: name.into(),
            ..stage.declare()
        });
        self
    }

    /// States the keys that the stage added last reads, by the pipeline's names; the plan checks this.
    pub fn reads<S: Into<String>>(self, keys: impl IntoIterator<Item = S>) -> Self {
        let keys: Vec<String> = keys.into_iter().map(Into::into).collect();
        self.update_last("reads", move |stage| stage.stated_reads = Some(keys))
    }

    /// States the keys that the stage added last writes, by the pipeline's names; the plan checks this.
    pub fn writes<S: Into<String>>(self, keys: impl IntoIterator<Item = S>) -> Self {
        let keys: Vec<String> = keys.into_iter().map(Into::into).collect();
        self.update_last("writes", move |stage| stage.stated_writes = Some(keys))
    }

    /// Makes the stage added last read its key `own` from the pipeline's `key`.
    pub fn reading(self, own: impl Into<String>, key: impl Into<String>) -> Self {
        let (own, key) = (own.into(), key.into());
        self.update_last("reading", move |stage| {
            stage.rename.insert(own, key);
        })
    }

    /// Makes the stage added last write its key `own` as the pipeline's `key`.
    pub fn writing(self, own: impl Into<String>, key: impl Into<String>) -> Self {
        let (own, key) = (own.into(), key.into());
        self.update_last("writing", move |stage| {
            stage.rename.insert(own, key);
        })
    }

    /// Records the stage added last in full at every step, within the size budget of the trace.
    ///
    /// ```
    /// use verl_pipe::keys::RESPONSES;
    /// use verl_pipe::pipe::{DataPipe, stage_fn};
    /// use verl_pipe::stage::{RowRule, StageSpec};
    ///
    /// let source = StageSpec::new().rows(RowRule::Source).writes(RESPONSES);
    /// let pipe = DataPipe::new("seen")
    ///     .add_stage("source", stage_fn(source, |batch, ctx| ctx.emit(batch)))
    ///     .debug();
    /// assert!(pipe.stages[0].debug);
    /// ```
    pub fn debug(self) -> Self {
        self.update_last("debug", |stage| stage.debug = true)
    }

    /// Runs the stage added last on a device group other than that of its model.
    pub fn stage_in(self, group: impl Into<String>) -> Self {
        let group = group.into();
        self.update_last("stage_in", |stage| stage.group = Some(group))
    }

    /// Adds the stages of a [`Chain`], in order.
    pub fn chain(mut self, chain: impl Into<Chain>) -> Self {
        self.stages.extend(chain.into().into_stages());
        self
    }

    fn update_last(mut self, statement: &str, change: impl FnOnce(&mut StageDecl)) -> Self {
        match self.stages.last_mut() {
            Some(stage) => change(stage),
            None => self.misplaced.push(statement.to_owned()),
        }
        self
    }
}

/// Kind of a stage, model or data set that was given as an object instead of a configuration.
pub const CUSTOM: &str = "custom";

impl StageDecl {
    /// The declaration of a stage from its configuration.
    pub fn new<C: StageConfig>(name: impl Into<String>, config: C) -> Self {
        StageDecl {
            name: name.into(),
            kind: C::KIND.to_owned(),
            config: config_json(C::KIND, &config).unwrap_or_default(),
            rename: BTreeMap::new(),
            stated_reads: None,
            stated_writes: None,
            debug: false,
            group: None,
            build: Arc::new(move |context| {
                config_json(C::KIND, &config)?;
                config.build(context)
            }),
        }
    }
}

impl DataPipe {
    /// The CPU kernels that all its models use, as far as they agree.
    pub fn cpu_kernels(&self) -> CpuKernels {
        CpuKernels::common(self.models.iter().map(|model| model.factory.cpu_kernels()))
    }
}

impl ModelDecl {
    /// The declaration of a model from its configuration.
    pub fn new<C: ModelConfig>(name: impl Into<String>, config: C) -> Self {
        let (json, unwritable) = match config_json(C::KIND, &config) {
            Ok(json) => (json, Vec::new()),
            Err(errors) => (serde_json::Value::Null, errors),
        };
        ModelDecl {
            name: name.into(),
            kind: C::KIND.to_owned(),
            config: json,
            group: None,
            factory: Arc::new(config),
            unwritable,
        }
    }

    /// Describes the model without loading weights.
    ///
    /// # Errors
    /// Settings that cannot be written as JSON, and those of [`ModelFactory::describe`].
    pub fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        match self.unwritable.as_slice() {
            [] => self.factory.describe(context),
            errors => Err(errors.to_vec()),
        }
    }
}

impl DataDecl {
    /// The declaration of a data set from its configuration.
    pub fn new<C: DataConfig>(name: impl Into<String>, config: C) -> Self {
        let (checked, started) = (config.clone(), config.clone());
        DataDecl {
            name: name.into(),
            kind: C::KIND.to_owned(),
            config: config_json(C::KIND, &config).unwrap_or_default(),
            check: Arc::new(move |context| {
                config_json(C::KIND, &checked)?;
                checked.check(context)
            }),
            open: Arc::new(move |context| config.open(context)),
            open_start: Arc::new(move |context| started.open_start(context)),
        }
    }
}
