//! Configurations of stages, models and data sets, and what they are built with.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{BatchPlan, Stage};
use crate::data::{DataError, DataLoaderInterface, OpenedData};
use crate::resource::{
    CpuKernels, DeviceRefusal, ModelInfo, ModelResource, ResourceError, Shortage, TokenTexts,
};

/// The context in which a stage is built from its configuration.
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
    /// The first device of the group (`cpu`, `cuda:0`), for settings that depend on the device; may be empty.
    pub device: String,
    /// Folder of the pipeline file, against which relative paths are resolved.
    pub base: std::path::PathBuf,
    /// Information about the declared models, by name, as far as they could be described.
    pub model_infos: BTreeMap<String, ModelInfo>,
    /// Temperature at which the tokens that the stage reads were sampled, for a stage that
    /// [follows](super::StageSpec::at_temperature_of) it; `None` if no stage samples them. It differs between stages.
    pub temperature: Option<f64>,
    /// Optimiser steps of the run by model, once the plan knows them, as the batch arithmetic counts them: a filter
    /// that keeps fewer rows than it may reduces them.
    pub optimizer_steps: BTreeMap<String, u64>,
}

impl BuildContext {
    /// Longest sequence of a model in tokens, if it is known.
    pub fn max_tokens(&self, model: &str) -> Option<usize> {
        let info = self.model_infos.get(model)?;
        (info.max_tokens > 0).then_some(info.max_tokens)
    }
}

/// Why a configuration cannot become a stage, model or data set: the setting, what is wrong, what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
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

/// The settings of a configuration as JSON, for the plan and the resolved configuration. Whoever ignores the error must
/// report it when the configuration is built or checked.
///
/// # Errors
/// Settings that JSON cannot represent, such as a path that is not valid UTF-8.
pub fn config_json<C: Serialize>(
    kind: &str,
    config: &C,
) -> Result<serde_json::Value, Vec<ConfigError>> {
    serde_json::to_value(config).map_err(|error| {
        let reason = format!("is `{kind}`, whose settings cannot be written as JSON: {error}");
        let help = "use paths that are valid UTF-8, and maps whose keys are strings";
        vec![ConfigError::new("kind", reason, help)]
    })
}

/// How a model is trained in a run, as the plan knows it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Training {
    /// One line about it, for `pipe plan`.
    pub summary: String,
    /// Its settings, including those that the run determines; null if it has none.
    pub settings: serde_json::Value,
    /// Settings that are probably not intended for this number of optimiser steps.
    pub warnings: Vec<ConfigError>,
}

/// The configuration of a stage: a plain struct that becomes the stage. A new stage only has to implement this.
///
/// Implementors derive `Deserialize` (with `deny_unknown_fields`), `Serialize` and `JsonSchema`; the registry, the
/// builder and the operator form take the same struct.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the configuration of a stage",
    note = "implement `StageConfig` for its settings: derive `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` if your crate does not depend on them)"
)]
pub trait StageConfig:
    DeserializeOwned + Serialize + JsonSchema + Clone + Send + Sync + 'static
{
    /// Registered name, equal to the file's name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;

    /// Builds the stage; loads nothing.
    ///
    /// # Errors
    /// All invalid settings.
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>>;
}

/// What a kind of model knows about devices.
pub trait DeviceSupport: Send + Sync {
    /// Checks whether a model could be loaded onto `device`, when the pipeline is checked; the default accepts any
    /// device.
    ///
    /// # Errors
    /// A device that does not exist, that this machine lacks, or that models cannot use.
    fn check(&self, _device: &str) -> Result<(), DeviceRefusal> {
        Ok(())
    }
    /// Bytes of memory of `device`; `None` if the device is absent or its memory is unknown.
    fn memory(&self, _device: &str) -> Option<u64> {
        None
    }
    /// Whether the message of a panic or an error reports that a device of such models is out of memory.
    fn shortage(&self, _message: &str) -> Option<Shortage> {
        None
    }
}

