//! Policies as resources of a pipeline.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use verl_models::chat_template::ChatTemplate;
use verl_models::model::PolicyModel;
use verl_models::rollout::engine::{
    EngineChoice, EventSink, RolloutError, RolloutRequest, SamplingSettings,
};
use verl_models::rollout::stop::{TextDecoder, text_to_stop};
use verl_models::sampled::SampledPolicy;
use verl_models::tokenizer::Tokenizer;
use verl_words::resource::{ModelResource, ResourceError, Snapshot, StoredState, WeightsVersion};
use verl_words::stage::Models;

use super::{
    TextTools, quick_snapshot, recall, restore, save, snapshot, store, trained_resource, version,
};

/// A policy with the engines that sample it, its tokenizer and its chat template, as stages use it.
pub struct PolicyResource {
    sampled: SampledPolicy,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Its chat template, if it has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Why there is no chat template, if one was looked for: it is missing or broken.
    pub no_template: Option<String>,
}

impl PolicyResource {
    /// A resource with only a model; set `tokenizer` and `template` if stages need text.
    pub fn new(policy: Box<dyn PolicyModel>) -> Self {
        PolicyResource {
            sampled: SampledPolicy::new(policy),
            tokenizer: None,
            template: None,
            no_template: None,
        }
    }

    /// A resource of a model with its tokenizer and chat template.
    pub(super) fn with_texts(policy: Box<dyn PolicyModel>, tools: TextTools) -> Self {
        PolicyResource {
            sampled: SampledPolicy::new(policy),
            tokenizer: tools.tokenizer,
            template: tools.template,
            no_template: tools.no_template,
        }
    }

    /// The model.
    pub fn policy(&self) -> &dyn PolicyModel {
        self.sampled.policy()
    }

    /// The model, to train it or to replace its weights; see [`SampledPolicy::policy_mut`].
    pub fn policy_mut(&mut self) -> &mut (dyn PolicyModel + 'static) {
        self.sampled.policy_mut()
    }

    /// Samples from the model's current weights; see [`SampledPolicy::generate`].
    ///
    /// # Errors
    /// As [`SampledPolicy::generate`].
    pub fn generate(
        &mut self,
        engine: &EngineChoice,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        sink: &mut EventSink<'_>,
    ) -> Result<(), RolloutError> {
        self.sampled.generate(engine, requests, settings, sink)
    }

    /// How often an engine loaded the weights.
    pub fn engine_loads(&self) -> u64 {
        self.sampled.loads()
    }

    /// Frees what engines keep between calls; see [`SampledPolicy::sleep`].
    pub fn sleep(&mut self) {
        self.sampled.sleep();
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
        self.response_texts().decode(ids)
    }

    /// Converts responses to text; cheap to create, and independent of the resource.
    pub fn response_texts(&self) -> ResponseTexts {
        ResponseTexts(self.tokenizer.clone())
    }

    /// The decoder that turns a response into text while it is sampled, for stop texts; it writes special tokens out.
    /// `None` without a tokenizer.
    pub fn text_decoder(&self) -> Option<TextDecoder> {
        let tokenizer = self.tokenizer.clone()?;
        Some(TextDecoder::new(move |ids| {
            tokenizer.decode_with_special(ids)
        }))
    }

    /// Text of a response as rewards see it; see [`ResponseTexts::response`].
    pub fn response_text(&self, ids: &[u32], stop: &[String], include_stop: bool) -> String {
        self.response_texts().response(ids, stop, include_stop)
    }
}

/// Converts responses to text with the tokenizer of a model, if it has one.
#[derive(Debug, Clone)]
pub struct ResponseTexts(Option<Arc<Tokenizer>>);

impl ResponseTexts {
    /// Text of token ids without special tokens; ids separated by spaces without a tokenizer.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.0 {
            Some(tokenizer) => tokenizer.decode(ids),
            None => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    /// Text of a response as rewards see it: without special tokens, up to the first of the texts `stop`; with
    /// `include_stop` that text is included.
    pub fn response(&self, ids: &[u32], stop: &[String], include_stop: bool) -> String {
        match &self.0 {
            Some(tokenizer) => text_to_stop(
                ids,
                stop,
                include_stop,
                |ids| tokenizer.decode_with_special(ids),
                |ids| tokenizer.decode(ids),
            ),
            None => self.decode(ids),
        }
    }
}

/// Frees what the engines of all `models` keep between calls: a stage that trains calls it first, so that packed weights
/// do not add to its peak of memory.
pub(crate) fn sleep_engines(models: &mut Models) {
    for model in models.values_mut() {
        if let Some(resource) = model.as_any_mut().downcast_mut::<PolicyResource>() {
            resource.sleep();
        }
    }
}

trained_resource!(PolicyResource, policy, policy_mut, "policy");
