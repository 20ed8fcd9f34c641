//! Model kind `causal_lm`: a decoder from a Hugging Face folder, with its tokenizer, as a resource of the pipeline.
//!
//! A model of one's own becomes a resource through [`PolicyResource::new`].

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_models::chat_template::ChatTemplate;
use verl_models::model::PolicyModel;
use verl_models::optim::OptimizerConfig;
use verl_models::tokenizer::Tokenizer;
use verl_pipe::resource::{ModelInfo, ModelResource, ResourceError, Snapshot, WeightsVersion};
use verl_pipe::stage::{BuildContext, ConfigError, ModelConfig};

/// A policy with its tokenizer and chat template, as stages find it.
pub struct PolicyResource {
    /// The model.
    pub policy: Box<dyn PolicyModel>,
    /// Its tokenizer, where it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Its chat template, where it has one.
    pub template: Option<Arc<ChatTemplate>>,
}

/// A snapshot's content.
struct PolicyState(Box<dyn Any + Send + Sync>);

impl PolicyResource {
    /// A resource of a model alone; set `tokenizer` and `template` where stages need text.
    pub fn new(policy: Box<dyn PolicyModel>) -> Self {
        PolicyResource { policy, tokenizer: None, template: None }
    }

    /// Ids that end a response; empty without a tokenizer.
    pub fn eos_ids(&self) -> Vec<u32> {
        self.tokenizer.as_ref().map(|t| t.eos_ids().to_vec()).unwrap_or_default()
    }

    /// Text of token ids without special tokens; ids separated by spaces without a tokenizer.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(ids),
            None => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        }
    }
}

impl ModelResource for PolicyResource {
    fn version(&self) -> WeightsVersion {
        WeightsVersion { step: self.policy.optimizer_steps(), hash: self.policy.weights_hash() }
    }

    fn snapshot(&mut self) -> Result<Snapshot, ResourceError> {
        Ok(Snapshot { version: self.version(), state: Arc::new(PolicyState(self.policy.snapshot())) })
    }

    fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ResourceError> {
        let state = snapshot.state.downcast_ref::<PolicyState>().ok_or(ResourceError::ForeignSnapshot)?;
        if self.policy.restore(state.0.as_ref()) { Ok(()) } else { Err(ResourceError::ForeignSnapshot) }
    }

    fn save(&mut self, dir: &Path) -> Result<(), ResourceError> {
        self.policy.save(dir).map_err(|error| ResourceError::Failed(Box::new(error)))?;
        if let Some(tokenizer) = &self.tokenizer {
            tokenizer.save(dir).map_err(|error| ResourceError::Failed(Box::new(error)))?;
        }
        Ok(())
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
