//! Models as resources of a pipeline: kind `causal_lm`, a decoder from a Hugging Face folder with its tokenizer, and kind
//! [`value_model`](ValueLm), the same with a value head.
//!
//! [`IlqlLm`] is a decoder with the heads of ILQL. Models of one's own are declared with [`policy_model`] and
//! [`value_model`](value_model()).

mod ilql;
mod own;
pub(crate) mod value;

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Device;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::chat_template::ChatTemplate;
use verl_models::hf::{Origin, SaveDType};
use verl_models::model::{PolicyModel, TrainedModel};
use verl_models::optim::OptimizerConfig;
use verl_models::policy::Policy;
use verl_models::rollout::stop::TextDecoder;
use verl_models::tokenizer::Tokenizer;
use verl_models::{Decoder, DecoderConfig};
use verl_pipe::resource::{ModelInfo, ModelResource, ResourceError, Snapshot, WeightsVersion};
use verl_pipe::stage::{BuildContext, ConfigError, ModelConfig, Models, StageError, find_model};

pub use ilql::IlqlLm;
pub use own::{OwnModel, policy_model, value_model};
pub use value::{HeadInit, ValueLm, ValueResource};

/// The [role](ModelInfo::role) of a model that samples and scores tokens.
pub const POLICY: &str = "policy";
/// The [role](ModelInfo::role) of a model that gives numbers: a critic, a reward model.
pub const VALUE_MODEL: &str = "value model";

/// A policy with its tokenizer and chat template, as stages find it.
pub struct PolicyResource {
    /// The model.
    pub policy: Box<dyn PolicyModel>,
    /// Its tokenizer, where it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Its chat template, where it has one.
    pub template: Option<Arc<ChatTemplate>>,
}

impl PolicyResource {
    /// A resource of a model alone; set `tokenizer` and `template` where stages need text.
    pub fn new(policy: Box<dyn PolicyModel>) -> Self {
        PolicyResource {
            policy,
            tokenizer: None,
            template: None,
        }
    }

    /// Ids that end a response; empty without a tokenizer.
    pub fn eos_ids(&self) -> Vec<u32> {
        self.tokenizer
            .as_ref()
            .map(|t| t.eos_ids().to_vec())
            .unwrap_or_default()
    }

    /// Text of token ids without special tokens; ids separated by spaces without a tokenizer.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(ids),
            None => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    /// What turns a response into text while it is sampled, for stop texts; `None` without a tokenizer.
    pub fn text_decoder(&self) -> Option<TextDecoder> {
        let tokenizer = self.tokenizer.clone()?;
        Some(TextDecoder::new(move |ids| tokenizer.decode(ids)))
    }
}

impl ModelResource for PolicyResource {
    fn version(&self) -> WeightsVersion {
        version(self.policy.as_ref())
    }

