//! Stage `generate`: samples responses from a policy; each prompt becomes `batch.samples` rows.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use verl_declare::part::Part;
use verl_models::random::{DrawKey, Purpose};
use verl_models::rollout::engine::{
    EngineChoice, Event, FinishReason, RolloutError, RolloutOutput, RolloutRequest,
    SamplingSettings,
};
use verl_words::batch::{Batch, RaggedColumn};
use verl_words::field::{LogProbTag, Support, Weights};
use verl_words::keys::{
    FINISH_REASONS, MASK_KINDS, PROMPTS, RESPONSE_TEXTS, RESPONSES, ROLLOUT_LOG_PROBS,
    SAMPLING_LOG_PROBS, finish, mask,
};
use verl_words::stage::{
    Access, BuildContext, Cardinality, ConfigError, Metric, MetricRole, ModelWork, Reduce, RowRule,
    Shown, Stage, StageConfig, StageContext, StageError, StageSpec, find_model,
};

use crate::engines::{self, Engine, Native};
use crate::model::{POLICY, PolicyResource, ResponseTexts, room_fault};
use crate::refusals::refused_request;

/// Mean response length of the step.
pub const RESPONSE_LENGTH: Metric = Metric {
    name: "response/length_mean",
    unit: "tokens",
    meaning: "mean number of tokens of a response, end-of-sequence included",
    reduce: Reduce::Mean,
    role: Some(MetricRole::ResponseLength),
};
/// Share of responses cut off by the limit.
pub const TRUNCATED: Metric = Metric {
    name: "response/truncated_share",
    unit: "share",
    meaning: "share of responses that reached the token limit or the end of the model's context",
    reduce: Reduce::Mean,
    role: Some(MetricRole::TruncatedShare),
};
/// Share of responses cut off by the model's context.
pub const CONTEXT_LIMITED: Metric = Metric {
    name: "response/context_limited_share",
    unit: "share",
    meaning: "share of responses that reached the end of the model's context before `max_new_tokens`",
    reduce: Reduce::Mean,
    role: None,
};
/// Entropy of the step's responses, estimated from what was sampled.
pub const SAMPLED_ENTROPY: Metric = Metric {
    name: "response/sampled_entropy",
    unit: "nats",
    meaning: "mean of −log q over the sampled tokens, where q is the sampling distribution (temperature, top-k and top-p included): an unbiased estimate of the entropy of q",
    reduce: Reduce::Mean,
    role: Some(MetricRole::Entropy),
};
/// Prompt and response tokens of the step, for throughput.
pub const TOKENS: Metric = Metric {
    name: "perf/tokens",
    unit: "tokens",
    meaning: "prompt and response tokens of the step",
    reduce: Reduce::Sum,
    role: None,
};

/// Settings of stage `generate`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Generate {
    /// Model to sample from.
    pub model: String,
    /// Divides logits before sampling; must be above 0 for training.
    pub temperature: f64,
    /// Keeps the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
    pub top_p: f64,
    /// Keeps tokens whose probability is at least this share of the highest one; 0 keeps all.
    pub min_p: f64,
    /// Divides positive logits of seen tokens and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Longest response, end-of-sequence included (tokens).
    pub max_new_tokens: usize,
    /// End-of-sequence is forbidden until a response has this many tokens (tokens).
    pub min_new_tokens: usize,
    /// Texts that end a response. They are matched against its text, special tokens included, and may begin or end inside
    /// a token.
    pub stop: Vec<String>,
    /// Whether the text that rewards see includes the stop text. By default it is removed, as inference servers do,
    /// together with the rest of the last token; the token ids stay as sampled, since they are trained on.
    pub include_stop: bool,
    /// Engine that samples.
    pub engine: Part<Engine>,
}

impl Default for Generate {
    fn default() -> Self {
        Generate {
            model: "actor".to_owned(),
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            max_new_tokens: 128,
            min_new_tokens: 0,
            stop: Vec::new(),
            include_stop: false,
            engine: Native::default().into(),
        }
    }
}

impl Generate {
    /// Sampling settings without the model's end-of-sequence ids.
    pub fn sampling(&self) -> SamplingSettings {
        SamplingSettings {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            min_new_tokens: self.min_new_tokens,
            stop_texts: self.stop.clone(),
            ..SamplingSettings::default()
        }
    }