/// Accepts any device, and knows nothing about it.
struct AnyDevice;

impl DeviceSupport for AnyDevice {}

/// Describes and loads a model: a [`ModelConfig`], or a custom object.
pub trait ModelFactory: Send + Sync {
    /// Describes the model without loading weights (reads `config.json` at most).
    ///
    /// # Errors
    /// Invalid settings, missing folders.
    fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>>;
    /// Whether a stage may update it.
    fn trainable(&self) -> bool;
    /// How it is trained in a run with this number of optimiser steps; `None` if the kind does not report it.
    fn training(&self, _optimizer_steps: u64) -> Option<Training> {
        None
    }
    /// What its kind knows about devices; by default it accepts any.
    fn devices(&self) -> &dyn DeviceSupport {
        &AnyDevice
    }
    /// The kernels that it uses on the CPU. By default they are unknown, and a replay on another processor does not
    /// expect equal bits.
    fn cpu_kernels(&self) -> CpuKernels {
        CpuKernels::default()
    }
    /// The texts of its token ids, without loading weights; `None` for a model without a tokenizer.
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
    /// Whether it can have replicas on several shares of the CPU: the kind implements [`ModelFactory::load_replicas`].
    fn can_replicate(&self) -> bool {
        false
    }
    /// Whether a copy in another device group can follow the model when it is trained: the kind implements
    /// [`ModelResource::weight_source`] and [`ModelResource::weight_sink`].
    fn can_follow(&self) -> bool {
        false
    }
    /// As [`ModelFactory::load_replicas`], for a copy in another device group, which is never trained: it needs no optimiser.
    ///
    /// # Errors
    /// As [`ModelFactory::load_replicas`].
    fn load_copy(
        &self,
        name: &str,
        devices: &[String],
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        self.load_replicas(name, devices, context)
    }
    /// Loads replicas of it onto `devices` (`cpu:0`, `cpu:1`), one onto each; results must have the bits of a single model.
    /// By default a model cannot have replicas, and is loaded onto a single device.
    ///
    /// # Errors
    /// As [`load`](Self::load); devices onto which replicas of this kind of model cannot be loaded.
    fn load_replicas(
        &self,
        name: &str,
        devices: &[String],
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        match devices {
            [device] => self.load(name, device, context),
            _ => Err(ResourceError::Failed(
                format!(
                    "model `{name}` cannot have replicas, but its group has {} devices ({}); use a group of one device",
                    devices.len(),
                    devices.join(", ")
                )
                .into(),
            )),
        }
    }
}

/// The configuration of a model: a plain struct that becomes the resource; [`ModelFactory`] has its methods.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the configuration of a model",
    note = "implement `ModelFactory` and `ModelConfig` for its settings: derive `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` if your crate does not depend on them)"
)]
pub trait ModelConfig:
    ModelFactory + DeserializeOwned + Serialize + JsonSchema + Clone + 'static
{
    /// Registered name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;
}

/// The configuration of a data set.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the configuration of a data set",
    note = "implement `DataConfig` for its settings: derive `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` if your crate does not depend on them)"
)]
pub trait DataConfig:
    DeserializeOwned + Serialize + JsonSchema + Clone + Send + Sync + 'static
{
    /// Registered name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;

    /// Checks it without reading it, when the pipeline is checked; reports missing files, for example.
    ///
    /// # Errors
    /// Invalid settings, missing files.
    fn check(&self, _context: &BuildContext) -> Result<(), Vec<ConfigError>> {
        Ok(())
    }

    /// Opens it.
    ///
    /// # Errors
    /// When a file is missing, empty or malformed.
    fn open(&self, context: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError>;

    /// Opens the part of it that a check reads: all of it, or only the beginning if it takes long to open.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    fn open_start(&self, context: &BuildContext) -> Result<OpenedData, DataError> {
        self.open(context).map(OpenedData::complete)
    }
}
