//! Configurations of stages, models and data sets, and what they are built with.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Stage;
use crate::data::{DataError, DataLoaderInterface, OpenedData};
use crate::resource::{
    CpuKernels, DeviceRefusal, ModelInfo, ModelResource, ResourceError, Shortage, TokenTexts,
};
use crate::schedule::batching::BatchPlan;

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
    /// The first device of the group (`cpu`, `cuda:0`), for what a model chooses by its device; may be empty.
    pub device: String,
    /// Folder of the pipeline file, against which relative paths are read.
    pub base: std::path::PathBuf,
    /// What the declared models tell of themselves, by name, as far as they could be described.
    pub model_infos: BTreeMap<String, ModelInfo>,
    /// Temperature at which the tokens that the stage asks about were sampled, for a stage that
    /// [follows](super::StageSpec::at_temperature_of) it; absent where no stage samples them. Each stage has its own.
    pub temperature: Option<f64>,
    /// Optimiser steps of the run by model, once the plan knows them, as the batch arithmetic counts them: fewer are taken
    /// where a filter keeps fewer rows than it may.
    pub optimizer_steps: BTreeMap<String, u64>,
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

/// How a model is trained in a run, as the plan knows it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Training {
    /// In a line, for `pipe plan`.
    pub summary: String,
    /// Its settings, with those filled in that the run decides; null where it has none.
    pub settings: serde_json::Value,
    /// Settings that are probably not meant for so many optimiser steps.
    pub doubts: Vec<ConfigError>,
}

/// The configuration of a stage: a plain struct that becomes the stage. This is the whole seam of adding one.
///
/// Implementors derive `Deserialize` (with `deny_unknown_fields`), `Serialize` and `JsonSchema`; the registry, the
/// builder and the operator form take the same struct.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the configuration of a stage",
    note = "implement `StageConfig` for its settings: derive `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` where these crates are not dependencies of yours)"
)]
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
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the configuration of a model",
    note = "implement `ModelConfig` for its settings: derive `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` where these crates are not dependencies of yours)"
)]
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
    /// How it is trained in a run that takes so many optimiser steps with it; `None` for a kind that does not say.
    fn training(&self, _optimizer_steps: u64) -> Option<Training> {
        None
    }
    /// Whether it could be loaded onto `device`, when the pipeline is checked; a kind that does not tell takes any.
    ///
    /// # Errors
    /// A device that no machine has, or that this one lacks.
    fn check_device(&self, _device: &str) -> Result<(), DeviceRefusal> {
        Ok(())
    }
    /// Bytes of memory of `device`, where it is here and tells; a kind that does not know says nothing.
    fn device_memory(&self, _device: &str) -> Option<u64> {
        None
    }
    /// Whether a message, of a panic or an error, says that the memory of a device that such models work on is used up.
    fn shortage(&self, _message: &str) -> Option<Shortage> {
        None
    }
    /// The kernels with which it computes on the CPU. By default nothing is known of them, and a replay on another
    /// processor expects no equal bits.
    fn cpu_kernels(&self) -> CpuKernels {
        CpuKernels::default()
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
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the configuration of a data set",
    note = "implement `DataConfig` for its settings: derive `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` where these crates are not dependencies of yours)"
)]
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

    /// Opens as much of it as a check looks at: all of it, or the beginning of one that takes long to open.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    fn open_start(&self, context: &BuildContext) -> Result<OpenedData, DataError> {
        self.open(context).map(OpenedData::whole)
    }
}
