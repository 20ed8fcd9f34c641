//! Model kind `value_model`: a decoder with one number per token instead of logits, as critic or reward model.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::ValueDecoder;
use verl_models::chat_template::ChatTemplate;
use verl_models::hf::LoadError;
use verl_models::memory::Usage;
use verl_models::model::ValueModel;
use verl_models::optim::OptimizerConfig;
use verl_models::replicas::Sharding;
use verl_models::tokenizer::Tokenizer;
use verl_models::value_head::{self, FreshHead, HeadKind};
use verl_words::resource::{
    CpuKernels, ModelInfo, ModelResource, ResourceError, Snapshot, StoredState, TokenTexts,
    WeightsVersion,
};
use verl_words::stage::{
    BuildContext, ConfigError, DeviceSupport, ModelConfig, ModelFactory, Training,
};

use super::replicas::{OnDevice, is_default};
use super::{
    BurnDevices, Init, SaveAs, TextTools, VALUE_MODEL, WeightsDType, check_optimizer,
    check_recompute, check_weights, decoder_config, decoder_kernels, describe_texts, failed,
    load_texts, optimizer_of, quick_snapshot, random_decoder, recall, restore, save, saved_bytes,
    sized, smaller, snapshot, store, token_texts, trained_resource, training, version,
};

/// A model of values with its tokenizer and chat template, as stages use it.
pub struct ValueResource {
    /// The model.
    pub model: Box<dyn ValueModel>,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Its chat template, if it has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Why there is no chat template, if one was looked for: it is missing or broken.
    pub no_template: Option<String>,
}

impl ValueResource {
    /// A resource with only a model; set `tokenizer` and `template` if stages need text.
    pub fn new(model: Box<dyn ValueModel>) -> Self {
        ValueResource {
            model,
            tokenizer: None,
            template: None,
            no_template: None,
        }
    }

    fn model(&self) -> &dyn ValueModel {
        self.model.as_ref()
    }

    fn model_mut(&mut self) -> &mut dyn ValueModel {
        self.model.as_mut()
    }

    /// A resource of a model with its tokenizer and chat template.
    pub(super) fn with_texts(model: Box<dyn ValueModel>, tools: TextTools) -> Self {
        ValueResource {
            model,
            tokenizer: tools.tokenizer,
            template: tools.template,
            no_template: tools.no_template,
        }
    }
}

trained_resource!(ValueResource, model, model_mut, "value model");

/// Weights of a fresh head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HeadInit {
    /// Zeros: every value is 0 at first.
    #[default]
    Zeros,
    /// N(0, 1 / (D + 1)), D the width of the decoder; a function of the run's seed.
    Normal,
}

/// Settings of model kind `value_model`: a language model with a value head.
///
/// The folder is that of a critic or reward model, or of a causal language model, whose decoder then gets a fresh head.
/// A fresh head has to be trained, so a model without an optimiser needs a stored head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ValueLm {
    /// Hugging Face folder; relative to the folder of the pipeline file.
    pub path: PathBuf,
    /// Where the decoder's weights come from; a decoder with fresh weights has a fresh head too.
    #[serde(default)]
    pub init: Init,
    /// Type of the weights on the device; values are always f32.
    #[serde(default)]
    pub dtype: WeightsDType,
    /// Whether training keeps only the inputs of layers and recomputes the rest in the backward pass: a tenth of the
    /// memory of activations for a fifth more time. Only on a GPU.
    #[serde(default)]
    pub recompute: bool,
    /// What a model with a fresh head is saved as: `token_classification` is usual for critics,
    /// `sequence_classification` for reward models. A stored head keeps its kind.
    #[serde(default = "token_classification")]
    pub head: HeadKind,
    /// Weights of a fresh head.
    #[serde(default)]
    pub head_init: HeadInit,
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

fn token_classification() -> HeadKind {
    HeadKind::TokenClassification
}

impl ValueLm {
    /// A frozen model of a folder with a head.
    pub fn frozen(path: impl Into<PathBuf>) -> Self {
        ValueLm {
            path: path.into(),
            init: Init::default(),
            dtype: WeightsDType::default(),
            recompute: false,
            head: token_classification(),
            head_init: HeadInit::default(),
            optimizer: None,
            save_as: SaveAs::default(),
            sharding: Sharding::default(),
        }
    }

