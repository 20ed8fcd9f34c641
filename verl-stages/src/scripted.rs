//! A policy that answers every prompt with the same tokens, for tests of stages that sample.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::Tensor;
use verl_models::model::{
    Extras, ModelError, PackedScores, PolicyModel, ScoreRow, Scores, StepReport, TrainedModel,
};
use verl_models::rollout::engine::{
    EngineWeights, FinishReason, OutputSink, PreparedModel, RolloutError, RolloutOutput,
    RolloutRequest, SamplingSettings,
};
use verl_models::rollout::stop::StopRules;
use verl_models::tokenizer::Tokenizer;

use crate::model::PolicyResource;

/// Answers with `script` up to a stop rule, a limit, or the end of a context of `context` tokens.
#[derive(Clone)]
pub(crate) struct Scripted {
    pub script: Vec<u32>,
    pub context: usize,
}

impl Scripted {
    /// As a resource, with the tokenizer of the addition models.
    pub fn resource(script: &[u32], context: usize) -> PolicyResource {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/addition-init");
        let mut resource = PolicyResource::new(Box::new(Scripted {
            script: script.to_vec(),
            context,
        }));
        resource.tokenizer = Some(Arc::new(Tokenizer::load(&folder).expect("a tokenizer")));
        resource
    }

    fn respond(&self, request: &RolloutRequest, rules: &StopRules<'_>) -> (usize, FinishReason) {
        let room = self.context - request.prompt.len();
        let limit = room.min(request.max_new_tokens);
        let ends = (1..=self.script.len())
            .find_map(|n| Some((n, rules.finish(&self.script[..n], limit)?)))
            .expect("a script longer than the limit");
        match ends {
            (n, FinishReason::Length) if room < request.max_new_tokens => {
                (n, FinishReason::Context)
            }
            ends => ends,
        }
    }
}

impl EngineWeights for Scripted {
    fn prepare(&self) -> Result<Box<dyn PreparedModel>, RolloutError> {
        Ok(Box::new(self.clone()))
    }
}

impl PreparedModel for Scripted {
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        let rules = StopRules::new(settings)?;
        for (index, request) in requests.iter().enumerate() {
            let (length, finish) = self.respond(request, &rules);
            let log_probs = vec![-1.0; length];
            on_done(
                index,
                RolloutOutput {
                    tokens: self.script[..length].to_vec(),
                    sampling_log_probs: log_probs.clone(),
                    log_probs,
                    finish,
                },
            )?;
        }
        Ok(())
    }
}

impl PolicyModel for Scripted {
    fn score(
        &self,
        _rows: &[ScoreRow<'_>],
        _temperature: f64,
        _extras: Extras,
    ) -> Result<Vec<Scores>, ModelError> {
        Err(ModelError::Frozen)
    }
    fn accumulate(
        &mut self,
        _rows: &[ScoreRow<'_>],
        _select: &dyn Fn(usize, usize) -> bool,
        _temperature: f64,
        _entropies: bool,
        _loss: &mut dyn FnMut(PackedScores) -> Tensor<1>,
    ) -> Result<f64, ModelError> {
        Err(ModelError::Frozen)
    }
}

impl TrainedModel for Scripted {
    fn optimizer_step(&mut self) -> Result<StepReport, ModelError> {
        Err(ModelError::Frozen)
    }
    fn optimizer_steps(&self) -> u64 {
        0
    }
    fn weights_hash(&self) -> String {
        String::new()
    }
    fn snapshot(&self) -> Box<dyn std::any::Any + Send + Sync> {
        Box::new(())
    }
    fn restore(&mut self, _snapshot: &(dyn std::any::Any + Send + Sync)) -> bool {
        true
    }
    fn save(&self, _dir: &Path) -> Result<(), ModelError> {
        Ok(())
    }
    fn vocab_size(&self) -> usize {
        32
    }
    fn max_tokens(&self) -> usize {
        self.context
    }
}
