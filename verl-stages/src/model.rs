//! Models as resources of a pipeline: kind `causal_lm`, a decoder from a Hugging Face folder with its tokenizer, and kind
//! [`value_model`](ValueLm), the same with a value head.
//!
//! [`IlqlLm`] is a decoder with the heads of ILQL, only in f32. Custom models are declared with [`policy_model`] and
//! [`value_model`](value_model()).

mod dtype;
mod ilql;
mod own;
mod policy;
mod replicas;
mod texts;
mod training;
pub(crate) mod value;
mod words;

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{DType, Device};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::device::{DeviceError, DeviceKind};
use verl_models::hf::save::companion_bytes;
use verl_models::hf::{LoadError, Origin, SaveDType};
use verl_models::memory::{Usage, footprint};
use verl_models::model::TrainedModel;
use verl_models::optim::OptimizerConfig;
use verl_models::replicas::Sharding;
use verl_models::tokenizer::Tokenizer;
use verl_models::{Decoder, DecoderConfig, parameters, registers};
use verl_words::resource::{
    CpuKernels, DeviceRefusal, Footprint, ModelInfo, ModelResource, ResourceError, Shortage,
    Snapshot, StoredState, TokenTexts, WeightsVersion,
};
use verl_words::stage::{
    BuildContext, ConfigError, DeviceSupport, ModelConfig, ModelFactory, Training,
};

use replicas::{OnDevice, is_default};
use texts::{describe_texts, load_texts};
use training::{optimizer_of, training};
use words::token_texts;

pub use dtype::WeightsDType;
pub use ilql::IlqlLm;
pub use own::{CustomModel, policy_model, value_model};
pub(crate) use policy::sleep_engines;
pub use policy::{PolicyResource, ResponseTexts};
pub(crate) use texts::{TextTools, room_fault, template_config_fault};
pub use value::{HeadInit, ValueLm, ValueResource};

/// The [role](ModelInfo::role) of a model that samples and scores tokens.
pub const POLICY: &str = "policy";
/// The [role](ModelInfo::role) of a model that returns numbers: a critic, a reward model.
pub const VALUE_MODEL: &str = "value model";

/// The resource of a model with weights and an optimiser, stored as kind `$kind`; `$model` and `$model_mut` are its
/// methods that return the model.
macro_rules! trained_resource {
    ($resource:ty, $model:ident, $model_mut:ident, $kind:literal) => {
        impl ModelResource for $resource {
            fn version(&self) -> WeightsVersion {
                version(self.$model())
            }

            fn optimizer_steps(&self) -> u64 {
                self.$model().optimizer_steps()
            }

            fn text_of(&self, tokens: &[u32]) -> Option<String> {
                Some(self.tokenizer.as_ref()?.decode(tokens))
            }

            fn snapshot(&mut self) -> Result<Snapshot, ResourceError> {
                Ok(snapshot(self.$model()))
            }

            fn quick_snapshot(&mut self) -> Result<Snapshot, ResourceError> {
                Ok(quick_snapshot(self.$model()))
            }

            fn weight_source(
                &mut self,
                version: WeightsVersion,
                bucket_bytes: usize,
            ) -> Result<Option<Box<dyn verl_models::reshard::WeightSource>>, ResourceError> {
                let source = self.$model().weight_source(version, bucket_bytes);
                source.map_err(|error| ResourceError::Failed(Box::new(error)))
            }

            fn weight_sink(&mut self) -> Option<&mut dyn verl_models::reshard::WeightSink> {
                self.$model_mut().weight_sink()
            }

            fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ResourceError> {
                restore(self.$model_mut(), snapshot)
            }

            fn store(&mut self, snapshot: &Snapshot) -> Result<Option<StoredState>, ResourceError> {
                store(self.$model(), $kind, snapshot)
            }

            fn recall(
                &mut self,
                version: &WeightsVersion,
                stored: &StoredState,
            ) -> Result<Snapshot, ResourceError> {
                recall(self.$model(), version, stored)
            }

            fn save(&mut self, dir: &Path) -> Result<(), ResourceError> {
                save(self.$model(), self.tokenizer.as_deref(), dir)
            }

            fn as_any_mut(&mut self) -> &mut dyn Any {
                self
            }
        }
    };
}
pub(crate) use trained_resource;

