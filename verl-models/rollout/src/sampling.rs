//! From one row of logits to a token.
//!
//! Order: repetition penalty, temperature, top-k, top-p, min-p, renormalise. Tokens are drawn by Gumbel-max: the argmax
//! of logitᵢ/T + gᵢ over the kept ids, where gᵢ is a function of only key, position and id i. So a draw does not depend
//! on the order in which ids are visited.

use verl_kernels::random::Stream;
use verl_kernels::vector::{exponentials, largest};

use super::engine::{RolloutError, SamplingSettings};
use super::race::Race;

/// A sampled token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Log-prob under the sampling distribution, nats; 0 when greedy, which leaves no choice.
    pub sampling_log_prob: f32,
    /// Log-prob under the full softmax of the model's own logits divided by the temperature (by 1 when greedy), nats:
    /// no penalty, no truncation, no forbidden id.
    pub log_prob: f32,
}

/// Logits contain NaN or +∞, or all are −∞ (which masks an id).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("logits are not finite")]
pub struct NonFiniteLogits;

/// The inputs of a draw besides logits and settings.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    /// Random words of the response.
    pub stream: &'a Stream,
    /// Tokens of the response so far: the position of the draw.
    pub position: usize,
    /// Distinct ids of prompt and response, for the repetition penalty; may be empty if that is 1.
    pub seen: &'a [u32],
}

/// Samples tokens; has the scratch space of one thread.
#[derive(Debug, Clone)]
pub struct Sampler<'a> {
    settings: &'a SamplingSettings,
    processed: Vec<f32>,
    weights: Vec<f32>,
    kept: Vec<u32>,
}

impl<'a> Sampler<'a> {
    /// A sampler for `settings`.
    ///
    /// # Errors
    /// [`RolloutError::Setting`] names the first setting that is out of range.
    pub fn new(settings: &'a SamplingSettings) -> Result<Self, RolloutError> {
        check(settings)?;
        Ok(Sampler {
            settings,
            processed: Vec::new(),
            weights: Vec::new(),
            kept: Vec::new(),
        })
    }

    /// Draws a token from `logits`, one for each id of the vocabulary.
    ///
    /// # Errors
    /// [`NonFiniteLogits`].
    pub fn sample(&mut self, logits: &[f32], draw: Draw<'_>) -> Result<Sampled, NonFiniteLogits> {
        let raw_max = max(logits)?;
        let temperature = match self.settings.temperature {
            0.0 => 1.0,
            temperature => temperature,
        };
        // Finite for every temperature, so that the best logit's exponent 0 · scale stays 0.
        let scale = ((1.0 / temperature) as f32).min(f32::MAX);
        let raw_sum = exponentials(logits, raw_max, scale, &mut self.weights);
        let log_prob =
            |token: u32| log_share(logits[token as usize], raw_max, temperature, raw_sum);

        if !self.changes_logits(draw) {
            let choice = if self.settings.temperature == 0.0 {
                Choice::greedy(argmax(logits, raw_max))
            } else {
                self.choose(logits, raw_max, raw_sum, draw)
            };
            return Ok(finish(choice, logits, raw_max, temperature, log_prob));
        }
        let mut processed = std::mem::take(&mut self.processed);
        self.process(logits, draw, &mut processed);
        let choice = max(&processed).map(|processed_max| {
            let choice = if self.settings.temperature == 0.0 {
                Choice::greedy(argmax(&processed, processed_max))
            } else {
                let sum = exponentials(&processed, processed_max, scale, &mut self.weights);
                self.choose(&processed, processed_max, sum, draw)
            };
            finish(choice, &processed, processed_max, temperature, log_prob)
        });
        self.processed = processed;
        choice
    }

    /// Whether a penalty or a forbidden id applies to this draw.
    fn changes_logits(&self, draw: Draw<'_>) -> bool {
        let penalises = self.settings.repetition_penalty != 1.0 && !draw.seen.is_empty();
        penalises || draw.position < self.settings.min_new_tokens
    }