    /// Settings whose values are out of range.
    fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        let mut fault = |setting: &str, bad: bool, reason: String, help: &str| {
            if bad {
                faults.push(ConfigError::new(setting, reason, help));
            }
        };
        fault(
            "temperature",
            !(self.temperature > 0.0 && self.temperature.is_finite()),
            format!(
                "is {}, but sampling for training needs a finite number above 0",
                self.temperature
            ),
            "set it to 1.0; for greedy decoding use stage `evaluate`",
        );
        fault(
            "top_p",
            !(self.top_p > 0.0 && self.top_p <= 1.0),
            format!("is {}, outside (0, 1]", self.top_p),
            "set it to 1.0 to keep all tokens",
        );
        fault(
            "min_p",
            !(0.0..1.0).contains(&self.min_p),
            format!("is {}, outside [0, 1)", self.min_p),
            "set it to 0.0 to keep all tokens",
        );
        fault(
            "repetition_penalty",
            !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()),
            format!(
                "is {}, but must be a finite number above 0",
                self.repetition_penalty
            ),
            "set it to 1.0 to change nothing",
        );
        fault(
            "max_new_tokens",
            self.max_new_tokens == 0,
            "is 0, so no response could have a token".to_owned(),
            "set it to the longest response in tokens",
        );
        fault(
            "min_new_tokens",
            self.min_new_tokens > self.max_new_tokens,
            format!(
                "is {}, above max_new_tokens = {}",
                self.min_new_tokens, self.max_new_tokens
            ),
            "set it to 0 or below max_new_tokens",
        );
        faults.extend(stop_fault(&self.stop));
        faults
    }
}

/// Refuses an empty text among those that end a response.
pub(crate) fn stop_fault(stop: &[String]) -> Option<ConfigError> {
    let empty = stop.iter().any(String::is_empty);
    empty.then(|| {
        ConfigError::new(
            "stop",
            "contains an empty text, which every response contains from the start",
            "remove it; responses end at end-of-sequence anyway",
        )
    })
}

/// [Agreement](StageSpec::agrees) between stages on the longest response.
pub(crate) const LONGEST: &str = "longest response in tokens";
/// [Agreement](StageSpec::agrees) between stages on the texts that end a response.
pub(crate) const STOPS: &str = "texts that end a response";

/// Texts that end a response, as the [agreement](StageSpec::agrees) compares them.
pub(crate) fn stop_list(stop: &[String]) -> String {
    format!("{stop:?}")
}

impl Generate {
    /// Warnings about settings that sample from a distribution other than the one whose log-probs are trained.
    fn warnings(&self) -> Vec<ConfigError> {
        let each = [
            ("top_k", self.top_k > 0, self.top_k.to_string(), "0"),
            ("top_p", self.top_p < 1.0, self.top_p.to_string(), "1.0"),
            ("min_p", self.min_p > 0.0, self.min_p.to_string(), "0.0"),
            (
                "repetition_penalty",
                self.repetition_penalty != 1.0,
                self.repetition_penalty.to_string(),
                "1.0",
            ),
        ];
        let each = each.into_iter().filter(|(_, set, _, _)| *set);
        each.map(|(setting, _, value, none)| {
            ConfigError::new(
                setting,
                format!(
                    "is {value}, so responses are not sampled from the full softmax, but the update computes its ratios from full-softmax log-probs"
                ),
                format!("set it to {none} for training; use it only to sample from a trained model"),
            )
        })
        .collect()
    }
}

impl StageConfig for Generate {
    const KIND: &'static str = "generate";
    const SUMMARY: &'static str =
        "samples responses from a policy, `batch.samples` for each prompt";

    fn build(&self, context: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> {
        let mut faults = self.faults();
        let longest = self.max_new_tokens;
        faults.extend(room_fault("max_new_tokens", longest, &self.model, context));
        let engine = self.engine.build("engine", context);
        let engine = match engine {
            Ok(Engine(choice)) if faults.is_empty() => choice,
            Ok(_) => return Err(faults),
            Err(errors) => {
                faults.extend(errors);
                return Err(faults);
            }
        };
        Ok(Box::new(GenerateStage {
            config: self.clone(),
            engine,
            samples: context.batch.samples.max(1),
            prompts: context.batch.prompts.max(1),
            has_warned: false,
        }))
    }
}

/// The running stage.
struct GenerateStage {
    config: Generate,
    engine: EngineChoice,
    samples: usize,
    prompts: usize,
    /// Whether the user was warned that the context limits responses.
    has_warned: bool,
}

impl GenerateStage {
    fn tag(&self, support: Support) -> LogProbTag {
        LogProbTag {
            policy: Some(self.config.model.clone()),
            temperature: Some(self.config.temperature),
            support: Some(support),
            weights: Some(Weights::StepStart),
        }
    }