    fn snapshot(&mut self) -> Result<Snapshot, ResourceError> {
        Ok(snapshot(self.policy.as_ref()))
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ResourceError> {
        restore(self.policy.as_mut(), snapshot)
    }

    fn save(&mut self, dir: &Path) -> Result<(), ResourceError> {
        save(self.policy.as_ref(), self.tokenizer.as_deref(), dir)
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

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

fn restore(model: &mut dyn TrainedModel, snapshot: &Snapshot) -> Result<(), ResourceError> {
    let state = snapshot.state.downcast_ref::<State>();
    let state = state.ok_or(ResourceError::ForeignSnapshot)?;
    match model.restore(state.0.as_ref()) {
        true => Ok(()),
        false => Err(ResourceError::ForeignSnapshot),
    }
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

/// What turns texts into the tokens of a model of either kind.
pub(crate) struct TextTools {
    /// Its tokenizer, where it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Its chat template, where it has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Longest sequence in tokens.
    pub max_tokens: usize,
}

impl TextTools {
    /// Those of the model `name`.
    ///
    /// # Errors
    /// When there is no such model, or it is of a type of its own.
    pub fn of(models: &mut Models, name: &str) -> Result<Self, StageError> {
        if let Ok(resource) = find_model::<PolicyResource>(models, name) {
            return Ok(TextTools {
                tokenizer: resource.tokenizer.clone(),
                template: resource.template.clone(),
                max_tokens: resource.policy.max_tokens(),
            });
        }
        let resource = find_model::<ValueResource>(models, name)?;
        Ok(TextTools {
            tokenizer: resource.tokenizer.clone(),
            template: resource.template.clone(),
            max_tokens: resource.model.max_tokens(),
        })
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
    /// Lossless for what was trained.
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
    /// How it is trained; absent: the model is frozen.
    #[serde(default)]
    pub optimizer: Option<OptimizerConfig>,
    /// Type of the weights in the saved folder.
    #[serde(default)]
    pub save_as: SaveAs,
}

impl CausalLm {
    /// A frozen model of a folder.
    pub fn frozen(path: impl Into<PathBuf>) -> Self {
        CausalLm {
            path: path.into(),
            init: Init::Pretrained,
            optimizer: None,
            save_as: SaveAs::F32,
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

    fn decoder(&self, dir: &Path, device: &str, seed: u64) -> Result<Decoder, ResourceError> {
        let device = verl_models::device::device(device).map_err(failed)?;
        let mut decoder = match self.init {
            Init::Pretrained => Decoder::load(dir, &device).map_err(failed)?,
            Init::Random => random_decoder(dir, &device, seed)?,
        };
        decoder.save_dtype = self.save_as.into();
        Ok(decoder)
    }
}

/// A decoder with the architecture of a folder and fresh weights.
fn random_decoder(dir: &Path, device: &Device, seed: u64) -> Result<Decoder, ResourceError> {
    let origin = Origin::read(dir).map_err(failed)?;
    let config = origin.decoder_config().map_err(failed)?;
    Ok(Decoder::random(config, seed, device).with_origin(origin))
}

/// The tokenizer of a folder, which must fit the model, and its chat template. A folder without a template can still be
/// used with prompts as they are.
fn texts(
    dir: &Path,
    config: &DecoderConfig,
) -> Result<(Arc<Tokenizer>, Option<Arc<ChatTemplate>>), ResourceError> {
    let tokenizer = Tokenizer::load(dir).map_err(failed)?;
    config
        .check_vocabulary(tokenizer.vocab_size())
        .map_err(failed)?;
    let template = ChatTemplate::load(dir).ok().map(Arc::new);
    Ok((Arc::new(tokenizer), template))
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> ResourceError {
    ResourceError::Failed(Box::new(error))
}

/// Parameters of a decoder.
fn count_parameters(c: &DecoderConfig) -> u64 {
    let (d, i) = (c.hidden_size as u64, c.intermediate_size as u64);
    let query = (c.heads.query * c.heads.dim) as u64;
    let key = (c.heads.key_value * c.heads.dim) as u64;
    let attention = 2 * d * query + 2 * d * key + if c.qkv_bias { query + 2 * key } else { 0 };
    let norms = 2 * d + if c.qk_norm { 2 * c.heads.dim as u64 } else { 0 };
    let head = if c.tied_head { 1 } else { 2 } * c.vocab_size as u64 * d;
    c.layers as u64 * (attention + 3 * d * i + norms) + d + head
}

/// Bytes of two moments and a gradient in f32; 0 for a frozen model.
fn training_bytes(optimizer: Option<&OptimizerConfig>, parameters: u64) -> u64 {
    optimizer.map_or(0, |_| 12 * parameters)
}

fn summary(config: &DecoderConfig) -> String {
    format!(
        "{} layers, width {}, vocabulary {}",
        config.layers, config.hidden_size, config.vocab_size
    )
}

/// The architecture of a folder.
fn decoder_config(dir: &Path) -> Result<DecoderConfig, ConfigError> {
    let help = "give the folder of a Llama, SmolLM2, Qwen2, Qwen2.5 or Qwen3 model with config.json, model.safetensors and tokenizer.json";
    Origin::read(dir)
        .and_then(|origin| origin.decoder_config())
        .map_err(|error| ConfigError::new("path", format!("cannot be used: {error}"), help))
}

/// Settings of an optimiser that make no sense.
fn check_optimizer(optimizer: Option<&OptimizerConfig>) -> Result<(), Vec<ConfigError>> {
    let Some(Err(error)) = optimizer.map(OptimizerConfig::validate) else {
        return Ok(());
    };
    Err(vec![ConfigError::new(
        format!("optimizer.{}", error.setting),
        format!("is {}", error.value),
        format!("it must be {}", error.expected),
    )])
}

impl ModelConfig for CausalLm {
    const KIND: &'static str = "causal_lm";
    const SUMMARY: &'static str =
        "a decoder of a Hugging Face folder (Llama, SmolLM2, Qwen2, Qwen2.5, Qwen3)";

    fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        let config = decoder_config(&self.folder(context)).map_err(|error| vec![error])?;
        check_optimizer(self.optimizer.as_ref())?;
        let parameters = count_parameters(&config);
        Ok(ModelInfo {
            num_parameters: parameters,
            weight_bytes: 4 * parameters,
            training_bytes: training_bytes(self.optimizer.as_ref(), parameters),
            kv_bytes_per_token: (4 * 2 * config.layers * config.heads.key_value * config.heads.dim)
                as u64,
            max_tokens: config.max_tokens,
            summary: summary(&config),
            role: POLICY,
        })
    }

    fn trainable(&self) -> bool {
        self.optimizer.is_some()
    }

    fn load(
        &self,
        _name: &str,
        device: &str,
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        let dir = self.folder(context);
        let decoder = self.decoder(&dir, device, context.seed)?;
        let (tokenizer, template) = texts(&dir, &decoder.config)?;
        let policy = Policy::new(decoder, self.optimizer.clone()).map_err(failed)?;
        Ok(Box::new(PolicyResource {
            policy: Box::new(policy),
            tokenizer: Some(tokenizer),
            template,
        }))
    }
}