    /// A model of a folder that is trained.
    pub fn trained(path: impl Into<PathBuf>, optimizer: OptimizerConfig) -> Self {
        ValueLm {
            optimizer: Some(optimizer),
            ..ValueLm::frozen(path)
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
        let dtype = self.dtype.on(on.device).map_err(failed)?;
        let device = verl_models::device::device(on.device).map_err(failed)?;
        let head = self.fresh_head(context.seed);
        let mut decoder = match self.init {
            Init::Pretrained => {
                let loaded = ValueDecoder::load_as(&dir, &device, dtype, head);
                loaded.map_err(failed)?.0
            }
            Init::Random => {
                let no_head = || failed(LoadError::NoHead { dir: dir.clone() });
                let head = head.ok_or_else(no_head)?;
                ValueDecoder::on(random_decoder(&dir, &device, dtype, context.seed)?, head)
            }
        };
        decoder.model.recompute = self.recompute;
        decoder.save_dtype = self.save_as.into();
        let tools = load_texts(&dir, &decoder.config)?;
        let optimizer = optimizer_of(self.optimizer.as_ref(), name, context);
        let model = on.values(decoder, optimizer, self.sharding)?;
        Ok(Box::new(ValueResource::with_texts(model, tools)))
    }

    /// The head for a folder without one; `None` if the model is frozen.
    fn fresh_head(&self, seed: u64) -> Option<FreshHead> {
        let init = match self.head_init {
            HeadInit::Zeros => value_head::HeadInit::Zeros,
            HeadInit::Normal => value_head::HeadInit::Normal { seed },
        };
        let kind = self.head;
        self.optimizer.as_ref().map(|_| FreshHead { kind, init })
    }

    /// Refuses a frozen model with a fresh head.
    fn check_head(&self, dir: &Path) -> Result<(), ConfigError> {
        if self.optimizer.is_some() {
            return Ok(());
        }
        let trained = "use the folder of a trained critic or reward model, or add an `optimizer` and a stage that trains the model";
        if self.init == Init::Random {
            let reason = "is `random`, but the model has no optimiser, so nothing would train it";
            return Err(ConfigError::new("init", reason, trained));
        }
        let reason = match value_head::has_head(dir) {
            Ok(true) => return Ok(()),
            Ok(false) => format!(
                "is `{}`, which has no value head (`score.weight`), and without an optimiser nothing would train a fresh one",
                dir.display()
            ),
            Err(error) => format!("cannot be used: {error}"),
        };
        Err(ConfigError::new("path", reason, trained))
    }
}

impl ModelConfig for ValueLm {
    const KIND: &'static str = "value_model";
    const SUMMARY: &'static str =
        "a decoder with a value head of a Hugging Face folder: a critic or a reward model";
}

impl ModelFactory for ValueLm {
    fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        let dir = self.folder(context);
        let mut config = decoder_config(&dir).map_err(|error| vec![error])?;
        check_optimizer(self.optimizer.as_ref())?;
        self.check_head(&dir).map_err(|error| vec![error])?;
        let rows = config.vocab_size;
        // The value head, with its bias, replaces the language-model head.
        config.tied_head = true;
        check_weights(&dir, &config, self.init).map_err(|error| vec![error])?;
        let parameters = config.num_parameters() + config.hidden_size as u64 + 1;
        let device = &context.device;
        let dtype = self.dtype.on(device).map_err(|error| vec![error])?;
        check_recompute(self.recompute, &config, device).map_err(|error| vec![error])?;
        let optimizer = self.optimizer.as_ref();
        let usage = Usage {
            dtype,
            device,
            scores_tokens: false,
            recompute: self.recompute,
        };
        let mut info = ModelInfo {
            // It never samples.
            kv_bytes_per_token: 0,
            role: VALUE_MODEL,
            smaller: smaller(&config, usage, optimizer.is_some()),
            saved_bytes: saved_bytes(self.save_as, parameters, &dir),
            ..sized(&config, usage, parameters, optimizer)
        };
        info.summary += ", value head";
        describe_texts(&mut info, &dir, Some(rows)).map_err(|error| vec![error])?;
        Ok(info)
    }

    fn trainable(&self) -> bool {
        self.optimizer.is_some()
    }

    fn training(&self, optimizer_steps: u64) -> Option<Training> {
        let own = self.optimizer.clone()?;
        Some(training(own, optimizer_steps, |optimizer| ValueLm {
            optimizer,
            ..self.clone()
        }))
    }

    fn devices(&self) -> &dyn DeviceSupport {
        &BurnDevices
    }

    /// burn computes the sums of the value head, with kernels that depend on the width of the registers.
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
        let frozen = ValueLm {
            optimizer: None,
            ..self.clone()
        };
        frozen.load_replicas(name, devices, context)
    }
}

/// A value model and rows for tests of the stages that use one.
#[cfg(test)]
pub(crate) mod testing {
    use verl_words::batch::{Batch, RaggedColumn, RowId};
    use verl_words::keys::{MASK_KINDS, PROMPTS, RESPONSES};
    use verl_words::stage::Models;

    use super::*;

    /// A value model on the addition example's decoder, under `name`.
    pub(crate) fn models(name: &str) -> Models {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-base");
        let optimizer = OptimizerConfig {
            learning_rate: 3e-3,
            ..OptimizerConfig::default()
        };
        let config = ValueLm {
            head_init: HeadInit::Normal,
            ..ValueLm::trained(folder, optimizer)
        };
        let model = config.load(name, "cpu", &BuildContext::default());
        Models::from([(name.to_owned(), model.expect("a model"))])
    }