    /// The samples of one prompt as a batch.
    fn group(
        &self,
        prompt: &Batch,
        outputs: Vec<RolloutOutput>,
        response_texts: &ResponseTexts,
    ) -> Result<Batch, StageError> {
        let mut batch = prompt.rows_only().repeat(self.samples)?;
        let column =
            |pick: fn(&RolloutOutput) -> &[f32]| RaggedColumn::from_rows(outputs.iter().map(pick));
        batch.put(
            &RESPONSES,
            RaggedColumn::from_rows(outputs.iter().map(|o| &o.tokens)),
        )?;
        let (stop, include_stop) = (&self.config.stop, self.config.include_stop);
        let texts = outputs.iter();
        let texts = texts.map(|o| response_texts.response(&o.tokens, stop, include_stop));
        batch.put(&RESPONSE_TEXTS, texts.collect::<Vec<_>>())?;
        let kinds = outputs.iter().map(|o| vec![mask::ACTION; o.tokens.len()]);
        batch.put(&MASK_KINDS, RaggedColumn::from_rows(kinds))?;
        batch.put(
            &FINISH_REASONS,
            outputs
                .iter()
                .map(|o| finish_code(o.finish))
                .collect::<Vec<_>>(),
        )?;
        batch.put(&SAMPLING_LOG_PROBS, column(|o| &o.sampling_log_probs))?;
        batch.put(&ROLLOUT_LOG_PROBS, column(|o| &o.log_probs))?;
        Ok(batch)
    }