/// A snapshot's content.
struct State(Box<dyn Any + Send + Sync>);

fn version(model: &dyn TrainedModel) -> WeightsVersion {
    WeightsVersion {
        step: model.optimizer_steps(),
        hash: model.weights_hash(),
    }
}

fn snapshot(model: &dyn TrainedModel) -> Snapshot {
    Snapshot {
        version: version(model),
        state: Arc::new(State(model.snapshot())),
    }
}

/// A snapshot whose version has no hash, since hashing reads every weight.
fn quick_snapshot(model: &dyn TrainedModel) -> Snapshot {
    Snapshot {
        version: WeightsVersion {
            step: model.optimizer_steps(),
            hash: String::new(),
        },
        state: Arc::new(State(model.snapshot())),
    }
}

fn restore(model: &mut dyn TrainedModel, snapshot: &Snapshot) -> Result<(), ResourceError> {
    let state = snapshot.state.downcast_ref::<State>();
    let state = state.ok_or(ResourceError::ForeignSnapshot)?;
    match model.restore(state.0.as_ref()) {
        true => Ok(()),
        false => Err(ResourceError::ForeignSnapshot),
    }
}

fn store(
    model: &dyn TrainedModel,
    kind: &str,
    snapshot: &Snapshot,
) -> Result<Option<StoredState>, ResourceError> {
    let state = snapshot.state.downcast_ref::<State>();
    let state = state.ok_or(ResourceError::ForeignSnapshot)?;
    let bytes = model.store(state.0.as_ref()).map_err(failed)?;
    Ok(bytes.map(|tensors| StoredState {
        tensors,
        about: serde_json::json!({ "kind": kind }),
    }))
}

fn recall(
    model: &dyn TrainedModel,
    version: &WeightsVersion,
    stored: &StoredState,
) -> Result<Snapshot, ResourceError> {
    let recalled = model.recall(&stored.tensors).map_err(failed)?;
    Ok(Snapshot {
        version: version.clone(),
        state: Arc::new(State(recalled.ok_or(ResourceError::NotStored)?)),
    })
}

fn save(
    model: &dyn TrainedModel,
    tokenizer: Option<&Tokenizer>,
    dir: &Path,
) -> Result<(), ResourceError> {
    model.save(dir).map_err(failed)?;
    match tokenizer {
        Some(tokenizer) => tokenizer.save(dir).map_err(failed),
        None => Ok(()),
    }
}

/// Where a model's weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// The folder's safetensors.
    #[default]
    Pretrained,
    /// Fresh: N(0, `initializer_range`) of the folder's config.json, a function of the run's seed.
    Random,
}

/// Type of the weights in the saved folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SaveAs {
    /// Lossless for trained weights.
    #[default]
    F32,
    /// Half the size.
    Bf16,
}

impl From<SaveAs> for SaveDType {
    fn from(saved: SaveAs) -> Self {
        match saved {
            SaveAs::F32 => SaveDType::F32,
            SaveAs::Bf16 => SaveDType::BF16,
        }
    }
}

/// Settings of model kind `causal_lm`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CausalLm {
    /// Hugging Face folder; relative to the folder of the pipeline file.
    pub path: PathBuf,
    /// Where weights come from.
    #[serde(default)]
    pub init: Init,
    /// Type of the weights on the device.
    #[serde(default)]
    pub dtype: WeightsDType,
    /// Whether training keeps only the inputs of layers and recomputes the rest in the backward pass: a tenth of the
    /// memory of activations for a fifth more time. Only on a GPU.
    #[serde(default)]
    pub recompute: bool,
    /// How it is trained; absent: the model is frozen.
    #[serde(default)]
    pub optimizer: Option<OptimizerConfig>,
    /// Type of the weights in the saved folder.
    #[serde(default)]
    pub save_as: SaveAs,
    /// What replicas of the model divide among them in training, if its group has several devices.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("default" = "optimizer"))]
    pub sharding: Sharding,
}

