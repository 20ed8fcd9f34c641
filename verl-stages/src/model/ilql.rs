//! Model kind `ilql_lm`: a decoder from a Hugging Face folder with the heads of implicit language Q-learning.

use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::hf::Origin;
use verl_models::ilql::{IlqlDecoder, IlqlHeads, IlqlPolicy, Q_HEADS};
use verl_models::optim::OptimizerConfig;
use verl_words::resource::{CpuKernels, ModelInfo, ModelResource, ResourceError, TokenTexts};
use verl_words::stage::{
    BuildContext, ConfigError, DeviceSupport, ModelConfig, ModelFactory, Training,
};

use super::{
    BurnDevices, CausalLm, Init, PolicyResource, SaveAs, WeightsDType, decoder_kernels, failed,
    load_texts, optimizer_of, training,
};

/// Settings of model kind `ilql_lm`: those of `causal_lm` except `dtype` and `recompute`, and the weight of the heads
/// in sampling.
///
/// Weights are f32 on every device: Q̂ follows Q by steps that bf16 would lose. A folder that was saved with heads is
/// loaded with them; any other folder gets fresh, untrained heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IlqlLm {
    /// Hugging Face folder; relative to the folder of the pipeline file.
    pub path: PathBuf,
    /// Where the decoder's weights come from.
    #[serde(default)]
    pub init: Init,
    /// How it is trained; absent: the model is frozen.
    #[serde(default)]
    pub optimizer: Option<OptimizerConfig>,
    /// Type of the decoder's weights in the saved folder; the heads are saved in f32.
    #[serde(default)]
    pub save_as: SaveAs,
    /// Weight β of the advantages in sampling, which draws from softmax(log π + β (min Q̂ − V)); 0 samples from the
    /// policy.
    #[serde(default = "one")]
    pub beta: f64,
}

fn one() -> f64 {
    1.0
}

impl IlqlLm {
    /// The decoder without heads.
    fn plain(&self) -> CausalLm {
        CausalLm {
            init: self.init,
            dtype: WeightsDType::F32,
            optimizer: self.optimizer.clone(),
            save_as: self.save_as,
            ..CausalLm::frozen(&self.path)
        }
    }
}

impl ModelConfig for IlqlLm {
    const KIND: &'static str = "ilql_lm";
    const SUMMARY: &'static str =
        "a decoder of a Hugging Face folder with the value heads of implicit language Q-learning";
}

impl ModelFactory for IlqlLm {
    fn describe(&self, context: &BuildContext) -> Result<ModelInfo, Vec<ConfigError>> {
        let mut info = self.plain().describe(context)?;
        if !(self.beta >= 0.0 && self.beta.is_finite()) {
            return Err(vec![ConfigError::new(
                "beta",
                format!("is {}", self.beta),
                "set it to 0 or more; 0 samples from the policy itself",
            )]);
        }
        let folder = self.plain().folder(context);
        let config = Origin::read(&folder).and_then(|origin| origin.decoder_config());
        if let Ok(config) = config {
            let heads = IlqlHeads::num_parameters(config.hidden_size, config.vocab_size);
            info.num_parameters += heads;
            info.weight_bytes += 4 * heads;
            info.saved_bytes += 4 * heads;
            if self.trainable() {
                info.optimizer_bytes += 8 * heads;
                info.gradient_bytes += 4 * heads;
            }
            // Q and Q̂ of every token in each state, the policy's logits, and the gradients of what is trained.
            let of_state = 4 * (2 * Q_HEADS + 1) * config.vocab_size;
            info.footprint.kept_bytes_per_token += of_state as u64;
            info.footprint.layer_bytes_per_token += of_state as u64;
            if self.beta != 0.0 {
                // Shifted logits are sampled from the decoder's own weights.
                info.footprint.engine_bytes = 0;
            }
            // Only f32 is supported.
            info.smaller = None;
        }
        info.summary += ", with V and two Q heads";
        Ok(info)
    }

    fn trainable(&self) -> bool {
        self.optimizer.is_some()
    }

    fn training(&self, optimizer_steps: u64) -> Option<Training> {
        let own = self.optimizer.clone()?;
        Some(training(own, optimizer_steps, |optimizer| IlqlLm {
            optimizer,
            ..self.clone()
        }))
    }

    fn devices(&self) -> &dyn DeviceSupport {
        &BurnDevices
    }

    fn token_texts(&self, context: &BuildContext) -> Option<Arc<dyn TokenTexts>> {
        self.plain().token_texts(context)
    }

    /// burn computes the products and sums of the heads, with kernels that depend on the processor.
    fn cpu_kernels(&self) -> CpuKernels {
        decoder_kernels()
    }

    fn load(
        &self,
        name: &str,
        device: &str,
        context: &BuildContext,
    ) -> Result<Box<dyn ModelResource>, ResourceError> {
        let plain = self.plain();
        let dir = plain.folder(context);
        let decoder = plain.decoder(&dir, device, context.seed)?;
        let tools = load_texts(&dir, &decoder.config)?;
        let mut model = IlqlDecoder::on(decoder, self.beta, context.seed);
        if self.init == Init::Pretrained {
            model = model.with_heads_of(&dir).map_err(failed)?;
        }
        let optimizer = optimizer_of(self.optimizer.as_ref(), name, context);
        let policy = IlqlPolicy::new(model, optimizer).map_err(failed)?;
        Ok(Box::new(PolicyResource::with_texts(
            Box::new(policy),
            tools,
        )))
    }
}
