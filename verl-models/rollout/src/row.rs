//! One growing response: everything that engines share, apart from how they compute logits.

use verl_kernels::random::Stream;

use super::engine::{FinishReason, RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};
use super::sampling::{Draw, Sampler};
use super::stop::StopRules;

/// An incomplete response.
#[derive(Debug)]
pub struct Row {
    /// Position of the request.
    pub request: usize,
    limit: usize,
    /// The reason if it ends at the limit.
    at_limit: FinishReason,
    stream: Stream,
    /// Distinct ids of prompt and response in the order of their first use; kept only for a penalty.
    seen: Option<Vec<u32>>,
    tokens: Vec<u32>,
    sampling_log_probs: Vec<f32>,
    log_probs: Vec<f32>,
}

impl Row {
    /// The empty response of `request` to a model with a context of `max_tokens`.
    pub fn new(
        index: usize,
        request: &RolloutRequest,
        settings: &SamplingSettings,
        max_tokens: usize,
    ) -> Self {
        let limit = request.room(max_tokens);
        let mut row = Row {
            request: index,
            limit,
            at_limit: request.limit(max_tokens),
            stream: request.key.stream(),
            seen: (settings.repetition_penalty != 1.0).then(Vec::new),
            tokens: Vec::with_capacity(limit.min(1024)),
            sampling_log_probs: Vec::new(),
            log_probs: Vec::new(),
        };
        for &id in &request.prompt {
            row.mark_seen(id);
        }
        row
    }

    /// The last sampled token.
    pub fn last_token(&self) -> Option<u32> {
        self.tokens.last().copied()
    }

    /// Tokens sampled so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Most tokens of this response.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Samples the next token from its logits; returns why the response ends, if it does.
    ///
    /// # Errors
    /// [`RolloutError::NonFinite`].
    pub fn advance(
        &mut self,
        logits: &[f32],
        sampler: &mut Sampler<'_>,
        rules: &StopRules<'_>,
    ) -> Result<Option<FinishReason>, RolloutError> {
        let draw = Draw {
            stream: &self.stream,
            position: self.tokens.len(),
            seen: self.seen.as_deref().unwrap_or(&[]),
        };
        let sampled = sampler
            .sample(logits, draw)
            .map_err(|_| RolloutError::NonFinite {
                request: self.request,
                tokens: self.tokens.len(),
            })?;
        self.mark_seen(sampled.token);
        self.tokens.push(sampled.token);
        self.sampling_log_probs.push(sampled.sampling_log_prob);
        self.log_probs.push(sampled.log_prob);
        let finish = rules.finish(&self.tokens, self.limit);
        Ok(finish.map(|reason| match reason {
            FinishReason::Length => self.at_limit,
            reason => reason,
        }))
    }

    /// The complete response.
    pub fn into_output(self, finish: FinishReason) -> RolloutOutput {
        RolloutOutput {
            tokens: self.tokens,
            sampling_log_probs: self.sampling_log_probs,
            log_probs: self.log_probs,
            finish,
        }
    }

    fn mark_seen(&mut self, id: u32) {
        if let Some(seen) = &mut self.seen
            && !seen.contains(&id)
        {
            seen.push(id);
        }
    }
}