impl CausalLm {
    /// A frozen model of a folder.
    pub fn frozen(path: impl Into<PathBuf>) -> Self {
        CausalLm {
            path: path.into(),
            init: Init::Pretrained,
            dtype: WeightsDType::Auto,
            recompute: false,
            optimizer: None,
            save_as: SaveAs::F32,
            sharding: Sharding::default(),
        }
    }

    /// A model of a folder that is trained.
    pub fn trained(path: impl Into<PathBuf>, optimizer: OptimizerConfig) -> Self {
        CausalLm {
            optimizer: Some(optimizer),
            ..CausalLm::frozen(path)
        }
    }

    fn folder(&self, context: &BuildContext) -> PathBuf {
        context.base.join(&self.path)
    }

    fn load_onto(
        &self,
        name: &str,
        on: OnDevice<'_>,
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        let dir = self.folder(context);
        let decoder = self.decoder(&dir, on.device, context.seed)?;
        let tools = load_texts(&dir, &decoder.config)?;
        let optimizer = optimizer_of(self.optimizer.as_ref(), name, context);
        let policy = on.policy(decoder, optimizer, self.sharding)?;
        Ok(Box::new(PolicyResource::with_texts(policy, tools)))
    }

    fn decoder(&self, dir: &Path, device: &str, seed: u64) -> Result<Decoder, ResourceError> {
        let dtype = self.dtype.on(device).map_err(failed)?;
        let device = verl_models::device::device(device).map_err(failed)?;
        let mut decoder = match self.init {
            Init::Pretrained => Decoder::load_as(dir, &device, dtype).map_err(failed)?.0,
            Init::Random => random_decoder(dir, &device, dtype, seed)?,
        };
        decoder.model.recompute = self.recompute;
        decoder.save_dtype = self.save_as.into();
        Ok(decoder)
    }
}

