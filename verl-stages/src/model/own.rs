//! A custom model, built by a closure, as a model of a pipeline.

use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::Device;
use verl_models::model::{ModelInterface, PolicyModel, ValueInterface, ValueModel};
use verl_models::optim::OptimizerConfig;
use verl_models::replicas::Sharding;
use verl_models::tokenizer::Tokenizer;
use verl_words::resource::{ModelInfo, ModelResource, ResourceError};
use verl_words::stage::{BuildContext, ConfigError, DeviceSupport, ModelFactory, Training};

use super::replicas::OnDevice;
use super::texts::template_of;
use super::{
    BurnDevices, POLICY, PolicyResource, TextTools, VALUE_MODEL, ValueResource, check_optimizer,
    describe_texts, failed, optimizer_of, training,
};

/// A model of either kind.
enum BuiltModel {
    Policy(Box<dyn PolicyModel>),
    Values(Box<dyn ValueModel>),
}

impl BuiltModel {
    fn vocab_size(&self) -> usize {
        match self {
            BuiltModel::Policy(policy) => policy.vocab_size(),
            BuiltModel::Values(model) => model.vocab_size(),
        }
    }
}

type BuildModel = dyn Fn(OnDevice<'_>, u64, Option<OptimizerConfig>) -> Result<BuiltModel, ResourceError>
    + Send
    + Sync;

/// A custom model, created by [`policy_model`] or [`value_model`] and passed to
/// [`DataPipe::model_object`](verl_declare::pipe::DataPipe::model_object).
pub struct CustomModel {
    make: Box<BuildModel>,
    role: &'static str,
    optimizer: Option<OptimizerConfig>,
    tokenizer: Option<PathBuf>,
    info: ModelInfo,
}

/// Declares the model that `make(device, seed)` returns when a run starts; frozen unless it is
/// [`trained`](CustomModel::trained). The seed is the run's; `make` decides the type of the weights.
///
/// ```
/// use std::sync::Arc;
/// use verl_models::Decoder;
/// use verl_models::optim::OptimizerConfig;
/// use verl_pipe::pipe::DataPipe;
/// use verl_stages::model::policy_model;
///
/// let folder = "../verl-models/tests/models/tiny-random-qwen3";
/// let model = policy_model(move |device, _seed| Decoder::load(folder.as_ref(), device))
///     .trained(OptimizerConfig::default())
///     .tokenizer(folder);
/// let pipe = DataPipe::new("mine").model_object("actor", Arc::new(model));
/// let actor = &pipe.models[0].factory;
/// assert!(actor.trainable());
/// assert!(actor.load("actor", "cpu", &Default::default()).is_err(), "no tokenizer in this folder");
/// ```
pub fn policy_model<M, E, F>(make: F) -> CustomModel
where
    M: ModelInterface,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
    F: Fn(&Device, u64) -> Result<M, E> + Send + Sync + 'static,
{
    CustomModel::new(POLICY, move |on, seed, optimizer| {
        let device = verl_models::device::device(on.device).map_err(failed)?;
        let module = make(&device, seed).map_err(|error| ResourceError::Failed(error.into()))?;
        let policy = on.policy(module, optimizer, Sharding::default())?;
        Ok(BuiltModel::Policy(policy))
    })
}

/// Declares a model of values, a critic or a reward model, in the same way.
///
/// ```
/// use verl_models::optim::OptimizerConfig;
/// use verl_models::value_head::{FreshHead, HeadInit, HeadKind, ValueDecoder};
/// use verl_pipe::pipe::ModelFactory;
/// use verl_stages::model::value_model;
///
/// let folder = "../verl-models/tests/models/tiny-random-qwen3";
/// let head = FreshHead { kind: HeadKind::TokenClassification, init: HeadInit::Zeros };
/// let critic = value_model(move |device, _seed| ValueDecoder::load(folder.as_ref(), device, Some(head)))
///     .trained(OptimizerConfig::default());
/// assert!(critic.load("critic", "cpu", &Default::default()).is_ok());
/// ```
pub fn value_model<M, E, F>(make: F) -> CustomModel
where
    M: ValueInterface,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
    F: Fn(&Device, u64) -> Result<M, E> + Send + Sync + 'static,
{
    CustomModel::new(VALUE_MODEL, move |on, seed, optimizer| {
        let device = verl_models::device::device(on.device).map_err(failed)?;
        let module = make(&device, seed).map_err(|error| ResourceError::Failed(error.into()))?;
        let model = on.values(module, optimizer, Sharding::default())?;
        Ok(BuiltModel::Values(model))
    })
}

impl CustomModel {
    fn new(
        role: &'static str,
        make: impl Fn(OnDevice<'_>, u64, Option<OptimizerConfig>) -> Result<BuiltModel, ResourceError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        CustomModel {
            make: Box::new(make),
            role,
            optimizer: None,
            tokenizer: None,
            info: ModelInfo {
                summary: "a custom model".to_owned(),
                ..ModelInfo::default()
            },
        }
    }

    /// Trains it with this optimiser.
    #[must_use]
    pub fn trained(mut self, optimizer: OptimizerConfig) -> Self {
        self.optimizer = Some(optimizer);
        self
    }

    /// Uses the tokenizer, and the chat template if there is one, of this folder; relative to the pipeline's.
    #[must_use]
    pub fn tokenizer(mut self, dir: impl Into<PathBuf>) -> Self {
        self.tokenizer = Some(dir.into());
        self
    }

    /// Sets what `pipe plan` shows about it; by default only that it is a custom model.
    #[must_use]
    pub fn described(mut self, info: ModelInfo) -> Self {
        self.info = info;
        self
    }
}

impl ModelFactory for CustomModel {
    fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        check_optimizer(self.optimizer.as_ref())?;
        if let Some(dir) = &self.tokenizer
            && !context.base.join(dir).join("tokenizer.json").is_file()
        {
            return Err(vec![ConfigError::new(
                "tokenizer",
                format!(
                    "is `{}`, which contains no tokenizer.json",
                    context.base.join(dir).display()
                ),
                "set it to the folder of a Hugging Face tokenizer",
            )]);
        }
        let mut info = ModelInfo {
            role: self.role,
            ..self.info.clone()
        };
        if let Some(dir) = &self.tokenizer {
            let described = describe_texts(&mut info, &context.base.join(dir), None);
            described.map_err(|error| {
                vec![ConfigError {
                    setting: "tokenizer".to_owned(),
                    ..error
                }]
            })?;
        }
        Ok(info)
    }

    fn trainable(&self) -> bool {
        self.optimizer.is_some()
    }

    fn training(&self, optimizer_steps: u64) -> Option<Training> {
        let own = self.optimizer.clone()?;
        // It is passed as an object, so it has no settings in a file.
        Some(training(own, optimizer_steps, |_| ()))
    }

    fn devices(&self) -> &dyn DeviceSupport {
        &BurnDevices
    }

    fn load(
        &self,
        name: &str,
        device: &str,
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        self.load_onto(name, OnDevice::one(device), context)
    }

    fn load_replicas(
        &self,
        name: &str,
        devices: &[String],
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        self.load_onto(name, OnDevice::all(name, devices)?, context)
    }
}