    /// Applies the repetition penalty and removes end-of-sequence ids if they are forbidden.
    fn process(&self, logits: &[f32], draw: Draw<'_>, processed: &mut Vec<f32>) {
        processed.clear();
        processed.extend_from_slice(logits);
        let penalty = self.settings.repetition_penalty as f32;
        for &id in draw.seen {
            let logit = &mut processed[id as usize];
            *logit = if *logit > 0.0 {
                *logit / penalty
            } else {
                *logit * penalty
            };
        }
        if draw.position < self.settings.min_new_tokens {
            for &id in &self.settings.eos_ids {
                if let Some(logit) = processed.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// A token from the kept ids, and their mass; `self.weights` contains e^((logit − max)/T), `sum` is their sum.
    fn choose(&mut self, logits: &[f32], max: f32, sum: f64, draw: Draw<'_>) -> Choice {
        let settings = self.settings;
        let truncates = settings.top_k > 0 && settings.top_k < logits.len();
        let race = Race::new(logits, &self.weights, max, settings.temperature, draw);
        if !truncates && settings.top_p >= 1.0 && settings.min_p <= 0.0 {
            return Choice::drawn(race.among_all(), sum);
        }
        let weights = &self.weights;
        let kept = &mut self.kept;
        kept.clear();
        kept.extend((0..logits.len() as u32).filter(|&id| logits[id as usize] > f32::NEG_INFINITY));
        if truncates {
            keep_best(kept, logits, settings.top_k);
        }
        if settings.top_p < 1.0 {
            keep_mass(kept, logits, weights, settings.top_p);
        }
        if settings.min_p > 0.0 {
            // The most probable token has weight 1 and is always kept so far.
            kept.retain(|&id| f64::from(weights[id as usize]) >= settings.min_p);
        }
        kept.sort_unstable();
        Choice::drawn(race.among(kept), mass(kept, weights))
    }
}

/// A chosen token.
struct Choice {
    token: u32,
    /// Sum of the weights of the tokens that it was drawn from; `None` if it was not drawn but is the best one.
    mass: Option<f64>,
}

impl Choice {
    fn greedy(token: u32) -> Self {
        Choice { token, mass: None }
    }

    fn drawn(token: u32, mass: f64) -> Self {
        let mass = Some(mass);
        Choice { token, mass }
    }
}

/// Combines the choice with its log-probs.
fn finish(
    Choice { token, mass }: Choice,
    logits: &[f32],
    max: f32,
    temperature: f64,
    log_prob: impl Fn(u32) -> f32,
) -> Sampled {
    Sampled {
        token,
        sampling_log_prob: mass.map_or(0.0, |mass| {
            log_share(logits[token as usize], max, temperature, mass)
        }),
        log_prob: log_prob(token),
    }
}

/// Rejects settings out of their ranges.
fn check(settings: &SamplingSettings) -> Result<(), RolloutError> {
    let finite = |value: f64| value.is_finite();
    let rules: [(&'static str, f64, bool, &str); 4] = [
        (
            "temperature",
            settings.temperature,
            finite(settings.temperature) && settings.temperature >= 0.0,
            "must be at least 0 (0 is greedy)",
        ),
        (
            "top_p",
            settings.top_p,
            settings.top_p > 0.0 && settings.top_p <= 1.0,
            "must be above 0 and at most 1 (1 keeps all)",
        ),
        (
            "min_p",
            settings.min_p,
            (0.0..=1.0).contains(&settings.min_p),
            "must be between 0 and 1 (0 keeps all)",
        ),
        (
            "repetition_penalty",
            settings.repetition_penalty,
            finite(settings.repetition_penalty) && settings.repetition_penalty > 0.0,
            "must be above 0 (1 changes nothing)",
        ),
    ];
    match rules.into_iter().find(|rule| !rule.2) {
        None => Ok(()),
        Some((setting, value, _, rule)) => Err(RolloutError::Setting {
            setting,
            reason: format!("{rule}, got {value}"),
        }),
    }
}

/// The largest logit; rejects NaN, +∞ and rows without a finite one.
fn max(logits: &[f32]) -> Result<f32, NonFiniteLogits> {
    largest(logits)
        .filter(|max| max.is_finite())
        .ok_or(NonFiniteLogits)
}

/// The lowest id with the largest logit.
pub(super) fn argmax(logits: &[f32], max: f32) -> u32 {
    logits.iter().position(|&logit| logit == max).unwrap_or(0) as u32
}

/// ln(e^((logit − max)/T) / sum).
fn log_share(logit: f32, max: f32, temperature: f64, sum: f64) -> f32 {
    ((f64::from(logit) - f64::from(max)) / temperature - libm::log(sum)) as f32
}

/// Sum of the weights of `ids`.
fn mass(ids: &[u32], weights: &[f32]) -> f64 {
    ids.iter().map(|&id| f64::from(weights[id as usize])).sum()
}

/// More probable first, and the lower id first among equals: a total order, so that the kept set is never ambiguous.
pub(super) fn by_logit(logits: &[f32]) -> impl Fn(&u32, &u32) -> std::cmp::Ordering + '_ {
    |a, b| {
        logits[*b as usize]
            .total_cmp(&logits[*a as usize])
            .then(a.cmp(b))
    }
}

/// Keeps the `count` most probable of `ids`, in any order.
fn keep_best(ids: &mut Vec<u32>, logits: &[f32], count: usize) {
    if count < ids.len() {
        ids.select_nth_unstable_by(count, by_logit(logits));
        ids.truncate(count);
    }
}

/// Keeps the smallest set of most probable `ids` whose share of their mass reaches `top_p`. Sorts only as many of the
/// first ids as needed, because a few ids of a large vocabulary usually have most of the mass.
fn keep_mass(ids: &mut Vec<u32>, logits: &[f32], weights: &[f32], top_p: f64) {
    let needed = top_p * mass(ids, weights);
    let (mut sorted, mut reached) = (0, 0.0);
    let mut step = 64;
    while sorted < ids.len() {
        let rest = &mut ids[sorted..];
        let count = step.min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count, by_logit(logits));
        }
        rest[..count].sort_unstable_by(by_logit(logits));
        for &id in &rest[..count] {
            sorted += 1;
            reached += f64::from(weights[id as usize]);
            if reached >= needed {
                ids.truncate(sorted);
                return;
            }
        }
        step *= 4;
    }
}

#[cfg(test)]
mod tests;
