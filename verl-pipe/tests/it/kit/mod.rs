//! A small set of stages, models and data that declare the same as real ones and run nothing.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use verl_pipe::batch::Batch;
use verl_pipe::data::{DataError, DataLoaderInterface};
use verl_pipe::field::{LogProbTag, Support, Weights};
use verl_pipe::keys::*;
use verl_pipe::pipe::DataPipe;
use verl_pipe::registry::Registry;
use verl_pipe::resource::{
    DeviceRefusal, Footprint, ModelInfo, ModelResource, ResourceError, Vocabulary,
};
use verl_pipe::schedule::batching::{BatchConfig, DevicesConfig};
use verl_pipe::stage::*;

/// A stage that only declares.
pub struct Declared(pub StageSpec);

impl Stage for Declared {
    fn spec(&self) -> StageSpec {
        self.0.clone()
    }
    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        context.emit(input)
    }
}

fn declared(spec: StageSpec) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
    Ok(Box::new(Declared(spec)))
}

fn tag(policy: &str, temperature: f64, weights: Weights) -> LogProbTag {
    LogProbTag {
        policy: Some(policy.to_owned()),
        temperature: Some(temperature),
        support: Some(Support::Full),
        weights: Some(weights),
    }
}

macro_rules! stage_config {
    ($(#[$doc:meta])* $name:ident, $kind:literal, { $($field:ident: $ty:ty = $default:expr),* $(,)? }, |$this:ident, $context:ident| $build:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $(pub $field: $ty),* }
        impl Default for $name {
            fn default() -> Self { $name { $($field: $default),* } }
        }
        impl StageConfig for $name {
            const KIND: &'static str = $kind;
            const SUMMARY: &'static str = concat!("a stand-in for ", $kind);
            fn build(&self, $context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
                let $this = self;
                let _ = $context;
                $build
            }
        }
        verl_pipe::chainable!($name);
    };
}

stage_config!(Prompts, "prompts", { data: String = "train".to_owned() }, |this, context| {
    if context.data.contains(&this.data) {
        declared(StageSpec::new().rows(RowRule::Source).draws_waves().writes(PROMPTS).writes(ANSWERS))
    } else {
        Err(vec![ConfigError::new(
            "data",
            format!("names `{}`, but the pipeline declares {:?}", this.data, context.data),
            "declare it in [data]",
        )])
    }
});

stage_config!(Generate, "generate", { model: String = "actor".to_owned(), temperature: f64 = 1.0, max_new_tokens: usize = 16 }, |this, context| {
    declared(
        StageSpec::new()
            .reads(PROMPTS)
            .writes(RESPONSES)
            .writes(RESPONSE_TEXTS)
            .writes(MASK_KINDS)
            .writes(ROLLOUT_LOG_PROBS.tagged(tag(&this.model, this.temperature, Weights::StepStart)))
            .rows(RowRule::Expand(context.batch.samples))
            .works(
                ModelWork::sampling(&this.model, context.batch.rows)
                    .of([PROMPTS.name(), RESPONSES.name()]),
            )
            .bounds(RESPONSES.name(), "max_new_tokens", Some(this.max_new_tokens))
            .uses(&this.model, Access::Read),
    )
});

stage_config!(Reward, "reward", { rule: String = "exact".to_owned() }, |_this, context| {
    declared(StageSpec::new().reads(RESPONSE_TEXTS).reads(ANSWERS).writes(REWARDS))
});

stage_config!(LogProbs, "log_probs", { model: String = "actor".to_owned(), temperature: f64 = 1.0, reference: bool = false }, |this, context| {
    let written = if this.reference {
        REF_LOG_PROBS.tagged(tag(&this.model, this.temperature, Weights::Frozen))
    } else {
        OLD_LOG_PROBS.tagged(tag(&this.model, this.temperature, Weights::StepStart))
    };
    declared(
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .writes(written)
            .works(ModelWork::scoring(&this.model).of([PROMPTS.name(), RESPONSES.name()]))
            .uses(&this.model, Access::Read),
    )
});

stage_config!(Advantages, "advantages", {}, |_this, context| {
    declared(
        StageSpec::new()
            .reads(REWARDS)
            .reads(MASK_KINDS)
            .reads_optional(GROUP_MEANS)
            .writes(ADVANTAGES)
            .cardinality(Cardinality::Group),
    )
});

/// The tag of values that a critic computed with the weights at the start of the step.
pub fn critic_tag(model: &str) -> LogProbTag {
    LogProbTag {
        policy: Some(model.to_owned()),
        weights: Some(Weights::StepStart),
        ..LogProbTag::default()
    }
}

stage_config!(Values, "values", { model: String = "critic".to_owned() }, |this, context| {
    declared(
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .writes(VALUES.tagged(critic_tag(&this.model)))
            .uses_as("value model", &this.model, Access::Read),
    )
});

stage_config!(Update, "update", { model: String = "actor".to_owned(), temperature: f64 = 1.0 }, |this, context| {
    let policy = tag(&this.model, this.temperature, Weights::StepStart);
    let reference = LogProbTag { policy: None, weights: Some(Weights::Frozen), ..policy.clone() };
    declared(
        StageSpec::new()
            .reads(PROMPTS)
            .reads(RESPONSES)
            .reads(MASK_KINDS)
            .reads(ADVANTAGES)
            .reads(OLD_LOG_PROBS.tagged(policy))
            .reads_optional(REF_LOG_PROBS.tagged(reference))
            .rows(RowRule::Sink)
            .cardinality(Cardinality::Batch)
            .works(
                ModelWork::training(&this.model, context.batch.micro_rows)
                    .of([PROMPTS.name(), RESPONSES.name()]),
            )
            .uses(&this.model, Access::Update),
    )
});

stage_config!(Evaluate, "evaluate", { model: String = "actor".to_owned(), every: u64 = 10 }, |this, context| {
    declared(StageSpec::new().observer(this.every).uses(&this.model, Access::Read))
});

stage_config!(FilterGroups, "filter_groups", { groups: usize = 30, max_waves: usize = 3 }, |this, context| {
    declared(
        StageSpec::new()
            .reads(REWARDS)
            .writes(GROUP_MEANS)
            .rows(RowRule::Filter)
            .cardinality(Cardinality::Group)
            .refill(Refill { groups: this.groups, waves: this.max_waves, on_short: OnShort::Error }),
    )
});

/// A model that is described and never loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Decoder {
    /// Folder.
    pub path: String,
    /// Optimiser settings; frozen without.
    #[serde(default)]
    pub optimizer: Option<Optimizer>,
}