impl CustomModel {
    fn load_onto(
        &self,
        name: &str,
        on: OnDevice<'_>,
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        let optimizer = optimizer_of(self.optimizer.as_ref(), name, context);
        let model = (self.make)(on, context.seed, optimizer)?;
        let mut tools = TextTools::default();
        if let Some(dir) = &self.tokenizer {
            let dir = context.base.join(dir);
            let found = Tokenizer::load(&dir).map_err(failed)?;
            let (ids, rows) = (found.vocab_size(), model.vocab_size());
            if ids > rows {
                let reason = format!(
                    "the tokenizer of `{}` has {ids} ids, but the model only has {rows}",
                    dir.display()
                );
                return Err(ResourceError::Failed(reason.into()));
            }
            tools.tokenizer = Some(Arc::new(found));
            (tools.template, tools.no_template) = template_of(&dir);
        }
        Ok(match model {
            BuiltModel::Policy(policy) => Box::new(PolicyResource::with_texts(policy, tools)),
            BuiltModel::Values(model) => Box::new(ValueResource::with_texts(model, tools)),
        })
    }
}

#[cfg(test)]
mod tests {
    use verl_models::Decoder;
    use verl_models::hf::Origin;

    use super::*;

    const FOLDER: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/models/addition-init"
    );

    fn decoder(device: &Device, seed: u64) -> Result<Decoder, String> {
        let origin = Origin::read(FOLDER.as_ref()).map_err(|error| error.to_string())?;
        let mut config = origin.decoder_config().map_err(|error| error.to_string())?;
        if seed == 404 {
            return Err("no such seed".to_owned());
        }
        if seed == 16 {
            config.vocab_size = 16;
        }
        Ok(Decoder::random(config, seed, device))
    }

    #[test]
    fn a_closure_becomes_a_resource_and_its_errors_are_reported() {
        let load = |model: &CustomModel, seed| {
            let context = BuildContext {
                seed,
                ..BuildContext::default()
            };
            model.load("actor", "cpu", &context)
        };
        let message = |model: &CustomModel, seed| match load(model, seed) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        let frozen = policy_model(decoder).tokenizer(FOLDER);
        assert!(!frozen.trainable());
        let (one, two) = (load(&frozen, 1).unwrap(), load(&frozen, 2).unwrap());
        assert_ne!(one.version().hash, two.version().hash);
        assert!(
            policy_model(decoder)
                .trained(OptimizerConfig::default())
                .trainable()
        );
        assert_eq!(message(&frozen, 404), "no such seed");
        assert!(message(&frozen, 16).contains("32 ids, but the model only has 16"));

        let context = BuildContext::default();
        let nowhere = policy_model(decoder).tokenizer("no/such/folder");
        assert!(
            nowhere.describe(&context).unwrap_err()[0]
                .reason
                .contains("no/such/folder")
        );
        let invalid = policy_model(decoder).trained(OptimizerConfig {
            learning_rate: -1.0,
            ..OptimizerConfig::default()
        });
        let faults = invalid.describe(&context).unwrap_err();
        assert_eq!(faults[0].setting, "optimizer.learning_rate");
    }
}