    /// Four responses, two to each prompt; one token is an observation.
    pub(crate) fn batch() -> Batch {
        let ids = [0, 1].map(|row| RowId::prompt(0, row).expect("small"));
        let mut batch = Batch::with_rows(&ids).repeat(2).expect("small");
        let prompts = [[1u32, 5], [1, 5], [1, 9], [1, 9]];
        let responses = [&[7u32, 8, 2][..], &[6, 2], &[10, 11, 12, 2], &[2]];
        let kinds = [&[1u8, 0, 1][..], &[1, 1], &[1, 1, 1, 1], &[1]];
        let fits = "as many rows";
        batch
            .put(&PROMPTS, RaggedColumn::from_rows(prompts))
            .expect(fits);
        batch
            .put(&RESPONSES, RaggedColumn::from_rows(responses))
            .expect(fits);
        batch
            .put(&MASK_KINDS, RaggedColumn::from_rows(kinds))
            .expect(fits);
        batch
    }
}

#[cfg(test)]
mod tests {
    use verl_models::model::ScoreRow;

    use super::*;

    /// A language model without a value head.
    const BASE: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/models/addition-base"
    );

    fn describe(config: &ValueLm) -> Result<ModelInfo, Vec<ConfigError>> {
        config.describe(&BuildContext::default())
    }

    fn load(config: &ValueLm) -> Box<dyn ModelResource> {
        let loaded = config.load("critic", "cpu", &BuildContext::default());
        loaded.unwrap_or_else(|error| panic!("{error}"))
    }

    fn trained() -> ValueLm {
        ValueLm::trained(BASE, OptimizerConfig::default())
    }

    fn scores(resource: &mut dyn ModelResource) -> Vec<f32> {
        let resource: &mut ValueResource = resource.as_any_mut().downcast_mut().unwrap();
        let row = ScoreRow {
            prompt: &[1, 5, 9],
            response: &[7, 8],
        };
        resource.model.scores(&[row]).unwrap()
    }

    #[track_caller]
    fn check_refused(config: &ValueLm, setting: &str, words: &str) {
        let faults = describe(config).expect_err("refused");
        assert_eq!(faults[0].setting, setting);
        assert!(faults[0].to_string().contains(words), "{}", faults[0]);
    }

    #[test]
    fn a_frozen_model_needs_a_stored_head() {
        check_refused(&ValueLm::frozen(BASE), "path", "has no value head");
        let random = ValueLm {
            init: Init::Random,
            ..ValueLm::frozen(BASE)
        };
        check_refused(&random, "init", "nothing would train it");
        let message = |config: &ValueLm| {
            let loaded = config.load("reward", "cpu", &BuildContext::default());
            loaded.err().expect("refused").to_string()
        };
        for config in [&ValueLm::frozen(BASE), &random] {
            let message = message(config);
            assert!(message.contains("no value head"), "{message}");
        }
        check_refused(&ValueLm::frozen("no/such/folder"), "path", "no/such/folder");
        let optimizer = OptimizerConfig {
            learning_rate: -1.0,
            ..OptimizerConfig::default()
        };
        let invalid = ValueLm::trained(BASE, optimizer);
        check_refused(&invalid, "optimizer.learning_rate", "is -1");
    }

    #[test]
    fn a_saved_critic_is_a_folder_that_may_be_frozen() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("critic");
        let normal = ValueLm {
            head_init: HeadInit::Normal,
            ..trained()
        };
        let mut critic = load(&normal);
        let before = scores(critic.as_mut());
        assert_ne!(before, [0.0]);
        critic.save(&dir).unwrap();
        let stored = ValueLm::frozen(&dir);
        assert!(describe(&stored).is_ok() && !stored.trainable());
        assert_eq!(scores(load(&stored).as_mut()), before);
        // A stored head takes precedence over a fresh one.
        let again = ValueLm::trained(&dir, OptimizerConfig::default());
        assert_eq!(scores(load(&again).as_mut()), before);
        assert_eq!(scores(load(&trained()).as_mut()), [0.0]);
    }

    #[test]
    fn snapshots_of_another_model_are_refused() {
        let (mut one, mut other) = (load(&trained()), load(&trained()));
        let snapshot = one.snapshot().unwrap();
        assert_eq!(snapshot.version, one.version());
        assert!(one.restore(&snapshot).is_ok());
        assert!(matches!(
            other.restore(&snapshot),
            Err(ResourceError::ForeignSnapshot)
        ));
    }

    #[test]
    fn a_critic_is_counted_without_logits_and_cache() {
        let info = describe(&trained()).unwrap();
        let mut critic = load(&trained());
        assert_eq!((info.kv_bytes_per_token, info.role), (0, VALUE_MODEL));
        assert_eq!(info.optimizer_bytes, 8 * info.num_parameters);
        assert_eq!(info.gradient_bytes, 4 * info.num_parameters);
        let dir = tempfile::tempdir().unwrap();
        let saved = dir.path().join("critic");
        critic.save(&saved).unwrap();
        let stored = verl_models::hf::weights::Checkpoint::open(&saved).unwrap();
        let sizes = stored
            .names()
            .map(|name| stored.find(name).unwrap().shape.iter().product::<usize>());
        assert_eq!(sizes.sum::<usize>() as u64, info.num_parameters);
    }
}