/// Settings of an optimiser.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Optimizer {
    /// Learning rate.
    pub learning_rate: f64,
}

impl ModelConfig for Decoder {
    const KIND: &'static str = "decoder";
    const SUMMARY: &'static str = "a stand-in for a decoder";
}

impl DeviceSupport for Decoder {
    fn check(&self, device: &str) -> Result<(), DeviceRefusal> {
        match self.path.as_str() {
            "for_newer_devices" => Err(DeviceRefusal::Unusable(format!(
                "`{device}` has compute capability 7.5; 8.0 is required"
            ))),
            _ => Ok(()),
        }
    }

    fn memory(&self, _: &str) -> Option<u64> {
        match self.path.as_str() {
            "on_a_small_device" => Some(8 << 30),
            "on_a_large_device" => Some(80 << 30),
            _ => None,
        }
    }
}

impl ModelFactory for Decoder {
    fn devices(&self) -> &dyn DeviceSupport {
        self
    }

    fn describe(&self, _: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        if self.path == "missing" {
            return Err(vec![ConfigError::new(
                "path",
                "is not a folder: missing",
                "set it to a model folder",
            )]);
        }
        Ok(ModelInfo {
            num_parameters: 494_032_768,
            weight_bytes: 988_065_536,
            optimizer_bytes: if self.trainable() { 5_928_393_216 } else { 0 },
            gradient_bytes: if self.trainable() { 1_976_131_072 } else { 0 },
            kv_bytes_per_token: 12_288,
            footprint: Footprint {
                cache_rows: [16, 512],
                cache_share: Some(0.4),
                kept_bytes_per_token: 975_872,
                layer_bytes_per_token: 40_448,
                call_tokens: 16_384,
                logit_bytes: 805_306_368,
                ..Footprint::default()
            },
            smaller: Some("dtype = \"bf16\""),
            max_tokens: 4096,
            summary: "24 layers of width 896".to_owned(),
            role: "policy",
            vocabulary: Some(vocabulary(&self.path)),
            ..ModelInfo::default()
        })
    }