/// A decoder with the architecture of a folder and fresh weights, drawn in f32.
fn random_decoder(
    dir: &Path,
    device: &Device,
    dtype: DType,
    seed: u64,
) -> Result<Decoder, ResourceError> {
    let origin = Origin::read(dir).map_err(failed)?;
    let config = origin.decoder_config().map_err(failed)?;
    let decoder = Decoder::random(config, seed, device).with_origin(origin);
    Ok(parameters::cast(decoder, dtype))
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> ResourceError {
    ResourceError::Failed(Box::new(error))
}

/// The devices of models on burn.
struct BurnDevices;

impl DeviceSupport for BurnDevices {
    fn check(&self, device: &str) -> Result<(), DeviceRefusal> {
        let found = verl_models::device::preflight(device).map(drop);
        found.map_err(|error| match error {
            DeviceError::Unknown { .. } => DeviceRefusal::Unknown(error.to_string()),
            DeviceError::Unusable { .. } => DeviceRefusal::Unusable(error.to_string()),
            _ => DeviceRefusal::Absent(error.to_string()),
        })
    }

    fn memory(&self, device: &str) -> Option<u64> {
        verl_models::device::memory(device)
    }

    fn shortage(&self, message: &str) -> Option<Shortage> {
        let found = verl_models::device::shortage(message)?;
        Some(Shortage { asked: found.asked })
    }
}

/// The memory that `parameters` parameters and the work of a decoder need.
fn sized(
    config: &DecoderConfig,
    usage: Usage<'_>,
    parameters: u64,
    optimizer: Option<&OptimizerConfig>,
) -> ModelInfo {
    let (taken, dtype) = (footprint(config, usage), usage.dtype);
    let element = dtype.size() as u64;
    // Two moments in f32, and the weights in f32 if the model's are narrower.
    let of_optimizer = 8 + if dtype == DType::F32 { 0 } else { 4 };
    let trained = |bytes: u64| optimizer.map_or(0, |_| bytes * parameters);
    ModelInfo {
        num_parameters: parameters,
        weight_bytes: element * parameters,
        optimizer_bytes: trained(of_optimizer),
        gradient_bytes: trained(4),
        kv_bytes_per_token: taken.cache_per_token,
        footprint: Footprint {
            cache_rows: taken.cache_rows,
            cache_share: taken.cache_share,
            kept_bytes_per_token: taken.kept_per_token,
            layer_bytes_per_token: taken.layer_per_token,
            call_tokens: taken.call_tokens,
            logit_bytes: taken.logits,
            kept_logit_bytes_per_token: taken.kept_logits_per_token,
            kept_logit_bytes: taken.kept_logits,
            copy_bytes: taken.copies,
            engine_bytes: taken.engine,
        },
        max_tokens: config.max_tokens,
        summary: summary(config, dtype),
        ..ModelInfo::default()
    }
}

/// Size in bytes of the folder that a model of `parameters` parameters, loaded from `dir`, is saved into.
fn saved_bytes(dtype: SaveAs, parameters: u64, dir: &Path) -> u64 {
    let element = match dtype {
        SaveAs::F32 => 4,
        SaveAs::Bf16 => 2,
    };
    element * parameters + companion_bytes(dir)
}

/// Refuses recomputation where it is not supported.
fn check_recompute(
    recompute: bool,
    config: &DecoderConfig,
    device: &str,
) -> Result<(), ConfigError> {
    let kind = DeviceKind::named(device);
    let reason = if !kind.is_some_and(DeviceKind::fuses_halves) {
        "recomputation is not supported on the CPU"
    } else if !config.has_block_kernels() {
        "recomputation does not support this model's head norms or biases"
    } else {
        return Ok(());
    };
    if !recompute {
        return Ok(());
    }
    Err(ConfigError::new(
        "recompute",
        format!("is true, but {reason}"),
        "remove it; a smaller `batch.micro_batch` also saves memory",
    ))
}

/// A setting that would save memory, if there is one.
fn smaller(config: &DecoderConfig, usage: Usage<'_>, trained: bool) -> Option<&'static str> {
    if DeviceKind::named(usage.device).is_none_or(DeviceKind::is_host) {
        None
    } else if usage.dtype == DType::F32 {
        Some("dtype = \"bf16\"")
    } else if trained && !usage.recompute && config.has_block_kernels() {
        Some("recompute = true")
    } else {
        None
    }
}

fn summary(config: &DecoderConfig, dtype: DType) -> String {
    let dtype = match dtype {
        DType::BF16 => "bf16",
        _ => "f32",
    };
    format!(
        "{dtype}, {} layers, width {}, vocabulary {}",
        config.layers, config.hidden_size, config.vocab_size
    )
}

/// The architecture that the config.json of a folder declares.
fn decoder_config(dir: &Path) -> Result<DecoderConfig, ConfigError> {
    Origin::read(dir)
        .and_then(|origin| origin.decoder_config())
        .map_err(|error| path_fault(&error))
}

/// The architecture of the model that is loaded from a folder, and warnings about it: the weights may have a separate
/// head although config.json declares none.
fn loaded_config(dir: &Path, init: Init) -> Result<(DecoderConfig, Vec<ConfigError>), ConfigError> {
    let declared = decoder_config(dir)?;
    if init == Init::Random || !declared.tied_head {
        return Ok((declared, Vec::new()));
    }
    let stored = Origin::read(dir).and_then(|origin| origin.stored_config());
    let stored = stored.map_err(|error| path_fault(&error))?;
    if stored.tied_head {
        return Ok((stored, Vec::new()));
    }
    let warning = ConfigError::new(
        "path",
        format!(
            "is `{}`, whose config.json sets `tie_word_embeddings` to true, but whose lm_head.weight is not the embedding; \
             the head is kept, and trained and saved separately",
            dir.display()
        ),
        "set `tie_word_embeddings` to false in that config.json; or, to use the embedding as the head, remove \
         lm_head.weight from the weights",
    );
    Ok((stored, vec![warning]))
}

/// Refuses a folder that would not load, as far as the headers of its files show.
fn check_weights(dir: &Path, config: &DecoderConfig, init: Init) -> Result<(), ConfigError> {
    match init {
        Init::Random => Ok(()),
        Init::Pretrained => Decoder::check_folder(dir, config).map_err(|error| path_fault(&error)),
    }
}

fn path_fault(error: &LoadError) -> ConfigError {
    let help = "set it to the folder of a Llama, SmolLM2, Qwen2, Qwen2.5 or Qwen3 model with config.json, model.safetensors and tokenizer.json";
    ConfigError::new("path", format!("cannot be used: {error}"), help)
}

/// Refuses invalid settings of an optimiser.
fn check_optimizer(optimizer: Option<&OptimizerConfig>) -> Result<(), Vec<ConfigError>> {
    let Some(Err(error)) = optimizer.map(OptimizerConfig::validate) else {
        return Ok(());
    };
    Err(vec![ConfigError::new(
        format!("optimizer.{}", error.setting),
        format!("is {}", error.value),
        format!("use a value {}", error.expected),
    )])
}

/// The kernels of all decoders and their heads.
fn decoder_kernels() -> CpuKernels {
    CpuKernels {
        registers: Some(registers::used().name().to_owned()),
        sums: Some(registers::SUMS.to_owned()),
    }
}

impl ModelConfig for CausalLm {
    const KIND: &'static str = "causal_lm";
    const SUMMARY: &'static str =
        "a decoder of a Hugging Face folder (Llama, SmolLM2, Qwen2, Qwen2.5, Qwen3)";
}

impl ModelFactory for CausalLm {
    fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        let dir = self.folder(context);
        let loaded = loaded_config(&dir, self.init);
        let (config, head_warnings) = loaded.map_err(|error| vec![error])?;
        check_optimizer(self.optimizer.as_ref())?;
        check_weights(&dir, &config, self.init).map_err(|error| vec![error])?;
        let device = &context.device;
        let dtype = self.dtype.on(device).map_err(|error| vec![error])?;
        check_recompute(self.recompute, &config, device).map_err(|error| vec![error])?;
        let optimizer = self.optimizer.as_ref();
        let parameters = config.num_parameters();
        let usage = Usage {
            dtype,
            device,
            scores_tokens: true,
            recompute: self.recompute,
        };
        let mut info = ModelInfo {
            role: POLICY,
            smaller: smaller(&config, usage, optimizer.is_some()),
            saved_bytes: saved_bytes(self.save_as, parameters, &dir),
            ..sized(&config, usage, parameters, optimizer)
        };
        info.warnings.extend(head_warnings);
        describe_texts(&mut info, &dir, Some(config.vocab_size)).map_err(|error| vec![error])?;
        Ok(info)
    }

    fn trainable(&self) -> bool {
        self.optimizer.is_some()
    }

    fn training(&self, optimizer_steps: u64) -> Option<Training> {
        let own = self.optimizer.clone()?;
        Some(training(own, optimizer_steps, |optimizer| CausalLm {
            optimizer,
            ..self.clone()
        }))
    }

    fn devices(&self) -> &dyn DeviceSupport {
        &BurnDevices
    }

    fn cpu_kernels(&self) -> CpuKernels {
        decoder_kernels()
    }

    fn token_texts(&self, context: &BuildContext) -> Option<Arc<dyn TokenTexts>> {
        token_texts(&self.folder(context))
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

    fn can_replicate(&self) -> bool {
        true
    }

    fn can_follow(&self) -> bool {
        true
    }

    fn load_copy(
        &self,
        name: &str,
        devices: &[String],
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        let frozen = CausalLm {
            optimizer: None,
            ..self.clone()
        };
        frozen.load_replicas(name, devices, context)
    }
}