    fn work(&self) -> ModelWork {
        let rows = self.prompts.saturating_mul(self.samples);
        let work = ModelWork::sampling(&self.config.model, rows);
        work.of([PROMPTS.name(), RESPONSES.name()])
    }
}

/// Mean of −log q over the sampled tokens of a response, whose expectation is the entropy of q; `None` without tokens.
fn sampled_entropy(log_probs: &[f32]) -> Option<f64> {
    let sum: f64 = log_probs.iter().map(|log_prob| -f64::from(*log_prob)).sum();
    (!log_probs.is_empty()).then(|| sum / log_probs.len() as f64)
}

/// The key's value for a finish reason.
pub fn finish_code(reason: FinishReason) -> u8 {
    match reason {
        FinishReason::Eos => finish::EOS,
        FinishReason::Stop => finish::STOP,
        FinishReason::Length => finish::LENGTH,
        FinishReason::Context => finish::CONTEXT,
    }
}

impl Stage for GenerateStage {
    fn spec(&self) -> StageSpec {
        let warnings = self.config.warnings().into_iter();
        warnings
            .fold(StageSpec::new(), StageSpec::warning)
            .agrees(LONGEST, "max_new_tokens", self.config.max_new_tokens)
            .agrees(STOPS, "stop", stop_list(&self.config.stop))
            .reads(PROMPTS.field().shaped("[P, S~]"))
            .writes(RESPONSES)
            .writes(RESPONSE_TEXTS)
            .writes(MASK_KINDS)
            .writes(FINISH_REASONS)
            .writes(SAMPLING_LOG_PROBS.tagged(self.tag(Support::Sampling)))
            .writes(ROLLOUT_LOG_PROBS.tagged(self.tag(Support::Full)))
            .rows(RowRule::Expand(self.samples))
            .cardinality(Cardinality::Row)
            .slice_rows(self.prompts)
            .uses_as(POLICY, &self.config.model, Access::Read)
            .works(self.work())
            .bounds(
                RESPONSES.name(),
                "max_new_tokens",
                Some(self.config.max_new_tokens),
            )
            .metrics(&[
                RESPONSE_LENGTH,
                TRUNCATED,
                CONTEXT_LIMITED,
                SAMPLED_ENTROPY,
                TOKENS,
            ])
            .shows(Shown::of(&RESPONSE_LENGTH, "len", Shown::RESPONSES).narrow())
            .shows(Shown::of(&SAMPLED_ENTROPY, "ent", Shown::RESPONSES + 2).narrow())
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let (seed, step, cancel) = (context.seed, context.step, context.cancel);
        let resource = find_model::<PolicyResource>(context.models, &self.config.model)?;
        let response_texts = resource.response_texts();
        let settings = SamplingSettings {
            eos_ids: resource.eos_ids(),
            text_decoder: resource.text_decoder(),
            cancel: Some(engines::cancel(cancel)),
            ..self.config.sampling()
        };
        let prompts = input.get(&PROMPTS)?;
        let mut requests = Vec::with_capacity(prompts.len() * self.samples);
        for (row, id) in input.ids().into_iter().enumerate() {
            for sample in 0..self.samples {
                requests.push(RolloutRequest {
                    prompt: prompts.row(row).to_vec(),
                    key: DrawKey {
                        seed,
                        purpose: Purpose::Rollout,
                        step,
                        row: id.sample(sample as u64)?.0,
                        attempt: id.wave() as u32,
                    },
                    max_new_tokens: self.config.max_new_tokens,
                });
            }
        }

        let mut pending: Vec<Vec<Option<RolloutOutput>>> =
            vec![vec![None; self.samples]; prompts.len()];
        let mut context_limited = 0usize;
        let mut entropies = Vec::new();
        let sink = &mut *context.sink;
        let mut emit_group = |index: usize, output: RolloutOutput| -> Result<(), StageError> {
            let row = index / self.samples;
            sink.record(&RESPONSE_LENGTH, output.tokens.len() as f64, 1.0);
            if let Some(entropy) = sampled_entropy(&output.sampling_log_probs) {
                entropies.push((output.tokens.len(), index, entropy));
            }
            let is_limited = output.finish == FinishReason::Context;
            context_limited += usize::from(is_limited);
            sink.record(&TRUNCATED, f64::from(output.finish.is_cut()), 1.0);
            sink.record(&CONTEXT_LIMITED, f64::from(is_limited), 1.0);
            sink.record(
                &TOKENS,
                (prompts.row_len(row) + output.tokens.len()) as f64,
                1.0,
            );
            pending[row][index % self.samples] = Some(output);
            if pending[row].iter().all(Option::is_some) {
                let outputs = std::mem::take(&mut pending[row])
                    .into_iter()
                    .flatten()
                    .collect();
                sink.emit(self.group(&input.slice(row..row + 1)?, outputs, &response_texts)?)?;
            }
            Ok(())
        };
        let done = resource.generate(
            &self.engine,
            &requests,
            &settings,
            &mut |event| match event {
                Event::Done {
                    request, output, ..
                } => emit_group(request, output)
                    .map_err(|error| RolloutError::Stopped(Box::new(error))),
                Event::Started { .. } => Ok(()),
            },
        );
        // Replicas complete responses in any order, but the last bits of a mean depend on it. This is the order in which an
        // engine completes responses that it decodes together.
        entropies.sort_by_key(|(tokens, index, _)| (*tokens, *index));
        for (tokens, _, entropy) in entropies {
            context
                .sink
                .record(&SAMPLED_ENTROPY, entropy, tokens as f64);
        }
        if context_limited > 0 && !self.has_warned {
            self.has_warned = true;
            warn_context_limit(
                context_limited,
                requests.len(),
                &self.config.model,
                resource,
            );
        }
        match done {
            Ok(()) => Ok(()),
            Err(RolloutError::Stopped(error)) => Err(match error.downcast::<StageError>() {
                Ok(error) => *error,
                Err(other) => StageError::Failed(other),
            }),
            Err(error) => Err(refused_request(error, &input.ids(), self.samples)),
        }
    }
}

/// Warns that the context, not `max_new_tokens`, cut responses off.
pub(crate) fn warn_context_limit(cut: usize, of: usize, model: &str, resource: &PolicyResource) {
    tracing::warn!(
        "{cut} of {of} responses reached the end of the context of `{model}` ({} tokens, prompt and response together) \
         before `max_new_tokens`: a larger `max_new_tokens` changes nothing; use shorter prompts, or a model with a longer \
         context",
        resource.policy().max_tokens()
    );
}

#[cfg(test)]
mod tests;