    fn trainable(&self) -> bool {
        self.optimizer.is_some()
    }

    fn load(
        &self,
        _: &str,
        _: &str,
        _: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        Err(ResourceError::Failed("a stand-in cannot be loaded".into()))
    }
}

/// The tokens of a folder; `other` belongs to another family.
fn vocabulary(path: &str) -> Vocabulary {
    let last = if path == "other" { "z" } else { "c" };
    Vocabulary::new(["a", "b", last])
}

/// A critic that is described and never loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Critic {
    /// Folder.
    pub path: String,
    /// Optimiser settings; frozen without.
    #[serde(default)]
    pub optimizer: Option<Optimizer>,
}

impl ModelConfig for Critic {
    const KIND: &'static str = "value_model";
    const SUMMARY: &'static str = "a stand-in for a critic";
}

impl ModelFactory for Critic {
    fn describe(&self, _: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        Ok(ModelInfo {
            role: "value model",
            vocabulary: Some(vocabulary(&self.path)),
            ..ModelInfo::default()
        })
    }

    fn trainable(&self) -> bool {
        self.optimizer.is_some()
    }

    fn load(
        &self,
        _: &str,
        _: &str,
        _: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        Err(ResourceError::Failed("a stand-in cannot be loaded".into()))
    }
}

/// A data set of one question, with any path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Questions {
    /// File.
    pub path: String,
}

impl DataConfig for Questions {
    const KIND: &'static str = "questions";
    const SUMMARY: &'static str = "a stand-in for a file of questions";

    fn open(&self, _: &BuildContext) -> Result<Arc<dyn DataLoaderInterface>, DataError> {
        Ok(Arc::new(self.clone()))
    }
}

/// One question.
impl DataLoaderInterface for Questions {
    fn len(&self) -> usize {
        1
    }

    fn row(&self, _: usize) -> Result<Map<String, Value>, DataError> {
        Ok(Map::from_iter([("question".to_owned(), "1+1".into())]))
    }

    fn origin(&self) -> String {
        self.path.clone()
    }

    fn fingerprint(&self) -> String {
        self.path.clone()
    }
}

/// A registry of all of these.
pub fn registry() -> Registry {
    Registry::new()
        .stage::<Prompts>()
        .stage::<Generate>()
        .stage::<Reward>()
        .stage::<LogProbs>()
        .stage::<Advantages>()
        .stage::<Update>()
        .stage::<Evaluate>()
        .stage::<FilterGroups>()
        .stage::<Values>()
        .model::<Decoder>()
        .model::<Critic>()
        .data_files::<Questions>(&["jsonl"])
}

/// A frozen model.
pub fn frozen() -> Decoder {
    Decoder {
        path: "base".to_owned(),
        optimizer: None,
    }
}

/// A model that trains.
pub fn trained() -> Decoder {
    Decoder {
        optimizer: Some(Optimizer {
            learning_rate: 1e-6,
        }),
        ..frozen()
    }
}

/// GRPO: 60 prompts × 12 samples on one device.
pub fn grpo() -> DataPipe {
    let reference = LogProbs {
        model: "ref".to_owned(),
        reference: true,
        ..LogProbs::default()
    };
    let chain = Prompts::default()
        >> Generate::default()
        >> Reward::default()
        >> verl_pipe::chain::IntoStage::named(LogProbs::default(), "old_log_probs")
        >> verl_pipe::chain::IntoStage::named(reference, "ref_log_probs")
        >> Advantages::default()
        >> Update::default()
        >> Evaluate::default();
    DataPipe::new("grpo")
        .batch(BatchConfig {
            prompts: 60,
            samples: 12,
            mini_batch: Some(30),
            micro_batch: Some(20),
            log_prob_micro_batch: Some(8),
            epochs: 1,
        })
        .devices(DevicesConfig {
            group: "cuda:0".to_owned(),
            ..DevicesConfig::default()
        })
        .data(
            "train",
            Questions {
                path: "train.jsonl".to_owned(),
            },
        )
        .model("actor", trained())
        .model("ref", frozen())
        .chain(chain)
}
